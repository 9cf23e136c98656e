r"""Serve a trained model over HTTP, with OpenAI's interface for completions and chat.

    python serve.py out-mqa-local         # http://127.0.0.1:8000/v1, only on this machine
    NANOKV_API_KEY=secret python serve.py --out_dir=out-mqa-local --host=0.0.0.0 --port=8080
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "ROMEO:", "max_tokens": 50}'
    python serve.py --help

POST /v1/completions and /v1/chat/completions (streaming too), GET /v1/models, /health, /metrics
(Prometheus); unless --page=False, / (a chat page) and /nanokv/... (the same streams with the state
of the KV cache). docs/serving.md describes them. Needs pip install -e '.[serve]'.
"""
import functools
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import configurator
from common.errors import UserError, at_least
from common.files import read_text
from common.settings import COMMAND_LINE, Running, Talking, key
from common.sizes import parse_bytes
from engine.steps.captured import CapturedDecode
from engine.text.dialogue import Template, longest_context, speakers
from engine.engine import Engine
from engine.steps.prepare import prepare
from interop.choose import Budget, paged
from interop.load import load, with_newest_run
from serving.api import Service
from serving.worker import Worker, most_choices
from training.checkpoint.convert import MEMORY
from training.checkpoint.file import config_of
from training.checkpoint.manager import checkpoint_in, load_to_resume
from training.device import total_memory
from training.elastic.plans import of_checkpoint

LOOPBACK = ('127.0.0.1', '::1', 'localhost')


@dataclass(frozen=True)
class Settings(Talking, Running):
    host: str = key('127.0.0.1', "where to listen: '127.0.0.1' = this machine, '0.0.0.0' = any")
    port: int = key(8000, 'port to listen on; 0 = a free one, which is printed')
    api_key_file: str = key('', "file of API keys, one a line; '' = NANOKV_API_KEY, if set")
    cors: str = key('', "origin whose web pages may use the server, as 'http://localhost:3000'; "
                    "'*' = any; '' = none but its own")
    model_name: str = key('', "name of the model in the API; '' = that of the folder out_dir")
    strict_messages: bool = key(False, 'reject messages with the end of a turn in them (by default '
                                'a blank line); False = remove their blank lines')
    max_new_tokens: int = key(256, 'longest answer, in tokens, unless the request sets it')
    parallel: int = key(16, 'requests that run at once')
    max_seq_len: int = key(0, 'longest prompt plus answer, in tokens; 0 = block_size, or up to 32 '
                           'times that (at most 8,192) with RoPE and local layers')
    max_waiting: int = key(64, 'requests that may wait; further ones are rejected (429)')
    max_body: str = key('1MB', 'largest request body')
    timeout: float = key(300.0, 'seconds after which a request is cancelled (504)')
    page: bool = key(True, 'serve a chat page at /, and the KV cache it shows at /nanokv/')
    log_requests: bool = key(True, 'print a line for each finished request')
    grace: float = key(10.0, 'seconds to finish running requests on Ctrl-C or SIGTERM')
    kv_budget: str = key('', "KV memory, as '1GB'; '' = all rows at full length, but at most half "
                         "of the machine's memory. An elastic model (train.py --plans) runs at "
                         'its best plan with which all rows fit (other forms: sample.py)')
    prefix_budget: str = key('256MB', "host memory for the prefix cache; '' = no such cache")
    all_plans: bool = key(False, 'serve all plans of an elastic model: a request names one by its '
                          "bytes, as 'NAME:64KB' (GET /v1/models lists them)")
    shared_prefix: bool = key(False, "requests of different API keys reuse each other's prompts, "
                              'and can find out what these are')


def check(s):
    at_least(s, parallel=1, max_new_tokens=1, max_waiting=0, port=0, grace=0.0)
    if s.port > 65535:  # some systems reduce it modulo 65536
        raise UserError(f'port={s.port}: must be at most 65535')
    if s.cors not in ('', '*') and not re.fullmatch(r'https?://[^/\s]+', s.cors):
        raise UserError(f"cors={s.cors!r}: must be an origin without a path, as "
                        "'http://localhost:3000', or '*'")
    if s.timeout <= 0:
        raise UserError(f'timeout={s.timeout}: must be above 0 seconds')


def read_keys(path: str, environment) -> list[str]:
    """Return the accepted API keys, from a file or otherwise from NANOKV_API_KEY. UserError: if it
    is empty, which is more likely a mistake than intended."""
    if path:
        lines = read_text(path, f'api_key_file={path!r}').splitlines()
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise UserError(f'api_key_file={path!r} has no key in it')
        return keys
    key = environment.get('NANOKV_API_KEY')
    if key is not None and not key.strip():
        raise UserError('NANOKV_API_KEY is set, and empty: give a key, or unset it')
    return [] if key is None else [key.strip()]


def each_plan(s) -> list[tuple]:
    """The settings at which a plan of an elastic model runs, and its validation loss, for all of
    them, the base first. UserError: if the model is not elastic, or settings choose one plan."""
    if s.init_from != 'resume' or s.kv_budget or any(
            s.given.get(name) == COMMAND_LINE for name in MEMORY):
        raise UserError('all_plans serves a run of train.py --plans at all of its memories: give '
                        'no kv_budget, no init_from and no field of the memory')
    path = checkpoint_in(s.out_dir, s.resume_from)
    saved = load_to_resume(path)
    plans, losses = of_checkpoint(saved.get('plans'), config_of(saved, path))
    if len(plans) == 1 or None in losses:
        raise UserError(f'all_plans: {path} has no plans that were evaluated (train.py --plans)')
    return [(replace(s, given=s.given | dict.fromkeys(plan.changes, COMMAND_LINE), **plan.changes),
             loss) for plan, loss in zip(plans, losses)]


def name_for(nbytes: int) -> str:
    """The shortest size of at least so many bytes: 73,728 -> '73.8KB'."""
    for unit, size in (('GB', 10 ** 9), ('MB', 10 ** 6), ('KB', 10 ** 3)):
        if nbytes >= size:
            return f'{-(-10 * nbytes // size) / 10:g}{unit}'
    return f'{nbytes}B'


def make_service(s, model, tokenizer, dataset: str, share: int = 1):
    """Return the engine, and the settings used to validate requests. share: how many engines share
    the memory."""
    template = Template(s.turn)
    try:
        for name in (s.user, s.reply_as):
            tokenizer.encode(template.head(name) + template.end)
    except UserError as e:
        print(f'Note: conversations will be refused because of --turn, --user or --reply_as: {e}')
    budget = Budget.parse(s.kv_budget).total if s.kv_budget else 0
    budget = budget or total_memory(model.device) // (2 * share)
    max_seq_len = s.max_seq_len or longest_context(model.config)
    prefix_budget = parse_bytes(s.prefix_budget, 'prefix_budget') // share if s.prefix_budget else 0
    engine = Engine(model, s.parallel, max_seq_len, s.kv_dtype, kv_budget=budget,
                    tokenizer=tokenizer, captured=s.captured, prefix_budget=prefix_budget)
    table = engine.cache.table
    positions = min(engine.cache.max_seq_len, table.n_pages * table.page_size)
    source, created = Path(s.init_from), time.time()
    if s.init_from == 'resume':
        source = Path(s.out_dir).resolve()
        created = checkpoint_in(s.out_dir, s.resume_from).stat().st_mtime
    return engine, Service(s.model_name or source.name, tokenizer, model.config.vocab_size,
                           positions, s.max_new_tokens, most_choices(s.parallel, s.max_waiting),
                           template, s.user, s.reply_as, parse_bytes(s.max_body, 'max_body'),
                           s.timeout, s.strict_messages, int(created), dataset)


def main(argv=None):
    s = configurator.parse(Settings, argv, usage=__doc__)
    check(s)
    try:
        from serving.app import make_app
        from serving.metrics import Metrics
        from serving.server import Server, bind
    except ModuleNotFoundError as e:
        if e.name.partition('.')[0] not in ('starlette', 'uvicorn', 'prometheus_client'):
            raise
        raise UserError(f"serve.py needs the package {e.name}: pip install -e '.[serve]'") from e
    keys = read_keys(s.api_key_file, os.environ)
    sock = bind(s.host, s.port)  # before anything slow
    s = with_newest_run(s)
    engines, services = [], []
    settings = each_plan(s) if s.all_plans else [(s, 0.0)]
    for each, loss in settings:
        model, tokenizer, dataset = load(each, lambda config, _: (
            s.parallel, s.max_seq_len or longest_context(config)), paged, engine=True)
        user, reply_as = speakers(s, dataset)
        engine, service = make_service(replace(s, user=user, reply_as=reply_as), model, tokenizer,
                                       dataset, len(settings))
        if isinstance(engine.fast_decode, CapturedDecode):
            print(f'Preparing decode steps of 1 to {s.parallel} rows', flush=True)
            prepare(engine)
        nbytes = model.plan.nbytes(1, model.config.block_size, engine.cache.kv_dtype)
        name = f'{service.model}:{name_for(nbytes)}' if engines else service.model
        if name in (other.model for other in services):  # of two in one size, the larger is better
            print(f'Note: {name} has two plans, of which the second is not served')
            continue
        services.append(replace(service, model=name, engine=len(engines), nbytes=nbytes, loss=loss))
        engines.append(engine)
    worker = Worker(engines, s.max_waiting, Metrics())
    worker.start()
    if s.host not in LOOPBACK and not keys:
        print(f'Note: anybody who can reach {s.host} can use this server: '
              'set NANOKV_API_KEY or --api_key_file to require a key', file=sys.stderr)
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    page = f', a chat page at {url}/' if s.page else ''
    names = ', '.join(repr(service.model) for service in services)
    greeting = f'Serving {names} at {url}/v1{page} (Ctrl-C ends it)'
    log = functools.partial(print, flush=True) if s.log_requests else None
    app = make_app(worker, services, keys, log, s.page, s.cors, s.shared_prefix)
    Server(app, worker, s.grace, greeting).run([sock])


if __name__ == '__main__':
    configurator.run_program(main)
