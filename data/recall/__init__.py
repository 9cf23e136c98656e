"""Synthetic recall at marked distances: see lags.py (the task) and README.md (why and how)."""
