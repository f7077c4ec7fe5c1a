"""Decisions without effects: which worker runs which task, deadlines, restarts, the state tables.

Pure: no threads, clock, pickle or system calls.
"""
