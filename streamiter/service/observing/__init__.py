"""What is known about a running service: health, metrics, the log, and the documents of its page."""
