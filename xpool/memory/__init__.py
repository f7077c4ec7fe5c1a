"""Memory for what is large."""
