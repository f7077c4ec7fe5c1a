"""Measurements: the machine's floor, xpool against its peers, and how xpool's cost grows.

``python -m bench.floor``, ``python -m bench.peers``, ``python -m bench.scaling``; each
prints a table and writes the same as JSON with ``--json FILE``.
"""
