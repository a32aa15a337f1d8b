"""The gradients of a backward pass become one sum over the replicas."""
