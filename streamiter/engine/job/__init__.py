"""The job of a flow: its coordinator, with barriers and checkpoints, and its followers in all processes."""
