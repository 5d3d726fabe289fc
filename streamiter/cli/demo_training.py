"""The demo's training: a flow from the events to the published model, and what can be seen of it on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamiter.cli.demo_data import DemoTopics
from streamiter.cli.figures import watched
from streamiter.flow.flow import Flow
from streamiter.learn import Examples, SparseRows, train_online
from streamiter.learn.flights.events import (
    Labels,
    delayed_labels,
    event_features,
    event_model,
    is_late_event,
    labelled_examples,
    learning_rate,
)
from streamiter.models import ModelSnapshot
from streamiter.runtime.running import stopping_on_signals
from streamiter.runtime.statistics import JobStatistics

__all__ = ["MODEL", "TrainingProgress", "train"]

MODEL: Final = "late-flights"

# Labels between two reports of how good the predictions are: about two days of flights.
_REPORT_EVERY: Final = 2_000


@dataclass
class TrainingProgress:
    """What has been reached, counted by the learner itself."""

    events_in_all: int
    events: int = 0
    predicted: int = 0
    learned_from: int = 0
    late: int = 0
    updates: int = 0
    reached: str = ""
    """The time in the data of the last prediction."""
    metrics: dict[str, float] = field(default_factory=dict)

    def asked(self, questions: Sequence[dict[str, Any]]) -> None:
        """Predictions have been made for these events."""
        self.predicted += len(questions)
        self.events += len(questions)
        self.reached = questions[-1]["time"]

    def answered(self, late: float) -> None:
        """A label has come."""
        self.events += 1
        self.late += late > 0

    def published(self, model: ModelSnapshot) -> None:
        """A model is on its way to the topic."""
        self.updates += 1
        self.learned_from = model.records or 0

    def render(self, statistics: JobStatistics) -> RenderableType:
        """A bar and the figures, in a width of 40 and more."""
        seconds = max(statistics.elapsed_s, 1e-9)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(self.events_in_all, self.events, width=24),
            Text(f"{self.events / self.events_in_all:4.0%}"),
            Text(_date_of(self.reached), style="bold"),
        )
        figures = Table.grid(padding=(0, 2))
        figures.add_row("events", f"{self.events:,}", f"{self.events / seconds:,.0f}/s")
        figures.add_row("updates", f"{self.updates:,}", f"{self.updates / seconds:,.0f}/s")
        figures.add_row("", "all", "last 10,000", style="dim")
        for name, metric in (("AUC", "auc"), ("log loss", "loss"), ("accuracy", "accuracy")):
            figures.add_row(name, _number(self.metrics, metric), _number(self.metrics, f"window_{metric}"))
        for column in figures.columns[1:]:
            column.justify = "right"
        return Group(Text(f"Training, {seconds:.0f} s"), bar, figures)


def _date_of(time: str) -> str:
    return f"{date.fromisoformat(time[:10]):%d %b %Y}" if time else ""


def _number(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.4f}" if name in metrics else "–"


async def train(
    topics: DemoTopics, labels: Labels, mini_batch: int, progress: TrainingProgress
) -> JobStatistics:
    """Train on the events in the topic, until its present end or Ctrl-C; with live figures on a terminal."""
    await topics.create()
    job = await _training_flow(topics, labels, mini_batch, progress).start()
    with stopping_on_signals(job) as stops:
        async with watched(job, progress.render, stops=stops):
            return await job.wait()


def _training_flow(topics: DemoTopics, labels: Labels, mini_batch: int, progress: TrainingProgress) -> Flow:
    flow = Flow("demo")
    features = event_features()
    events = flow.source(topics.flights, stop="latest")

    def asked(questions: Sequence[dict[str, Any]]) -> SparseRows:
        progress.asked(questions)
        return features.rows(questions)

    def answered(answer: dict[str, Any]) -> float:
        late = is_late_event(answer)
        progress.answered(late)
        return late

    def examples(mini_batch: Sequence[dict[str, Any]]) -> Examples:
        progress.asked(mini_batch)
        examples = labelled_examples(mini_batch, features)
        progress.late += int(np.sum(examples.targets))
        return examples

    rate = learning_rate(mini_batch, labels)
    delayed = replace(delayed_labels(features), features=asked, target_of=answered)
    training = train_online(
        events,
        lambda: event_model(rate),
        extract=examples if labels == "immediate" else None,
        labels=delayed if labels == "delayed" else None,
        mini_batch=mini_batch,
        # One worker in one process has nothing to gain from working ahead with an older model.
        mode="synchronous",
        report_every=_REPORT_EVERY,
    )

    def published(model: ModelSnapshot) -> ModelSnapshot:
        progress.published(model)
        return _in_single_precision(model)

    def validated(metrics: dict[str, float]) -> dict[str, Any]:
        progress.metrics = metrics
        return {"time": progress.reached, **metrics}

    training.models.map(published).publish_model(topics.updates, model=MODEL, format="safetensors")
    training.validation.map(validated).sink(topics.validation)
    return flow


def _in_single_precision(model: ModelSnapshot) -> ModelSnapshot:
    """Half the bytes; predictions change in the seventh digit."""
    parameters = model.parameters | {"weights": model.parameters["weights"].astype(np.float32)}
    return msgspec.structs.replace(model, parameters=parameters)
