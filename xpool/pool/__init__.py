"""The pools."""
