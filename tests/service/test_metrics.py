"""The metrics of a service: valid, complete, bounded, and cheap."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from service.service_models import trained_in_epochs
from support.waiting import PATIENCE_S

from streamiter import Flow
from streamiter.engine.storage.store import Checkpoints, MemoryStore
from streamiter.learn import train_online
from streamiter.models import ServedModel
from streamiter.operators import DeadLetter
from streamiter.service.metrics import MetricsNow, exposition
from streamiter.service.observations import Observations
from streamiter.service.page_documents import page_state
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
    writer = await flights.open_writer()
    await writer.write(OutgoingBatch([*values, b'{"km": "secret key"}']))
    await writer.close()
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
        observations.drifted({"row": 4000, "old_loss": 0.1, "new_loss": 0.2, "detector": "ADWIN"})
        while not (observations.validation and observations.rejected):
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
