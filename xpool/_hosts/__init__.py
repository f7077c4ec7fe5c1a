"""Pools whose workers are on many hosts: docs/hosts.md.  `xpool.ray` places them."""
