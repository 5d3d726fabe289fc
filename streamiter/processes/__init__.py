"""A flow in several processes: links between processes, and channels whose ends are in two processes."""
