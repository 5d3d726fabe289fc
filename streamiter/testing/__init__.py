"""What users need to test their flows."""

from streamiter.testing.clock import VirtualClock

__all__ = ["VirtualClock"]
