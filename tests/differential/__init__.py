"""Random programs, run over xpool's pools and over those of the standard library."""
