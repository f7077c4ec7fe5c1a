"""Functions, classes and names of ``__main__`` that another process cannot import."""
