"""The part of a process in the checkpoints of a job, commits, restores, and states for another parallelism."""
