"""What each optimizer holds, beside AdamW: bytes of its state, the most memory of a training step, and its own time.

    python lab/scripts/optimizers.py                        # results/cpu/optimizers.json (about two minutes on 2 cores)
    python lab/scripts/optimizers.py --device=cuda --save=results/gpu/optimizers.json

GPT-2 124M's shape, float32, each in a process of its own: three training steps (batch 1, T=256), of which the last is measured.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console
from rich.table import Table

from config.errors import UserError
from config.gpt_config import GPTConfig
from config.sizes import nice_bytes
from configurator import run_program
from lab.benchmarks.setting import processor
from model import GPT
from training.device import device_name, memory_use, pick_device, synchronize
from training.memory_use import state_bytes
from training.optim import make_optimizer
from training.update import GuardedUpdate

RESULT = ROOT / 'results' / 'cpu' / 'optimizers.json'
OPTIMIZERS = {'adamw': {}, 'muon': dict(optimizer='muon'), 'adamw8bit': dict(optimizer='adamw8bit'),
              'adamw, offload_optimizer': dict(offload_optimizer=True)}
SETTINGS = dict(optimizer='adamw', offload_optimizer=False, muon_momentum=0.95, weight_decay=0.1, learning_rate=6e-4, beta1=0.9,
                beta2=0.95)
SHAPE = dict(vocab_size=50304, n_layer=12, n_head=12, n_embd=768)
B, T = 1, 256


def measure(name: str, device: torch.device) -> dict:
    """In this process: what a step with this optimizer holds, and how long its update takes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=T, **SHAPE)).to(device)
    optimizer = make_optimizer(model, SimpleNamespace(**SETTINGS | OPTIMIZERS[name]), device.type)
    update = GuardedUpdate(optimizer, torch.amp.GradScaler(device.type, enabled=False), 1.0, device)
    idx = torch.randint(SHAPE['vocab_size'], (B, T + 1), device=device)
    for i in range(3):
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats()
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        synchronize(device)
        began = time.perf_counter()
        update(i, loss.detach())
        synchronize(device)
        seconds = time.perf_counter() - began
    parameters, gradients, state = state_bytes(model, optimizer)
    on_host = optimizer.host_nbytes() if hasattr(optimizer, 'host_nbytes') else 0
    peak = torch.cuda.max_memory_allocated() if device.type == 'cuda' else memory_use(device).peak
    return {'parameters_bytes': parameters, 'gradients_bytes': gradients, 'state_bytes': state, 'host_bytes': on_host,
            'peak_bytes': peak, 'update_seconds': seconds}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu', help='default: %(default)s')
    parser.add_argument('--save', type=Path, default=RESULT, help='the JSON file (%(default)s)')
    parser.add_argument('--one', choices=OPTIMIZERS, help='measure this one, in this process, and print JSON')
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    if args.one:
        print(json.dumps(measure(args.one, device)))
        return
    found = {'device': device_name(device), 'processor': processor(), 'threads': torch.get_num_threads(),
             'torch': torch.__version__, 'dtype': 'float32', 'B': B, 'T': T, 'optimizers': {}}
    for name in OPTIMIZERS:
        done = subprocess.run([sys.executable, __file__, f'--device={args.device}', f'--one={name}'], stdout=subprocess.PIPE,
                              text=True)
        if done.returncode:
            raise UserError(f'{name} failed; its output is above')
        found['optimizers'][name] = json.loads(done.stdout.splitlines()[-1])
    args.save.parent.mkdir(parents=True, exist_ok=True)
    args.save.write_text(json.dumps(found, indent=1) + '\n')
    table = Table(title=f"{found['device']}; {found['processor']}", box=None)
    for name in ('optimizer', 'state', 'on the host', 'peak', 'update, ms'):
        table.add_column(name, justify='left' if name == 'optimizer' else 'right')
    for name, row in found['optimizers'].items():
        table.add_row(name, *(nice_bytes(row[key]) for key in ('state_bytes', 'host_bytes', 'peak_bytes')),
                      f"{1000 * row['update_seconds']:,.0f}")
    Console().print(table)


if __name__ == '__main__':
    run_program(main)
