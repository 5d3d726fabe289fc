"""Bounded iterations of tests: a body, a limit of epochs ahead, and what the log of a witness has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from iteration.iteration_support import kinds

from streamiter import Flow, IterationConfig, OutputTag, Stream, iterate_bounded_streams_until_termination

SEEDS = range(3)
CRITERIA = OutputTag("criteria")
AHEAD = [0, 1, 2, None]


def records(log: Sequence[tuple[Any, ...]]) -> list[tuple[Any, int]]:
    """Return record and epoch of all records in a log, in order."""
    return [(entry[1], entry[2]) for entry in kinds(log, "record")]


def raised(record: int, context: Any, out: Any) -> None:
    out.emit(record + 1)


def asks_for_rounds(rounds: int) -> Callable[[int, Any, Any], None]:
    """Return a callback that asks for this number of rounds."""

    def on_callback(epoch: int, context: Any, out: Any) -> None:
        if epoch + 1 < rounds:
            out.emit("go on", tag=CRITERIA)

    return on_callback


def iterate(initial: Sequence[Stream], data: Sequence[Any], body: Any, ahead: int | None = 0) -> Any:
    return iterate_bounded_streams_until_termination(initial, data, body, IterationConfig(max_epochs_ahead=ahead))


def nothing(flow: Flow, parallelism: int = 1) -> Stream:
    return flow.from_items([], parallelism=parallelism)
