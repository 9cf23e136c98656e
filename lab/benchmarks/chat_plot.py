"""Plot a measurement of conversations from the file written by `bench.py --mode=chat --save=FILE`.

    python -m lab.benchmarks.chat_plot results/cpu/chat.json results/cpu/chat.png
"""
import sys

from configurator import run_program
from lab.benchmarks.table import read
from training.plotting import plain_log_ticks, save, subplots


def draw(document: dict, path: str) -> None:
    """Left: cached tokens against cache size. Right: time to the first token against the length of
    the conversation. Raises UserError if the PNG, SVG or PDF cannot be made."""
    with subplots(1, 2, figsize=(10, 4), layout='constrained') as (figure, (left, right)):
        lines = {}
        for cell in document['workload']:
            lines.setdefault(cell['page_size'], []).append(cell)
        for page_size, cells in lines.items():
            cells = sorted(cells, key=lambda cell: cell['held_nbytes'])
            megabytes = [cell['held_nbytes'] / cell['dialogues'] / 1e6 for cell in cells]
            left.plot(megabytes, [100 * cell['hit_rate'] for cell in cells], 'o-',
                      label=f'blocks of {page_size}')
        left.set(xscale='log', xlabel='MB kept per dialogue',
                 ylabel='prompt tokens that need not be computed, %')
        left.set_title(f"{document['requests']:,} requests, {document['dialogues']:,} dialogues of "
                       f"up to {document['longest']:,} tokens", fontsize=10)
        past = [cell['context'] for cell in document['cells']]
        for name in document['cells'][0]['sides']:
            times = [cell['sides'][name]['ttft_ms']['median'] for cell in document['cells']]
            right.plot(past, times, 'o-', label='with a store' if name == 'ours' else name)
        right.set(xscale='log', yscale='log', xlabel='tokens of the conversation so far',
                  ylabel='time to the first token, ms')
        right.set_title(f"a message of {document['message']} tokens, batch 1, "
                        f"{document['device']}", fontsize=10)
        for axis in left, right:
            axis.legend()
            axis.tick_params(which='both', labelsize=8)
        for scale in left.xaxis, right.xaxis, right.yaxis:
            plain_log_ticks(scale, *scale.get_view_interval())
        save(figure, path, dpi=120)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2:
        print(__doc__.strip())
        raise SystemExit(2)
    draw(read(argv[0], ('chat',)), argv[1])


if __name__ == '__main__':
    run_program(main)
