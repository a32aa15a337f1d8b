"""The machine of a rank: attempts at a step, the commit vote, who heals from whom."""
