"""`DataLoader`: torch's, over a pool of xpool's.  docs/data.md is the guide.

Importing this imports torch.
"""

from __future__ import annotations

from xpool.data.loader import DataLoader
from xpool.data.report import LoaderReport
from xpool.data.workers import RETRIES

__all__ = ["RETRIES", "DataLoader", "LoaderReport"]
