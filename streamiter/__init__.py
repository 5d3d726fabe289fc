"""streamiter: learning on streams."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.engine.graph.feedback import FeedbackLimits as FeedbackLimits
    from streamiter.engine.processes.local import LocalProcesses as LocalProcesses
    from streamiter.engine.processes.on_ray import Ray as Ray
    from streamiter.engine.states.rocks_state import RocksState as RocksState
    from streamiter.engine.storage.store import Checkpoints as Checkpoints
    from streamiter.flow.flow import Flow as Flow, connect as connect
    from streamiter.flow.keyed_stream import KeyedStream as KeyedStream
    from streamiter.flow.stream import Stream as Stream
    from streamiter.iteration.api import (
        iterate_bounded_streams_until_termination as iterate_bounded_streams_until_termination,
        iterate_unbounded_streams as iterate_unbounded_streams,
    )
    from streamiter.iteration.config import (
        IterationBodyResult as IterationBodyResult,
        IterationConfig as IterationConfig,
        OperatorLifeCycle as OperatorLifeCycle,
    )
    from streamiter.iteration.loop import for_each_round as for_each_round
    from streamiter.iteration.marked_streams import feedback_through as feedback_through, replayed as replayed
    from streamiter.iteration.stamping import epochs_every as epochs_every
    from streamiter.operators.operator import IterationListener as IterationListener, Operator as Operator
    from streamiter.operators.timed.aggregates import fold as fold, quantile as quantile
    from streamiter.operators.timed.kinds import (
        calendar as calendar,
        hopping as hopping,
        session as session,
        sliding as sliding,
        tumbling as tumbling,
    )
    from streamiter.operators.timed.windowing import WindowResult as WindowResult
    from streamiter.topics.formats import Json as Json
    from streamiter.topics.urls import topic as topic
    from streamiter.values.records import Columns as Columns, OutputTag as OutputTag
else:
    from streamiter.values.helpers.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
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
