"""The pictures of a measurement of conversations, beside the file that `bench.py --mode=chat --save=FILE` wrote.

    python -m lab.benchmarks.chat_plot results/cpu/chat.json results/cpu/chat.png
"""
import json
import sys
from pathlib import Path

from config.errors import UserError
from configurator import run_program


def draw(document: dict, path: str) -> None:
    """Tokens found over the size of the store, and the time to the first token over the past, as one PNG (or SVG, PDF).

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
        import matplotlib.ticker
    except ImportError as e:
        raise UserError("the picture needs matplotlib: pip install -e '.[plot]'") from e
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    lines = {}
    for cell in document['workload']:
        lines.setdefault((cell['page_size'], cell['prune']), []).append(cell)
    for (page_size, prune), cells in lines.items():
        cells = sorted(cells, key=lambda cell: cell['held_nbytes'])
        left.plot([cell['held_nbytes'] / cell['dialogues'] / 1e6 for cell in cells], [100 * cell['hit_rate'] for cell in cells],
                  'o-' if prune else 's--', label=f"blocks of {page_size}, local parts {'pruned' if prune else 'all kept'}")
    left.set(xscale='log', xlabel='MB kept per dialogue', ylabel='prompt tokens that need not be computed, %',
             title=f"{document['requests']:,} requests, {document['dialogues']:,} dialogues of up to "
                   f"{document['longest']:,} tokens")
    past = [cell['context'] for cell in document['cells']]
    for name in document['cells'][0]['sides']:
        right.plot(past, [cell['sides'][name]['ttft_ms']['median'] for cell in document['cells']], 'o-',
                   label='with a store' if name == 'ours' else name)
    right.set(xscale='log', yscale='log', xlabel='tokens of the conversation so far', ylabel='time to the first token, ms',
              title=f"a message of {document['message']} tokens, batch 1, {document['device']}")
    for scale in (left.xaxis, right.xaxis, right.yaxis):
        scale.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter('{x:,g}')
        scale.set_minor_formatter('')
    for axis in (left, right):
        axis.tick_params(which='both', labelsize=8)
        axis.grid(True, linewidth=0.5, alpha=0.5)
        axis.legend(frameon=False, fontsize=8.5)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be written: {e}') from e
    finally:
        plt.close(figure)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2:
        print(__doc__.strip())
        raise SystemExit(2)
    try:
        document = json.loads(Path(argv[0]).read_text(encoding='utf-8'))
    except (OSError, ValueError) as e:
        raise UserError(f'{argv[0]} cannot be read as JSON: {type(e).__name__}') from e
    if not isinstance(document, dict) or document.get('mode') != 'chat':
        raise UserError(f"{argv[0]} is no document of bench.py --mode=chat")
    draw(document, argv[1])


if __name__ == '__main__':
    run_program(main)
