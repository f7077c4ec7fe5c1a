"""Hypothesis calls every kind of pool in random orders."""

import os

import pytest
from hooks.own_pools import QueueThreadPool

from xpool import CtxPool, CtxThreadPool, P2PPool, Pool, ThreadPool
from xpool.testing import PoolStateMachine

EXAMPLES = 12 * int(os.environ.get("XPOOL_TEST_DEEP", "1"))


def case(pool, tier="test", **options):
    made = PoolStateMachine.for_pool(pool, examples=EXAMPLES, **options).TestCase
    if tier == "test-all":
        made = pytest.mark.exhaustive(made)
    return made


TestPool = case(Pool)
TestForkedPool = case(Pool, "test-all", context="fork")
TestPoolOfShortLives = case(Pool, "test-all", maxtasksperchild=2)
TestP2PPool = case(P2PPool, "test-all")
TestCtxPool = case(CtxPool, "test-all")
TestThreadPool = case(ThreadPool)
TestCtxThreadPool = case(CtxThreadPool, "test-all")
TestQueueThreadPool = case(QueueThreadPool)

pytestmark = [pytest.mark.xpool_only, pytest.mark.usefixtures("warm")]
