"""Learns from the flights in Kafka, for as long as they come, and publishes the model after every step.

    pip install "streamiter[kafka,demo]"
    KAFKA=127.0.0.1:9092 python examples/online_service/trainer.py

It begins with the model published last and the events written since then; the first time with all events there are.
What a run before had not learned from by then is passed over, and so are arrivals whose departures it had read.
SIGTERM and Ctrl-C suspend it: nothing more is read, and mini-batches that wait for their turn are let go.

Environment, besides that of service.py::

    MINI_BATCH    100    events a step
    REPORT_EVERY  5000   flights between two reports on how good the predictions were
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import UTC, datetime

import msgspec
from service import MODEL, Arrival, Departure, created_topics, topics, until_terminated

from streamiter import Flow
from streamiter.learn import train_online
from streamiter.learn.flights.events import delayed_labels, event_features, event_model, learning_rate
from streamiter.models import initial_model, last_update
from streamiter.topics import StartPosition, Typed

MINI_BATCH = int(os.environ.get("MINI_BATCH", "100"))
REPORT_EVERY = int(os.environ.get("REPORT_EVERY", "5000"))

log = logging.getLogger("trainer")


def training_flow(start: StartPosition = "earliest") -> Flow:
    """From the topic of events to that of model updates."""
    events, updates, dead_letters = topics()
    flow = Flow("late flights")
    flights = flow.source(
        events, decode=Typed(Departure | Arrival), start=start, name="flights", dead_letter=dead_letters
    )
    rate = learning_rate(MINI_BATCH, "delayed")
    training = train_online(
        flights.map(msgspec.to_builtins),
        lambda: event_model(rate),
        labels=delayed_labels(event_features()),
        mini_batch=MINI_BATCH,
        initial=flow.from_source(initial_model(updates, model=MODEL, default=None), parallelism=1),
        report_every=REPORT_EVERY,
        window=REPORT_EVERY,
        on_error="skip",  # After a restart the first arrivals answer departures that the run before has read.
    )
    training.models.publish_model(updates, model=MODEL)
    training.validation.map(report)
    return flow


def report(metrics: dict[str, float]) -> None:
    """Log how good the last predictions were; each was made before its flight was learned from."""
    quality = "AUC {window_auc:.3f}, log loss {window_loss:.3f}".format_map(metrics)
    log.info("the last %d flights: %s", REPORT_EVERY, quality)


async def prepare(starts: list[StartPosition]) -> None:
    """Create the topics, and find out where to begin."""
    update = await last_update((await created_topics()).updates, MODEL)
    if update is None:
        log.info("no model yet: learning from all events")
        starts.append("earliest")
    else:
        published = datetime.fromtimestamp(update.created_at_ms / 1000, UTC)
        log.info("going on from model %d.%d of %s", update.generation, update.version, published)
        starts.append(published)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stdout)
    starts: list[StartPosition] = []
    if until_terminated(prepare(starts)):
        return
    statistics = training_flow(starts[0]).run()
    read, skipped = statistics.step("flights"), statistics.step("train")
    log.info(
        "%s after %d events, %d undecodable, %d skipped",
        statistics.state,
        read.records_in,
        read.rejected,
        skipped.rejected,
    )


if __name__ == "__main__":
    main()
