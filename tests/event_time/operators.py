"""Operators of the tests of event time."""

from typing import Any

from streamiter import Operator
from streamiter.operators import Context, Output, Source, SourceBatch

SIZE_MS = 100
"""The size of a window."""


class Singles(Source):
    """Reads given records, each in a batch of its own."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records
        self._done = 0

    def open(self, context: Context, positions: Any) -> None:
        self._done = (positions or {}).get("done", 0)

    def read(self) -> SourceBatch | None:
        if self._done == len(self._records):
            return None
        self._done += 1
        return SourceBatch([self._records[self._done - 1]], {"done": self._done})


class Stamped(Operator):
    """Emits each record as (record, timestamp, event time)."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        out.emit((record, self.context.timestamp, self.context.event_time))


class NeverLate(Operator):
    """Passes records on, and fails if a watermark has overtaken one."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        timestamp, event_time = self.context.timestamp, self.context.event_time
        assert timestamp is not None
        assert event_time is None or timestamp >= event_time, f"{record} of {timestamp} is behind {event_time}"
        out.emit(record)


class Countdown(Operator):
    """Sets the timer that a record names, and emits its key at each timer; ``+n`` sets one n later, again and again."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: dict[str, Any], out: Output) -> None:
        if record.get("timer") is not None:
            self.context.set_event_timer(record["timer"], record.get("again"))

    def on_event_timer(self, payload: Any, out: Output) -> None:
        assert self.context.timestamp == self.context.event_time
        out.emit((self.context.key, self.context.event_time))
        if payload:
            self.context.set_event_timer(self.context.event_time + payload, payload)


class WindowCounts(Operator):
    """Counts the records of each key in windows of ``SIZE_MS``, by event timers and the state of the key."""

    def open(self, context: Context) -> None:
        self.context = context

    def process(self, record: Any, out: Output) -> None:
        timestamp = self.context.timestamp
        assert timestamp is not None
        start = timestamp // SIZE_MS * SIZE_MS
        assert self.context.event_time is None or timestamp >= self.context.event_time
        counts = self.context.state
        counts[start] = counts.get(start, 0) + 1
        self.context.set_event_timer(start + SIZE_MS, start)

    def on_event_timer(self, payload: int, out: Output) -> None:
        out.emit([self.context.key, payload, self.context.state.pop(payload)], event_time=payload + SIZE_MS - 1)


def events(count: int, *, users: int = 5, jitter_ms: int = 40) -> list[dict[str, Any]]:
    """Return events 10 ms apart, which arrive at most ``jitter_ms`` out of order."""
    return [
        {"id": number, "user": number * 7 % users, "at": 10 * number - number * 37 % (jitter_ms + 1)}
        for number in range(count)
    ]


def window_counts(given: list[dict[str, Any]]) -> list[list[int]]:
    """Return the results of ``WindowCounts``, sorted, by a plain loop."""
    counts: dict[tuple[int, int], int] = {}
    for event in given:
        window = event["user"], event["at"] // SIZE_MS * SIZE_MS
        counts[window] = counts.get(window, 0) + 1
    return sorted([user, start, count] for (user, start), count in counts.items())
