"""What a checkpoint holds of a run, and how a run goes on from it."""
import itertools
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import UserError
from common.gpt_config import model_args
from common.settings import MODEL
from training.checkpoint import file as ckpt
from training.checkpoint.manager import peek
from training.elastic.plans import SHARED
from training.parallel import fsdp
from training.parallel.distributed import Ranks, env_int, launch_id
from training.step.optim import load_optimizer


def resumed_after_restart(s, ranks: Ranks):
    """The settings, which resume from ckpt.pt if torchrun has restarted the processes
    (--max-restarts) because one died or joined, and this launch has saved one. Raises UserError if
    it may restart them, but its launch has no id."""
    path, launch = Path(s.out_dir) / 'ckpt.pt', launch_id()
    if env_int('TORCHELASTIC_MAX_RESTARTS', 0) and not launch:
        raise UserError('--max-restarts needs a launch with an id, by which a restart knows its '
                        'own checkpoint: give torchrun --standalone or --rdzv-id=NAME')
    saved = peek(path)
    if ranks.gather(saved is not None and saved.launch == launch != '')[0]:
        print(f'{path} was saved by this launch ({launch}), so this is a restart: going on from it')
        return replace(s, init_from='resume', resume_from=path.name)
    return s


def checkpoint_of(run) -> dict | None:
    """Return the checkpoint of a `Run` on rank 0, None on others. All ranks must call it, since
    each has its own generators."""
    states = run.ranks.gather(ckpt.rng_state())
    weights, moments = run.model.state_dict(), run.optimizer.state_dict()
    if run.sharded:
        weights = fsdp.gathered(weights, run.ranks.main)
        moments = fsdp.gathered(moments, run.ranks.main)
        weights[ckpt.HEAD] = weights[ckpt.EMBEDDING]  # one parameter, gathered twice
    if not run.ranks.main:
        return None
    config, plans = run.model.config, {}
    if run.plans:
        plans = {'plans': [{'changes': plan.changes, 'loss': loss, 'shared': SHARED} for plan, loss
                           in itertools.zip_longest(run.plans, run.elastic.losses)]}
    shape = {name: getattr(config, name) for name in MODEL}
    return {'model': weights, 'optimizer': moments, 'model_args': model_args(config),
            'iter_num': run.iter_num, 'best_val_loss': run.best_val_loss,
            'config': run.s.values() | shape,
            # beyond nanoGPT's keys: what an exact resume needs
            'scaler': run.scaler.state_dict(), 'rng': states, 'data_rng': run.batches.state,
            'holds_best': run.holds_best, 'skipped': int(run.update.counts[0]),
            'launch': launch_id(), 'tokens': run.data.tokens, 'meta': run.data.alphabet, **plans}


def restore(run, saved: dict):
    """Restore a run's optimizer, scaler, counters and generators; returns its next batch."""
    origin, config = run.origin, saved['config']
    with ckpt.restoring(origin, 'optimizer'):
        kind = config.get('optimizer', 'adamw')
        if saved['optimizer']['state'] and kind != run.s.optimizer:
            raise UserError(f'{origin} was trained with optimizer={kind!r}, whose state '
                            f'{run.s.optimizer!r} cannot use: go on with --optimizer={kind}')
        load_optimizer(run.optimizer, saved['optimizer'])
        if saved['iter_num'] and not saved['optimizer']['state']:
            print(f'Note: {origin} has no state of an optimizer, which starts anew')
    if saved.get('scaler'):
        with ckpt.restoring(origin, 'scaler'):
            run.scaler.load_state_dict(saved['scaler'])
    run.iter_num = saved['iter_num']
    with ckpt.restoring(origin, 'skipped'):
        run.update.counts[0] = run.update.reported = int(saved.get('skipped', 0))
    if not run.changed:  # a changed model starts a new history
        run.best_val_loss = torch.as_tensor(saved['best_val_loss'])
        run.holds_best, run.saved_at = bool(saved.get('holds_best', True)), run.iter_num
        run.manager.resume(origin, saved)
    with ckpt.restoring(origin, 'rng'):  # nanoGPT saves neither rng nor data_rng
        states, rank = saved.get('rng', []), run.ranks.rank
        if rank < len(states):  # there may be more processes than before
            ckpt.set_rng_state(states[rank])
    if 'data_rng' not in saved:
        return run.batches.next()
    order = config.get('data_order', 'random')
    if order != run.s.data_order:
        raise UserError(f'{origin} was trained with data_order={order!r}, whose data position '
                        f'{run.s.data_order!r} cannot use: go on with --data_order={order}')
    with ckpt.restoring(origin, 'data_rng'):
        return run.batches.resume(saved['data_rng'])
