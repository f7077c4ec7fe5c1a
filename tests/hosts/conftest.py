from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from xpool import Pool


@pytest.fixture(scope="module")
def pool(cluster: Any, warm: None) -> Iterator[Any]:
    """A pool of two hosts with two workers each. The tests of a module share it."""
    import xpool.ray

    with Pool(hosts=xpool.ray.hosts(n=2, per_host=2)) as shared:
        assert len(shared.run_all(abs, 1)) == 4
        yield shared
        shared.close()
        shared.join()
