"""The metrics of a service for Prometheus, collected from its observations at a scrape.

Labels are bounded: names of the flow, its steps and topics, numbers of subtasks and partitions, at most twenty names of
fields, and a few words. Keys, values of records and URLs are never labels. A figure that is not known is left out.
"""

from __future__ import annotations

import functools
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from operator import itemgetter
from typing import Any, Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from streamiter.engine.graph.statistics import HistogramStatistics, JobStatistics, TaskStatistics
from streamiter.models.published_embeddings import EmbeddingFigures
from streamiter.service.observing.challenger import Challenger
from streamiter.service.observing.health import facts_of, readiness
from streamiter.service.observing.observations import Observations

MetricRow = tuple[Any, ...]
"""The values of the labels, then the figure."""


# Each has a series for each measure, and those that moved most are others at another time.
_FEATURES: Final = 20

# The windows of the metrics of a model, and how the names of progressive validation begin.
_WINDOWS: Final[Mapping[str, str]] = {"all": "", "recent": "window_"}


class MetricsNow(Collector):
    """The metrics of this moment. They are made in the event loop, and may be written in a thread."""

    def __init__(self, observations: Observations) -> None:
        self._metrics = list(_metrics(observations))

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition(now: MetricsNow, accept: str) -> tuple[bytes, str]:
    """Return the metrics as Prometheus reads them, and their content type.

    ``accept`` is the header of the request: it asks for OpenMetrics or for the text format.

    >>> text, content_type = exposition(MetricsNow(Observations("late-flights")), "")
    >>> content_type.split(";")[0], b'streamiter_build_info{' in text
    ('text/plain', True)
    """
    encode, content_type = choose_encoder(accept)
    return encode(now), content_type


def _metrics(observations: Observations) -> Iterator[Metric]:
    statistics = observations.statistics()
    if statistics is not None:
        yield from _steps(statistics)
        yield from _processes(statistics)
        yield from _channels(statistics)
        yield from _loops(statistics)
        yield from _sources(statistics)
        yield from _checkpoints(statistics)
    yield from _history(observations)
    yield from _model(observations)
    yield from _process(observations, statistics)


def _metric(kind: str, name: str, text: str, labels: str, rows: Iterable[MetricRow], suffix: str = "") -> Metric:
    """Return a metric with a series for each row; ``labels`` are names with spaces between them."""
    metric, names = Metric(f"streamiter_{name}", text, kind), labels.split()
    for *values, figure in rows:
        metric.add_sample(metric.name + suffix, dict(zip(names, map(str, values), strict=True)), figure)
    return metric


def _counter(name: str, text: str, labels: str, rows: Iterable[MetricRow]) -> Metric:
    return _metric("counter", name, text, labels, rows, "_total")


def _gauge(name: str, text: str, labels: str, rows: Iterable[MetricRow]) -> Metric:
    return _metric("gauge", name, text, labels, rows)


def _histogram(name: str, text: str, observed: HistogramStatistics) -> Metric:
    bounds = [*map(str, observed.bounds), "+Inf"]
    buckets = list(zip(bounds, observed.counts, strict=True))
    return HistogramMetricFamily(f"streamiter_{name}", text, buckets, observed.total)


def _steps(statistics: JobStatistics) -> Iterator[Metric]:
    flow, tasks = statistics.flow, statistics.tasks
    steps = [step for task in tasks for step in task.steps]
    counts = (
        (flow, step.step, step.subtask, direction, count)
        for step in steps
        for direction, count in (("in", step.counts.records_in), ("out", step.counts.records_out))
    )
    text = "Records that a step has received (in) and emitted (out)."
    yield _counter("records", text, "flow step subtask direction", counts)
    sizes = (
        (*_labels(flow, task), direction, sum(each.total_bytes for each in ends))
        for task in tasks
        for direction, ends in (("in", task.inputs), ("out", task.outputs))
        if ends
    )
    text = "Estimated bytes that a task has received (in) and sent (out). The step is the first of the task."
    yield _counter("bytes", text, "flow step subtask direction", sizes)
    rejected: Counter[tuple[str, str]] = Counter()
    for step in steps:
        if step.policy != "fail":
            rejected[step.step, step.policy] += step.counts.rejected
    refused = ((*labels, count) for labels, count in rejected.items())
    yield _counter("rejected", "Records that a step has refused.", "step policy", refused)
    for name, text, seconds in (
        ("busy", "Seconds in which a task has handled records.", [task.busy_s for task in tasks]),
        ("blocked", "Seconds in which a task has waited for room downstream.", [task.blocked_s for task in tasks]),
        ("held", "Seconds in which a task had only input that it did not want yet.", [task.held_s for task in tasks]),
    ):
        rows = ((*_labels(flow, task), spent) for task, spent in zip(tasks, seconds, strict=True))
        text = f"{text} The step is the first of the task."
        yield _counter(f"step_{name}_seconds", text, "flow step subtask", rows)


def _labels(flow: str, task: TaskStatistics) -> tuple[str, str, int]:
    first = task.steps[0]
    return flow, first.step, first.subtask


def _processes(statistics: JobStatistics) -> Iterator[Metric]:
    if not statistics.processes:
        return
    places = ((*_labels(statistics.flow, task), task.process) for task in statistics.tasks)
    text = "The process of a subtask. The step is the first of the task."
    yield _gauge("subtask_process", text, "flow step subtask", places)
    ages = ((one.process, one.age_s) for one in statistics.processes)
    yield _gauge("process_age_seconds", "How old the figures of a process are.", "process", ages)


def _channels(statistics: JobStatistics) -> Iterator[Metric]:
    channels = [channel for task in statistics.tasks for channel in task.inputs]
    rows = ((each.name, each.records) for each in channels)
    yield _gauge("channel_records", "Records that wait in a channel.", "channel", rows)
    peaks = ((each.name, each.peak_records) for each in channels)
    yield _gauge("channel_peak_records", "The largest number of records in a channel.", "channel", peaks)


def _loops(statistics: JobStatistics) -> Iterator[Metric]:
    names = [loop.heads[0] for loop in statistics.loops]
    watermarks: dict[tuple[str, str], int] = {}
    for task in statistics.tasks:
        if task.loop is not None:
            key = names[task.loop], task.steps[0].step
            watermarks[key] = min(task.epoch_watermark, watermarks.get(key, task.epoch_watermark))
    text = "The last epoch that is complete at all subtasks of a step; the loop has the name of its first head."
    complete = ((*key, epoch) for key, epoch in watermarks.items() if epoch >= 0)
    yield _gauge("epoch_watermark", text, "loop step", complete)
    spilled = ((name, loop.bytes_on_disk) for name, loop in zip(names, statistics.loops, strict=True))
    yield _gauge("feedback_spilled_bytes", "Bytes of feedback on disk.", "loop", spilled)


def _sources(statistics: JobStatistics) -> Iterator[Metric]:
    sources = [
        (task, task.steps[0].step, task.source, task.source.topic)
        for task in statistics.tasks
        if task.source is not None and task.source.topic is not None
    ]
    records = ((step, topic, part, left) for task, step, _, topic in sources for part, left in task.lag.items())
    yield _gauge("source_lag_records", "Unread records of a partition.", "step topic partition", records)
    ages = ((step, topic, part, age) for _, step, source, topic in sources for part, age in source.lag_s.items())
    text = "The age of the record read last, while there are more; 0 if there are none."
    yield _gauge("source_lag_seconds", text, "step topic partition", ages)
    answers = (
        (step, topic, task.steps[0].subtask, source.answered_at_ms / 1000)
        for task, step, source, topic in sources
        if source.answered_at_ms is not None
    )
    text = "When the topic answered last, also with no records."
    yield _gauge("source_last_fetch_timestamp_seconds", text, "step topic subtask", answers)


def _history(observations: Observations) -> Iterator[Metric]:
    """Yield how far a history is; the figures are left out when it is read, or not known."""
    read = observations.catching_up
    share, left_s = (None, None) if read is None else (read.share, read.left_s)
    for name, text, figure in (
        ("share", "The share of the history that has been read; left out when all is read.", share),
        ("left_seconds", "The seconds until the history is read, at the rate of the last minute.", left_s),
    ):
        yield _gauge(f"history_{name}", text, "", [] if figure is None else [(figure,)])


def _checkpoints(statistics: JobStatistics) -> Iterator[Metric]:
    checkpoints = statistics.checkpoints
    if checkpoints is None:
        return
    text = "Seconds from the barrier of a checkpoint to its commit."
    yield _histogram("checkpoint_duration_seconds", text, checkpoints.durations_s)
    if checkpoints.committed_at_ms is not None:
        yield _gauge("checkpoint_bytes", "The size of the last snapshot.", "", [(checkpoints.last_size_bytes,)])
        text, at_s = "When the last checkpoint was committed.", checkpoints.committed_at_ms / 1000
        yield _gauge("checkpoint_last_success_timestamp_seconds", text, "", [(at_s,)])
    outcomes = [("committed", checkpoints.taken), ("given_up", checkpoints.given_up)]
    yield _counter("checkpoints", "Checkpoints by outcome.", "outcome", outcomes)


def _embeddings(name: str, figures: EmbeddingFigures) -> Iterator[Metric]:
    text = "The share of embeddings in the prediction."
    yield _gauge("model_embeddings_share", text, "model", [(name, figures.share)])
    text = "Features that the model knows: those admitted have a vector of their own."
    features = [(name, "true", figures.admitted), (name, "false", figures.features - figures.admitted)]
    yield _gauge("model_features", text, "model admitted", features)
    text = "Features that have left: expired, or evicted where there was no room."
    left = [(name, "expired", figures.expired), (name, "evicted", figures.evicted)]
    yield _counter("model_features_left", text, "model reason", left)


def _challenger(challenger: Challenger) -> Iterator[Metric]:
    found, name = challenger.compared, challenger.name
    stopped = [(name, float(challenger.stopped is not None))]
    yield _gauge("challenger_stopped", "Whether the challenger has stopped: 1 or 0.", "model", stopped)
    if found is None:
        return
    text = "Rows that both learners have predicted."
    yield _counter("challenger_rows", text, "model", [(name, found.compared_rows)])
    losses = [(name, "challenger", found.challenger_loss), (name, "champion", found.champion_loss)]
    yield _gauge("challenger_loss", "The mean loss over these rows.", "model learner", losses)
    differences = [
        (name, "mean", found.loss_difference),
        (name, "least", found.loss_difference_least),
        (name, "most", found.loss_difference_most),
    ]
    text = "The mean difference of the losses, and its bounds at any time, with 95 %. Below 0 the challenger is better."
    yield _gauge("challenger_loss_difference", text, "model bound", differences)


def _features(observations: Observations) -> Iterator[Metric]:
    name, window = observations.name, observations.quality.window
    counts = ((name, str(is_so).lower(), count) for is_so, count in observations.quality.window_counts.items())
    yield _counter("feature_windows", "Windows of rows, by whether a field has shifted.", "model shifted", counts)
    if window is None:
        return
    text = "Fields that have shifted in the last window of rows."
    yield _gauge("features_shifted", text, "model", [(name, window.shifted)])
    fields = window.report["fields"][:_FEATURES]
    for metric, text, of_field in (
        ("shifted", "Whether a field has shifted: 1 or 0.", lambda each: float(bool(each["shifted"]))),
        ("missing_ratio", "The share of the rows without a value.", itemgetter("missing")),
        ("new_ratio", "The share of texts that the reference does not have.", itemgetter("new_values")),
        ("psi", "The population stability index.", itemgetter("psi")),
        ("ks", "The largest difference of two distribution functions.", itemgetter("ks")),
    ):
        rows = [(name, each["field"], figure) for each in fields if (figure := of_field(each)) is not None]
        text = f"{text} Of the fields that moved most in the last window."
        yield _gauge(f"feature_{metric}", text, "model field", rows)


def _model(observations: Observations) -> Iterator[Metric]:
    name, update, quality = observations.name, observations.model, observations.quality
    if update is not None:
        for metric, text, figure in (
            ("generation", "The generation of the model that answers.", update.generation),
            ("version", "The version of the model that answers.", update.version),
            ("published_timestamp_seconds", "When this version was made.", update.created_at_ms / 1000),
        ):
            yield _gauge(f"model_{metric}", text, "model", [(name, figure)])
        if (figures := EmbeddingFigures.of(update.parameters)) is not None:
            yield from _embeddings(name, figures)
    metrics = quality.reports[-1].metrics if quality.reports else {}
    of_probabilities = {
        "log_loss": ("loss", "The mean log loss of predictions that were made before learning."),
        "auc": ("auc", "The area under the ROC curve."),
        "baseline_log_loss": ("baseline_loss", "The log loss of always predicting the mean of the same labels."),
    }
    of_numbers = {"rmse": ("rmse", "The root of the mean squared error of predictions that were made before learning.")}
    for family, (metric, text) in (of_numbers if "mae" in metrics else of_probabilities).items():
        windows = {window: prefix + metric for window, prefix in _WINDOWS.items()}
        if rows := [(name, window, metrics[each]) for window, each in windows.items() if each in metrics]:
            yield _gauge(f"model_{family}", text, "model window", rows)
    if metrics:
        text = "For how many seconds predictions have been worse than always predicting the mean of the labels."
        yield _gauge("model_worse_seconds", text, "model", [(name, quality.worse_s)])
    drifts = ((name, detector, count) for detector, count in quality.drift_counts.items())
    yield _counter("drift", "Drifts that a detector has found.", "model detector", drifts)
    yield from _features(observations)
    predicted = ((name, outcome, count) for outcome, count in observations.predictions.items())
    yield _counter("predictions", "Rows of requests for predictions.", "model outcome", predicted)
    if observations.challenger is not None:
        yield from _challenger(observations.challenger)
    text = "Seconds of a request for predictions."
    yield _histogram("prediction_seconds", text, observations.prediction_s.statistics())
    if (log := observations.prediction_log) is not None:
        logged = ((name, outcome, count) for outcome, count in log.counts.items())
        text = "Predictions for the log, and those that were computed again from their record."
        yield _counter("prediction_log", text, "model outcome", logged)
        if log.waiting is not None:
            text = "Predictions that were answered, and are not in the log yet."
            yield _gauge("prediction_log_waiting", text, "model", [(name, log.waiting)])


def _process(observations: Observations, statistics: JobStatistics | None) -> Iterator[Metric]:
    is_ready = not readiness(facts_of(observations, statistics))
    yield _gauge("ready", "Whether /readyz answers 200: 1 or 0.", "", [(int(is_ready),)])
    role = observations.role
    text = "Whether this process learns: 1, or 0 for a standby or a replica."
    yield _gauge("learns", text, "model role", [(observations.name, role, int(role in ("service", "leader")))])
    requests = ((*route_and_code, count) for route_and_code, count in observations.requests.items())
    yield _counter("http_requests", "HTTP requests.", "route code", requests)
    text = "Seconds by which the event loop was late, ten times a second."
    yield _histogram("event_loop_lag_seconds", text, observations.loop_lag.histogram.statistics())
    yield _metric(
        "info", "build", "The versions of streamiter and Python.", "version python", [(*_versions(), 1)], "_info"
    )


@functools.cache  # Reading the metadata of a package takes half a millisecond.
def _versions() -> tuple[str, str]:
    return version("streamiter"), platform.python_version()
