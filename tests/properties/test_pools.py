"""Every kind of pool, used in every order that hypothesis can think of."""

from __future__ import annotations

import os

import pytest
from hooks.own_pools import QueueThreadPool

from xpool import CtxPool, CtxThreadPool, P2PPool, Pool, ThreadPool
from xpool.testing import PoolStateMachine

EXAMPLES = 12 * int(os.environ.get("XPOOL_TEST_DEEP", "1"))


def case(pool, **options):
    return PoolStateMachine.for_pool(pool, examples=EXAMPLES, **options).TestCase


TestPool = case(Pool)
TestForkedPool = case(Pool, context="fork")
TestPoolOfShortLives = case(Pool, maxtasksperchild=2)
TestP2PPool = case(P2PPool)
TestCtxPool = case(CtxPool)
TestThreadPool = case(ThreadPool)
TestCtxThreadPool = case(CtxThreadPool)
TestQueueThreadPool = case(QueueThreadPool)

pytestmark = [pytest.mark.xpool_only, pytest.mark.usefixtures("warm")]
