"""Measurements: ablation ladders, benchmarks, and scripts that answer one question each."""
