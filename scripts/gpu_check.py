"""The parts of scripts/gpu_check.sh: commands of this project, one after another, within a time limit.

Every command's words are kept in OUT/PART.log; what it measured in OUT/NAME.json, as it ends: a part that is cut off keeps
what it has. `--list` names the commands.
"""
import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FULL = 'config/train_gpt2_mqa_local.py'                       # GPT-2 124M's shape with every saving on, as many parameters
LIMIT = 520                                                   # seconds a part
LEAST = 10                                                    # seconds in which a command is worth beginning
GRACE = 10                                                    # seconds that it has to write what it knows
BENCH = {
    'kernels': {
        'kernels-mqa': f'{FULL} --mode=kernels --n_kv_head=1 --window_size=512 --batch_sizes=256 --contexts=8192 --tune=True',
        'kernels-mqa-sizes': f'{FULL} --mode=kernels --window_size=256 --batch_sizes=1,16,64 --contexts=1024,8192,32768',
        'kernels-mha': '--mode=kernels --window_size=512 --batch_sizes=1,16 --contexts=1024,8192',
        'kernels-mqa-d128': '--mode=kernels --n_head=16 --n_kv_head=1 --n_embd=2048 --window_size=512 --batch_sizes=64 '
                            '--contexts=8192'},
    'decode': {
        'decode-b1': f'{FULL} --mode=decode --against=vanilla --batch_sizes=1 --contexts=1024,8192 --steps=128',
        'decode-b64': f'{FULL} --mode=decode --against=vanilla --batch_sizes=64 --contexts=8192 --steps=32',
        'decode-b64-int8': f'{FULL} --mode=decode --against=vanilla --batch_sizes=64,256 --contexts=8192 --steps=32 '
                           '--kv_dtype=int8',
        'decode-1B': f'{FULL} --mode=decode --n_layer=24 --n_head=16 --n_embd=2048 --mlp_hidden=0 --batch_sizes=1,16 '
                     '--contexts=1024 --steps=64',
        'decode-b16': f'{FULL} --mode=decode --against=vanilla --batch_sizes=16 --contexts=1024,8192,32768 --steps=32',
        'serve': f'{FULL} --mode=serve --batch_sizes=64 --contexts=256 --requests=256',
        'prefill': f'{FULL} --mode=prefill --against=vanilla --batch_sizes=1,8 --contexts=1024,8192',
        'decode-b1-compiled': f'{FULL} --mode=decode --batch_sizes=1 --contexts=1024 --steps=128 --compile=True'},
    'train': {
        'train-vanilla-1024': '--mode=train --real_data=False --block_size=1024 --batch_size=16',
        'train-full-1024': f'{FULL} --mode=train --real_data=False --block_size=1024 --batch_size=16',
        'recompute': f'{FULL} --mode=recompute --against=vanilla --contexts=1024 --batch_sizes=16',
        'train-vanilla-8192': '--mode=train --real_data=False --block_size=8192 --batch_size=2',
        'train-full-8192': f'{FULL} --mode=train --real_data=False --block_size=8192 --batch_size=2',
        'lengths': f'{FULL} --mode=lengths --against=vanilla --contexts=1024,8192'},
}
RECALL = ('config/train_recall.py --max_iters=60 --lr_decay_iters=60 --warmup_iters=10 --eval_interval=60 --eval_iters=4 '
          '--log_interval=10')
STACK = '--n_kv_head=1 --layer_pattern=LLLLLG --window_size=16 --kv_share=AABBBC --share_global_kv=True'
POLICIES = ('none', 'selective', 'mlp', 'block', 'sqrt', 'offload')
PARTS = ('tests', 'kernels', 'decode', 'train', 'ablate')


class Part:
    """Runs commands until the time is up; `done` is what became of each."""

    def __init__(self, name: str, out: Path, limit: float):
        self.name, self.out, self.end = name, out, time.monotonic() + limit
        self.done, self.log = {}, out / f'{name}.log'
        self.log.write_text('', encoding='utf-8')

    def run(self, name: str, *args: str) -> bool:
        """One command of Python in the checkout; whether it went well."""
        left = self.end - time.monotonic()
        if left < LEAST:
            self.done[name] = 'not run: the time was up'
            return False
        print(f'== {name}: {shlex.join(args)}', flush=True)
        start = time.monotonic()
        with open(self.log, 'a', encoding='utf-8') as log:
            log.write(f'\n== {name}: {shlex.join(args)}\n')
            log.flush()
            process = subprocess.Popen([sys.executable, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                code = process.wait(left)
                self.done[name] = 'ok' if code == 0 else f'failed with status {code}'
            except subprocess.TimeoutExpired:
                self.done[name] = f'stopped after {left:.0f} s: the time was up'
            finally:
                end(process)
        print(f'   {self.done[name]}, {time.monotonic() - start:.0f} s', flush=True)
        if self.done[name] != 'ok':
            print('\n'.join(self.log.read_text(encoding='utf-8', errors='replace').splitlines()[-25:]), flush=True)
        return self.done[name] == 'ok'


def end(process) -> None:
    """The command and all that it has started: asked first (pytest then writes its report), then killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            pass


def versions() -> dict:
    import torch
    try:
        import triton
        found = triton.__version__
    except ImportError:
        found = None
    gpu = torch.cuda.is_available()
    try:
        git = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=ROOT, capture_output=True, text=True)
        commit = git.stdout.strip()
    except OSError:  # no git
        commit = ''
    return {'python': platform.python_version(), 'torch': torch.__version__, 'triton': found, 'cuda': torch.version.cuda,
            'device': torch.cuda.get_device_name() if gpu else None,
            'capability': '.'.join(map(str, torch.cuda.get_device_capability())) if gpu else None,
            'commit': commit}


def tests(part: Part) -> None:
    report = part.out / 'tests.xml'
    part.run('pytest', '-m', 'pytest', '-q', '-m', 'gpu', '--maxfail=40', '--tb=short', f'--junit-xml={report}')
    if not report.exists():
        return
    became = {}
    for case in ET.parse(report).iter('testcase'):
        outcome = next((child.tag for child in case if child.tag != 'properties'), 'passed')
        became[f"{case.get('classname')}::{case.get('name')}"] = outcome
    report.unlink()
    counts = {kind: list(became.values()).count(kind) for kind in sorted(set(became.values()))}
    write(part.out / 'tests.json', {'counts': counts, 'not passed': {k: v for k, v in became.items() if v != 'passed'}})


def benches(part: Part) -> None:
    for name, args in BENCH[part.name].items():
        part.run(name, 'bench.py', *shlex.split(args), '--device=cuda', '--json=True', f'--save={part.out / name}.json')


def train(part: Part) -> None:
    """Short runs of train.py first: that they learn, in both half precisions, under every policy; then the clock."""
    runs = {f'{model}-{dtype}-{policy}': (stack, dtype, policy)
            for model, stack in (('vanilla', ''), ('full', STACK)) for dtype in ('bfloat16', 'float16')
            for policy in POLICIES if dtype == 'bfloat16' or policy == 'none'}
    found = {}
    for name, (stack, dtype, policy) in runs.items():
        folder = part.out / 'runs' / name
        if part.run(name, 'train.py', *shlex.split(f'{RECALL} {stack} --dtype={dtype} --recompute={policy} --compile=False'),
                    '--device=cuda', f'--out_dir={folder}'):
            rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()]
            found[name] = {'losses': [row['loss'] for row in rows], 'skipped': rows[-1].get('skipped', 0),
                           'memory_peak_bytes': max(row.get('memory_peak_bytes', 0) for row in rows)}
            for leftover in folder.glob('*.pt'):
                leftover.unlink()
    write(part.out / 'train-short.json', {'runs': found})
    benches(part)


def ablate(part: Part) -> None:
    import torch
    if part.run('text', 'data/text/prepare.py', '--input', str(Path(torch.__file__).parent), '--glob', '*.py'):
        part.run('ladder', 'ablate.py', 'config/ablate_gpu_short.py', f"--folder={part.out / 'ablate_gpu_short'}")


def write(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document | {'versions': versions()}, indent=1) + '\n', encoding='utf-8')


def page(out: Path) -> str:
    """Markdown of all results that are there."""
    from benchmarks.report import GRIDS
    from benchmarks.table import section
    lines = ['# On a GPU', '', 'Made by `scripts/gpu_check.sh`, part by part; `*.json` has every number, `summary.json` what '
             'was run, and on what.', '']
    for path in sorted(out.glob('*.json')):
        document = json.loads(path.read_text(encoding='utf-8'))
        if document.get('mode') in GRIDS:
            lines.append(section(path.stem, document))
        elif document.get('mode') == 'train':
            lines += [f'## {path.stem}', '', f"{document['device']}, torch {document['torch']}, {document['dtype']}, compile "
                      f"{document['compile']}: {document['tokens_per_second']:,.0f} tokens/s, "
                      f"{document['model_tflops_per_second']:.1f} model TFLOP/s, {document['median_ms']:.1f} ms a step of "
                      f"{document['batch_size']} x {document['block_size']} tokens", '']
        elif path.stem == 'tests':
            lines += ['## tests', '', ', '.join(f'{n} {kind}' for kind, n in document['counts'].items()), '']
        elif path.stem == 'train-short':
            lines += ['## train-short', '', '| run | first loss | last loss | skipped | peak, MB |',
                      '|---|---:|---:|---:|---:|']
            lines += [f"| {name} | {run['losses'][0]:.3f} | {run['losses'][-1]:.3f} | {run['skipped']} | "
                      f"{run['memory_peak_bytes'] / 1e6:,.0f} |" for name, run in document['runs'].items()] + ['']
    return '\n'.join(lines)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description='See scripts/gpu_check.sh.')
    parser.add_argument('--part', choices=PARTS, help='what to check')
    parser.add_argument('--out', type=Path, default=ROOT / 'results' / 'gpu', help='folder (default: results/gpu)')
    parser.add_argument('--limit', type=float, default=LIMIT, help=f'seconds (default: {LIMIT})')
    parser.add_argument('--table', action='store_true', help='only make README.md anew')
    parser.add_argument('--list', action='store_true', help='name the commands of the parts')
    s = parser.parse_args(argv)
    if s.list:
        for part, benches_of in BENCH.items():
            print('\n'.join(f'{part} {name}: python bench.py {args}' for name, args in benches_of.items()))
        return 0
    out = s.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not s.table:
        if s.part is None:
            parser.error(f"--part is needed: one of {', '.join(PARTS)}")
        found = versions()
        print(json.dumps(found), flush=True)
        if found['device'] is None:
            print('error: there is no CUDA device here', file=sys.stderr)
            return 2
        part = Part(s.part, out, s.limit)
        {'tests': tests, 'train': train, 'ablate': ablate}.get(s.part, benches)(part)
        summary = out / 'summary.json'
        before = json.loads(summary.read_text(encoding='utf-8')) if summary.exists() else {}
        summary.write_text(json.dumps(before | {s.part: {'versions': found, 'commands': part.done}}, indent=1) + '\n',
                           encoding='utf-8')
    (out / 'README.md').write_text(page(out), encoding='utf-8')
    return 0 if s.table or all(state == 'ok' for state in part.done.values()) else 1


if __name__ == '__main__':
    raise SystemExit(main())
