"""Iterations: loops in a flow, and what algorithms want of them."""

from streamiter.iteration.all_reduce import all_reduce
from streamiter.iteration.feedback_records import FeedbackRecords
from streamiter.iteration.feedback_through import FeedbackThrough
from streamiter.iteration.last_round import last_round
from streamiter.iteration.map_with import map_with
from streamiter.iteration.replayed import Replayed
from streamiter.iteration.terminate_after import terminate_after

__all__ = [
    "FeedbackRecords",
    "FeedbackThrough",
    "Replayed",
    "all_reduce",
    "last_round",
    "map_with",
    "terminate_after",
]
