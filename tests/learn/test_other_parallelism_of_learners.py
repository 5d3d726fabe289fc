"""A learner that resumes with another number of subtasks has the result of a learner that was never stopped."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, MakeFlow, Stops, new_broker, numbers, outputs
from learn.online_support import delayed
from learn.parameter_server_support import made_up_rows
from support.soak import in_soak
from support.waiting import until

from streamiter import Columns, Flow, Stream
from streamiter.errors import CheckpointError
from streamiter.learn import (
    Examples,
    GradientDescent,
    LinearRegression,
    OnlineTraining,
    SparseRows,
    StandardScaler,
    apriori,
    k_means,
    train_offline,
    train_on_parameter_server,
    train_online,
)
from streamiter.learn.trees.tree_growing import TreeOptions, grow_tree
from streamiter.parameter_server import BSP, ParameterServer
from streamiter.topics import MemoryBroker

ROWS = 240
TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])


def table() -> Columns:
    features = np.random.default_rng(3).normal(size=(ROWS, 3))
    return Columns({"x": features, "y": features @ TRUE_WEIGHTS})


def examples_of(rows: Any) -> Examples:
    return Examples(rows["x"], rows["y"])


def fitted(flow: Flow, *, replay: bool) -> Stream:
    def regression() -> LinearRegression:
        return LinearRegression(3, optimizer=GradientDescent(0.3))

    training = train_offline(
        flow.from_items(table(), name="rows"), regression, extract=examples_of, rounds=12, replay=replay
    )
    return training.models.map(lambda model: [model.records, *model.parameters["weights"].tolist()])


def fitted_from_memory(flow: Flow) -> Stream:
    return fitted(flow, replay=False)


def fitted_from_replay(flow: Flow) -> Stream:
    return fitted(flow, replay=True)


def centroids(flow: Flow) -> Stream:
    models = k_means(flow.from_items(table()["x"], name="rows"), clusters=4, rounds=9, seed=2)
    return models.map(lambda model: model.parameters["centroids"].ravel().tolist())


def tree(flow: Flow) -> Stream:
    rows = table()
    columns = Columns({"features": rows["x"], "label": rows["y"], "weight": np.ones(ROWS)})
    options = TreeOptions(classes=None, maximum_depth=5, minimum_rows=4, minimum_gain=0.0, maximum_bins=16)
    grown = grow_tree(flow.from_items(columns, name="rows"), options)["tree"]
    return grown.map(lambda growing: growing["tree"]["threshold"].tolist())


def item_sets(flow: Flow) -> Stream:
    baskets = [[item for item in range(8) if number * 7919 >> item & 1] for number in range(ROWS)]
    return apriori(flow.from_items(baskets, name="rows"), minimum_support=0.1).map(lambda found: [*found[0], found[1]])


def written_by(learner: Callable[[Flow], Stream], broker: MemoryBroker, parallelism: int) -> Flow:
    flow = Flow("learn", parallelism=parallelism)
    learner(flow).sink(broker.topic("out"))
    return flow


@functools.cache
def undisturbed_outputs(learner: Callable[[Flow], Stream]) -> list[Any]:
    return outputs(functools.partial(written_by, learner), [1], turns=1, seed=0)


# Learners are stopped while they read, and in rounds: at other points with each change.
@pytest.mark.parametrize("learner", [fitted_from_memory, fitted_from_replay, centroids, tree, item_sets])
@pytest.mark.parametrize(
    ("before", "after", "turns"),
    [(2, 1, (60,)), (2, 3, (120,)), *in_soak((2, 1, (300,)), (2, 3, (40,)), (3, 2, (20, 250)))],
)
def test_a_bounded_training_resumes_with_other_workers(
    learner: Callable[[Flow], Stream], before: int, after: int, turns: tuple[int, ...]
) -> None:
    """A training could not resume on a machine with more cores: its workers had no way to share their rows again."""
    expected = undisturbed_outputs(learner)
    for each in turns:
        got = outputs(functools.partial(written_by, learner), [before, after, before], turns=each, seed=each)
        assert len(got) == len(expected)
        for found, undisturbed in zip(sorted(got), sorted(expected), strict=True):
            np.testing.assert_allclose(found, undisturbed, rtol=1e-9, atol=1e-12)


def row_of(number: int) -> dict[str, Any]:
    features = np.random.default_rng(number).normal(size=3)
    return {"id": number, "x": features.tolist(), "y": float(features @ TRUE_WEIGHTS)}


def by_gradients(rows: Stream, mode: Any) -> OnlineTraining:
    """Train a model of one's own, with a scaler."""
    return train_online(
        rows.map(row_of),
        lambda: LinearRegression(3, optimizer=GradientDescent(0.1)),
        extract=lambda batch: Examples(np.array([row["x"] for row in batch]), [row["y"] for row in batch]),
        scaler=StandardScaler(),
        mini_batch=4,
        mode=mode,
        name="train",
    )


def by_rows(rows: Stream, mode: Any) -> OnlineTraining:
    """Train the default learner."""
    named = rows.map(row_of).map(lambda row: {"a": row["x"][0], "b": row["x"][1], "y": row["y"]})
    return train_online(named, label="y", mini_batch=4, mode=mode, name="train")


def with_late_labels(rows: Stream, mode: Any) -> OnlineTraining:
    """Train with labels that arrive a few records after their questions."""
    labels = delayed(lambda asked: SparseRows.from_dense(np.array([event["x"] for event in asked])), "y")

    def events_of(number: int) -> list[dict[str, Any]]:
        row = row_of(number)
        late = [row_of(number - 9)] if number >= 9 else []
        last = [row_of(other) for other in range(NUMBERS - 9, NUMBERS)] if number == NUMBERS - 1 else []
        answers = [{"id": answer["id"], "y": answer["y"]} for answer in (*late, *last)]
        return [{"id": row["id"], "x": row["x"]}, *answers]

    return train_online(
        rows.flat_map(events_of),
        lambda: LinearRegression(3, optimizer=GradientDescent(0.1)),
        labels=labels,
        mini_batch=4,
        mode=mode,
        on_error="skip",
        name="train",
    )


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    ("learner", "changes"),
    [
        (by_gradients, [1, 2, 3]),
        (by_rows, [3, 2, 1]),
        (with_late_labels, [3, 1]),
        *in_soak((by_gradients, [3, 2, 1]), (by_rows, [1, 2, 3])),
    ],
)
def test_online_training_with_other_workers_learns_each_row_once(
    learner: Callable[[Stream, Any], OnlineTraining], changes: list[int], mode: str
) -> None:
    """Rows of a worker that was gone were lost, or questions waited at a worker that no answer reaches."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("learn", parallelism=parallelism)
        # An answer must not come before its question, so those are in one partition.
        in_order = flow.from_items(range(NUMBERS), name="rows", parallelism=1)
        source = in_order if learner is with_late_labels else numbers(flow, broker)
        learner(source, mode).models.map(lambda model: model.records).sink(broker.topic("out"))
        return flow

    for seed, turns in enumerate((60, 300)):
        records = outputs(make_flow, changes, turns=turns, seed=seed)
        assert records == sorted(records)
        assert records[-1] == NUMBERS


def in_own_rounds(broker: MemoryBroker, parallelism: int) -> Flow:
    """Fit by asynchronous workers, which never end."""
    flow = Flow("learn", parallelism=parallelism)
    rows = flow.from_items(table(), name="rows")
    train_offline(
        rows, lambda: LinearRegression(3), extract=examples_of, rounds=10**9, mode="asynchronous", name="train"
    ).models.map(lambda model: model.records).sink(broker.topic("out"))
    return flow


def with_questions(broker: MemoryBroker, parallelism: int) -> Flow:
    """Train on questions whose answers come at the end of an endless topic."""
    flow = Flow("learn", parallelism=parallelism)
    rows = flow.source(broker.topic("in"), name="rows", parallelism=1)
    with_late_labels(rows, "asynchronous").models.map(lambda model: model.records).sink(broker.topic("out"))
    return flow


def on_a_server(broker: MemoryBroker, parallelism: int) -> Flow:
    """Fit by workers of a parameter server, for very many epochs."""
    flow = Flow("learn", parallelism=parallelism)
    rows = flow.from_items(made_up_rows(ROWS), name="rows")
    train_on_parameter_server(
        rows, ParameterServer(), features=40, consistency=BSP(), extract=sparse_examples, epochs=10**9, name="train"
    ).models.map(lambda model: model.records).sink(broker.topic("out"))
    return flow


def sparse_examples(rows: Any) -> Examples:
    features = SparseRows.from_rows(((row["indices"], row["values"]) for row in rows), width=40)
    return Examples(features, [row["label"] for row in rows])


@pytest.mark.parametrize(
    ("make_flow", "reason"),
    [
        (on_a_server, "each of its subtasks repeats records of its own, in a pass of its own"),
        (in_own_rounds, "in asynchronous training each worker has its own rounds"),
        (with_questions, "only one worker can take over questions that wait for labels"),
    ],
)
async def test_workers_that_cannot_share_their_state_keep_their_number(make_flow: MakeFlow, reason: str) -> None:
    """Workers waited for answers that went to other workers, or questions for labels that another worker received."""
    broker, stops = await new_broker(), Stops(seed=0)
    job = await stops.start(make_flow(broker, 2))
    await until(lambda: job.statistics().step("train: train").records_in > 0)
    await stops.suspend(job)
    with pytest.raises(CheckpointError, match=f"its 2 subtasks cannot become 3: {reason}.*; keep parallelism=2"):
        await stops.start(make_flow(broker, 3))
