"""Starts nanoKV, vLLM or llama.cpp with the same random weights and the same bytes of KV cache.

llama.cpp gets a vanilla GPT-2 of the same width and depth, as it does not run ours.
"""
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from data.tokenizer import BPETokenizer
from interop.export import hf_model
from interop.tokenizer_files import save_tokenizer
from lab.benchmarks.llama import CELLS, write_gguf
from lab.benchmarks.setting import shape_of, vanilla_config
from lab.sessions.client import Client, Failed
from model import GPT

ROOT = Path(__file__).resolve().parents[2]
CONFIG = 'config/sessions.py'
ROWS = 16          # requests that run at once
START_S = 300.0
MIB = 2 ** 20
NAME = 'sessions'  # of the model in the API


def build(longest: int, vanilla: bool = False) -> GPT:
    """A model with random weights of CONFIG, for `longest` tokens."""
    s = configurator.parse('bench', [str(ROOT / CONFIG)], echo=False)
    found = shape_of(s, 50304)
    found = replace(found, dropout=0.0, block_size=max(found.block_size, longest))
    torch.manual_seed(1)
    if vanilla:
        found = replace(vanilla_config(found, longest), bias=True)  # llama.cpp knows no other
    return GPT(found).eval()


@contextlib.contextmanager
def started(name: str, program: str, longest: int, kv: int, more: list[str]):
    """Yield (url, process) of a running server, and stop it at the end.

    program: of vLLM, its Python; of llama.cpp, its llama-server; '' = the usual one. kv: bytes of
    KV cache, in rows and between requests. longest: tokens of a conversation. more: further
    arguments.
    Raises:
        UserError: if the server ends or does not answer. Its output is in the message.
    """
    command, usual = SERVERS[name]
    program = program or usual
    if program and not shutil.which(program):
        raise UserError(f'start={name!r}: {program} is not there (--program says where)')
    port = free_port()
    url = f'http://127.0.0.1:{port}'
    with (tempfile.TemporaryDirectory() as folder,
          tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace') as log):
        model = build(longest, vanilla=name == 'llama.cpp')
        arguments = command(program, model, Path(folder), port, longest, kv) + more
        print('Starting:', *arguments, flush=True, file=sys.stderr)
        with subprocess.Popen(arguments, stdout=log, stderr=log) as process:
            try:
                end = time.monotonic() + START_S
                while not answers(url):
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        raise UserError(f'the server does not answer: {log.read()[-600:]}')
                    time.sleep(0.5)
                yield url, process
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def answers(url: str) -> bool:
    with contextlib.suppress(Failed):
        return bool(Client(url, timeout=5.0).model())
    return False


def nanokv(_program, model, folder, port, longest, kv):
    export(model, folder)
    rows = min(kv // 4, model.plan.nbytes(ROWS, longest, 'float32'))
    return [sys.executable, str(ROOT / 'serve.py'), f'--init_from={folder}', f'--port={port}',
            '--page=False', '--log_requests=False', f'--model_name={NAME}', f'--parallel={ROWS}',
            f'--max_seq_len={longest}', f'--kv_budget={rows}', f'--prefix_budget={kv - rows}']


def vllm(program, model, folder, port, longest, kv):
    export(model, folder)
    return [program, '-m', 'vllm.entrypoints.openai.api_server',
            f'--model={folder}', f'--port={port}', '--host=127.0.0.1', f'--max-num-seqs={ROWS}',
            f'--served-model-name={NAME}', f'--max-model-len={longest}',
            f'--kv-cache-memory-bytes={kv}', '--enable-prompt-tokens-details']


def llama(program, model, folder, port, longest, kv):
    """Half of the bytes, or what one request takes, are for running requests. The rest keeps
    prompts."""
    import gguf
    write_gguf(gguf, model, folder / 'model.gguf', BPETokenizer())
    cell = model.plan.nbytes(1, 1, 'float16')
    row = -(-longest // CELLS) * CELLS * cell
    rows = min(ROWS, max(1, kv // 2 // row))
    rest = max(0, (kv - rows * row) // MIB)
    return [program, '--model', str(folder / 'model.gguf'), '--port', str(port),
            '--threads', str(torch.get_num_threads()), '--parallel', str(rows), '--no-kv-unified',
            '--ctx-size', str(rows * row // cell), '--cache-ram', str(rest), '--no-webui',
            '--alias', NAME]


# the command, and the usual program
SERVERS = {'nanokv': (nanokv, ''), 'vllm': (vllm, str(ROOT / '.venv-vllm' / 'bin' / 'python')),
           'llama.cpp': (llama, 'llama-server')}


def export(model, folder: Path) -> None:
    hf_model(model).save_pretrained(folder)
    save_tokenizer(BPETokenizer(), folder, 0)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        return sock.getsockname()[1]


def resident(process) -> int:
    """Bytes of memory of a process and its children (Linux)."""
    total, waiting = 0, [process.pid]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            total += 4096 * int(Path(f'/proc/{pid}/statm').read_text().split()[1])
            for children in Path(f'/proc/{pid}/task').glob('*/children'):
                waiting += map(int, children.read_text().split())
    return total
