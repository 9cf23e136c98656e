"""Kernels for GPUs: Triton's, FlexAttention, flash-attn. Each has a twin in plain torch."""
