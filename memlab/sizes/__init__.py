"""What a training step of a model will take, from a forward pass on tensors without data."""
