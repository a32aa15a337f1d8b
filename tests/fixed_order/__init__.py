"""The same trajectory, bit for bit: the order of additions, the carrier, real Managers in threads, and processes."""
