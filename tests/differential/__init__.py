"""Random programs that run on xpool's pools and on those of the standard library."""
