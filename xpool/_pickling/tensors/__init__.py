"""Pickles tensors of torch and arrays of numpy: as copies, as shared memory, or as handles."""
