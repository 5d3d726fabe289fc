"""Speed of streamiter, beside hand-written loops in the same run: ``python -m benchmarks``."""
