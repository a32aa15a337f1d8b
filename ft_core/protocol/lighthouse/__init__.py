"""The machine of a lighthouse: who is there, whether a quorum may form, who is refused."""
