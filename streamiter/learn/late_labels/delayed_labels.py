"""How labels that come later are declared: ``DelayedLabels``, its checks, and the order of the events of a training.

A training handles questions and answers one by one in the order of event time, so a stream of them gets event time, and
is put in order, before the training reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, Literal

from streamiter.engine.graph.graph import SINGLE_INPUT, comes_one_way
from streamiter.errors import GraphError
from streamiter.flow.building import add_next_step, edges_of, outlets_of
from streamiter.flow.event_time import checked_duration, has_event_time, is_behind_topic, is_from_topic
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.stream import Stream
from streamiter.learn.labels import Label, counts_as_false
from streamiter.learn.losses import LogLoss
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.operators.timed.in_order import InOrder, SpansInOrder
from streamiter.values.numbers import whole_number
from streamiter.values.times import Seconds

_log = logging.getLogger("streamiter.learn")

Schedule = Literal["expected", "end", "weighted", "at once"]


@dataclass(frozen=True, slots=True)
class DelayedLabels:
    """How to read a stream of questions and answers: predict a question now, learn from it when its label is known.

    Questions and answers are joined one to one by their key and their time: ``question ≤ answer < question +
    within_s``. In a stream with event time the times are the timestamps, and answers wait for questions that arrive
    later. In other streams an event has the time at which it arrives, and an answer follows its question.

    Events are handled one by one, in the order of event time: before an event, all waits end that are over by the
    watermark behind the events before it. Batches, load and a backlog change nothing.
    """

    key_of: Callable[[Any], Hashable]
    """``key_of(event)`` returns the key that a question and its answer share: int, str, bytes or a tuple of these."""
    is_answer: Callable[[Any], bool]
    """Whether an event is an answer; all other events are questions."""
    features: Callable[[Sequence[Any]], Any] | Sequence[str] | None
    """``features(questions)`` returns a row of features for each question. A list of fields, or None for all fields of
    the question, only with the model that ``train_online`` makes itself."""
    target_of: Callable[[Any], Label | None]
    """``target_of(answer)`` returns the label; None if the question has no label: then the question is forgotten."""
    waiting_max: int = 1_000_000
    """The largest number of events that wait, with ``model=`` at each worker; beyond it the oldest is forgotten."""
    within_s: Seconds | None = None
    """How long a question waits. None: without end."""
    otherwise: Label = None
    """The label of a question whose wait is over, also by the end of the stream; None: the question is forgotten."""
    weight_of: Callable[[Any], float] | None = None
    """``weight_of(answer)`` returns the sample weight of its row; None: 1. Not with ``model=``, and not with
    the schedules ``"expected"`` and ``"weighted"``."""
    unknown: Literal["report", "refuse", "skip"] = "report"
    """What happens to an answer without a question that waits. "report": it becomes a dead letter if the training has a
    topic for these, else it is skipped. "refuse": it follows the policy of the training, which may end the job. It is
    counted in each case."""
    schedule: Schedule | None = None
    """When a question is learned from.

    - ``"expected"``: with an ``otherwise`` that counts as False, when its answer comes, or as False at an age at which
      answers come; a True answer after that learns True, and takes back what was learned. So most labels are learned as
      soon as those of answered questions, without bias. Until 1,000 waits have ended, and 100 answers have come, it
      works as ``"end"``; so it does for most questions that come in bursts, or while answers fail to come.
    - ``"end"``: at the end of its wait, with its answer or ``otherwise``. Unbiased; nothing is learned in the first
      wait.
    - ``"weighted"``: with ``otherwise=False``, as False at once; an answer True then learns True, and takes back what
      was learned at the question. It learns from the first question on, and is unbiased while traffic is steady.
    - ``"at once"``: when its answer comes, or with ``otherwise`` at the end of its wait. With ``otherwise`` the model
      is biased until the first wait is over, and when traffic changes.
    - None: without ``within_s`` or ``otherwise`` ``"at once"``; ``"expected"`` where it is possible, else ``"end"``. It
      is possible with labels that are True and False, 1 and 0 or two texts, an ``otherwise`` that is the negative
      label, a model that predicts the probability of the positive label, and no ``weight_of``.
    """
    time: Literal["event", "processing"] | None = None
    """The time that counts: the time of the events, or the clock when they arrive. None: event time if the stream has
    it or comes directly from a topic with timestamps, else the clock."""

    def chosen_schedule(self) -> Schedule:
        """Return the schedule, or the default."""
        if self.schedule is not None:
            return self.schedule
        if self.otherwise is None or self.within_s is None:
            return "at once"
        return "expected" if counts_as_false(self.otherwise) and self.weight_of is None else "end"


def come_with_questions(labels: DelayedLabels) -> bool:
    """Return whether a join has labelled the rows, see :func:`labels_of_rows`."""
    return labels.is_answer is _is_given


def labels_of_rows(
    label: str | Callable[[Any], Label],
    features: Callable[[Sequence[Any]], Any] | Sequence[str] | None,
    weight: str | Callable[[Any], float] | None,
) -> DelayedLabels:
    """Return the labels of rows that a join has labelled: ``SpansInOrder`` emits each as a question and its answer."""
    weight_of = itemgetter(weight) if isinstance(weight, str) else weight
    target_of = itemgetter(label) if isinstance(label, str) else label
    return DelayedLabels(_is_given, _is_given, features, target_of, weight_of=weight_of, schedule="at once")


def _is_given(event: Any) -> Any:
    raise NotImplementedError  # The events have it.


_CHOICES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "unknown": ("report", "refuse", "skip"),
    "schedule": ("expected", "end", "weighted", "at once", None),
    "time": ("event", "processing", None),
}


def check_labels(labels: DelayedLabels) -> None:
    """Raise GraphError for options that cannot be used."""
    for option in ("key_of", "is_answer", "target_of"):
        check_user_function(getattr(labels, option), f"DelayedLabels({option}=)", ["event"])
    for option, choices in _CHOICES.items():
        if (given_choice := getattr(labels, option)) not in choices:
            raise GraphError(
                f"DelayedLabels({option}=): expected {' or '.join(map(repr, choices))}, given {given_choice!r}"
            )
    whole_number("DelayedLabels(waiting_max=)", labels.waiting_max, 1, error=GraphError)
    if labels.within_s is not None:
        checked_duration("DelayedLabels(within_s=)", labels.within_s, "train_online", 0.001)


# After this many seconds without an event, waits by the time of a topic end by the clock.
_SECONDS_QUIET: Final = 5.0


def with_schedule(labels: DelayedLabels, model: Any) -> DelayedLabels:
    """Return the labels with the chosen schedule; raise GraphError for a schedule that is not possible."""
    schedule = labels.chosen_schedule()
    is_text, positive = isinstance(labels.otherwise, str), None
    if isinstance(model, AdaptiveLinearModel):
        options = model.get_params()
        is_of_classes = model.classes is not None or options["task"] == "multiclass"
        is_binary, positive = model.task != "regression" and not is_of_classes, options["positive"]
        is_text = is_text and schedule != "expected"  # Which of two texts is negative is known after the first labels.
    else:
        is_binary = isinstance(model.loss, LogLoss)
    is_false = not is_text and counts_as_false(labels.otherwise, positive=positive)
    assumes = schedule in ("expected", "weighted")
    if labels.schedule is None and schedule == "expected" and not (is_binary and is_false):
        schedule = "end"
    elif assumes and not (is_binary and is_false):
        raise GraphError(
            f'DelayedLabels(schedule="{schedule}"): expected otherwise=False and a model that predicts the probability '
            f'of True, given otherwise={labels.otherwise!r} and {type(model).__name__}; write schedule="end"'
        )
    elif assumes and labels.weight_of is not None:
        raise GraphError(
            f'DelayedLabels(schedule="{schedule}"): expected no weight_of=, since a question is learned before its '
            'answer tells its weight, given one; write schedule="end"'
        )
    if schedule in ("expected", "end") and labels.within_s is None:
        raise GraphError(
            f'DelayedLabels(schedule="{schedule}"): expected within_s=, since a question is learned at the end of its '
            'wait, given none; say how long labels may take, or write schedule="at once"'
        )
    return replace(labels, schedule=schedule)


def in_order_of_events(
    events: Stream, labels: DelayedLabels, named: Callable[[str], str], *, synchronous: bool, in_columns: bool
) -> tuple[Stream, bool]:
    """Return the events as the training reads them, and whether they are in the order of event time.

    They then come one after the other as ``InOrder``, or ``SpansInOrder``, emits them. ``in_columns``: they are not
    sent by key.
    """
    events = with_event_time(events, labels, named)
    tell_of_clock(events, labels)
    is_timed = is_in_event_time(events, labels)
    if synchronous and not is_timed and (labels.otherwise is not None or labels.within_s is not None):
        raise GraphError(
            'train_online(mode="synchronous"): expected DelayedLabels with within_s= and otherwise= only in event '
            "time, since the result must not depend on timing; use the asynchronous mode, or .event_time(…)"
        )
    if not is_timed:
        return events, False
    kind, one_way = SpansInOrder if come_with_questions(labels) else InOrder, comes_one_way(edges_of(events))
    ordered = add_next_step(
        {SINGLE_INPUT: events},
        "in order",
        lambda: kind(one_way=one_way, in_columns=in_columns),
        {"name": named("in order"), "parallelism": 1},
        order="needs",
    )
    return Stream(events.flow, ordered), True


def is_in_event_time(events: Stream, labels: DelayedLabels) -> bool:
    """Return whether questions and answers are joined by the time of the events, not by the clock."""
    return labels.time != "processing" and has_event_time(events)


def with_event_time(events: Stream, labels: DelayedLabels, named: Callable[[str], str]) -> Stream:
    """Return the events with the time by which they are joined: their own time, the time of their topics, or none."""
    if labels.time == "processing" or has_event_time(events):
        return events
    behind_topics = [is_behind_topic(outlet) for outlet in outlets_of(events)]
    if all(behind_topics):
        timed = [
            Stream(events.flow, outlet).event_time(
                idle_after_s=_SECONDS_QUIET, when_idle="advance", name=named(f"times of {outlet.step.name}")
            )
            for outlet in outlets_of(events)
        ]
        return timed[0].union(*timed[1:]) if len(timed) > 1 else timed[0]
    if any(outlet.step.watermarked for outlet in outlets_of(events)):
        raise GraphError(
            f"train_online(labels=): expected event time of all of the events, given {events.name!r}, of which a part "
            'has none; put .event_time(…) behind each source, or write DelayedLabels(time="processing")'
        )
    if labels.time == "event" or (labels.within_s is not None and is_from_topic(events)):
        raise GraphError(
            f"train_online(labels=): expected events with event time, given {events.name!r} without, and the clock "
            "would count all events of a backlog as events of the present; put .event_time(…) right behind "
            'flow.source(…), or write DelayedLabels(time="processing")'
        )
    return events


def tell_of_clock(events: Stream, *given: DelayedLabels) -> None:
    """Warn if the clock counts the waits of labels, most likely by mistake, while a stream is read that ends."""
    counts = any(labels.time is None and labels.within_s is not None for labels in given)
    if counts and events.is_bounded and not has_event_time(events):
        _log.warning(
            "DelayedLabels: the stream %r ends and has no event time, so the clock measures how long a question waits, "
            "although all events are read at once; put .event_time(…) before the training, or write "
            'DelayedLabels(time="processing") if that is meant',
            events.name,
        )
