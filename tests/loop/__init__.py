"""Work that the members of a quorum divide, and the rest of the kit for training loops."""
