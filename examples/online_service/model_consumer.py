"""Predict which departing flights will arrive late, with the newest model. The program has no flow.

    pip install ".[kafka]"
    KAFKA=127.0.0.1:9092 python examples/online_service/model_consumer.py

Environment variables, in addition to those of service.py::

    REPORT_EVERY  1000   predictions for each printed line
    PREDICTIONS   0      end after so many; 0: run until SIGTERM or Ctrl-C
"""

from __future__ import annotations

import contextlib
import os

import msgspec
import numpy as np
from service import MODEL, Arrival, Departure, created_topics, until_terminated

from streamiter.errors import ModelError
from streamiter.models import NoModel, ServedModel
from streamiter.topics import ReadRequest, TopicBatch, TopicReader

REPORT_EVERY = int(os.environ.get("REPORT_EVERY", "1000"))
PREDICTIONS = int(os.environ.get("PREDICTIONS", "0"))


async def main() -> None:
    events, updates, _ = await created_topics()
    async with ServedModel(updates, MODEL) as model:
        reader = await events.open_reader(ReadRequest(start="latest"))
        try:
            await predict(reader, model)
        finally:
            await reader.close()


async def predict(reader: TopicReader, model: ServedModel) -> None:
    """Predict each departure when it arrives; print a line after each ``report_every`` predictions."""
    predicted = unanswered = 0
    reported: list[float] = []
    while (not PREDICTIONS or predicted < PREDICTIONS) and (batch := await reader.read()) is not None:
        departures = departures_of(batch)
        if not departures:
            continue
        try:
            prediction = model.predict(departures)
        except NoModel:
            unanswered += len(departures)
            reason = model.statistics().last_error or "none has been published"
            print(f"no model yet ({reason}): {unanswered} departures without a prediction", flush=True)
            continue
        except ModelError:  # A row does not fit the model; the others do.
            if not (departures := those_that_fit(model, departures)):
                continue
            prediction = model.predict(departures)
        predicted += len(departures)
        reported += prediction.value.tolist()
        if len(reported) >= REPORT_EVERY:
            print(
                f"{predicted} predictions, now with model {prediction.generation}.{prediction.version}, "
                f"{prediction.age_s:.2f} s old; {np.mean(reported):.1%} of the last {len(reported)} expected late",
                flush=True,
            )
            reported.clear()


def those_that_fit(model: ServedModel, departures: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the departures that the model takes; say why it does not take the others."""
    fitting = []
    for departure in departures:
        try:
            model.predict(departure)
            fitting.append(departure)
        except ModelError as error:
            print(f"a departure without a prediction: {error}", flush=True)
    return fitting


def departures_of(batch: TopicBatch) -> list[dict[str, object]]:
    """Return the departures among the events; the trainer reports records that are no events."""
    decode = msgspec.json.Decoder(Departure | Arrival).decode
    events = []
    for value in batch.values:
        with contextlib.suppress(msgspec.DecodeError):
            events.append(decode(value or b""))
    return [msgspec.to_builtins(event) for event in events if isinstance(event, Departure)]


if __name__ == "__main__":
    if until_terminated(main()):
        print("stopped", flush=True)
