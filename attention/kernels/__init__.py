"""GPU kernels: Triton, FlexAttention, flash-attn. Each has a plain torch equivalent."""
