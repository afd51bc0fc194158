"""What `python -m mcore_snap demo` runs: a look-back to version 1 in a real training run, checked bit by bit."""
