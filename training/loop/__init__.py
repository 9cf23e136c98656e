"""A training run from its settings to its end: data, checkpoints, steps and log. Everything that
train.py itself needs is here; the rooms below know nothing of a run."""
