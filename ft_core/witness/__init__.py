"""Death known in a millisecond: a witness process holds what the kernel releases when a training process ends."""
