"""For frameworks that own the training loop."""
