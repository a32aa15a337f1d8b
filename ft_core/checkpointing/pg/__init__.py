"""Live state over a process group."""
