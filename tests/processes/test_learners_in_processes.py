"""Learners in several processes: batches and messages go through links, and the models have the bits of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import cut_items, run
from learn.frozen_states import frozen
from learn.online_support import FEATURES, trips

from streamiter import Columns, Flow, Stream
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.learn import (
    SGD,
    Examples,
    ForeignModel,
    LinearRegression,
    LogisticRegression,
    k_means,
    online_k_means,
    train_offline,
    train_online,
)

ROWS = np.random.default_rng(7).normal(size=(90, 4))


def rows(flow: Flow, parallelism: int = 3) -> Stream:
    return flow.from_items(ROWS, parallelism=parallelism)


def examples_of(batch: Any) -> Examples:
    batch = np.asarray(batch)
    return Examples(batch[:, :3], (batch[:, 3] > 0).astype(float), np.abs(batch[:, 3]) + 1)


def online(model: Any, **options: Any) -> Callable[[Flow], Stream]:
    return lambda flow: (
        train_online(
            rows(flow), model, extract=examples_of, mode="synchronous", mini_batch=7, workers=3, **options
        ).models
    )


LEARNERS: dict[str, Callable[[Flow], Stream]] = {
    "gradients": online(lambda: LogisticRegression(3)),
    "rows": lambda flow: (
        train_online(
            flow.from_items(trips(80), parallelism=2),
            label="kind",
            features=FEATURES,
            mini_batch=9,
            workers=3,
            mode="synchronous",
        ).models
    ),
    "offline": lambda flow: (
        train_offline(
            rows(flow), lambda: LogisticRegression(3), extract=examples_of, rounds=15, mini_batch=20, workers=3
        ).models
    ),
    "another library": lambda flow: (
        train_online(
            flow.from_items([{"x": x, "y": y} for x, y, *_ in ROWS.tolist()], parallelism=1),
            ForeignModel(
                make=lambda: [0.0, 0],
                learn=lambda model, row, label: model.__setitem__(slice(None), [model[0] + label, model[1] + 1]),
                predict=lambda model, row: model[0] / max(model[1], 1),
                save=lambda model: repr(model).encode(),
                load=json.loads,
                task="regression",
            ),
            label="y",
            mini_batch=9,
        ).models
    ),
    "online k-means": lambda flow: online_k_means(
        rows(flow), clusters=4, mini_batch=7, decay=0.9, initial=ROWS[:4], workers=3
    ),
    "k-means": lambda flow: k_means(rows(flow), clusters=4, rounds=8),
}


def models(learner: Callable[[Flow], Stream], processes: int) -> list[Any]:
    flow = Flow("learn", parallelism=3)
    collected = learner(flow).collect()
    run(flow, seed=processes, limits=ChannelLimits(records=50), processes=processes)
    return [(frozen(model.parameters), model.records) for model in collected.items]


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_model_has_the_same_bits_in_any_number_of_processes(learner: str) -> None:
    """Gradients of two processes were added in the order of their arrival, and no training could be repeated."""
    expected = models(LEARNERS[learner], 1)
    assert expected
    assert models(LEARNERS[learner], 2) == models(LEARNERS[learner], 3) == expected


def test_metrics_have_the_same_bits_in_any_number_of_processes() -> None:
    """Predictions were counted as they came from the workers, so two runs differed in the last digit of the loss."""

    def metrics(seed: int, processes: int) -> list[Any]:
        flow = Flow("learn", parallelism=3)
        training = train_online(
            rows(flow),
            lambda: LogisticRegression(3),
            extract=examples_of,
            mode="synchronous",
            mini_batch=7,
            report_every=20,
        )
        collected = training.validation.collect()
        run(flow, seed=seed, limits=ChannelLimits(records=50), processes=processes)
        return collected.items

    expected = metrics(0, 1)
    assert len(expected) == 5
    assert [metrics(seed, processes) for processes in (1, 2, 3) for seed in (1, 2)] == 6 * [expected]


@pytest.mark.parametrize("mini_batch", [None, 20])
def test_replayed_rows_have_the_same_bits_however_batches_are_cut(mini_batch: int | None) -> None:
    """Gradients of replayed rows were added by batch, so the last digits depended on the speed of the source."""

    def learner(seed: int) -> Callable[[Flow], Stream]:
        def replaying(flow: Flow) -> Stream:
            given = cut_items(flow, ROWS.tolist(), seed=seed).rebalance()
            return train_offline(
                given, lambda: LogisticRegression(3), extract=examples_of, rounds=9, mini_batch=mini_batch, replay=True
            ).models

        return replaying

    expected = models(learner(0), 1)
    assert expected
    assert all(models(learner(seed), 1 + seed % 3) == expected for seed in range(1, 5))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_asynchronous_workers_do_not_learn_from_old_models(processes: int) -> None:
    """Dozens of gradients of one model were on their way to the owner, and the model oscillated."""
    for seed in range(3):
        x, weights = np.random.default_rng(seed).normal(size=(4_500, 4)), np.array([1.0, -2.0, 0.5, 3.0])
        flow = Flow("learn", parallelism=3)
        training = train_online(
            flow.from_items(Columns({"x": x, "y": x @ weights})),
            lambda: LinearRegression(4, optimizer=SGD(0.2), intercept=False),
            extract=lambda batch: Examples(batch["x"], batch["y"]),
            mini_batch=20,
            report_every=len(x),
        )
        metrics, versions = training.validation.collect(), training.models.collect()
        run(flow, seed=seed, processes=processes)
        assert metrics.items[-1]["loss"] < 1, seed  # 7 for a model that predicts 0, 36 or more if old models count
        assert versions.items[-1].parameters["weights"] == pytest.approx(weights, abs=0.01), seed
