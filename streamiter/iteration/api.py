"""The entry points of iterations.

They check their arguments, and ``IterationBuilder`` puts the iteration into the graph: it adds the border steps of the
loop (heads and entrances), calls the body, and closes the loop with the feedback streams that the body returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from streamiter.engine.graph.graph import Edge, Step, has_timestamps, has_watermarks
from streamiter.errors import user_line
from streamiter.flow.building import RoundScope, edges_of, matched, outlets_of
from streamiter.flow.stream import Stream
from streamiter.iteration.border import FEEDBACK, INITIAL, CriteriaHead, Entrance, Head
from streamiter.iteration.config import (
    AS_THE_ENTRY_POINT_SAYS,
    IterationBodyResult,
    IterationConfig,
    OperatorLifeCycle,
    Outputs,
    check_arguments,
    check_body,
    check_body_result,
    check_config,
    check_inputs,
    is_stamped,
)
from streamiter.iteration.loop import Loop
from streamiter.iteration.marked_streams import FeedbackThrough, Replayed, Replayer, check_topic_is_free, stream_of
from streamiter.operators.operator import OperatorFactory
from streamiter.operators.steps import Identity

Body = Callable[[list[Stream], list[Stream]], IterationBodyResult[Outputs]]

# The default of ``max_epochs_ahead`` in a bounded iteration: synchronous. In an unbounded iteration plain data never
# completes an epoch, so the default is asynchronous.
_AHEAD_IN_BOUNDED = 0


class IterationBuilder:
    """Puts one iteration into the graph of a flow. Raises GraphError for arguments that it cannot use."""

    def __init__(self, initial: object, data: object, body: Body[Any], config: object, *, bounded: bool) -> None:
        check_body(body)
        self._body = body
        self._initial, self._data = check_arguments(initial, data)
        self._config = check_config(config)
        self._bounded = bounded
        self._flow = self._initial[0].flow
        self._where = user_line()
        ahead = self._config.max_epochs_ahead
        if ahead is AS_THE_ENTRY_POINT_SAYS:
            ahead = _AHEAD_IN_BOUNDED if bounded else None
        self._ahead: int | None = ahead
        check_inputs(self._initial, self._data, self._config, ahead, bounded=bounded)

    def build(self) -> list[Stream] | dict[str, Stream]:
        """Return the output streams, as a list or a dict like the body's. If this raises, the flow is as before."""
        with self._flow.graph.all_or_nothing():
            return self._build(self._body)

    def _build(self, body: Body[Any]) -> list[Stream] | dict[str, Stream]:
        streams = [stream_of(given) for given in self._data]
        loop = self._loop = Loop(
            bounded=self._bounded,
            has_plain_endless_data=any(not stream.is_bounded and not is_stamped(stream) for stream in streams),
            limits=self._config.feedback_limits,
            max_epochs_ahead=self._ahead,
            has_stamped_data=any(is_stamped(stream) for stream in streams),
        )
        variables = [self._add_head(number, stream) for number, stream in enumerate(self._initial)]
        data = [self._add_entrance(number, given) for number, given in enumerate(self._data)]
        is_per_round = self._config.operator_life_cycle is OperatorLifeCycle.PER_ROUND
        with self._flow.graph.body_of(loop, RoundScope(whole_body=True) if is_per_round else None):
            result = check_body_result(body(variables, data), loop, self._initial, bounded=self._bounded)
        for head, initial, feedback in zip(loop.heads, self._initial, result.feedback_variable_streams, strict=True):
            self._close_loop(head, feedback, initial.parallelism)
        if result.termination_criteria is not None:
            self._add_criteria_head(result.termination_criteria)
        outputs = result.output_streams
        if isinstance(outputs, Mapping):
            return {key: self._outside(f"output {key}", stream) for key, stream in outputs.items()}
        return [self._outside(f"output {number}", stream) for number, stream in enumerate(outputs)]

    # -- the border ----------------------------------------------------------------------------------------

    def _add_head(self, number: int, stream: Stream) -> Stream:
        loop, ahead = self._loop, self._ahead
        variable = self._add(
            f"variable {number}",
            edges_of(stream, INITIAL),
            stream.parallelism,
            lambda: Head(loop.join, ahead),
            loop=loop,
            epochs_seen="initial values: epoch 0",
        )
        loop.add_head(variable.steps[0])
        return variable

    def _add_entrance(self, number: int, given: Stream | Replayed) -> Stream:
        loop, config, ahead, stream = self._loop, self._config, self._ahead, stream_of(given)
        is_replayed, stamped = isinstance(given, Replayed), is_stamped(stream)
        epochs_seen = "stamped epochs" if stamped else "epoch 0"

        def entrance() -> Entrance:
            return Entrance(loop.join, stamped=stamped, max_epochs_ahead=ahead)

        def replayer() -> Replayer:
            return Replayer(loop.join, config.replay_memory_bytes)

        data = self._add(
            f"data {number}",
            edges_of(stream),
            stream.parallelism,
            replayer if is_replayed else entrance,
            loop=loop,
            epochs_seen="every epoch (replayed)" if is_replayed else epochs_seen,
            passes_watermarks=not is_replayed,  # They would not fit the records of a later epoch.
        )
        loop.add_entrance(data.steps[0], is_plain=not is_replayed and not stamped)
        return data

    def _add_criteria_head(self, criteria: Stream) -> None:
        loop = self._loop
        head = self._add(
            "termination criteria",
            [],
            criteria.parallelism,
            lambda: CriteriaHead(loop.join),
            loop=loop,
            epochs_seen="an epoch without records ends the iteration",
        )
        loop.add_criteria_head(head.steps[0])
        self._close_loop(head.steps[0], criteria, criteria.parallelism)

    def _outside(self, label: str, stream: Stream) -> Stream:
        """Return an output stream as the steps outside the iteration read it.

        A stream that was repartitioned goes to a step of its own, with the parallelism of the stream: the next step may
        have another parallelism.
        """
        outlets = [outlet.outside() for outlet in outlets_of(stream)]
        if stream.parallelism == 1 or all(outlet.partitioning is None for outlet in outlets):
            return Stream(self._flow, *(outlet._replace(partitioning=None) for outlet in outlets))
        return self._add(label, edges_of(stream), stream.parallelism, Identity, loop=None)

    def _add(
        self,
        label: str,
        edges: list[Edge],
        parallelism: int,
        factory: OperatorFactory,
        *,
        loop: Loop | None,
        epochs_seen: str = "",
        passes_watermarks: bool = True,
    ) -> Stream:
        prefix = "" if self._config.name is None else f"{self._config.name}: "
        step = Step(
            name=prefix + label,
            parallelism=parallelism,
            where=self._where,
            factory=factory,
            edges=matched(edges, parallelism),
            loop=loop,
            bounded=all(stream_of(given).is_bounded for given in self._data),
            timed=has_timestamps(edges),
            watermarked=passes_watermarks and has_watermarks(edges),
            shape="iteration",
            epochs_seen=epochs_seen,
        )
        return Stream(self._flow, self._flow.graph.add_step(step, is_named=False, label_lasts=True))

    def _close_loop(self, head: Step, feedback: Stream | FeedbackThrough, parallelism: int) -> None:
        through = feedback.topic if isinstance(feedback, FeedbackThrough) else None
        edges = edges_of(stream_of(feedback), FEEDBACK, feedback=self._loop.limits, feedback_topic=through)
        if through is not None:
            check_topic_is_free(head, edges, through, self._flow.steps)
        self._loop.close(head, matched(edges, parallelism))


@overload
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Sequence[Stream]],
    config: IterationConfig | None = None,
) -> list[Stream]: ...
@overload
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Mapping[str, Stream]],
    config: IterationConfig | None = None,
) -> dict[str, Stream]: ...
def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body[Any],
    config: IterationConfig | None = None,
) -> list[Stream] | dict[str, Stream]:
    """Iterate as long as data arrives; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop. ``variables`` are streams of the initial
    values followed by the feedback, and ``data`` are the data streams. The body returns an
    :class:`IterationBodyResult`, and the iteration returns the body's output streams, as a list or a dict.

    Records of the initial variables and of the data have epoch 0. A record that a step emits has the epoch of the
    record that it was emitted for, and each way round the loop adds one. When all inputs have ended, the iteration ends
    at the first complete epoch that brought no feedback. This is epoch 1 or later; if the data is stamped and its last
    epoch is k, it is epoch k + 2 or later: steps are told of the end of the data in epoch k + 1, and the records that
    they emit then in ``input_ended`` are fed back and handled.

    Raises GraphError for a graph that cannot run, naming the stream.

    >>> from streamiter import Flow, IterationBodyResult
    >>> flow = Flow("count to five")
    >>> def body(variables, data):
    ...     raised = variables[0].map(lambda x: x + 1)
    ...     return IterationBodyResult([raised.filter(lambda x: x < 5)], [raised])
    >>> [numbers] = iterate_unbounded_streams([flow.from_items([0])], [], body)
    >>> seen = numbers.collect()
    >>> flow.run().state, seen.items
    ('finished', [1, 2, 3, 4, 5])
    """
    return IterationBuilder(init_variable_streams, data_streams, body, config, bounded=False).build()


@overload
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Sequence[Stream]],
    config: IterationConfig | None = None,
) -> list[Stream]: ...
@overload
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Mapping[str, Stream]],
    config: IterationConfig | None = None,
) -> dict[str, Stream]: ...
def iterate_bounded_streams_until_termination(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream | Replayed],
    body: Body[Any],
    config: IterationConfig | None = None,
) -> list[Stream] | dict[str, Stream]:
    """Iterate over bounded data until nothing is fed back, or the termination criteria end it; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop, as in :func:`iterate_unbounded_streams`. A
    plain data stream arrives in epoch 0 only, and ``replayed(stream)`` in every epoch.

    Records have epochs as in :func:`iterate_unbounded_streams`. Epoch e is complete when all its feedback has arrived
    and the data has ended. The iteration ends at the first complete epoch from 1 on that brought no feedback,
    or no record of ``termination_criteria`` if the body returns them. The feedback of this last epoch is still handled,
    and the resulting records are output.

    Feedback waits until its epoch is complete (``IterationConfig(max_epochs_ahead=0)``), so that the result does not
    depend on the speed of subtasks. A larger number, or None, lets feedback run ahead.

    Raises GraphError for a graph that cannot run, naming the stream.

    >>> from streamiter import Flow, IterationBodyResult
    >>> flow = Flow("count to five")
    >>> def body(variables, data):
    ...     raised = variables[0].map(lambda x: x + 1)
    ...     return IterationBodyResult([raised.filter(lambda x: x < 5)], [raised])
    >>> [numbers] = iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    >>> seen = numbers.collect()
    >>> flow.run().state, seen.items
    ('finished', [1, 2, 3, 4, 5])
    """
    return IterationBuilder(init_variable_streams, data_streams, body, config, bounded=True).build()
