"""Checkpoints of a running job: barriers, what is stored, what is committed, and where a job goes on."""
