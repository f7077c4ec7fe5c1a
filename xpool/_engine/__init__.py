"""What moves tasks to workers and answers back."""
