"""The same trajectory, bit for bit: the order of additions, the reducer, real Managers in threads, and processes."""
