"""Attention functions: plain tensors in, plain tensors out.

Letters: B rows, H query heads, Hkv K/V heads, t new tokens, S keys, D head_dim.
q (B, H, t, D); k, v (B, Hkv, S, D).
"""
from attention.cached import cached_attention
from attention.causal import causal_attention

__all__ = ['cached_attention', 'causal_attention']
