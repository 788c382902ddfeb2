"""What a training step holds besides the tensors of forward and backward: the optimizer, and its update."""
