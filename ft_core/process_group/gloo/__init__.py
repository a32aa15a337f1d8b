"""Process groups over Gloo."""
