"""Checkpoints of a running job: barriers, commits, restores, and redistribution to another parallelism."""
