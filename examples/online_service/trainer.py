"""Learn from the flights in Kafka without end, and publish the model several times a second.

    pip install ".[kafka,demo]"
    KAFKA=127.0.0.1:9092 python examples/online_service/trainer.py

The first run starts with the first event of the topic. Each later run resumes at the last checkpoint, however the run
before has ended: the model learns from every event once, versions are counted further, and departures that wait for
their arrivals still wait. Updates become visible with the next checkpoint.

SIGTERM and Ctrl-C suspend it: it stops reading, and commits a last checkpoint.

Environment variables, in addition to those of service.py::

    MODE                 asynchronous  or synchronous: then the models are the same, bit for bit, in every run
    MINI_BATCH           1000          events for each version; asynchronous, or those of a tenth of a second
    REPORT_EVERY         5000          flights between two reports on how good the predictions were
    CHECKPOINTS          checkpoints   folder of the checkpoints, to be kept as long as the topics
    CHECKPOINT_INTERVAL  1             seconds between two of them, by which consumers see updates later
    STOP                 never         latest: end with the newest event that there is as it begins
    FLOW                 late-flights  the flow's name (that of the model unless given): commits are kept under it,
                                       and of two trainers with one name the newer takes over
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Literal, cast

import msgspec
from service import MODEL, Arrival, Departure, created_topics, topics, until_terminated

from streamiter import Checkpoints, Flow
from streamiter.learn import train_online
from streamiter.learn.flights import delayed_labels
from streamiter.topics import Typed

MODE = cast("Any", os.environ.get("MODE", "asynchronous"))
MINI_BATCH = int(os.environ.get("MINI_BATCH", "1000"))
REPORT_EVERY = int(os.environ.get("REPORT_EVERY", "5000"))
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")
CHECKPOINT_INTERVAL = float(os.environ.get("CHECKPOINT_INTERVAL", "1"))
STOP: Literal["latest"] | None = "latest" if os.environ.get("STOP") == "latest" else None
FLOW = os.environ.get("FLOW", MODEL)

log = logging.getLogger("trainer")


def training_flow() -> Flow:
    """Return the flow from the topic of events to the topic of model updates."""
    events, updates, dead_letters = topics()
    flow = Flow(FLOW)
    flights = flow.source(
        events, decode=Typed(Departure | Arrival), stop=STOP, name="flights", dead_letter=dead_letters
    )
    training = train_online(
        flights.map(msgspec.to_builtins),
        labels=delayed_labels(),
        mode=MODE,
        mini_batch=MINI_BATCH,
        report_every=REPORT_EVERY,
        window=REPORT_EVERY,
        on_error="skip",  # The topic keeps a day: its first arrivals answer departures that are gone.
    )
    training.models.publish_model(updates, model=MODEL)
    training.validation.map(report)
    return flow


def report(metrics: dict[str, float]) -> None:
    """Log the quality of the last predictions; each was made before the model learned from its flight."""
    quality = "AUC {window_auc:.3f}, log loss {window_loss:.3f}, always the share {window_baseline_loss:.3f}"
    quality = quality.format_map(metrics)
    log.info("the last %d flights: %s", REPORT_EVERY, quality)


async def prepare() -> None:
    """Create the topics."""
    await created_topics()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stdout)
    if until_terminated(prepare()):
        return
    statistics = training_flow().run(checkpoints=Checkpoints(CHECKPOINTS, interval_s=CHECKPOINT_INTERVAL))
    read, learned = statistics.step("flights"), statistics.step("learn")
    log.info(
        "%s after %d events, %d undecodable, %d skipped",
        statistics.state,
        read.records_in,
        read.rejected,
        learned.rejected,
    )


if __name__ == "__main__":
    main()
