"""Workers as the parent sees them: how they start, how they are watched, how they end."""
