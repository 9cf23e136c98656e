"""What turns logits into text: samplers and the generation loop. Knows nothing of training."""
