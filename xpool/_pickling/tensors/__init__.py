"""Tensors of torch and arrays of numpy: copied, shared, exported, or kept by their worker."""
