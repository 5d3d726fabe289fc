"""Checks of the arguments with which a flow is built or started: options, positions in topics, functions, factories.

Each check raises GraphError, or ConfigurationError at the start, with the step or the flow, the expected value, the
given value, and what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from numbers import Real
from typing import Any, Literal

import numpy as np

from streamiter.engine.graph.graph import Edge, Step, awaited_edges, upstream_of
from streamiter.engine.states.backends import StateBackend
from streamiter.engine.tasks.making import SOURCE_METHODS, check_handlers, check_methods
from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.operators.functions import asynchronous_kind, misfit
from streamiter.operators.operator import Operator
from streamiter.operators.output import RejectionPolicy
from streamiter.operators.services import Service
from streamiter.topics.topic import SourceStart, StartPosition, StopPosition, Topic
from streamiter.topics.urls import shown_given
from streamiter.values.numbers import one_of, whole_number
from streamiter.values.records import OutputTag
from streamiter.values.times import Seconds, in_seconds


def check_name(name: str | None) -> None:
    """Raise GraphError for a name that is neither None nor a text with characters."""
    if name is not None and (not isinstance(name, str) or not name):
        raise GraphError(f'step: expected name= to be a text, given {name!r}; write name="…", or leave it out')


def check_count(count: int, what: str, *, step: str) -> int:
    """Return ``count``. Raises GraphError unless it is a whole number of at least 1."""
    return whole_number(f"step {step!r}, {what}", count, 1, error=GraphError)


def check_seconds(seconds: Any, option: str, otherwise: str, *, step: str) -> float | None:
    """Return an option as seconds. Raises GraphError unless it is above 0, or None, which means ``otherwise``."""
    seconds = in_seconds(seconds)
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < math.inf):
        raise GraphError(
            f"step {step!r}: expected {option} to be a number of seconds above 0, given {seconds!r}; "
            f"leave it out to {otherwise}"
        )
    return seconds  # type: ignore[no-any-return]


def check_retries(
    retries: int, backoff_s: Seconds, backoff_max_s: Seconds, seed: int, *, step: str
) -> tuple[float, float]:
    """Return the shortest and the longest delay.

    Raises GraphError unless the number of further calls and the delays before them are possible.
    """
    for option, number in (("retries", retries), ("seed", seed)):
        whole_number(f"step {step!r}, {option}", number, 0, error=GraphError)
    backoff_s, backoff_max_s = in_seconds(backoff_s), in_seconds(backoff_max_s)
    for option, seconds in (("backoff_s", backoff_s), ("backoff_max_s", backoff_max_s)):
        check_seconds(math.nan if seconds is None else seconds, option, "use its default", step=step)
    if backoff_max_s < backoff_s:
        raise GraphError(
            f"step {step!r}: expected backoff_max_s of at least backoff_s ({backoff_s}), given {backoff_max_s}; it is "
            "the longest delay"
        )
    return backoff_s, backoff_max_s


def check_service(given: Any, *, step: str) -> Service | None:
    """Return the argument ``parameter_server=``. Raises GraphError unless it is a parameter server or None."""
    if given is None or (isinstance(given, Service) and not isinstance(given, type)):
        return given
    what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
    raise GraphError(
        f"step {step!r}: expected a ParameterServer as parameter_server=, given {what}; make one before the flow, and "
        "give it to every step that works with it"
    )


def check_state_backend(flow: str, given: Any) -> StateBackend | None:
    """Return the argument ``state=`` of a flow. Raises GraphError unless it keeps states, or is None."""
    if given is None or (isinstance(given, StateBackend) and not isinstance(given, type)):
        return given
    raise GraphError(
        f"flow {flow!r}: expected state= to be None (in memory) or a RocksState, given {shortened(given)}; write "
        'Flow(…, state=RocksState("folder"))'
    )


def check_holds_dead_letters(topic: Topic, *, step: str) -> None:
    """Raise GraphError for a topic without headers: it would refuse every dead letter, and the first ends the job."""
    if not topic.has_headers:
        raise GraphError(
            f"step {step!r}: expected a dead-letter topic whose records have headers, since these say why a record was "
            f"refused, given {topic.url}; write the dead letters to a topic of kafka:// or sqlite://"
        )


def check_policy(on_error: RejectionPolicy, dead_letter: Topic | None, *, step: str) -> RejectionPolicy:
    """Return the policy for refused records; it is ``"dead_letter"`` if there is a topic for them."""
    check_choice("on_error", on_error, ("fail", "skip", "dead_letter"), step=step)
    if dead_letter is None:
        if on_error == "dead_letter":
            raise GraphError(
                f'step {step!r}: on_error="dead_letter" expected a topic for the dead letters, given none; '
                'add dead_letter=topic("scheme://…")'
            )
        return on_error
    check_topic(f"step {step!r}, dead_letter=", dead_letter, 'dead_letter=topic("scheme://…")')
    check_holds_dead_letters(dead_letter, step=step)
    if on_error == "skip":
        raise GraphError(
            f'step {step!r}: expected on_error="skip" or a dead_letter topic, given both; leave one of them out'
        )
    return "dead_letter"


# -- topics ------------------------------------------------------------------------------------------------


def check_source_start(
    topic: Topic, start: SourceStart | None, first_start: StartPosition | None, *, step: str
) -> None:
    """Raise GraphError unless the source can begin there; None is the default."""
    if not _is_end(start, "committed"):
        _check_position(start, "start", step)
        if first_start is not None:
            raise GraphError(
                f'step {step!r}: expected first_start= together with start="committed", given it with start={start!r}; '
                "leave it out, since each run begins at start="
            )
        return
    if not topic.has_transactions:
        raise GraphError(
            f'step {step!r}: expected start="committed" of a topic that keeps positions, given {topic.url}, which has '
            "no transactions; use flow.start(checkpoints=…), which stores the positions in a folder or an object store"
        )
    _check_position(first_start, "first_start", step)


def _check_position(start: SourceStart | None, argument: str, step: str) -> None:
    if start is None:
        return
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise GraphError(
                f"step {step!r}: expected {argument} to be an aware datetime, given {start} without a time zone; "
                "say which one: start.replace(tzinfo=UTC)"
            )
    elif not _is_end(start, "earliest", "latest") and not _are_offsets(start):
        committed = '"committed", ' if argument == "start" else ""
        raise GraphError(
            f'step {step!r}: expected {argument} "earliest", "latest", {committed}an offset for each partition '
            f"({{0: 1200}}) or an aware datetime, given {start!r}; choose one of these"
        )


def check_topic(what: str, given: object, call: str) -> None:
    """Raise GraphError for anything but a topic; a URL is shown without its secrets."""
    if not isinstance(given, Topic):
        raise GraphError(f"{what}: expected a topic, given {shown_given(given)}; write {call}")


def check_choice(option: str, given: object, allowed: tuple[str, ...], *, step: str) -> None:
    """Raise GraphError for a value that an option does not have."""
    one_of(f"step {step!r}, {option}=", given, *allowed, error=GraphError)


def check_tag(tag: object, *, step: str) -> OutputTag | None:
    """Return the side output of late records; raise GraphError for anything else."""
    if tag is None or isinstance(tag, OutputTag):
        return tag
    raise GraphError(f'step {step!r}: expected late= to be an OutputTag, given {tag!r}; write OutputTag("late")')


def check_nothing_is_late(late: object, allowed_lateness_s: Seconds, *, step: str) -> None:
    """Raise GraphError for options of late records in processing time."""
    if late is not None or allowed_lateness_s:
        raise GraphError(
            f"step {step!r}: expected no allowed_lateness_s= and no late= in processing time, where nothing is late, "
            "given one; leave it out"
        )


def check_end_is_told(table: Iterable[Edge], *, step: str) -> None:
    """Raise GraphError if a step cannot know that an endless table has been read to its end.

    Only topics have such an end, and the control record that tells it does not pass through a loop.
    """
    for upstream in upstream_of(table):
        if upstream.bounded:
            continue
        if upstream.loop is not None or upstream.stamped:
            raise GraphError(
                f"step {step!r}: expected an endless table from outside of iterations and without epochs, since the "
                f"stream waits for it, given one that comes through {upstream.name!r}; write wait_for_table=False"
            )
        if upstream.source is not None and upstream.topic is None:
            raise GraphError(
                f"step {step!r}: expected a table that ends or comes from topics, since the stream waits for it, given "
                f"one from the source {upstream.name!r}, which never ends; write wait_for_table=False"
            )


def check_can_wait(
    stream: Iterable[Edge],
    table: Iterable[Edge],
    steps: Iterable[Step],
    *,
    step: str,
    waits: Literal["table", "then"] = "table",
) -> None:
    """Raise GraphError if a step of a flow with these ``steps`` cannot read a table first, and then a stream.

    While it waits, the steps before the stream wait for room; the table must need none of them. With "then", the
    table is the first one of two streams.
    """
    needed, waiting = upstream_of(table), [each for each in steps if each.awaited_input is not None]
    for _ in waiting:  # A step that waits for another table holds up the steps before its stream, too.
        for other in waiting:
            held_up = [edge for edge in other.edges if edge.input_name != other.awaited_input]
            if any(each in needed for each in upstream_of(held_up, but_awaited=True)):
                needed |= upstream_of(awaited_edges(other))
    for upstream in upstream_of(stream, but_awaited=True):
        if upstream in needed and upstream.source is not None and waits == "then":
            raise GraphError(
                f"step {step!r}: expected two streams from different sources, since the second one waits for "
                f"the end of the first one, given {upstream.name!r}, which both need; read it twice"
            )
        if upstream in needed and upstream.source is not None:
            raise GraphError(
                f"step {step!r}: expected a stream and a table from different sources, since the stream waits for the "
                f"table, given {upstream.name!r}, which both need; read it twice, or write wait_for_table=False"
            )


def check_on(on: object, *, step: str | None) -> None:
    """Raise GraphError unless ``on`` is the name of a field, a function, or a pair of these for left and right."""
    if isinstance(on, tuple) and len(on) != 2:
        raise GraphError(
            f"join: expected a field's name, a function or a pair of these, given {on!r}; "
            'write on="id", or on=("user_id", "id") for left and right'
        )
    for key in on if isinstance(on, tuple) else (on,):
        check_field_or_function(key, "join", step=step)


def check_stop(stop: StopPosition, *, step: str) -> None:
    """Raise GraphError unless ``stop`` is None, the end of the topic, or an offset for each partition."""
    if stop is not None and not _is_end(stop, "latest") and not _are_offsets(stop):
        raise GraphError(
            f'step {step!r}: expected stop None (read on for ever), "latest" or an offset for each partition '
            f"({{0: 1200}}), given {stop!r}; choose one of these"
        )


def _is_end(position: Any, *ends: str) -> bool:
    return isinstance(position, str) and position in ends


def _are_offsets(position: Any) -> bool:
    return isinstance(position, Mapping) and all(map(_is_count, (*position.keys(), *position.values())))


def _is_count(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and bool(number >= 0)


def check_codec(codec: Any, method: Literal["decode", "encode"], *, step: str) -> None:
    """Raise GraphError unless ``codec`` is an object with the method; its class has the method, too, and is refused."""
    kind = "a decoder" if method == "decode" else "an encoder"
    if isinstance(codec, type):
        raise GraphError(
            f"step {step!r}: expected {method}= to be {kind} such as Json(), given the class "
            f"{codec.__name__}; write {codec.__name__}()"
        )
    # The encode method of texts and the decode method of bytes do something else.
    if isinstance(codec, (str, bytes)) or not callable(getattr(codec, method, None)):
        raise GraphError(
            f"step {step!r}: expected {method}= to be {kind} such as Json(), given {shortened(codec)}; "
            f"give an object with a method {method}(batch)"
        )


# -- functions ---------------------------------------------------------------------------------------------


def check_user_function(
    f: Any,
    argument: str,
    takes: Sequence[str],
    *,
    step: str | None = None,
    expected: str = "a function",
    is_awaited: bool = False,
) -> None:
    """Raise GraphError unless ``f`` is a plain function of the arguments ``takes``, or one that ``is_awaited``.

    The error names the ``argument``, and the ``step`` if the user has named it.
    """
    label = argument if step is None else f"step {step!r}, {argument}"
    if not callable(f):
        write = "async def" if is_awaited else "a function or a lambda"
        raise GraphError(f"{label}: expected {expected}, given {shortened(f)}; write {write}")
    kind, name = asynchronous_kind(f), getattr(f, "__name__", type(f).__name__)
    if is_awaited and kind != "coroutine function":
        raise GraphError(
            f"{label}: expected {expected}, given the {kind or 'plain function'} {name}; write async def, or use "
            ".map(f) for a function that awaits nothing"
        )
    if kind and not is_awaited:
        raise GraphError(
            f"{label}: expected a plain function, given the {kind} {name}; await it in an Operator with "
            "async def process(self, record, out) and .process(…), or in .map_async(f)"
        )
    if reason := misfit(f, takes):
        called = ", ".join(takes)
        around = "" if is_awaited else f", or lambda {called}: … around it" if takes else ", or lambda: … around it"
        raise GraphError(
            f"{label}: expected a function that is called as f({called}), given {reason}; write "
            f"{'async ' if is_awaited else ''}def f({called}){around}"
        )


def check_field_or_function(key: Any, argument: str, *, step: str | None = None) -> None:
    """Raise GraphError unless ``key`` is the name of a field or a function of a record."""
    if not isinstance(key, str):
        check_user_function(key, argument, ["record"], step=step, expected="a field's name or a function")


def check_factory(
    factory: Any, input_names: list[str], *, step: str, base: type[Any] = Operator, keyed: bool = False
) -> None:
    """Raise GraphError unless ``factory`` is a class derived from ``base`` or a callable without arguments.

    An instance is refused, because all subtasks would share it. ``keyed``: the step has keys.
    """
    kind = base.__name__
    room = "streamiter" if base is Operator else base.__module__.rpartition(".")[0]
    if isinstance(factory, base):
        name = type(factory).__name__
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, given "
            f"an instance of {name}, which all subtasks would share; write {name} or lambda: {name}(…)"
        )
    if not callable(factory):
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, "
            f"given {shortened(factory)}; write a class derived from {room}.{kind}"
        )
    if kind_of_function := asynchronous_kind(factory):
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, "
            f"given a {kind_of_function}; write async def in a class derived from {room}.{kind}"
        )
    if isinstance(factory, type):
        if not issubclass(factory, base):
            raise GraphError(
                f"step {step!r}: expected a class derived from {room}.{kind}, given {factory.__name__}; write class "
                f"{factory.__name__}({kind}), or a function that makes one"
            )
        if base is Operator:
            check_handlers(factory, input_names, step=step, keyed=keyed)
        else:
            check_methods(factory, SOURCE_METHODS, step=step)
    if reason := misfit(factory, []):
        name = getattr(factory, "__name__", type(factory).__name__).replace("<lambda>", "f")
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, given {reason}; "
            f"write lambda: {name}(…)"
        )


def check_input_names(names: Iterable[str]) -> None:
    """Raise GraphError for the name of an input whose method ``process_<name>`` would mean something else."""
    for name in names:
        if not name.isidentifier():
            raise GraphError(
                f"connect: expected names of inputs that can be part of a method's name, given {name!r}; "
                "use letters, digits and underscores"
            )
        if name == "input":
            raise GraphError(
                "connect: expected a name of an input of its own, given 'input', which the only input of other steps "
                "has; choose another, such as data"
            )
        if name == "batch" or name.endswith("_batch"):
            raise GraphError(
                f"connect: expected a name of an input that does not end in batch, given {name!r}: process_{name} "
                f"would be a method for whole batches; choose another, such as {name}es"
            )


def check_checkpoints(flow: str, options: Mapping[str, object]) -> None:
    """Raise ConfigurationError unless ``checkpoints=`` and ``snapshot=`` of a start fit."""
    from streamiter.engine.storage.store import Checkpoints  # A program that only builds a flow does not need it.

    checkpoints, snapshot = options.get("checkpoints"), options.get("snapshot")
    if not isinstance(checkpoints, Checkpoints | None):
        raise ConfigurationError(
            f"flow {flow!r}: expected checkpoints= to be Checkpoints(…), given {shortened(checkpoints)}; write "
            'checkpoints=Checkpoints("folder")'
        )
    if checkpoints is not None and snapshot is not None:
        raise ConfigurationError(
            f"flow {flow!r}: expected either checkpoints= or snapshot=, given both; a job with checkpoints resumes "
            "from the last checkpoint by itself"
        )


def checked_steps(flow: str, given: object) -> frozenset[str]:
    """Return the names in ``changed_steps=``. A str is refused, although it is an iterable of letters."""
    names = None if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"flow {flow!r}: expected changed_steps= to be a list of names of steps, given "
            f'{shortened(given if names is None else names)}; write changed_steps=["name of the step"]'
        )
    return frozenset(names)
