"""The child's side: what runs in a worker."""
