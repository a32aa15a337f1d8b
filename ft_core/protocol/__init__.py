"""What is decided: the machines of the lighthouse, of a replica group and of its ranks. Pure: no clock, no I/O."""
