"""CPython's own tests of its pools, from the interpreter at hand, run over xpool's."""
