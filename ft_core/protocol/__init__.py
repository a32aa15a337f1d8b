"""What is decided: three machines, of the lighthouse, of a replica group and of a rank. Pure: no clock, no I/O."""
