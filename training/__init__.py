"""What a training step needs around the model: batches, optimizer, checkpoints, metrics. Knows nothing of sampling."""
