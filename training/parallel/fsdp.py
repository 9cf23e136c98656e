"""FSDP2: parameters, gradients and optimizer state are sharded across the processes; each block
is gathered while it runs.

Source: torch.distributed.fsdp.fully_shard; the idea is ZeRO stage 3 (Rajbhandari et al. 2020).
"""
import warnings

import torch

from common.errors import UserError


def used(parallel: str, ranks) -> bool:
    return parallel == 'fsdp' and ranks.world_size > 1


def check(memory_report: bool, dtype: torch.dtype) -> None:
    """Raise UserError if a setting is incompatible with parallel='fsdp'."""
    if memory_report:
        raise UserError("memory_report=True does not go with parallel='fsdp'")
    if dtype == torch.float16:
        raise UserError("dtype='float16' needs loss scaling, which does not go with "
                        "parallel='fsdp': use bfloat16 or float32")


def shard(model, ranks, dtype: torch.dtype, compiled: bool = False) -> None:
    """Shard the parameters of a GPT in place, by block, with the values of rank 0; the models of
    others may be on the 'meta' device. Blocks are gathered in `dtype`, but gradients averaged in
    float32. Embeddings, last norm, head (autocast rounds its matmul) and residual stream too."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    # V is a view of c_attn's output. Nothing writes to it.
    warnings.filterwarnings('ignore', message='FSDP2-wrapped module .* returned a view tensor')
    weights = model.state_dict() if ranks.main else {}
    model.to('meta')
    model.transformer.wte.weight = model.lm_head.weight  # `to` unties them
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=ranks.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def gathered(x, main: bool):
    """Return a state dict with each DTensor in full in host memory, on the device only one at a
    time; None in place of DTensors if not `main`. All processes must call it."""
    if isinstance(x, dict):
        return {name: gathered(value, main) for name, value in x.items()}
    if not is_sharded(x):
        return x
    x = x.full_tensor()
    return x.cpu() if main else None


def full(x: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's full value on every process; other tensors unchanged."""
    return x.full_tensor() if is_sharded(x) else x


def is_sharded(x: torch.Tensor) -> bool:
    return hasattr(x, 'full_tensor')


def own_nbytes(x: torch.Tensor) -> int:
    """Return the bytes that this process stores of x."""
    return (x.to_local() if is_sharded(x) else x).nbytes


def like(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Shard x, which every process has in full, like the parameter p."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    if not isinstance(p, DTensor) or isinstance(x, DTensor) or x.dim() == 0:
        return x
    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
