"""What train.py prints of the memory of its steps."""
import torch

from common.sizes import nice_bytes
from kv.console import output, print_table, table_of
from training.device import memory_use
from training.memory.measure import measure, predict
from training.step.optim import state_bytes


def print_memory_report(run) -> None:
    """Print the report of train.py's --memory_report for a `Run` that has its first batch. The
    run's random state, data and gradients are left unchanged."""
    s, policy = run.s, run.model.recompute.name if run.model.recompute else 'none'
    accumulate = s.gradient_accumulation_steps > run.ranks.world_size
    predictions = predict(s, run.model.config, run.device, run.dtype, accumulate=accumulate)
    print_table(output(), policy_table(predictions), 'Memory of a step, predicted')
    measured = vars(measure(run.model, run.batch, run.autocast, optimizer=s.optimizer,
                            accumulate=accumulate))
    rows = ((name.replace('_', ' '), nice_bytes(n), nice_bytes(measured[name]))
            for name, n in vars(predictions[policy]).items())
    title = f'\n{s.batch_size} x {run.model.config.block_size:,} tokens, recompute={policy!r}'
    print_table(output(), table_of(('', 'predicted', 'measured'), rows), title)


def policy_table(predictions):
    rows = ([policy, *(nice_bytes(n) for n in (m.activations, m.loss_peak, m.peak))]
            for policy, m in predictions.items())
    return table_of(('recompute', 'activations', 'logits and loss', 'peak'), rows,
                    left=('recompute',))


def memory_line(model, optimizer: str, device: torch.device) -> str:
    """Return two lines to print after the first step: bytes that stay, and the peak."""
    parameters, gradients, state = state_bytes(model, optimizer)
    text = (f'memory: parameters {nice_bytes(parameters)}, gradients {nice_bytes(gradients)}, '
            f'optimizer {nice_bytes(state)}')
    peak = memory_use(device).peak
    if device.type == 'cuda':
        rest = max(0, peak - parameters - gradients - state)
        text += (f',\n        activations and all else {nice_bytes(rest)}, '
                 f'peak {nice_bytes(peak)}')
    elif peak is not None:
        text += f',\n        peak {nice_bytes(peak)} (of the whole process, with Python and torch)'
    return text
