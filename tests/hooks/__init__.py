"""Pools built by overriding the hooks of `BasePool` alone."""
