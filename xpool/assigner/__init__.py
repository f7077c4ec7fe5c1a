"""`ModelAssigner`, which places models on devices, and the estimators that it uses.

::

    from xpool import CtxPool
    from xpool.assigner import ModelAssigner

    assigner = ModelAssigner(models, {(0, 1): 5}, devices=["cuda:0", "cuda:1"], move_models=False)
    assigner.assignment                          # the device of each model
    pool = CtxPool(worker_contexts=assigner)     # a worker for each device, holding its models

Importing this package imports torch but starts no device runtime.  ``docs/assigner.md`` defines the
cost, and says when the search is exact.
"""

from __future__ import annotations

from xpool.assigner._assign import ModelAssigner, ModelContext, PlacementError
from xpool.assigner._estimate import ModelComplexityEstimator, ModelSizeEstimator

__all__ = [
    "ModelAssigner",
    "ModelComplexityEstimator",
    "ModelContext",
    "ModelSizeEstimator",
    "PlacementError",
]
