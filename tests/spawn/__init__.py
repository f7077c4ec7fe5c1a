"""`xpool.spawn` and what start-up is shared with."""
