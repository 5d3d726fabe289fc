"""When a training publishes a version: after mini-batches, records or seconds, by a schedule that may change."""

from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed

from streamiter import Flow
from streamiter.learn import Examples, LogisticRegression, ProgressiveValidation, PublishSchedule, train_online
from streamiter.learn.model_owner import ModelOwner
from streamiter.learn.online.row_training import RowOwner
from streamiter.testing import VirtualClock

Record = dict[str, Any]
ROWS = [{"x": float(x), "y": bool(x > 0)} for x in np.random.default_rng(7).normal(size=200)]


def examples(rows: list[Record]) -> Examples:
    return Examples(np.array([[row["x"]] for row in rows]), np.array([float(row["y"]) for row in rows]))


LEARNERS: dict[str, dict[str, Any]] = {
    "rows": {"label": "y"},
    "gradients": {"model": lambda: LogisticRegression(1), "extract": examples},
}


@pytest.mark.parametrize("kind", list(LEARNERS))
async def test_versions_are_published_in_time_with_the_loss_of_all_their_rows(kind: str) -> None:
    """A model of a quiet night was published in the morning; the loss was that of its last mini-batch."""
    schedule, given, clock, flow = PublishSchedule(every_s=10.0), Fed(), VirtualClock(), Flow("f")
    stream = flow.from_source(lambda: given, parallelism=1)
    training = train_online(stream, mini_batch=10, workers=1, publish_every=schedule, **LEARNERS[kind])
    models, predicted = training.models.collect(), training.predictions.collect()
    job = await flow.start(clock=clock)
    given.give(*ROWS[:10])
    await clock.advance(1)
    given.give(*ROWS[10:60])
    await clock.advance(8)
    assert [model.records for model in models.items] == [10]
    await clock.advance(2)
    assert [model.records for model in models.items] == [10, 60]
    since = ProgressiveValidation()
    for rows in predicted.items[1:]:
        since.update(rows["predictions"], rows["targets"])
    assert models.items[-1].metrics["loss"] == pytest.approx(since.metrics()["loss"])
    schedule.change(records=100)
    given.give(*ROWS[60:150])
    await clock.advance(60)
    assert len(models.items) == 2
    given.give(*ROWS[150:170])
    await clock.advance(1)
    assert [model.records for model in models.items] == [10, 60, 160]
    given.end()
    await job.wait()
    assert models.items[-1].records == 170


def test_seconds_are_an_option_of_their_own() -> None:
    """Whoever wanted a version a minute had to know how many rows a minute brings."""
    flow = Flow("f")
    models = train_online(flow.from_items(ROWS, parallelism=1), label="y", mini_batch=10, publish_every_s=60.0).models
    published = models.collect()
    flow.run()
    assert [model.records for model in published.items] == [10, 200]


@pytest.mark.parametrize(("cost_s", "waits_s"), [(0.0, 1.0), (0.5, 2.0)])
async def test_versions_leave_time_to_learn(cost_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version with tables costs as much as 250 rows: with one after each ten rows, there was little time to learn.
    One of millions of texts costs seconds, and the next one was due a second later.
    """
    given, clock, flow = Fed(), VirtualClock(), Flow("f")

    def parameters(owner: RowOwner) -> Any:
        clock.now_s += cost_s
        return ModelOwner.parameters(owner)

    monkeypatch.setattr(RowOwner, "parameters", parameters)
    stream = flow.from_source(lambda: given, parallelism=1)
    models = train_online(stream, label="y", mini_batch=10, workers=1).models.collect()
    job = await flow.start(clock=clock)
    given.give(*ROWS[:100])
    await clock.advance(0.9 * waits_s + cost_s)
    assert [model.records for model in models.items] == [10]
    await clock.advance(0.2 * waits_s)
    assert [model.records for model in models.items] == [10, 100]
    given.give(*ROWS, *ROWS[:100])
    await clock.advance(0.5)
    assert [model.records for model in models.items] == [10, 100, 360]
    given.end()
    await job.wait()
    assert models.items[-1].records == 400
