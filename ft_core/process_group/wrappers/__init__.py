"""Process groups that pass everything on to another one, and change a little."""
