"""A model that is trained on a parameter server has versions with correct counts, and publishes them."""

import sys
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import ended
from learn.parameter_server_support import ALL, WORKERS, made_up_rows

from streamiter import Flow
from streamiter.learn import SGD, train_on_parameter_server
from streamiter.learn.losses import LogLoss
from streamiter.learn.on_parameter_server import LinearLearner
from streamiter.learn.server_training import Versions
from streamiter.models import ServedModel, model_updates
from streamiter.operators import Output
from streamiter.parameter_server import ASP, BSP, ParameterServer
from streamiter.topics import MemoryBroker

EVERY = pytest.mark.parametrize("how", ALL)


@EVERY
async def test_versions_are_published_and_served(how: str) -> None:
    """The last version must be the state after the last worker has left, and not after the first has finished."""
    updates = MemoryBroker().topic("updates")
    await updates.create()
    server, flow = ParameterServer(shards=2), Flow("publish")
    training = train_on_parameter_server(
        flow.from_items(made_up_rows(203)),
        server,
        features=40,
        consistency=ALL[how],
        workers=WORKERS,
        batch=10,
        epochs=3,
        publish_every=4,
    )
    training.models.publish_model(updates, model="ctr")
    await ended(await flow.start())
    seen = [update async for update in model_updates(updates, "ctr", follow=False)]
    # The first worker makes 18 clocks: a version at the clocks 4, 8, 12 and 16, and one at the end.
    assert [update.version for update in seen] == [1, 2, 3, 4, 5]
    assert [update.records for update in seen] == sorted(update.records or 0 for update in seen)
    assert seen[-1].records == 3 * 203
    assert all(0 < update.metrics["loss"] < 1 for update in seen)
    assert seen[-1].metrics["loss"] < seen[0].metrics["loss"]
    last = await server.client(worker=0).get("w", row=0)
    parameters: Any = seen[-1].parameters
    assert parameters["weights"].tolist() == last[:40].tolist()
    async with ServedModel(updates, "ctr") as served:
        await served.ready(timeout_s=10)
        prediction = served.predict(([1, 2], [1.0, -1.0]))
        assert prediction.version == 5
        margin = last[1] - last[2] + last[40]
        assert prediction.value == pytest.approx(1 / (1 + np.exp(-margin)))


def versions_of(messages: list[dict[str, Any]], consistency: Any) -> list[tuple[int | None, float]]:
    """Return records and loss of each version that the messages of two workers produce."""
    learner = LinearLearner(
        matrix="w",
        features=1,
        intercept=True,
        loss=LogLoss(),
        labels="0/1",
        optimizer=SGD(),
        consistency=consistency,
        dtype="float64",
        rows_in_step=2,
    )
    versions, out, made = Versions(learner, ParameterServer(), 2, "train"), Output(), []
    out.connect(made.extend, None)
    for message in messages:
        versions.process(message, out)
    out.flush()
    return [(version.records, version.metrics["loss"]) for version in made]


def message_of(worker: int, clock: int) -> dict[str, Any]:
    return {"worker": worker, "clock": clock, "records": 10, "loss": 10.0 * clock + worker, "waited_s": 0.0}


@pytest.mark.parametrize("late", range(4))
def test_in_step_a_version_counts_the_rows_of_all_workers_at_its_clock(late: int) -> None:
    """The message of a worker arrived later and counted for the next version, so two runs gave different counts."""
    messages = [message_of(0, 1), message_of(0, 2), {"clock": 2, "parameters": {}}, message_of(0, 3)]
    others = [message_of(1, 1), message_of(1, 2), message_of(1, 3)]
    for place, message in enumerate(others):
        messages.insert(late + 2 * place, message)
    assert versions_of(messages, BSP()) == [(40, 62.0 / 40)]


def test_in_step_a_version_does_not_wait_for_ended_workers() -> None:
    """The version came only with the last version, at the end of the job."""
    messages = [message_of(1, 1), message_of(0, 1), message_of(0, 2), {"clock": 2, "parameters": {}}]
    assert versions_of(messages, BSP()) == []
    assert versions_of([*messages, {"worker": 1, "clock": sys.maxsize}], BSP()) == [(30, 41.0 / 30)]


def test_out_of_step_a_version_counts_the_reported_rows() -> None:
    """The clock of one worker does not say which rows another worker has learned from."""
    assert versions_of([message_of(1, 7), message_of(0, 1), {"clock": 1, "parameters": {}}], ASP()) == [(20, 81.0 / 20)]
