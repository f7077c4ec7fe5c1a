"""What xpool is tested with, for pools of your own too: see ``docs/testing.md``."""
