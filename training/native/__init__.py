"""What a training step does beside its matmuls, in C++ on a CPU (train.cpp): attention, QK-norm
with RoPE, GELU and cross-entropy, forward and backward. All arithmetic is float32.

`loading` compiles and opens the library, `operators` gives its functions to torch
(`torch.ops.nanokv`), and `modules` gives them gradients and puts them into a model.
"""
