"""Pickles functions, classes and globals of ``__main__`` that another process cannot import."""
