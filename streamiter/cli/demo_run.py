"""What ``streamiter demo`` does: events written once, a training, a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from streamiter.cli.demo_data import Contents, DemoTopics, flights_in_topic, start_over, write_flights
from streamiter.cli.demo_summary import print_summary, summarize
from streamiter.cli.demo_training import TrainingProgress, train
from streamiter.cli.failures import INTERRUPTED
from streamiter.cli.wrapping import say
from streamiter.learn.flights.events import FlightEvents, Labels
from streamiter.runtime.running import run_in_own_loop

__all__ = ["run_demo"]


def run_demo(
    directory: Path, *, labels: Labels, flights: int | None, mini_batch: int, fresh: bool, as_json: bool
) -> None:
    """Write the events unless they are there, learn from them, and say how good that was."""
    wanted = Contents(labels, flights)
    topics = DemoTopics.in_directory(directory)
    started_s = time.monotonic()
    try:
        prepared = _prepare(topics, wanted, fresh, partial(say, err=as_json))
    except KeyboardInterrupt:
        say("Stopped before the events were complete; nothing of them is kept.", err=as_json)
        return
    progress = TrainingProgress(prepared.events)
    statistics = run_in_own_loop(train(topics, wanted.labels, mini_batch, progress))
    summary = run_in_own_loop(
        summarize(
            topics,
            wanted,
            progress,
            statistics,
            mini_batch=mini_batch,
            reused_events=prepared.reused,
            flights=prepared.flights,
            seconds=time.monotonic() - started_s,
        )
    )
    if as_json:
        typer.echo(msgspec.json.encode(summary).decode())
    else:
        print_summary(summary)
    if statistics.state == "aborted":
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True)
class _Prepared:
    """The events that are in the topic."""

    events: int
    flights: int
    reused: bool


def _prepare(topics: DemoTopics, wanted: Contents, fresh: bool, tell: Callable[[str], None]) -> _Prepared:
    if fresh and run_in_own_loop(start_over(topics)):
        tell(f"Deleted the topics of earlier runs in {topics.database}")
    there = run_in_own_loop(flights_in_topic(topics, wanted))
    if there is not None:
        events, flights = there
        tell(
            f"The {events:,} events of {flights:,} flights are in {topics.database} already, "
            "and are used again (--fresh writes them anew)"
        )
        return _Prepared(events, flights, reused=True)
    topics.check_directory()  # Before reading the flights takes seconds.
    return _write(topics, wanted, tell)


def _write(topics: DemoTopics, wanted: Contents, tell: Callable[[str], None]) -> _Prepared:
    started_s = time.monotonic()
    bar = (
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Reading the flights", total=None)
        events = FlightEvents(wanted.labels, wanted.flights)
        progress.update(task, description="Writing events in time order", total=len(events))
        written = write_flights(topics, wanted, events, lambda count: progress.update(task, completed=count))
        run_in_own_loop(written)
    arrival = (
        ""
        if wanted.labels == "immediate"
        else " (arrival: scheduled departure + delay there + time in the air)"
    )
    tell(
        f"Wrote {events.flights:,} flights of 2013 as {len(events):,} events in time order{arrival} "
        f"to {topics.database} in {time.monotonic() - started_s:.1f} s"
    )
    return _Prepared(len(events), events.flights, reused=False)
