"""Decisions without effects: which worker runs which task, deadlines, budgets, the state tables.

Pure: no threads, clock, pickle or system calls.
"""
