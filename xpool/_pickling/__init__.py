"""Objects to messages and back; what kinds of object there are is told by others."""
