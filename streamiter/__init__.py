"""streamiter: learning on streams."""

from streamiter.checkpoints.store import Checkpoints
from streamiter.flow.flow import Flow, connect
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination, iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult, IterationConfig, OperatorLifeCycle
from streamiter.iteration.loop import for_each_round
from streamiter.iteration.marked_streams import feedback_through, replayed
from streamiter.iteration.stamping import epochs_every
from streamiter.operators.operator import IterationListener, Operator
from streamiter.records import Columns, OutputTag
from streamiter.runtime.feedback import FeedbackLimits
from streamiter.topics.formats import Json
from streamiter.topics.urls import topic

__all__ = [
    "Checkpoints",
    "Columns",
    "FeedbackLimits",
    "Flow",
    "IterationBodyResult",
    "IterationConfig",
    "IterationListener",
    "Json",
    "Operator",
    "OperatorLifeCycle",
    "OutputTag",
    "Stream",
    "connect",
    "epochs_every",
    "feedback_through",
    "for_each_round",
    "iterate_bounded_streams_until_termination",
    "iterate_unbounded_streams",
    "replayed",
    "topic",
]
