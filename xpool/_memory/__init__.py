"""Shared memory: the arena, and buffers for what is large."""
