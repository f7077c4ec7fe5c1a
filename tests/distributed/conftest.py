"""Ranks for the tests of this folder."""

from support.ranks import loopback, ranks

__all__ = ["loopback", "ranks"]
