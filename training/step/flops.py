"""FLOPs of a training step: as nanoGPT counts them, and with only the keys that each query
attends to.

Notation: N parameters, L layers, H query heads, Hkv key/value heads, D head_dim, C n_embd,
F mlp_hidden, V vocab_size, T sequence length, W window_size. A multiply-add is two FLOPs.
"""
import re

import torch

from kv.counts import total_keys
from kv.weights import POSITIONS

A100_BF16_FLOPS = 312e12


def estimate_mfu(model, fwdbwd_per_iter: int, dt: float) -> float:
    """Return model FLOPs utilization as nanoGPT does, for comparison with it: 6N + 12*L*H*D*T per
    token (PaLM, appendix B) over an A100's peak. Every layer counts as full attention over
    block_size, which overstates the utilization of models with windows."""
    c, head_dim = model.config, model.plan.head_dim
    per_token = 6 * model.get_num_params() + 12 * c.n_layer * c.n_head * head_dim * c.block_size
    return per_token * c.block_size * fwdbwd_per_iter / dt / A100_BF16_FLOPS


def flops_per_token(model) -> tuple[float, float]:
    """Return model FLOPs per token of weights and of attention, forward and backward, averaged over
    the positions of a sequence of block_size tokens.

        weights    6 * (elements of all weight matrices)
                     = 6 * (V*C for lm_head, and the sum over layers of
                            (H + 2*Hkv [owners only])*D*C + H*D*C + 2*C*F);
                     where K = V, Hkv in place of 2*Hkv; with latents of width dc, dc in place of
                     2*Hkv*D and 2*H*D*dc more in every layer that makes K and V from them
        attention  12 * H * D * (sum over layers of the mean number of keys that a query sees)

    Six is two forward and four backward (the gradients of input and weight each cost as much as the
    forward pass). Twelve is six each for the scores and for the weighted sum of values. Norms,
    biases, GELU and softmax are ignored, and what the hardware does beside (blocks of a mask,
    recomputation).
    Source: PaLM (Chowdhery et al. 2022), appendix B, without its "every query sees T keys".
    """
    plan, T = model.plan, model.config.block_size
    matrices = sum(p.numel() for name, p in model.named_parameters()  # lm_head is wte
                   if p.dim() == 2 and name != POSITIONS)
    keys = sum(total_keys(layer, T) for layer in plan.layers) / T
    return 6 * matrices, 12 * plan.n_head * plan.head_dim * keys


def achieved(model, sequences: int, dt: float) -> float:
    """Return model TFLOP/s, forward and backward, for `sequences` sequences of block_size tokens in
    `dt` seconds."""
    return sum(flops_per_token(model)) * model.config.block_size * sequences / dt / 1e12


# Peak dense TFLOP/s with float32 accumulation, from NVIDIA's data sheets and whitepapers (numbers
# "with sparsity" are twice these). Missing dtypes are not supported by the hardware. The
# first line whose words are all in the device name applies, such as "NVIDIA A100-SXM4-80GB".
PEAKS = (
    ('V100-PCIE', dict(float16=112.0, float32=14.0)),
    ('V100', dict(float16=125.0, float32=15.7)),
    ('T4', dict(float16=65.0, float32=8.1)),
    ('A100', dict(float16=312.0, bfloat16=312.0, tf32=156.0, float32=19.5)),
    ('A10', dict(float16=125.0, bfloat16=125.0, tf32=62.5, float32=31.2)),
    ('A40', dict(float16=149.7, bfloat16=149.7, tf32=74.8, float32=37.4)),
    ('RTX A6000', dict(float16=154.8, bfloat16=154.8, tf32=77.4, float32=38.7)),
    ('L4', dict(float16=121.0, bfloat16=121.0, tf32=60.0, float32=30.3)),
    ('L40', dict(float16=181.0, bfloat16=181.0, tf32=90.5, float32=90.5)),
    ('L40S', dict(float16=362.0, bfloat16=362.0, tf32=183.0, float32=91.6)),
    ('H100 PCIe', dict(float16=756.0, bfloat16=756.0, tf32=378.0, float32=51.0)),
    ('H100 NVL|H200 NVL', dict(float16=835.0, bfloat16=835.0, tf32=417.5, float32=60.0)),
    ('H100|H200|GH200', dict(float16=989.4, bfloat16=989.4, tf32=494.7, float32=66.9)),
    ('B200', dict(float16=2250.0, bfloat16=2250.0, tf32=1125.0, float32=75.0)),
    ('RTX 3090', dict(float16=71.0, bfloat16=71.0, tf32=35.6, float32=35.6)),
    ('RTX 4090', dict(float16=165.2, bfloat16=165.2, tf32=82.6, float32=82.6)),
    ('RTX 5090', dict(float16=209.5, bfloat16=209.5, tf32=104.8, float32=104.8)),
)
# a partition of a chip, or a different chip with nearly the same name
OTHER_CHIP = r'\bMIG\b|\bLaptop\b|\bMax-Q\b|\bTi\b|\bD\b'


def peak_tflops(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense TFLOP/s for matmuls in `dtype` of a device with this name, as returned
    by torch.cuda.get_device_name; float32 means TF32 if torch may use that. None if unknown."""
    if re.search(OTHER_CHIP, name):
        return None
    rates = next((rates for chip, rates in PEAKS if re.search(rf'\b({chip})\b', name)), {})
    kind = str(dtype).removeprefix('torch.')
    if kind == 'float32' and torch.get_float32_matmul_precision() != 'highest':
        return rates.get('tf32', rates.get('float32'))
    return rates.get(kind)
