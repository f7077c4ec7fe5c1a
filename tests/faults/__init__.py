"""What goes wrong, crossed with where it goes wrong."""
