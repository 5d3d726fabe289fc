"""Tests of training on a parameter server share this code."""

from typing import Any

import numpy as np
from iteration.iteration_support import cut_items, run

from streamiter import Flow
from streamiter.learn import Examples, ParameterServerTraining, SparseRows, train_on_parameter_server
from streamiter.parameter_server import ASP, BSP, SSP, Consistency, ParameterServer

WORKERS = 4
ALL = {"BSP": BSP(), "SSP": SSP(staleness=2), "ASP": ASP()}


def made_up_rows(count: int, *, width: int = 40, seed: int = 1) -> list[dict[str, Any]]:
    """Return sparse rows of six features with targets 0 or 1, as in libsvm files."""
    generator = np.random.default_rng(seed)
    weights = np.random.default_rng(0).normal(size=width)
    rows = []
    for _ in range(count):
        indices = np.sort(generator.choice(width, 6, replace=False))
        values = generator.normal(size=6)
        chance = 1 / (1 + np.exp(-(values @ weights[indices])))
        rows.append({"label": float(generator.random() < chance), "indices": indices, "values": values})
    return rows


def dense(rows: list[dict[str, Any]], width: int = 40) -> tuple[Any, Any]:
    """Return features and targets as arrays."""
    features = SparseRows.from_rows(((row["indices"], row["values"]) for row in rows), width=width)
    return features.to_dense(), np.array([row["label"] for row in rows])


def dense_examples(records: Any) -> Examples:
    """Return the rows of ``made_up_rows``, each with all its features."""
    return Examples(*dense(list(records)))


def trained(
    rows: Any,
    consistency: Consistency,
    *,
    shards: int = 2,
    seed: int | None = None,
    server: ParameterServer | None = None,
    **options: Any,
) -> Any:
    """Return the versions and losses of a training; with a ``seed``, the job runs under a random schedule."""
    flow = Flow("training")
    given = flow.from_items(rows) if seed is None else cut_items(flow, rows, seed=seed)
    settings = {"features": 40, "workers": WORKERS, "batch": 10, "epochs": 3} | options
    training: ParameterServerTraining = train_on_parameter_server(
        given, server or ParameterServer(shards=shards), consistency=consistency, **settings
    )
    models, losses = training.models.collect(), training.losses.collect()
    run(flow, seed=seed or 0, processes=1)
    return models.items, losses.items
