"""`xpool.spawn` and the objects that its processes share."""
