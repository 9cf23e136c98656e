"""Everything for training except the model: batches, optimizers, checkpoints, metrics."""
