"""The step that gives a stream event time, and the check of steps that need it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import tzinfo
from functools import partial
from typing import Any, Literal, get_args

from streamiter.engine.graph.graph import SINGLE_INPUT, Step, telling_order, upstream_of
from streamiter.errors import ConfigurationError, GraphError, shortened
from streamiter.flow.building import Outlets, StepOutput, add_next_step, edges_of, outlets_of
from streamiter.flow.graph_checks import check_choice, check_field_or_function, check_seconds
from streamiter.flow.options import StepOptions, check_step_options
from streamiter.operators.event_time import AssignEventTime, EventTimeSettings
from streamiter.values.numbers import one_of
from streamiter.values.times import UNIT_NAMES, Seconds, TimeUnit, duration_ms


def add_event_time(
    stream: Outlets,
    of: str | Callable[[Any], Any] | None,
    unit: TimeUnit | None,
    out_of_orderness_s: Seconds,
    idle_after_s: Seconds | None,
    time_zone: str | None,
    when_idle: Literal["wait", "advance"],
    check_unit: bool,
    max_ahead_s: Seconds | None,
    options: StepOptions,
) -> StepOutput:
    """Add the step of ``Stream.event_time``."""
    check_step_options("event_time", options)
    label = options.get("name") or "event_time"
    if of is None:
        _check_behind_topic(stream, unit, time_zone, options, label)
        unit, check_unit = "ms", False
    else:
        check_field_or_function(of, "event_time", step=options.get("name"))
    if unit is not None:
        remedy = "leave it out for datetimes"
        one_of(f"step {label!r}, unit=", unit, *get_args(TimeUnit), error=GraphError, remedy=remedy)
    check_choice("when_idle", when_idle, ("wait", "advance"), step=label)
    idle_s = check_seconds(idle_after_s, "idle_after_s", "wait 60 s, or write None to wait for ever", step=label)
    settings = EventTimeSettings(
        of=of,
        unit=unit,
        time_zone=_zone(time_zone, unit, label),
        bound_ms=checked_duration("out_of_orderness_s", out_of_orderness_s, label),
        idle_after_s=idle_s,
        when_idle=when_idle,
        check_unit=check_unit,
        max_ahead_ms=None if max_ahead_s is None else checked_duration("max_ahead_s", max_ahead_s, label),
    )
    return add_next_step(
        {SINGLE_INPUT: stream},
        "event_time",
        partial(AssignEventTime, settings),
        options,
        begins_event_time=True,
        order="begins",
    )


def check_event_time(stream: Outlets, method: str) -> None:
    """Raise GraphError unless the whole stream has event time, which ``method`` needs."""
    for step in _steps_without(stream):
        raise GraphError(
            f"{method}: expected a stream with event time, given {step.name!r} without; put .event_time(…) before it"
        )


def has_event_time(stream: Outlets) -> bool:
    """Return whether the whole stream has event time."""
    return not _steps_without(stream)


def is_behind_topic(outlet: StepOutput) -> bool:
    """Return whether the records come directly from a topic that has a timestamp for each."""
    step = outlet.step
    is_straight = outlet.partitioning is None and outlet.tag is None
    return step.source is not None and step.topic is not None and step.topic.has_timestamps and is_straight


def numbers_of_event_time(stream: Outlets) -> list[str]:
    """Return the fields of the stream's records whose numbers are its event time."""
    made = [step.factory for step in telling_order(edges_of(stream))]
    settings = [each.args[0] for each in made if isinstance(each, partial) and each.func is AssignEventTime]
    return [each.of for each in settings if isinstance(each.of, str) and each.unit in UNIT_NAMES]


def comes_from_join(stream: Outlets) -> bool:
    """Return whether records of a stream with event time come from joins by an interval, through other steps."""
    return has_event_time(stream) and any(step.order == "spans" for step in telling_order(edges_of(stream)))


def is_labelled_by_join(stream: Outlets) -> bool:
    """Return whether all records of a stream with event time come from joins by an interval, through other steps."""
    telling = telling_order(edges_of(stream))
    return has_event_time(stream) and bool(telling) and all(step.order == "spans" for step in telling)


def is_from_topic(stream: Outlets) -> bool:
    """Return whether records of the stream come from a topic that has a timestamp for each, through other steps."""
    upstream = upstream_of(edge for edge in edges_of(stream))
    return any(step.source is not None and step.topic is not None and step.topic.has_timestamps for step in upstream)


def _steps_without(stream: Outlets) -> list[Step]:
    in_round = stream.flow.graph.round_scope is not None
    steps = [outlet.step for outlet in outlets_of(stream)]
    return [step for step in steps if not (step.watermarked or (step.timed and in_round))]


def _check_behind_topic(stream: Outlets, unit: object, time_zone: object, options: StepOptions, label: str) -> None:
    if unit is not None or time_zone is not None:
        raise GraphError(
            f"step {label!r}: expected unit= and time_zone= only together with the name of a field or a function, "
            "given neither of them; write event_time(lambda record: …, unit=…)"
        )
    [outlet, *others] = outlets_of(stream)
    step = outlet.step
    if others or not is_behind_topic(outlet):
        raise GraphError(
            f"step {label!r}: expected a stream that comes directly from a topic, since without a field or a function "
            f"the topic's timestamps are used, given {stream.name!r}; write event_time(lambda record: …), or put "
            "event_time() right behind flow.source(…)"
        )
    if options.get("parallelism") not in (None, step.parallelism):
        raise GraphError(
            f"step {label!r}: expected the parallelism {step.parallelism} of its source, since it uses the topic's "
            f"timestamps, given {options['parallelism']}; leave parallelism= out"
        )


def checked_duration(option: str, seconds: object, label: str, least: float = 0.0) -> int:
    """Return the seconds of an option as milliseconds; raise GraphError for anything else."""
    try:
        return duration_ms(option, seconds, least)
    except ConfigurationError as error:
        raise GraphError(f"step {label!r}: {error}") from None


def _zone(name: object, unit: TimeUnit | None, label: str) -> tzinfo | None:
    if name is None:
        return None
    if unit in UNIT_NAMES:
        raise GraphError(
            f"step {label!r}: expected no time_zone= for numbers, which count from 1970 UTC, given {name!r}; "
            "leave it out"
        )
    import zoneinfo  # Few flows need it.

    try:
        return zoneinfo.ZoneInfo(name)  # type: ignore[arg-type]
    except Exception:
        raise GraphError(
            f"step {label!r}: expected the name of a time zone of the IANA, given {shortened(name)}; write "
            'time_zone="Europe/Berlin", or "UTC"'
        ) from None
