"""Every fault at every stage of a task."""
