"""Sums of gradients whose rounding does not depend on who adds."""
