"""One suite for all pool classes: what `multiprocessing.pool` documents, and what xpool adds."""
