"""The command ``demo``: it writes a year of flights as events, learns from them, and prints a summary.

The training itself is in ``demo_training``.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from streamiter.cli.demo_training import (
    MODEL,
    UPDATES_BYTES,
    Contents,
    DemoTopics,
    TrainingProgress,
    flights_in_topic,
    start_over,
    train,
    write_flights,
)
from streamiter.cli.figures import INTERRUPTED, say
from streamiter.learn.flights import FlightEvents, Labels, event_features
from streamiter.models import ServedModel, last_update
from streamiter.runtime.running import run_in_own_loop
from streamiter.runtime.statistics import JobState, JobStatistics


def run_demo(
    directory: Path, *, labels: Labels, flights: int | None, mini_batch: int, fresh: bool, as_json: bool
) -> None:
    """Write the events if they do not exist, learn from them, and print a summary."""
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
    """The events in the topic."""

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
            "and are used again (--fresh writes new ones)"
        )
        return _Prepared(events, flights, reused=True)
    topics.check_directory()  # Before reading the flights, which takes seconds.
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


# The question to ServedModel at the end, with the fields of a departure event.
_QUESTION: Final = {
    "carrier": "UA",
    "origin": "EWR",
    "dest": "ORD",
    "hour": 18,
    "weekday": 4,
    "month": 12,
    "distance": 719,
}
_QUESTION_IN_WORDS: Final = "UA from EWR to ORD, a Friday in December at 18:00"

# The model is in a local file: it is ready at once, or something is wrong.
_READY_TIMEOUT_S: Final = 10.0


class Served(msgspec.Struct, frozen=True):
    """The answer of ServedModel."""

    question: str
    late: float
    generation: int
    version: int
    age_s: float


class DemoSummary(msgspec.Struct, frozen=True):
    """The results of a run; ``metrics`` is empty before the first report of the validation."""

    state: JobState
    labels: str
    mini_batch: int
    reused_events: bool
    flights: int
    events: int
    reached: str
    predicted: int
    learned_from: int
    late: int
    updates: int
    metrics: dict[str, float]
    training_s: float
    events_per_s: float
    updates_per_s: float
    seconds: float
    file: str
    file_bytes: int
    model: str
    topic: str
    follow: str
    served: Served | None

    @property
    def always_on_time(self) -> float:
        """Return the accuracy of predicting that no flight is late."""
        return 1 - self.late / self.learned_from if self.learned_from else 1.0


async def summarize(
    topics: DemoTopics,
    contents: Contents,
    progress: TrainingProgress,
    statistics: JobStatistics,
    *,
    mini_batch: int,
    reused_events: bool,
    flights: int,
    seconds: float,
) -> DemoSummary:
    """Return the results of the run, with a prediction of the published model."""
    training_s = max(statistics.elapsed_s, 1e-9)
    return DemoSummary(
        state=statistics.state,
        labels=contents.labels,
        mini_batch=mini_batch,
        reused_events=reused_events,
        flights=flights,
        events=progress.events,
        reached=progress.reached,
        predicted=progress.predicted,
        learned_from=progress.learned_from,
        late=progress.late,
        updates=progress.updates,
        metrics=progress.metrics,
        training_s=training_s,
        events_per_s=progress.events / training_s,
        updates_per_s=progress.updates / training_s,
        seconds=seconds,
        file=str(topics.database),
        file_bytes=_size_bytes(topics.database),
        model=MODEL,
        topic=topics.updates.url,
        follow=f"{program()} models tail {shlex.quote(topics.updates.url)} --model {MODEL} --follow",
        served=await _served(topics),
    )


async def _served(topics: DemoTopics) -> Served | None:
    if await last_update(topics.updates, MODEL) is None:
        return None
    rows = event_features().rows([_QUESTION])
    async with ServedModel(topics.updates, MODEL) as model:
        await model.ready(timeout_s=_READY_TIMEOUT_S)
        answer = model.predict((rows.indices, rows.values))
    return Served(_QUESTION_IN_WORDS, answer.value, answer.generation, answer.version, answer.age_s)


def _size_bytes(database: Path) -> int:
    """Return the size of the file with its journal."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def program() -> str:
    """Return the command that runs this program from here, so that a printed command can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m streamiter"
    found = shutil.which(called.name)
    if found is not None and Path(found).resolve() == called.resolve():
        return called.name
    return shlex.quote(str(called))


def print_summary(summary: DemoSummary) -> None:
    """Print the summary in words."""
    say(_headline(summary))
    for name, value, remark in _figures(summary):
        say(f"  {name:<18}{value:>9}  {remark}".rstrip(), hanging=31)
    if summary.served is not None:
        typer.echo()
        say(f"A prediction by ServedModel: {_answer(summary.served)}")
        say("Follow the updates, in another terminal while the demo runs again:")
        typer.echo(f"  {summary.follow}")


def _headline(summary: DemoSummary) -> str:
    speed = f"{summary.events:,} events in {summary.training_s:.1f} s, {summary.events_per_s:,.0f} events/s"
    if summary.state == "finished":
        return f"Trained on {speed}"
    where = f" at {summary.reached[:10]} in the data" if summary.reached else ""
    return f"{summary.state.capitalize()}{where}, after {speed}"


def _answer(served: Served) -> str:
    return f"{served.question}: {served.late:.0%} late (version {served.generation}.{served.version})"


def _figures(summary: DemoSummary) -> list[tuple[str, str, str]]:
    """Return the lines of the summary: name, value, remark."""
    when = "at once" if summary.labels == "immediate" else "when they had arrived"
    if summary.state == "finished" and summary.predicted > summary.learned_from:
        when += "; the others were cancelled or diverted"
    return [
        ("flights predicted", f"{summary.predicted:,}", "each before it was learned from"),
        ("learned from", f"{summary.learned_from:,}", when),
        ("model updates", f"{summary.updates:,}", f"{summary.updates_per_s:,.0f}/s, each published"),
        *_metrics(summary),
        (
            "file",
            _size(summary.file_bytes),
            f"{summary.file} (of all updates it keeps the last {UPDATES_BYTES >> 20} MiB)",
        ),
    ]


def _size(size_bytes: int) -> str:
    """Return a size in kB or MB.

    >>> _size(73_728), _size(126_000_000)
    ('74 kB', '126 MB')
    """
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.0f} kB"


def _metrics(summary: DemoSummary) -> list[tuple[str, str, str]]:
    remarks = {
        "auc": ("AUC", "of all predictions so far"),
        "loss": ("log loss", ""),
        "accuracy": ("accuracy", f"always “on time” has {summary.always_on_time:.4f}"),
    }
    metrics = summary.metrics
    return [
        (name, f"{metrics[metric]:.4f}", remark)
        for metric, (name, remark) in remarks.items()
        if metric in metrics
    ]
