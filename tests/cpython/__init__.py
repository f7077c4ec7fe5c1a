"""The running interpreter's own tests of pools, run with xpool's pools."""
