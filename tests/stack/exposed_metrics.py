"""The metrics that a service exposes, with their labels, as Prometheus reads them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from prometheus_client.parser import text_string_to_metric_families
from topics.topic_case import write

from streamiter import Checkpoints, Flow
from streamiter.learn import PageHinkley, train_online
from streamiter.models import ServedModel
from streamiter.service.metrics import MetricsNow, exposition
from streamiter.service.observations import Observations
from streamiter.topics import MemoryBroker

__all__ = ["exposed_metrics"]


async def exposed_metrics(folder: Path) -> dict[str, set[str]]:
    """Return the labels of each sample of a service for yes or no, and of a service for numbers."""
    classes = await _scraped(folder / "classes", lambda x: x > 0.5)
    return classes | await _scraped(folder / "numbers", lambda x: 3.0 * x)


async def _scraped(folder: Path, label_of: object) -> dict[str, set[str]]:
    broker, draw = MemoryBroker(), Random(1)
    events, updates, dead_letters = [broker.topic(name) for name in ("events", "updates", "dead-letters")]
    for topic in (events, updates, dead_letters):
        await topic.create()
    values = [draw.random() for _ in range(2_000)]
    await write(events, [b"no JSON", *(json.dumps({"x": x, "y": label_of(x)}).encode() for x in values)])  # type: ignore[operator]
    observations = Observations("clicks")
    flow = Flow("clicks")
    rows = flow.source(events, stop="latest", dead_letter=dead_letters)
    training = train_online(rows, label="y", report_every=500, drift=PageHinkley())
    training.models.publish_model(updates, model="clicks")
    training.validation.map(observations.validated)
    async with ServedModel(updates, "clicks") as served:
        observations.served = served
        observations.job = job = await flow.start(checkpoints=Checkpoints(folder, interval_s=0.1))
        await job.wait()
        await served.ready()
        observations.drifted({"row": 1, "old_loss": 0.1, "new_loss": 0.2, "detector": "PageHinkley"})
        observations.predicted(0.001, predicted=1)
        observations.requested("/predict", 200)
        body, _ = exposition(MetricsNow(observations), "")
    families = text_string_to_metric_families(body.decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}
