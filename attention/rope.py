"""QK-norm (RMS norm over head_dim; Henry et al. 2020) of queries and keys, and rotary
position embedding with half-split pairs (RoFormer, Su et al. 2021; Llama's layout in Hugging Face).
"""
import torch


class RotaryTable:
    """cos and sin of pos * theta**(-2d/D), for one base.

    Not a module: nothing here may enter a state dict or be cast by `module.to()`, since an angle
    rounded to bf16 is wrong by full turns at high positions. Angles are computed in float64; the
    tables are float32 (float64 for float64 models).

    fraction: share of the pairs that are rotated, those with the largest angles (Gemma 4).
    """

    def __init__(self, head_dim: int, theta: float, fraction: float = 1.0):
        self.head_dim, self.theta, self.n_rotated = head_dim, theta, round(fraction * head_dim / 2)
        self._tables = {}  # (device, dtype) -> (cos, sin), each (positions, D)

    def __call__(self, start: int, end: int, device, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (end - start, D), for positions start to end - 1 in a `dtype` model."""
        cos, sin = self._tables_for(end, torch.device(device), dtype)
        return cos[start:end], sin[start:end]

    def at(self, positions: torch.Tensor, end: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (B, 1, t, D), for `positions` (B, t), all below `end`."""
        cos, sin = self._tables_for(end, positions.device, dtype)
        return cos[positions][:, None], sin[positions][:, None]

    def _tables_for(self, end, device, dtype):
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tables = self._tables.get((device, dtype))
        if tables is None or tables[0].size(0) < end:
            n = max(256, 1 << (end - 1).bit_length())  # grows by doubling
            with torch.inference_mode(False):  # a table made in sampling must also work in training
                tables = self._build(n, device, dtype)
            self._tables[device, dtype] = tables
        return tables

    def _build(self, n, device, dtype):
        d = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        positions = torch.arange(n, dtype=torch.float64)
        angles = positions[:, None] * self.theta ** (-d / self.head_dim)     # (n, D/2)
        angles[:, self.n_rotated:] = 0
        cos, sin = torch.cos(angles), torch.sin(angles)
        # full head width, with the signs that `apply_rope` needs
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return cos.to(device, dtype), sin.to(device, dtype)


def norm_and_rotate(x: torch.Tensor, norm: torch.nn.RMSNorm | None, rope=None) -> torch.Tensor:
    """QK-norm of x's head vectors in the dtype of its gains (float32 under autocast), then RoPE.
    The result is in x's dtype, so that K matches V.

    Args:
        x: (B, h, t, D). norm: over D, or None.
        rope: (cos, sin) from a `RotaryTable`, broadcastable to x, or None.
    Returns (B, h, t, D).
    """
    if norm is None:
        return x if rope is None else apply_rope(x, *rope)
    if rope is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        from attention.kernels.norm_rope import NormAndRotate  # same, saves less for backward
        return NormAndRotate.apply(x, norm.weight, norm.eps, *rope)
    y = norm(x.to(norm.weight.dtype)).to(x.dtype)
    return y if rope is None else apply_rope(y, *rope)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (a, b) at d and d + D/2 of x (B, h, t, D) to (a cos - b sin, b cos + a sin).

    cos, sin: from a `RotaryTable`. Computed in their dtype, float32 or float64; returned in x's.
    """
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.size(-1) // 2, -1), sin).to(x.dtype)


def split_by_speed(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (B, Hkv, t, D) -> the faster and the slower half of their rotated pairs, each
    (B, Hkv, t, 2, D/4)."""
    fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)
    return fast, slow


def offset_keys(fast, slow, before=None) -> torch.Tensor:
    """Keys (B, Hkv, t, D) whose slower half is that of the previous token (modded-nanogpt).

    fast, slow: from `split_by_speed`. before: (B, Hkv, 1, 2, D/4), the slower half of the token
    before the first one; None = 0.
    """
    if before is None:
        before = torch.zeros_like(slow[:, :, :1])
    slow = torch.cat([before, slow[:, :, :-1]], dim=2)
    return torch.stack([fast, slow], dim=-2).flatten(-3)
