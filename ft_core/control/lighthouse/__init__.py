"""The lighthouse: server, command line, clients."""
