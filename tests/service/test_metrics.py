"""The metrics of a service, its log, and what is known about the job that runs now."""

import asyncio
import io
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from service.service_models import trained_in_epochs
from support.waiting import PATIENCE_S, until
from topics.topic_case import write

from streamiter import Flow
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import Checkpoints, MemoryStore
from streamiter.learn import train_online
from streamiter.models import ServedModel
from streamiter.operators import DeadLetter
from streamiter.service.observing.logs import figures_of, log_figures, logging_to
from streamiter.service.observing.metrics import MetricsNow, exposition
from streamiter.service.observing.observations import Observations, Sample
from streamiter.service.observing.page_documents import page_state
from streamiter.service.settings.tables import (
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    LogSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

# As the documents have them; the labels of each, without those of histograms.
NAMES: dict[str, set[str]] = {
    "streamiter_records_total": {"flow", "step", "subtask", "direction"},
    "streamiter_bytes_total": {"flow", "step", "subtask", "direction"},
    "streamiter_rejected_total": {"step", "policy"},
    "streamiter_step_busy_seconds_total": {"flow", "step", "subtask"},
    "streamiter_step_blocked_seconds_total": {"flow", "step", "subtask"},
    "streamiter_step_held_seconds_total": {"flow", "step", "subtask"},
    "streamiter_channel_records": {"channel"},
    "streamiter_channel_peak_records": {"channel"},
    "streamiter_feedback_spilled_bytes": {"loop"},
    "streamiter_source_lag_records": {"step", "topic", "partition"},
    "streamiter_source_lag_seconds": {"step", "topic", "partition"},
    "streamiter_source_last_fetch_timestamp_seconds": {"step", "topic", "subtask"},
    "streamiter_event_loop_lag_seconds_bucket": {"le"},
    "streamiter_checkpoint_duration_seconds_bucket": {"le"},
    "streamiter_checkpoint_bytes": set(),
    "streamiter_checkpoint_last_success_timestamp_seconds": set(),
    "streamiter_checkpoints_total": {"outcome"},
    "streamiter_model_generation": {"model"},
    "streamiter_model_version": {"model"},
    "streamiter_model_published_timestamp_seconds": {"model"},
    "streamiter_model_log_loss": {"model", "window"},
    "streamiter_model_auc": {"model", "window"},
    "streamiter_model_worse_seconds": {"model"},
    "streamiter_learns": {"model", "role"},
    "streamiter_model_baseline_log_loss": {"model", "window"},
    "streamiter_drift_total": {"model", "detector"},
    "streamiter_predictions_total": {"model", "outcome"},
    "streamiter_prediction_seconds_bucket": {"le"},
    "streamiter_http_requests_total": {"route", "code"},
    "streamiter_build_info": {"version", "python"},
    "streamiter_ready": set(),
}


@asynccontextmanager
async def learning() -> Any:
    """Run a training on a topic in memory; return its observations and the job."""
    broker, observations = MemoryBroker(), Observations("late flights")
    flights, updates, dead = (broker.topic(name) for name in ("flights", "updates", "dead"))
    for each in (flights, updates, dead):
        await each.create()
    values = [b'{"km": %d, "late": %s}' % (n % 7, b"true" if n % 7 > 3 else b"false") for n in range(5000)]
    await write(flights, [*values, b'{"km": "secret key"}'])
    flow = Flow("late flights")
    training = train_online(flow.source(flights, name="events"), label="late", dead_letter=dead, report_every=100)
    training.models.publish_model(updates, model="late flights", name="publish")
    training.validation.map(observations.validated)
    observations.served = ServedModel(updates, "late flights")
    async with observations.served:
        job = await flow.start(checkpoints=Checkpoints(MemoryStore(), interval_s=0.1), on_rejected=observations.refused)
        observations.job = job
        await observations.served.ready()
        await job.checkpoint()
        yield observations
        await job.stop()


def families(observations: Observations, accept: str) -> list[Metric]:
    """Return the metrics as Prometheus's own parsers read them."""
    text, content_type = exposition(MetricsNow(observations), accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    return list((openmetrics if accept else plain)(text.decode()))


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_the_metrics_are_valid_and_have_the_names_of_the_documents(accept: str) -> None:
    """A dashboard was empty, because a metric had been renamed."""
    async with learning() as observations:
        observations.predicted(0.001, predicted=3)
        observations.requested("/predict", 200)
        observations.quality.drifted({"row": 4000, "old_loss": 0.1, "new_loss": 0.2, "detector": "ADWIN"})
        while not (observations.quality.reports and observations.rejected):
            await asyncio.sleep(0.01)
        found = families(observations, accept)
    labels = {sample.name: set(sample.labels) for family in found for sample in family.samples}
    assert {name: labels.get(name) for name in NAMES} == NAMES
    others = {name for name in labels if not re.search(r"_(sum|count|created)$", name)} - set(NAMES)
    assert others == set()
    assert all(family.documentation.endswith(".") for family in found)
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in found for sample in family.samples
    }
    assert values["streamiter_records_total", "0", "events", "in", "late flights"] == 5001
    assert values["streamiter_rejected_total", "dead_letter", "read"] == 1
    assert values["streamiter_predictions_total", "late flights", "predicted"] == 3
    assert values["streamiter_source_lag_records", "0", "events", "flights"] == 0
    assert values["streamiter_checkpoints_total", "committed"] >= 1
    assert 0.0 < values["streamiter_model_log_loss", "late flights", "recent"] < 0.6
    assert values["streamiter_model_baseline_log_loss", "late flights", "recent"] > 0.6


async def test_a_loop_has_the_figure_of_its_epochs_only_if_it_has_epochs() -> None:
    """The watermark of a training without epochs was −1 for ever, and an alert on it never ended."""
    async with learning() as observations:  # The training is asynchronous: it waits for no epoch.
        assert b"\nstreamiter_epoch_watermark{" not in exposition(MetricsNow(observations), "")[0]
        [loop] = page_state(observations).loops
        assert loop.progress is None
    observations = await trained_in_epochs()
    [family] = [each for each in families(observations, "") if each.name == "streamiter_epoch_watermark"]
    assert family.samples
    assert all((set(each.labels), each.value >= 8) == ({"loop", "step"}, True) for each in family.samples)


async def test_contents_of_records_and_urls_are_no_labels() -> None:
    """A key that was a label made a million time series, and the monitoring fell over."""
    async with learning() as observations:
        letter = DeadLetter({"user": "secret key"}, "read", "a bad record: secret key")
        observations.refused(letter)
        for path in range(50):
            observations.requested("none", 404 if path else 400)
        text = exposition(MetricsNow(observations), "")[0].decode()
    assert "secret key" not in text
    assert "://" not in text


def test_a_service_without_a_job_has_metrics() -> None:
    """A scrape failed while the service started."""
    text = exposition(MetricsNow(Observations("clicks")), "")[0].decode()
    assert "streamiter_build_info" in text
    assert "streamiter_records_total" not in text
    assert "streamiter_model_version" not in text


def best_of(times: int, measured: Iterator[float]) -> float:
    return min(next(measured) for _ in range(times))


async def test_a_scrape_is_cheap() -> None:
    """A scrape of a large flow stopped its event loop for half a second, every five seconds."""
    wide = MemoryBroker().topic("wide")
    await wide.create(partitions=1000)
    writer = await wide.open_writer()
    for partition in range(1000):
        await writer.write(OutgoingBatch([b"1"], partition=partition))
    flow = Flow("large")
    flow.source(wide, name="in").map(int, name="read")
    stream = flow.from_items([-1])
    for number in range(97):
        stream = stream.rebalance().map(abs, name=f"step {number}")
    observations = Observations("large")
    job = observations.job = await flow.start()
    async with asyncio.timeout(PATIENCE_S):
        while job.statistics().step("read").records_in < 1000:
            await asyncio.sleep(0.01)

    def scrapes() -> Iterator[float]:
        while True:
            began_s = time.thread_time()
            now = MetricsNow(observations)  # The rest is done in a thread.
            yield time.thread_time() - began_s
            text, _ = exposition(now, "")
            assert text.count(b"streamiter_source_lag_records{") == 1000
            assert text.count(b"streamiter_source_lag_seconds{") == 1000

    took_s = best_of(20, scrapes())
    await job.stop("abort")
    assert took_s < 0.02, took_s


async def test_a_job_that_is_started_again_has_no_figures_of_the_one_before() -> None:
    """After an outage the first rate was counted from the job before, and the log had an old lag."""
    clock, events = VirtualClock(), MemoryBroker().topic("events")
    await events.create()
    writer = await events.open_writer()
    observations = Observations("again", clock=clock)

    async def sampled(phase: str) -> tuple[float | None, int | None]:
        await clock.advance(1)
        observations.enter(phase)  # type: ignore[arg-type]
        observations.sample()
        state, figures = page_state(observations), figures_of(observations, 30)
        assert (figures["events_per_s"], figures["lag_records"]) == (state.events_per_s, state.lag_records)
        assert bool(observations.rates) is (state.events_per_s is not None)
        return state.events_per_s, state.lag_records

    for records in (10, 20):
        await writer.write(OutgoingBatch([b"1"] * 10))
        flow = Flow("again")
        flow.source(events, name="events").collect()
        job = observations.job = await flow.start(clock=clock)
        await until(lambda job=job, records=records: job.statistics().step("collect").records_in == records)
        assert await sampled("running") == (None, 0)
        assert await sampled("running") == (0.0, 0)
        await job.stop("abort")
        assert await sampled("waiting") == (None, None)


async def test_a_source_without_a_topic_has_no_lag() -> None:
    """A lag of 0 was shown where none is known, and read as a consumer that keeps up."""
    flow, observations = Flow("items"), Observations("items", clock=VirtualClock())
    flow.from_items([1]).collect()
    observations.job = await flow.start()
    observations.enter("running")
    observations.sample()
    assert observations.samples[-1].lag_records is None
    await observations.job.stop("abort")


@pytest.mark.parametrize("answer", [page_state, MetricsNow, Observations.sample])
async def test_the_statistics_of_the_job_are_made_once_for_an_answer(
    answer: Callable[[Observations], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the page took 9 ms of a flow with 97 tasks, half of it for statistics that were there already."""
    flow, observations, made = Flow("items"), Observations("items"), 0
    flow.from_items([1]).collect()
    observations.job = await flow.start()
    observations.enter("running")
    statistics = Job.statistics

    def counted(job: Job) -> JobStatistics:
        nonlocal made
        made += 1
        return statistics(job)

    monkeypatch.setattr(Job, "statistics", counted)
    answer(observations)
    assert made == 1
    await observations.job.stop("abort")


SETTINGS = ServiceSettings(
    "late-flights",
    InputSettings("kafka://h:9092/flights?sasl_username=alice&sasl_password_env=KAFKA_PASSWORD"),
    LearnSettings("classification", LabelSettings("late")),
    PublishSettings("memory://updates"),
    http=HttpSettings(token_env="SERVICE_TOKEN"),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_each_line_is_json() -> None:
    """A collector of logs dropped the lines of a traceback."""
    stream = io.StringIO()
    with logging_to(stream, SETTINGS):
        [handler] = [each for each in logging.getLogger().handlers if getattr(each, "stream", None) is stream]
        # Not by a logger: pytest captures what these log, and cannot send half a pair from process to process.
        record = {"name": "streamiter.job", "levelno": logging.INFO, "levelname": "INFO"}
        handler.handle(logging.makeLogRecord(record | {"msg": "two\nlines, half a pair: \ud800"}))
        logging.getLogger("aiokafka").info("of another package")
        logging.getLogger("uvicorn.error").warning("a warning of another package")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("deprecated", stacklevel=1)
        try:
            raise ValueError("no number")
        except ValueError:
            logging.getLogger("streamiter.service").exception("failed")
    logging.getLogger("streamiter.job").error("after the service")
    lines = lines_of(stream)
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error"]
    assert lines[0]["message"] == "two\nlines, half a pair: ?"
    assert lines[0]["logger"] == "streamiter.job"
    assert lines[0]["time"].endswith("+00:00")
    assert "ValueError: no number" in lines[3]["traceback"]


def test_no_secret_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library wrote its password into an error, and the log was kept for years."""
    monkeypatch.setenv("KAFKA_PASSWORD", "hushhush")
    monkeypatch.setenv("SERVICE_TOKEN", "open sesame")
    for form in ("json", "text"):
        stream = io.StringIO()
        with logging_to(stream, replace(SETTINGS, log=LogSettings(format=form))):
            try:
                raise ConnectionError(f"login of alice with {'hushhush'!r} failed")
            except ConnectionError:
                logging.getLogger("aiokafka").exception("%s", SETTINGS.input.topic)
            logging.getLogger("streamiter.service").warning("Authorization: Bearer open sesame")
        shown = stream.getvalue()
        assert "login of … with '…' failed" in shown
        assert not any(secret in shown for secret in ("alice", "hushhush", "open sesame"))


def test_no_secret_of_a_file_is_in_the_log(tmp_path: Path) -> None:
    """Secrets of the environment were hidden, and those of files, which the documents prefer, were not."""
    files = [tmp_path / name for name in ("kafka", "token", "key")]
    for number, file in enumerate(files):
        file.write_text(f"hush hush {number}\n")
    os.mkfifo(pipe := tmp_path / "pipe")  # Its secret is for the program that reads it first.
    options = f"?sasl_username=alice&sasl_password_file={quote(str(files[0]))}&ssl_password_file={pipe}"
    http = HttpSettings(token_file=str(files[1]), tls_key_password_file=str(files[2]))
    given = replace(SETTINGS, http=http, publish=PublishSettings(f"kafka://h:9092/updates{options}"))
    stream = io.StringIO()
    with logging_to(stream, replace(given, input=InputSettings("kafka://h:9092/flights?sasl_password_file=missing"))):
        logging.getLogger("aiokafka").error("login of %r failed", [file.read_text().strip() for file in files])
    assert lines_of(stream)[0]["message"] == "login of ['…', '…', '…'] failed"


def test_on_a_terminal_lines_are_text() -> None:
    """A developer read JSON on the terminal."""
    stream = Terminal()
    with logging_to(stream, SETTINGS):
        logging.getLogger("streamiter.service").info("ready")
    assert stream.getvalue().endswith(" INFO    ready\n")


def test_a_line_of_figures_has_rate_lag_version_and_loss() -> None:
    """The log of a pod was empty for a month, and no one knew whether it had worked."""
    clock, stream = VirtualClock(), io.StringIO()
    observations = Observations("late-flights", clock=clock)
    with logging_to(stream, SETTINGS):
        log_figures(observations, 30)
        for rate in (9e9, 100.0, 300.0):
            clock.now_s += 20.0
            observations.samples.append(Sample(clock.now_ms(), rate, 1200, 1.5))
        observations.validated({"window_loss": 0.4321, "window_baseline_loss": 0.6931})
        observations.enter("running")
        log_figures(observations, 30)
        observations.validated({"window_loss": 2.0, "window_baseline_loss": 8.0, "window_mae": 1.0})
        log_figures(observations, 30)
        pinball = {"window_loss": 0.5, "window_baseline_loss": 0.8, "window_mae": 2.0, "window_squared_error": 9.0}
        observations.validated(pinball)
        log_figures(observations, 30)
    before, after, of_numbers, of_quantiles = lines_of(stream)
    assert before["message"] == ("starting: – events/s, lag – records (– s), version – (– s old), loss – (baseline –)")
    assert after["message"] == (
        "running: 200 events/s, lag 1200 records (1.5 s), version – (– s old), loss 0.4321 (baseline 0.6931)"
    )
    assert (after["phase"], after["events_per_s"], after["lag_records"]) == ("running", 200.0, 1200)
    assert (after["loss"], after["baseline_loss"], before["loss"]) == (0.4321, 0.6931, None)
    # As on the page: the RMSE, unless the learner has another loss of numbers.
    assert (of_numbers["loss"], of_numbers["baseline_loss"]) == (2.0, 4.0)
    assert (of_quantiles["loss"], of_quantiles["baseline_loss"]) == (0.5, 0.8)
