"""Flows and learners of the library in several processes have the results, to the last bit, of one process."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import cut_items, ended, run, run_shuffled
from learn.frozen_states import frozen
from learn.parameter_server_support import made_up_rows
from learn.test_foreign_models import Mean
from networks.training_support import network, records, rows
from processes.linked_jobs import piped_jobs_of
from support.soak import in_soak

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Stream,
    for_each_round,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.iteration import all_reduce, last_round, map_with, terminate_after
from streamiter.learn import (
    SGD,
    DelayedLabels,
    Examples,
    ForeignModel,
    GradientDescent,
    LinearRegression,
    LogisticRegression,
    PageHinkley,
    SparseRows,
    StandardScaler,
    apriori,
    compare_online,
    k_means,
    k_means_on_parameter_server,
    online_k_means,
    online_standard_scaler,
    train_offline,
    train_on_parameter_server,
    train_online,
)
from streamiter.learn.trees.tree_growing import TreeOptions, grow_tree
from streamiter.models import ModelSnapshot, Rollbacks
from streamiter.networks import train_network, train_network_online
from streamiter.parameter_server import BSP, ParameterServer
from streamiter.topics import MemoryBroker

TRUE_WEIGHTS = np.array([1.0, -2.0, 0.5])
PARALLELISM = 3
ROWS = 240
WIDTH = np.random.default_rng(3).normal(size=(ROWS, 3))
TARGETS = WIDTH @ TRUE_WEIGHTS
EXAMPLES = Columns({"x": WIDTH, "y": TARGETS})
TRIPS = [
    {"id": n, "km": km, "wind": wind, "town": ["Rome", "Oslo", None][n % 3], "late": km > wind, "minutes": 9 * km}
    for n, (km, wind, _) in enumerate(WIDTH.tolist())
]

Outputs = Sequence[Stream]


def examples_of(batch: Any) -> Examples:
    return Examples(batch["x"], batch["y"])


def regression() -> LinearRegression:
    return LinearRegression(3, optimizer=GradientDescent(0.3))


# ---- online


def online(flow: Flow, stream: Stream | None = None, **options: Any) -> Outputs:
    training = train_online(
        flow.from_items(TRIPS, parallelism=1).rebalance() if stream is None else stream,
        **{"mode": "synchronous", "mini_batch": 10, "report_every": 50} | options,
    )
    return training.models, training.validation, training.predictions, training.drifts


def by_rows(flow: Flow) -> Outputs:
    return online(flow, label="late", features=["km", "wind", "town"], crosses=[("town", "wind")])


def of_columns(flow: Flow) -> Outputs:
    return online(flow, flow.from_items(Columns({"a": WIDTH[:, 0], "b": WIDTH[:, 1], "y": TARGETS})), label="y")


def of_sparse_rows(flow: Flow) -> Outputs:
    made = flow.from_items(made_up_rows(ROWS))
    return online(flow, made, extract=sparse_examples)


def sparse_examples(batch: Any) -> Examples:
    features = SparseRows.from_rows(((row["indices"], row["values"]) for row in batch), width=40)
    return Examples(features, [row["label"] for row in batch])


def by_gradients(flow: Flow) -> Outputs:
    return online(flow, flow.from_items(EXAMPLES), model=regression, extract=examples_of)


def by_scaled_gradients(flow: Flow) -> Outputs:
    return online(flow, flow.from_items(EXAMPLES), model=regression, extract=examples_of, scaler=StandardScaler())


def by_sparse_gradients(flow: Flow) -> Outputs:
    made = flow.from_items(made_up_rows(ROWS))
    return online(flow, made, model=lambda: LogisticRegression(40), extract=sparse_examples)


def _events() -> list[dict[str, Any]]:
    asked = [{"question": trip["id"], "km": trip["km"], "wind": trip["wind"]} for trip in TRIPS]
    answers = [{"answer": trip["id"], "late": trip["late"]} for trip in TRIPS]
    events = []
    for place in range(ROWS + 9):
        events += asked[place : place + 1] + answers[max(place - 9, 0) : max(place - 8, 0)]
    return events


def labels(features: Any) -> DelayedLabels:
    return DelayedLabels(
        key_of=lambda event: event.get("question", event.get("answer")),
        is_answer=lambda event: "answer" in event,
        features=features,
        target_of=lambda answer: answer["late"],
    )


def with_late_labels(flow: Flow) -> Outputs:
    return online(flow, flow.from_items(_events(), parallelism=1), labels=labels(["km", "wind"]), workers=3)


def with_late_labels_of_gradients(flow: Flow) -> Outputs:
    def rows(asked: Any) -> SparseRows:
        return SparseRows.from_dense(np.array([[event["km"], event["wind"]] for event in asked]))

    events = flow.from_items(_events(), parallelism=1)
    return online(flow, events, model=lambda: LogisticRegression(2), labels=labels(rows), workers=3)


def with_drifts(flow: Flow) -> Outputs:
    turned = [trip | {"late": trip["late"] is (trip["id"] < ROWS // 2)} for trip in TRIPS]
    return online(
        flow,
        flow.from_items(turned, parallelism=1).rebalance(),
        label="late",
        features=["km", "wind"],
        drift=PageHinkley(threshold=5.0),
        on_drift="raise rates",
    )


def with_rollbacks(flow: Flow) -> Outputs:
    models = MemoryBroker().topic("models")
    asyncio.run(models.create())
    outputs = online(flow, label="late", features=["km", "wind"], rollbacks=Rollbacks(models, model="late"))
    outputs[0].publish_model(models, model="late")
    return outputs


def of_another_library(flow: Flow) -> Outputs:
    training = train_online(
        flow.from_items(TRIPS, parallelism=1),
        ForeignModel(
            make=Mean, learn=Mean.learn, predict=Mean.predict, save=Mean.save, load=Mean.load, task="regression"
        ),
        label="minutes",
        features=["km"],
        report_every=50,
    )
    return training.models, training.validation, training.predictions


def compared(flow: Flow) -> Outputs:
    learners: Any = {"km": {"features": ["km"]}, "all": None}
    trips = flow.from_items(TRIPS, parallelism=1)
    comparison = compare_online(trips, learners, label="late", mini_batch=20, report_every=60)
    return [comparison.metrics]


# ---- offline


def offline(flow: Flow, examples: Stream | None = None, **options: Any) -> Outputs:
    given = flow.from_items(EXAMPLES) if examples is None else examples
    training = train_offline(
        given, **{"model": regression, "extract": examples_of, "rounds": 6, "publish_every": 2} | options
    )
    return training.models, training.losses


def fitted(flow: Flow) -> Outputs:
    return offline(flow, mini_batch=50)


def fitted_sparse(flow: Flow) -> Outputs:
    given = flow.from_items(made_up_rows(ROWS))
    return offline(flow, given, model=lambda: LogisticRegression(40), extract=sparse_examples)


def fitted_again(flow: Flow) -> Outputs:
    return offline(flow, flow.from_items(EXAMPLES, parallelism=1).rebalance(), replay=True, workers=3)


def centroids(flow: Flow) -> Outputs:
    return [k_means(flow.from_items(WIDTH), clusters=4, rounds=5, seed=2)]


def centroids_of_a_stream(flow: Flow) -> Outputs:
    points = flow.from_items(WIDTH, parallelism=1)
    begun = {"clusters": 4, "mini_batch": 40, "initial": WIDTH[:4], "workers": 3, "name": "by workers"}
    return [online_k_means(points, clusters=4, mini_batch=40), online_k_means(points, **begun)]


def scales_of_a_stream(flow: Flow) -> Outputs:
    return [online_standard_scaler(flow.from_items(WIDTH, parallelism=1), window=50)]


def tree(flow: Flow) -> Outputs:
    columns = Columns({"features": WIDTH, "label": TARGETS, "weight": np.ones(ROWS)})
    options = TreeOptions(classes=None, maximum_depth=4, minimum_rows=4, minimum_gain=0.0, maximum_bins=16)
    grown = grow_tree(flow.from_items(columns), options)
    return grown["tree"], grown["leaves"]


def item_sets(flow: Flow) -> Outputs:
    baskets = [[item for item in range(8) if number * 7919 >> item & 1] for number in range(ROWS)]
    return [apriori(flow.from_items(baskets), minimum_support=0.1)]


# ---- parameter servers and networks


def on_a_server(flow: Flow) -> Outputs:
    given = flow.from_items(made_up_rows(ROWS))
    training = train_on_parameter_server(
        given, ParameterServer(), features=40, consistency=BSP(), extract=sparse_examples, batch=20, epochs=2
    )
    return [training.models]


def centroids_on_a_server(flow: Flow) -> Outputs:
    training = k_means_on_parameter_server(
        flow.from_items(WIDTH), ParameterServer(), initial=WIDTH[:4], consistency=BSP(), epochs=3
    )
    return [training.models]


def of_a_network(flow: Flow) -> Outputs:
    training = train_network(
        flow, rows(120), network(), ParameterServer(), consistency=BSP(), workers=3, epochs=2, validation=rows(30)
    )
    return [training.models]


def of_a_network_online(flow: Flow) -> Outputs:
    training = train_network_online(
        flow.from_items(records(rows(120))), network(), ParameterServer(), consistency=BSP(), batch=10
    )
    return [training.models]


# ---- loops, the service and the examples


def with_helpers(flow: Flow) -> Outputs:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        scaled = map_with(data[0], variables[0], lambda factor, batch: factor * batch)
        sums = all_reduce(scaled)
        [smallest] = for_each_round([scaled], lambda given: [given[0].rebalance().reduce_all(min)])
        grown = sums.filter(lambda _: True, parallelism=1).map(lambda total: 1.0 + abs(total) / 1000)
        return IterationBodyResult([grown], [last_round(sums), smallest], terminate_after(grown, rounds=5))

    return iterate_bounded_streams_until_termination(
        [flow.from_items([1.0], parallelism=1)], [replayed(flow.from_items(TARGETS, parallelism=1).rebalance())], body
    )


FLOWS = (
    by_rows,
    of_columns,
    of_sparse_rows,
    by_gradients,
    by_scaled_gradients,
    by_sparse_gradients,
    with_late_labels,
    with_late_labels_of_gradients,
    with_drifts,
    with_rollbacks,
    of_another_library,
    compared,
    fitted,
    fitted_sparse,
    fitted_again,
    centroids,
    centroids_of_a_stream,
    scales_of_a_stream,
    tree,
    item_sets,
    on_a_server,
    centroids_on_a_server,
    of_a_network,
    of_a_network_online,
    with_helpers,
)


def results(learn: Callable[[Flow], Outputs], processes: int) -> list[list[Any]]:
    """Return the records of all outputs, in any order, of a flow that each process has built for itself."""

    def build() -> tuple[Flow, Any]:
        flow = Flow("flow", parallelism=PARALLELISM)
        flow.register(ModelSnapshot)
        # The results cross, too.
        return flow, [each.rebalance().map(lambda record: record, parallelism=2).collect() for each in learn(flow)]

    async def main() -> None:
        jobs = piped_jobs_of([flow for flow, _ in built], processes, JobOptions())
        await asyncio.gather(*(job.start() for job in jobs))
        await ended(*jobs)

    built = [build() for _ in range(processes)]
    run_shuffled(main(), seed=processes)
    return [sorted(map(_bits, each.items), key=repr) for each in built[0][1]]


def _bits(record: Any) -> Any:
    if hasattr(record, "parameters"):
        return frozen(record.parameters), record.records
    return frozen(record)


@pytest.mark.parametrize("learn", FLOWS, ids=lambda learn: learn.__name__)
def test_a_flow_has_the_same_bits_in_any_number_of_processes(learn: Callable[[Flow], Outputs]) -> None:
    """A worker got no plain data, or shared an object with the owner, which another process does not have; and
    gradients of two processes were added in the order of their arrival, so that no training could be repeated.
    """
    expected = results(learn, 1)
    assert all(expected[:1])
    assert results(learn, 2) == expected


def asynchronous_by_rows(flow: Flow) -> Outputs:
    return online(flow, label="late", features=["km", "wind"], mode="asynchronous")


def asynchronous_by_gradients(flow: Flow) -> Outputs:
    return online(flow, flow.from_items(EXAMPLES), model=regression, extract=examples_of, mode="asynchronous")


def asynchronous_fitted(flow: Flow) -> Outputs:
    return offline(flow, mode="asynchronous", rounds=1)


@pytest.mark.parametrize("learn", [asynchronous_by_rows, asynchronous_by_gradients, asynchronous_fitted])
def test_asynchronous_training_learns_every_row_if_records_travel(learn: Callable[[Flow], Outputs]) -> None:
    """An answer of the owner shared its arrays with the workers in one process, and could not leave it."""
    assert max(records for _, records in results(learn, 2)[0]) == ROWS


RECORDS = np.random.default_rng(7).normal(size=(90, 4))


def features_and_labels(flow: Flow, parallelism: int = 3) -> Stream:
    return flow.from_items(RECORDS, parallelism=parallelism)


def labelled(batch: Any) -> Examples:
    batch = np.asarray(batch)
    return Examples(batch[:, :3], (batch[:, 3] > 0).astype(float), np.abs(batch[:, 3]) + 1)


def models(learner: Callable[[Flow], Stream], processes: int) -> list[Any]:
    flow = Flow("learn", parallelism=3)
    collected = learner(flow).collect()
    run(flow, seed=processes, limits=ChannelLimits(records=50), processes=processes)
    return [(frozen(model.parameters), model.records) for model in collected.items]


def test_metrics_have_the_same_bits_in_any_number_of_processes() -> None:
    """Predictions were counted as they came from the workers, so two runs differed in the last digit of the loss."""

    def metrics(seed: int, processes: int) -> list[Any]:
        flow = Flow("learn", parallelism=3)
        training = train_online(
            features_and_labels(flow),
            lambda: LogisticRegression(3),
            extract=labelled,
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
            given = cut_items(flow, RECORDS.tolist(), seed=seed).rebalance()
            return train_offline(
                given, lambda: LogisticRegression(3), extract=labelled, rounds=9, mini_batch=mini_batch, replay=True
            ).models

        return replaying

    expected = models(learner(0), 1)
    assert expected
    assert all(models(learner(seed), 1 + seed % 3) == expected for seed in range(1, 5))


@pytest.mark.parametrize("processes", [1, 3, *in_soak(2)])
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
