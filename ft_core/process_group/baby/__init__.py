"""Process groups in a child process that can be killed: for backends whose own abort cannot be trusted."""
