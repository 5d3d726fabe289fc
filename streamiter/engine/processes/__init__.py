"""A flow in several processes: hosts that start them, their supervisor, links between them, and remote channels."""
