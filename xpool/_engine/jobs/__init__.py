"""Decisions without effects: which worker runs which task, deadlines, restarts, workers' states.

Pure: no threads, clock, pickle or system calls.
"""
