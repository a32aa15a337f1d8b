"""`ftrun`: launches, supervises and restarts replica groups. `supervisor` is the whole, `options` the command line."""
