"""Random scripts and programs: tasks see what a process that is forked at the call sees."""
