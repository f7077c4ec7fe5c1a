"""Benchmarks.  README.md says what each module measures."""
