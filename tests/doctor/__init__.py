"""ft-doctor."""
