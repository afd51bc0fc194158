"""What `python -m mcore_snap bench` runs: our copies beside the fastest there can be, and beside those of others."""
