"""One suite over all pool classes: what `multiprocessing.pool` documents, and what xpool adds."""
