"""ConnectedStreams: what ``connect`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamiter.flow.graph_checks import check_factory
from streamiter.flow.next_step import add_next_step, label_of, may_emit_unasked
from streamiter.flow.step_options import StepOptions
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.rejection import RejectionPolicy
from streamiter.operators.service import Service
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.flow.stream import Stream

__all__ = ["ConnectedStreams"]


class ConnectedStreams:
    """Several streams on their way to one step, each to an input of its own name."""

    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams

    def process(
        self,
        factory: OperatorFactory,
        *,
        name: str | None = None,
        parallelism: int | None = None,
        on_error: RejectionPolicy = "fail",
        dead_letter: Topic | None = None,
        parameter_server: Service | None = None,
    ) -> Stream:
        """An operator with ``process_<input>(record, out)`` or ``process_<input>_batch(batch, out)`` each.

        Between inputs there is no order unless ``wanted_inputs()`` makes one; see :class:`~streamiter.Operator`,
        and :func:`connect` for an example.
        """
        label = name or label_of(factory)
        check_factory(factory, list(self._streams), step=label)
        options = StepOptions(name, parallelism, on_error, dead_letter, parameter_server)
        return add_next_step(self._streams, label, factory, options, emits_unasked=may_emit_unasked(factory))
