"""Live state over HTTP."""
