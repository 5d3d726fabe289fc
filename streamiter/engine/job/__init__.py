"""The job of a flow in one process: its start, its end, and what it tells other jobs."""
