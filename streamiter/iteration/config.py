"""The settings of an iteration, the result of its body, and the checks of both while the iteration is built.

Each error names the stream and says what to write instead.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, Generic

from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.graph.output import Forward
from streamiter.errors import GraphError, shortened
from streamiter.flow.building import check_round_scope, edges_of, emits_at_end, outlets_of
from streamiter.flow.graph_checks import check_name
from streamiter.flow.stream import Stream
from streamiter.iteration.loop import Loop, for_each_epoch
from streamiter.iteration.marked_streams import FeedbackThrough, Replayed, stream_of
from streamiter.operators.functions import asynchronous_kind, misfit
from streamiter.values.numbers import whole_number

if TYPE_CHECKING:
    # Only type checkers need the default: IterationBodyResult without a parameter has a list of outputs.
    from typing_extensions import TypeVar

    Outputs = TypeVar(
        "Outputs", bound=Sequence[Stream] | Mapping[str, Stream], covariant=True, default=Sequence[Stream]
    )
else:
    from typing import TypeVar

    Outputs = TypeVar("Outputs", covariant=True)


class _Default(enum.Enum):
    AS_THE_ENTRY_POINT_SAYS = "as the entry point says"


AS_THE_ENTRY_POINT_SAYS: Final = _Default.AS_THE_ENTRY_POINT_SAYS


class OperatorLifeCycle(enum.Enum):
    """How long the operators of an iteration body live; source: FLIP-176."""

    ALL_ROUND = "all round"
    """One instance for the whole iteration."""
    PER_ROUND = "per round"
    """A new instance for each epoch that has records: no state is kept from one epoch to the next."""


# Enough for about ten million small rows; a few replayed streams need a small part of the memory of a training machine.
_REPLAY_MEMORY_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class IterationConfig:
    """The settings of an iteration."""

    max_epochs_ahead: int | _Default | None = AS_THE_ENTRY_POINT_SAYS
    """How far feedback may run ahead of the last complete epoch: 0 is synchronous (BSP), s bounded-stale (SSP), None
    asynchronous (ASP). The default is 0 in a bounded iteration and None in an unbounded one, where a number needs
    stamped data (``epochs_every``)."""
    operator_life_cycle: OperatorLifeCycle = OperatorLifeCycle.ALL_ROUND
    """How long the operators of the body live; ``PER_ROUND`` is for bounded iterations."""
    feedback_limits: FeedbackLimits = field(default_factory=FeedbackLimits)
    """How much may wait in each channel of a feedback edge, and in each queue of records whose epoch is not due, at
    heads and at operators with ``epochs_in_order``, or whose turn has not come in a synchronous loop."""
    replay_memory_bytes: int = _REPLAY_MEMORY_BYTES
    """How much each subtask of a replayed stream keeps in memory. Above it records are kept on disk, up to the
    ``disk_bytes`` of ``feedback_limits`` and in their ``directory``."""
    name: str | None = None
    """The beginning of the names of the loop's border steps; checkpoints need it if a flow has several iterations."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.operator_life_cycle, OperatorLifeCycle):
            raise GraphError(
                "IterationConfig: expected operator_life_cycle to be an OperatorLifeCycle, given "
                f"{self.operator_life_cycle!r}; write OperatorLifeCycle.ALL_ROUND or OperatorLifeCycle.PER_ROUND"
            )
        _check_count("replay_memory_bytes", self.replay_memory_bytes, "it is a number of bytes")
        if not isinstance(self.feedback_limits, FeedbackLimits):
            raise GraphError(
                f"IterationConfig: expected feedback_limits to be FeedbackLimits, given {self.feedback_limits!r}; "
                "write FeedbackLimits(memory_bytes=…, disk_bytes=…)"
            )
        if self.max_epochs_ahead is not None and not isinstance(self.max_epochs_ahead, _Default):
            _check_count("max_epochs_ahead", self.max_epochs_ahead, "0 is synchronous, None asynchronous")


def _check_count(option: str, given: object, remedy: str) -> None:
    whole_number(f"IterationConfig({option}=)", given, 0, error=GraphError, remedy=remedy)


@dataclass(frozen=True, slots=True)
class IterationBodyResult(Generic[Outputs]):
    """The streams that an iteration body returns."""

    feedback_variable_streams: Sequence[Stream | FeedbackThrough]
    """One feedback stream for each variable stream, in the same order."""
    output_streams: Outputs
    """The streams that the iteration returns. If this is a dict, the iteration returns a dict; the type of the body's
    result is then ``IterationBodyResult[dict[str, Stream]]``."""
    termination_criteria: Stream | None = None
    """For bounded iterations: the iteration ends when an epoch brings no record of this stream."""

    if not TYPE_CHECKING:
        # Generic's own method sets an attribute of each instance, and a frozen class with slots does not allow that.
        __class_getitem__ = classmethod(GenericAlias)


# -- checks of the arguments ------------------------------------------------------------------------------------


def is_stamped(stream: Stream) -> bool:
    """Return whether all records of a stream carry epochs that they were given outside an iteration."""
    return all(step.stamped for step in stream.steps)


def check_arguments(initial: Any, data: Any) -> tuple[list[Stream], list[Stream | Replayed]]:
    """Return the streams in the arguments of an iteration: streams of one flow, from outside iterations."""
    initial, data = _listed("initial variable", initial), _listed("data", data)
    for number, given in enumerate(initial):
        if isinstance(given, Replayed):
            raise GraphError(
                f"iteration: expected initial variable stream {number} to be a Stream, given {given!r}; only data "
                "streams are replayed"
            )
    if not initial:
        raise GraphError(
            "iteration: expected at least one initial variable stream, given none; a loop needs a stream to feed "
            "back: pass flow.from_items([]) if it has no initial value"
        )
    unmarked = [given.stream if isinstance(given, Replayed) else given for given in data]
    numbered = [
        (kind, number, stream)
        for kind, streams in (("initial variable", initial), ("data", unmarked))
        for number, stream in enumerate(streams)
    ]
    for kind, number, stream in numbered:
        if not isinstance(stream, Stream):
            raise GraphError(
                f"iteration: expected {kind} stream {number} to be a Stream, given {shortened(stream)}; write "
                "flow.from_items([value]) for a value"
            )
        if stream.flow is not initial[0].flow:
            raise GraphError(
                f"iteration: expected streams of one flow, given {kind} stream {number} ({stream.name!r}) of flow "
                f"{stream.flow.name!r} and flow {initial[0].flow.name!r}; make all of them with methods of one flow"
            )
    if initial[0].flow.graph.loop is not None:
        raise GraphError(
            "iteration: expected no iteration inside the body of another, given one; use the outputs of the first as "
            "inputs of the second"
        )
    for kind, number, stream in numbered:
        if any(outlet.loop is not None for outlet in outlets_of(stream)):
            raise GraphError(
                f"iteration: expected {kind} streams from outside iterations, given stream {number} "
                f"({stream.name!r}) of the body of another; return it in output_streams there"
            )
    return initial, data


def _listed(kind: str, streams: Any, container: str = "list") -> list[Any]:
    if not isinstance(streams, (list, tuple)):
        raise GraphError(f"iteration: expected a {container} of {kind} streams, given {streams!r}; write [stream]")
    return list(streams)


def check_inputs(
    initial: Sequence[Stream],
    data: Sequence[Stream | Replayed],
    config: IterationConfig,
    max_epochs_ahead: int | None,
    *,
    bounded: bool,
) -> None:
    """Raise GraphError for streams and settings that this kind of iteration cannot use."""
    for number, stream in enumerate(initial):
        if not stream.is_bounded:
            raise GraphError(
                f"iteration: expected bounded initial variable streams, given stream {number} "
                f"({stream.name!r}), which never ends; pass endless input as a data stream"
            )
        if any(step.stamped for step in stream.steps):
            raise GraphError(
                f"iteration: expected initial variable streams without epochs, given stream {number} "
                f"({stream.name!r}) of epochs_every; stamp data streams only: initial variables have epoch 0"
            )
    if bounded:
        _check_bounded_data(data)
    else:
        if config.operator_life_cycle is not OperatorLifeCycle.ALL_ROUND:
            raise GraphError(
                "iteration: expected operator_life_cycle=OperatorLifeCycle.ALL_ROUND in an unbounded iteration, given "
                f"{config.operator_life_cycle}; use iterate_bounded_streams_until_termination"
            )
        _check_unbounded_data(data, max_epochs_ahead)


def _check_bounded_data(data: Sequence[Stream | Replayed]) -> None:
    for number, stream in enumerate(map(stream_of, data)):
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


def _check_unbounded_data(data: Sequence[Stream | Replayed], max_epochs_ahead: int | None) -> None:
    for number, given in enumerate(data):
        if isinstance(given, Replayed):
            raise GraphError(
                f"iteration: expected no replayed data in an unbounded iteration, given data stream {number} "
                f"({given.stream.name!r}); use iterate_bounded_streams_until_termination, or leave replayed out"
            )
        if len({step.stamped for step in given.steps}) > 1:
            raise GraphError(
                f"iteration: expected all records of data stream {number} ({given.name!r}) to have epochs, or none, "
                "given a union of both; stamp the union: epochs_every(first.union(second), …)"
            )
        if max_epochs_ahead is not None and not given.is_bounded and not is_stamped(given):
            raise GraphError(
                f"iteration: max_epochs_ahead={max_epochs_ahead} expected data with epochs, given data stream "
                f"{number} ({given.name!r}), which is endless and has no epochs; stamp it with "
                "epochs_every(stream, records=…), or leave max_epochs_ahead out"
            )


def check_config(config: Any) -> IterationConfig:
    """Return the config of an iteration, by default an ``IterationConfig()``."""
    if config is None:
        return IterationConfig()
    if not isinstance(config, IterationConfig):
        raise GraphError(
            f"iteration: expected config to be an IterationConfig, given {config!r}; "
            "write IterationConfig(max_epochs_ahead=…)"
        )
    return config


def check_body(body: Any) -> None:
    """Raise GraphError unless the body is a plain function of variables and data."""
    if not callable(body):
        raise GraphError(
            f"iteration: expected the body to be a function, given {shortened(body)}; "
            "write def body(variables, data) that returns an IterationBodyResult"
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


# -- checks of the body ----------------------------------------------------------------------------------------


def check_body_result(result: Any, loop: Loop, initial: Sequence[Stream], *, bounded: bool) -> IterationBodyResult[Any]:
    """Return the result of a body. Raises GraphError for streams that the iteration cannot use."""
    if not isinstance(result, IterationBodyResult):
        raise GraphError(
            f"iteration: expected the body to return an IterationBodyResult, given {shortened(result)}; write "
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
            f"given {len(feedback)}; return one for each, in the same order"
        )
    outputs = result.output_streams
    listed = list(outputs.values()) if isinstance(outputs, Mapping) else _listed("output", outputs, _OR_A_DICT)
    feedback = [given.stream if isinstance(given, FeedbackThrough) else given for given in feedback]
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
            f"iteration: expected {what} to be a Stream, given {shortened(stream)}; return a stream of the body"
        )
    if any(outlet.loop is not loop for outlet in outlets_of(stream)):
        raise GraphError(
            f"iteration: expected {what} to come from inside the body, given {stream.name!r} from outside; "
            "pass it as a data stream"
        )
    check_round_scope("iteration", stream, None)


def _check_comes_before_end(what: str, stream: Stream, *, bounded: bool) -> None:
    """Raise GraphError for a stream whose records arrive at the end of the iteration, which waits for them."""
    if emits_at_end(stream):
        raise GraphError(
            f"iteration: expected {what} to receive records while the iteration runs, given {stream.name!r}, whose "
            f"records arrive only when it has ended; {for_each_epoch(bounded=bounded)}"
        )


def _check_parallelism(number: int, initial: Stream, feedback: Stream) -> None:
    """Raise GraphError unless subtask i can feed back to head i, or the stream was repartitioned."""
    for edge in edges_of(feedback):
        given = edge.upstream.parallelism
        if isinstance(edge.partitioning, Forward) and given != initial.parallelism:
            raise GraphError(
                f"iteration: expected feedback stream {number} ({feedback.name!r}) to have the parallelism "
                f"{initial.parallelism} of its initial variable stream ({initial.name!r}), given "
                f"{given}; set parallelism={initial.parallelism} on its last step, or parallelism={given} on "
                f"{initial.name!r}"
            )
