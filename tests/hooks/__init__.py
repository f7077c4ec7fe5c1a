"""Pools that override only the hooks of `BasePool`."""
