"""Decode steps: static, captured, fused, and in C++."""
