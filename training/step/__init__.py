"""What one training step computes around the model: loss, attention kernels, optimizer, update. It
also counts the step's FLOPs."""
