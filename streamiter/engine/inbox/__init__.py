"""The inbox of a task: which record comes next, and what waits."""
