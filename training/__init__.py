"""What a training step needs around the model: batches, optimizers, checkpoints, metrics."""
