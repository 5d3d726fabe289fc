"""Compare the speed of streamiter with hand-written loops in the same run: ``python -m benchmarks``."""
