"""Worlds in which a seed decides everything, for xpool's decision code.

There are three worlds: `scheduler.SchedulerWorld` (the policy alone, thousands of histories a
second), `engine.EngineWorld` (the real engine on virtual workers, pipes and clock) and
`hosts.HostWorld` (the real driver of many hosts, on virtual hosts and network). A history is a
seed::

    python -m tests.simulation engine --seeds 10000
    python -m tests.simulation engine 4711   # replays one and prints it
"""
