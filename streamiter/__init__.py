"""streamiter: learning on streams."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.engine.graph.feedback import FeedbackLimits
    from streamiter.engine.processes.local import LocalProcesses
    from streamiter.engine.processes.on_ray import Ray
    from streamiter.engine.states.rocks_state import RocksState
    from streamiter.engine.storage.store import Checkpoints
    from streamiter.flow.flow import Flow, connect
    from streamiter.flow.keyed_stream import KeyedStream
    from streamiter.flow.stream import Stream
    from streamiter.iteration.api import iterate_bounded_streams_until_termination, iterate_unbounded_streams
    from streamiter.iteration.config import IterationBodyResult, IterationConfig, OperatorLifeCycle
    from streamiter.iteration.loop import for_each_round
    from streamiter.iteration.marked_streams import feedback_through, replayed
    from streamiter.iteration.stamping import epochs_every
    from streamiter.operators.operator import IterationListener, Operator
    from streamiter.operators.timed.aggregates import fold, quantile
    from streamiter.operators.timed.kinds import calendar, hopping, session, sliding, tumbling
    from streamiter.operators.timed.windowing import WindowResult
    from streamiter.topics.formats import Json
    from streamiter.topics.urls import topic
    from streamiter.values.records import Columns, OutputTag
else:
    from streamiter.values.helpers.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "streamiter.engine.storage.store": "Checkpoints",
            "streamiter.flow.flow": "Flow connect",
            "streamiter.flow.keyed_stream": "KeyedStream",
            "streamiter.flow.stream": "Stream",
            "streamiter.iteration.api": "iterate_bounded_streams_until_termination iterate_unbounded_streams",
            "streamiter.iteration.config": "IterationBodyResult IterationConfig OperatorLifeCycle",
            "streamiter.iteration.loop": "for_each_round",
            "streamiter.iteration.marked_streams": "feedback_through replayed",
            "streamiter.iteration.stamping": "epochs_every",
            "streamiter.operators.operator": "IterationListener Operator",
            "streamiter.operators.timed.aggregates": "fold quantile",
            "streamiter.operators.timed.kinds": "calendar hopping session sliding tumbling",
            "streamiter.operators.timed.windowing": "WindowResult",
            "streamiter.engine.processes.local": "LocalProcesses",
            "streamiter.engine.processes.on_ray": "Ray",
            "streamiter.values.records": "Columns OutputTag",
            "streamiter.engine.graph.feedback": "FeedbackLimits",
            "streamiter.engine.states.rocks_state": "RocksState",
            "streamiter.topics.formats": "Json",
            "streamiter.topics.urls": "topic",
        },
    )

__all__ = [
    "Checkpoints",
    "Columns",
    "FeedbackLimits",
    "Flow",
    "IterationBodyResult",
    "IterationConfig",
    "IterationListener",
    "Json",
    "KeyedStream",
    "LocalProcesses",
    "Operator",
    "OperatorLifeCycle",
    "OutputTag",
    "Ray",
    "RocksState",
    "Stream",
    "WindowResult",
    "calendar",
    "connect",
    "epochs_every",
    "feedback_through",
    "fold",
    "for_each_round",
    "hopping",
    "iterate_bounded_streams_until_termination",
    "iterate_unbounded_streams",
    "quantile",
    "replayed",
    "session",
    "sliding",
    "topic",
    "tumbling",
]
