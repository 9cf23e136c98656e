"""Weights for inference: quantized, and faster matmuls for few rows."""
