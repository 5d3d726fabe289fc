"""Unbounded iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import user_line
from streamiter.flow.stream import Stream
from streamiter.iteration.config import AS_THE_ENTRY_POINT_SAYS, IterationBodyResult, IterationConfig
from streamiter.iteration.entrance import Entrance
from streamiter.iteration.exit import Exit
from streamiter.iteration.head import FEEDBACK, INITIAL, Head
from streamiter.iteration.loop import Loop
from streamiter.runtime.graph import Edge, Step
from streamiter.runtime.partitioning import Forward, Rebalance

__all__ = ["Body", "iterate_unbounded_streams"]

Body = Callable[[list[Stream], list[Stream]], IterationBodyResult]


def iterate_unbounded_streams(
    init_variable_streams: Sequence[Stream],
    data_streams: Sequence[Stream],
    body: Body,
    config: IterationConfig | None = None,
) -> Any:
    """Iterate for as long as data comes in; source: FLIP-176.

    ``body(variables, data)`` is called once, to build the graph of the loop: ``variables`` are the initial
    values followed by what is fed back, ``data`` the data streams. It gives an
    :class:`IterationBodyResult`; the iteration gives its output streams (a list, or a dict as it was given).

    Records of the initial variables and of the data have epoch 0, what is emitted has the epoch of what
    it was emitted for, and each way round the loop adds one. When all inputs have ended, the iteration
    ends at the first complete epoch, above those of the data, that brought no feedback.

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
    builder = _Builder(list(init_variable_streams), list(data_streams), config or IterationConfig())
    return builder.build(body)


class _Builder:
    """Checks one iteration and puts its border into the graph."""

    def __init__(self, initial: list[Stream], data: list[Stream], config: IterationConfig) -> None:
        self._initial = initial
        self._data = data
        self._config = config
        self._check_inputs()
        self._flow: Flow = initial[0].flow
        self._where = user_line()
        if self._flow.loop is not None:
            raise GraphError(
                "iteration: expected no iteration inside the body of another, given one; "
                "use the outputs of the first as inputs of the second"
            )
        ahead = config.max_epochs_ahead
        self._ahead: int | None = None if ahead is AS_THE_ENTRY_POINT_SAYS else ahead
        self._check_stamps()

    def build(self, body: Body) -> Any:
        endless = any(not stream.is_bounded and not _is_stamped(stream) for stream in self._data)
        loop = self._loop = Loop(has_plain_endless_data=endless)
        self._flow.loop = loop
        try:
            variables = [self._add_head(number, stream) for number, stream in enumerate(self._initial)]
            data = [self._add_entrance(number, stream) for number, stream in enumerate(self._data)]
            result = body(variables, data)
        finally:
            self._flow.loop = None
        self._check_result(result)
        for head, initial, feedback in zip(
            loop.heads, self._initial, result.feedback_variable_streams, strict=True
        ):
            self._close_loop(head, initial, feedback)
        for stream, then in loop.leaving:
            then(self._add_exit(f"exit {stream.name}", stream))
        outputs = result.output_streams
        if isinstance(outputs, Mapping):
            return {key: self._add_exit(f"output {key}", stream) for key, stream in outputs.items()}
        return [self._add_exit(f"output {number}", stream) for number, stream in enumerate(outputs)]

    # -- checks ------------------------------------------------------------------------------------------

    def _check_inputs(self) -> None:
        if not self._initial:
            raise GraphError(
                "iteration: expected at least one initial variable stream, given none; "
                "a loop needs something to feed back, if only flow.from_items([])"
            )
        for kind, streams in (("initial variable", self._initial), ("data", self._data)):
            for number, stream in enumerate(streams):
                if not isinstance(stream, Stream):
                    raise GraphError(
                        f"iteration: expected {kind} stream {number} to be a Stream, given {stream!r}"
                    )
                if stream.flow is not self._initial[0].flow:
                    raise GraphError(
                        f"iteration: expected streams of one flow, given {kind} stream {number} "
                        f"({stream.name!r}) of flow {stream.flow.name!r}"
                    )
        for number, stream in enumerate(self._initial):
            if not stream.is_bounded:
                raise GraphError(
                    f"iteration: expected bounded initial variable streams, given stream {number} "
                    f"({stream.name!r}), which never ends; pass endless input as a data stream"
                )

    def _check_stamps(self) -> None:
        if self._ahead is None:
            return
        for number, stream in enumerate(self._data):
            if not stream.is_bounded and not _is_stamped(stream):
                raise GraphError(
                    f"iteration: max_epochs_ahead={self._ahead} expected data with epochs, given data stream "
                    f"{number} ({stream.name!r}), endless and without; stamp it with "
                    "epochs_every(stream, records=…), or leave max_epochs_ahead out"
                )

    def _check_result(self, result: Any) -> None:
        if not isinstance(result, IterationBodyResult):
            raise GraphError(f"iteration: expected the body to give an IterationBodyResult, given {result!r}")
        if result.termination_criteria is not None:
            raise GraphError(
                "iteration: expected no termination criteria in an unbounded iteration, given "
                f"{result.termination_criteria.name!r}; it ends when its inputs end"
            )
        feedback = list(result.feedback_variable_streams)
        if len(feedback) != len(self._initial):
            raise GraphError(
                f"iteration: expected as many feedback streams as variable streams ({len(self._initial)}), "
                f"given {len(feedback)}"
            )
        outputs = result.output_streams
        listed = list(outputs.values()) if isinstance(outputs, Mapping) else list(outputs)
        for kind, streams in (("feedback", feedback), ("output", listed)):
            for number, stream in enumerate(streams):
                self._check_inside(kind, number, stream)
        for number, (initial, stream) in enumerate(zip(self._initial, feedback, strict=True)):
            plain = all(isinstance(edge.partitioning, Forward) for edge in stream.edges())
            if plain and stream.parallelism != initial.parallelism:
                raise GraphError(
                    f"iteration: expected feedback stream {number} ({stream.name!r}) to have the parallelism "
                    f"{initial.parallelism} of its initial variable stream ({initial.name!r}), given "
                    f"{stream.parallelism}; set parallelism={initial.parallelism} on its last step"
                )

    def _check_inside(self, kind: str, number: int, stream: Any) -> None:
        if not isinstance(stream, Stream):
            raise GraphError(f"iteration: expected {kind} stream {number} to be a Stream, given {stream!r}")
        if any(step.loop is not self._loop for step in stream.steps):
            raise GraphError(
                f"iteration: expected {kind} stream {number} to come from inside the body, given "
                f"{stream.name!r} from outside; pass it in as a data stream"
            )

    # -- the border ----------------------------------------------------------------------------------------

    def _add_head(self, number: int, stream: Stream) -> Stream:
        loop, ahead = self._loop, self._ahead
        variable = self._add(
            f"variable {number}", stream, INITIAL, lambda: Head(loop.coordinator, ahead), loop=loop
        )
        loop.heads += variable.steps
        return variable

    def _add_entrance(self, number: int, stream: Stream) -> Stream:
        loop, ahead, stamped = self._loop, self._ahead, _is_stamped(stream)
        data = self._add(
            f"data {number}",
            stream,
            "input",
            lambda: Entrance(loop.coordinator, stamped=stamped, max_epochs_ahead=ahead),
            loop=loop,
        )
        loop.entrances += data.steps
        return data

    def _add_exit(self, label: str, stream: Stream) -> Stream:
        return self._add(label, stream, "input", Exit, loop=None)

    def _add(
        self, label: str, stream: Stream, input_name: str, factory: Callable[[], Any], *, loop: Loop | None
    ) -> Stream:
        edges = stream.edges(input_name)
        _match(edges, stream.parallelism)
        return self._flow.add_step(
            Step(
                name=self._flow.unique_name(label, named=False),
                parallelism=stream.parallelism,
                where=self._where,
                factory=factory,
                inputs=edges,
                loop=loop,
                bounded=all(given.is_bounded for given in self._data),
                shape="iteration",
            )
        )

    def _close_loop(self, head: Step, initial: Stream, feedback: Stream) -> None:
        edges = feedback.edges(FEEDBACK)
        _match(edges, initial.parallelism)
        for edge in edges:
            edge.feedback = self._config.feedback_limits
        head.inputs.extend(edges)


def _match(edges: Sequence[Edge], parallelism: int) -> None:
    for edge in edges:
        if isinstance(edge.partitioning, Forward) and edge.upstream.parallelism != parallelism:
            edge.partitioning = Rebalance()


def _is_stamped(stream: Stream) -> bool:
    return all(step.stamped for step in stream.steps)
