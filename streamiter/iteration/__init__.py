"""Iterations: loops in a flow, and helpers for algorithms in rounds."""

from streamiter.iteration.helpers import all_reduce, last_round, map_with, terminate_after
from streamiter.iteration.marked_streams import FeedbackRecords, FeedbackThrough, Replayed

__all__ = ["FeedbackRecords", "FeedbackThrough", "Replayed", "all_reduce", "last_round", "map_with", "terminate_after"]
