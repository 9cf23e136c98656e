"""Ladders of models, each one change from the one above; their losses and costs (ablate.py)."""
