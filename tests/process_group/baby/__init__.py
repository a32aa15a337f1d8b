"""Process groups in a child process."""
