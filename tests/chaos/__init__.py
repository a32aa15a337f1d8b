"""Real processes, really killed: each test proves much, so there are few."""
