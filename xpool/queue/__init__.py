"""How messages cross the border between two processes."""
