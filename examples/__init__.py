"""Applications that use unstuck, to be run and read."""
