"""Checks of an iteration while it is built; each error names the stream and says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.config import IterationBodyResult, IterationConfig, OperatorLifeCycle
from streamiter.iteration.feedback_through import feedback_stream
from streamiter.iteration.loop import Loop
from streamiter.iteration.replay import DataStream, Replayed
from streamiter.iteration.rounds import for_each_epoch
from streamiter.operators.output import asynchronous_kind, misfit
from streamiter.operators.rejection import shortened
from streamiter.runtime.output import Forward

__all__ = [
    "check_arguments",
    "check_body",
    "check_body_stream",
    "check_bounded",
    "check_bounded_data",
    "check_config",
    "check_config_of_unbounded",
    "check_result",
    "check_stamps",
    "is_stamped",
]


def is_stamped(stream: Stream) -> bool:
    """Whether all of its records carry epochs from outside an iteration."""
    return all(step.stamped for step in stream.steps)


def check_arguments(initial: Any, data: Any) -> tuple[list[Stream], list[DataStream]]:
    """The streams an iteration is given: streams of one flow, from outside iterations."""
    initial, given = _listed("initial variable", initial), _listed("data", data)
    for number, stream in enumerate(initial):
        if isinstance(stream, Replayed):
            raise GraphError(
                f"iteration: expected initial variable stream {number} to be a Stream, given {stream!r}; only data "
                "streams are replayed"
            )
    data = [stream.stream if isinstance(stream, Replayed) else stream for stream in given]
    if not initial:
        raise GraphError(
            "iteration: expected at least one initial variable stream, given none; "
            "a loop needs something to feed back, if only flow.from_items([])"
        )
    for kind, streams in (("initial variable", initial), ("data", data)):
        for number, stream in enumerate(streams):
            _check_stream(kind, number, stream)
            if stream.flow is not initial[0].flow:
                raise GraphError(
                    f"iteration: expected streams of one flow, given {kind} stream {number} "
                    f"({stream.name!r}) of flow {stream.flow.name!r} beside flow {initial[0].flow.name!r}; make "
                    "all of them with methods of one flow"
                )
    if initial[0].flow.loop is not None:
        raise GraphError(
            "iteration: expected no iteration inside the body of another, given one; "
            "use the outputs of the first as inputs of the second"
        )
    for kind, streams in (("initial variable", initial), ("data", data)):
        for number, stream in enumerate(streams):
            if any(step.loop is not None for step in stream.steps):
                raise GraphError(
                    f"iteration: expected {kind} streams from outside iterations, given stream {number} "
                    f"({stream.name!r}) of the body of another; return it in output_streams there"
                )
    return initial, [
        DataStream(stream, isinstance(as_given, Replayed))
        for stream, as_given in zip(data, given, strict=True)
    ]


def _listed(kind: str, streams: Any, container: str = "list") -> list[Any]:
    if not isinstance(streams, (list, tuple)):
        raise GraphError(
            f"iteration: expected a {container} of {kind} streams, given {streams!r}; write [stream]"
        )
    return list(streams)


def _check_stream(kind: str, number: int, stream: Any) -> None:
    if not isinstance(stream, Stream):
        raise GraphError(
            f"iteration: expected {kind} stream {number} to be a Stream, given {shortened(stream)}; write "
            "flow.from_items([value]) for a value"
        )


def check_bounded(initial: Sequence[Stream]) -> None:
    """Initial variables end, and have no epochs of their own."""
    for number, stream in enumerate(initial):
        if not stream.is_bounded:
            raise GraphError(
                f"iteration: expected bounded initial variable streams, given stream {number} "
                f"({stream.name!r}), which never ends; pass endless input as a data stream"
            )
        if any(step.stamped for step in stream.steps):
            raise GraphError(
                f"iteration: expected initial variable streams without epochs, given stream {number} "
                f"({stream.name!r}) of epochs_every; initial variables are of epoch 0, stamp data streams"
            )


def check_bounded_data(data: Sequence[DataStream]) -> None:
    """The data of a bounded iteration ends, and has no epochs of its own."""
    for number, given in enumerate(data):
        stream = given.stream
        if not stream.is_bounded:
            raise GraphError(
                f"iteration: expected bounded data streams in a bounded iteration, given stream {number} "
                f'({stream.name!r}), which never ends; read the topic with stop="latest", or use '
                "iterate_unbounded_streams"
            )
        if any(step.stamped for step in stream.steps):
            raise GraphError(
                f"iteration: expected data streams without epochs in a bounded iteration, given stream {number} "
                f"({stream.name!r}) of epochs_every; leave epochs_every out, or use iterate_unbounded_streams"
            )


def check_config_of_unbounded(config: IterationConfig, data: Sequence[DataStream]) -> None:
    """What only bounded iterations can do."""
    if config.operator_life_cycle is not OperatorLifeCycle.ALL_ROUND:
        raise GraphError(
            "iteration: expected operator_life_cycle=OperatorLifeCycle.ALL_ROUND in an unbounded iteration, given "
            f"{config.operator_life_cycle}; use iterate_bounded_streams_until_termination"
        )
    for number, given in enumerate(data):
        if given.replayed:
            raise GraphError(
                f"iteration: expected no replayed data in an unbounded iteration, given data stream {number} "
                f"({given.stream.name!r}); use iterate_bounded_streams_until_termination, or leave replayed out"
            )


def check_config(config: Any) -> IterationConfig:
    """An IterationConfig, or None for the default."""
    if config is None:
        return IterationConfig()
    if not isinstance(config, IterationConfig):
        raise GraphError(
            f"iteration: expected config to be an IterationConfig, given {config!r}; "
            "write IterationConfig(max_epochs_ahead=…)"
        )
    return config


def check_body(body: Any) -> None:
    """A plain function: it is called once, while the graph is built."""
    if not callable(body):
        raise GraphError(
            f"iteration: expected the body to be a function, given {shortened(body)}; "
            "write def body(variables, data) that gives an IterationBodyResult"
        )
    if reason := misfit(body, ["variables", "data"]):
        raise GraphError(
            f"iteration: expected the body to take two arguments, variables and data, given {reason}; write "
            "def body(variables, data)"
        )
    if inspect.isgeneratorfunction(body):
        raise GraphError(
            "iteration: expected the body to be a plain function that is called once, given a generator function; "
            "write return instead of yield"
        )
    if kind := asynchronous_kind(body):
        raise GraphError(
            f"iteration: expected the body to be a plain function, since it only builds the graph, given a {kind}; "
            "write def"
        )


def check_body_stream(stream: Any, call: str) -> None:
    """A stream of the body that is being built; elsewhere the helper that ``call`` shows would hear of no epoch."""
    name, _, _ = call.partition("(")
    if not isinstance(stream, Stream):
        raise GraphError(f"{name}: expected a stream of the body, given {shortened(stream)}; write {call}")
    if stream.loop is None:
        raise GraphError(
            f"{name}: expected a stream of an iteration body, given {stream.name!r} from outside, where no epoch ends; "
            "call it in the body"
        )


def check_stamps(max_epochs_ahead: int | None, data: Sequence[Stream]) -> None:
    """Feedback that is held for a complete epoch needs data that completes one."""
    for number, stream in enumerate(data):
        stamps = {step.stamped for step in stream.steps}
        if len(stamps) > 1:
            raise GraphError(
                f"iteration: expected all of data stream {number} ({stream.name!r}) to have epochs or none, given "
                "a union of both; stamp the union: epochs_every(first.union(second), …)"
            )
    if max_epochs_ahead is None:
        return
    for number, stream in enumerate(data):
        if not stream.is_bounded and not is_stamped(stream):
            raise GraphError(
                f"iteration: max_epochs_ahead={max_epochs_ahead} expected data with epochs, given data stream "
                f"{number} ({stream.name!r}), endless and without; stamp it with "
                "epochs_every(stream, records=…), or leave max_epochs_ahead out"
            )


def check_result(
    result: Any, loop: Loop, initial: Sequence[Stream], *, bounded: bool
) -> IterationBodyResult[Any]:
    """What the body of an iteration gives back."""
    if not isinstance(result, IterationBodyResult):
        raise GraphError(
            f"iteration: expected the body to give an IterationBodyResult, given {shortened(result)}; write "
            "return IterationBodyResult([feedback], [output])"
        )
    criteria = result.termination_criteria
    if criteria is not None and not bounded:
        raise GraphError(
            "iteration: expected no termination criteria in an unbounded iteration, given "
            f"{getattr(criteria, 'name', None)!r}; it ends when its inputs end"
        )
    feedback = _listed("feedback", result.feedback_variable_streams)
    if len(feedback) != len(initial):
        raise GraphError(
            f"iteration: expected as many feedback streams as variable streams ({len(initial)}), "
            f"given {len(feedback)}; give one for each, in the same order"
        )
    outputs = result.output_streams
    listed = (
        list(outputs.values()) if isinstance(outputs, Mapping) else _listed("output", outputs, _OR_A_DICT)
    )
    feedback = [feedback_stream(given) for given in feedback]
    for kind, streams in (("feedback", feedback), ("output", listed)):
        for number, stream in enumerate(streams):
            _check_inside(f"{kind} stream {number}", stream, loop)
    if criteria is not None:
        _check_inside("termination_criteria", criteria, loop)
    for number, (start, stream) in enumerate(zip(initial, feedback, strict=True)):
        _check_parallelism(number, start, stream)
        _check_comes_before_end(f"feedback stream {number}", stream, bounded=bounded)
    if criteria is not None:
        _check_comes_before_end("termination_criteria", criteria, bounded=bounded)
    return result


_OR_A_DICT = "list (or dict)"


def _check_inside(what: str, stream: Any, loop: Loop) -> None:
    if not isinstance(stream, Stream):
        raise GraphError(
            f"iteration: expected {what} to be a Stream, given {shortened(stream)}; give a stream of the body"
        )
    if any(step.loop is not loop for step in stream.steps):
        raise GraphError(
            f"iteration: expected {what} to come from inside the body, given {stream.name!r} from outside; "
            "pass it in as a data stream"
        )
    loop.check_streams("iteration", stream.edges())


def _check_comes_before_end(what: str, stream: Stream, *, bounded: bool) -> None:
    """The iteration waits for the stream, and the stream for the end of the iteration: it would bring nothing."""
    if stream.emits_at_end:
        raise GraphError(
            f"iteration: expected {what} to bring records while the iteration runs, given {stream.name!r}, whose "
            f"records come when it has ended; {for_each_epoch(bounded=bounded)}"
        )


def _check_parallelism(number: int, initial: Stream, feedback: Stream) -> None:
    """Subtask i feeds back to head i, unless the stream was repartitioned."""
    for edge in feedback.edges():
        given = edge.upstream.parallelism
        if isinstance(edge.partitioning, Forward) and given != initial.parallelism:
            raise GraphError(
                f"iteration: expected feedback stream {number} ({feedback.name!r}) to have the parallelism "
                f"{initial.parallelism} of its initial variable stream ({initial.name!r}), given "
                f"{given}; set parallelism={initial.parallelism} on its last step, or parallelism={given} on "
                f"{initial.name!r}"
            )
