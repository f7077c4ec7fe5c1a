"""Messages: objects to frames of bytes and back, and the policy for large buffers.

Used on both sides of the process border; runs users' code (`__reduce__`), so never on the engine's
thread or under a lock.  The codec knows no kind of object: `by_value` and `tensors` register theirs
through `xpool.pickle`.  Imports `xpool._memory` and lower layers.
"""
