"""How the training loop is written: batches, what it keeps by name, gradients it clears."""
