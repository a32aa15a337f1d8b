"""What one rank runs around the protocol: threads, process groups, state, and the parts of `Manager`."""
