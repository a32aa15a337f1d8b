"""What ftrun and its workers print."""
