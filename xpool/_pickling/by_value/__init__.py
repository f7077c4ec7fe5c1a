"""What has no name that another process could import: functions, classes, ``__main__``."""
