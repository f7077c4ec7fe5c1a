"""What the tests share: pool kinds, functions for workers, leak checks, bounded waiting."""
