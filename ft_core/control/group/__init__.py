"""The leader of a replica group: what its ranks do, it does as one."""
