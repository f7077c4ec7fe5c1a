"""Pools over the hosts of a Ray cluster."""
