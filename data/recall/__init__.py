"""Synthetic associative recall with controlled distances: see task.py (the task) and README.md (why and how)."""
