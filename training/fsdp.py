"""FSDP2: parameters, gradients and optimizer state shared out over the processes, a block gathered while it is at work.

Source: torch.distributed.fsdp.fully_shard; the idea is ZeRO's third stage (Rajbhandari et al. 2020).
"""
import warnings

import torch

from config.errors import UserError


def check(s, dtype: torch.dtype) -> None:
    """Raises UserError: settings that do not go with parallel='fsdp'."""
    for name, wrong in (('optimizer', 'adamw8bit'), ('offload_optimizer', True), ('recompute', 'auto'),
                        ('memory_report', True)):
        if getattr(s, name) == wrong:
            raise UserError(f"{name}={wrong!r} does not go with parallel='fsdp'")
    if dtype == torch.float16:
        raise UserError("dtype='float16' needs loss scaling, which does not go with parallel='fsdp': use bfloat16 or float32")


def shard(model, ranks, dtype: torch.dtype, compiled: bool = False, empty: bool = False) -> None:
    """Share out the parameters of a GPT in place, a block at a time; they become DTensors on the ranks' device.

    Their values are those of rank 0's model; the others' may be on the 'meta' device.

    empty: no rank has any yet. dtype: of the arithmetic. In bfloat16 blocks are gathered in it, and gradients are still
    averaged in float32; embeddings, the last norm and the head, whose products autocast rounds by itself, stay in float32, and
    so does the residual stream.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    # V is a view of what a product gave. Nothing writes to it.
    warnings.filterwarnings('ignore', message='FSDP2-wrapped module .* returned a view tensor')
    weights = model.state_dict() if ranks.main and not empty else {}
    model.to('meta')
    model.transformer.wte.weight = model.lm_head.weight  # `to` makes new parameters, and of a tied one two
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    half = dtype != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype if half else None, reduce_dtype=torch.float32 if half else None,
                                  cast_forward_inputs=False)
    for block in model.transformer.h:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=ranks.device)
    if not empty:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def full(x: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value on every process; other tensors are their own."""
    return x.full_tensor() if hasattr(x, 'full_tensor') else x


def like(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x, which every process has whole, as p is: this process's part of it where p is shared out."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    if not isinstance(p, DTensor) or isinstance(x, DTensor) or x.dim() == 0:
        return x
    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
