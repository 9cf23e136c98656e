"""Ladders of models, each one change from the one above: what they cost and buy, side by side (ablate.py)."""
