"""How queries meet keys. Shapes throughout: q (B, H, t, D); k, v (B, Hkv, S, D); the last key is the last query's own."""
from attention.cached import cached_attention
from attention.causal import causal_attention

__all__ = ['cached_attention', 'causal_attention']
