"""The data plane: collectives, aborts, forks, killed processes."""
