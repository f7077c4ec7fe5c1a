"""Tensors of torch and arrays: copied, shared, lent, or kept where they are."""
