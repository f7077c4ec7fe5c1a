"""What is to be done by whom: pure state, no threads, clock, pickle or system calls."""
