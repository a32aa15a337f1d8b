"""The machine of a replica group: the asks and votes of its ranks as one."""
