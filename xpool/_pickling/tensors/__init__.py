"""Tensors of torch and arrays: copied, shared, exported, or kept where they are."""
