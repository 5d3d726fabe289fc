"""Linear models on a parameter server learn the same numbers with any shards, schedule and distribution of rows."""

import asyncio
from typing import Any

import numpy as np
import pytest
from files.files_support import data_file
from learn.parameter_server_support import ALL, WORKERS, dense, dense_examples, made_up_rows, trained

from streamiter import Flow, topic
from streamiter.errors import GraphError, JobFailed
from streamiter.learn import (
    SGD,
    AdaGrad,
    Examples,
    LogisticRegression,
    ParameterServerWorker,
    SparseRows,
    train_on_parameter_server,
)
from streamiter.learn.quality.score_metrics import area_under_curve
from streamiter.operators import Source
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer

EVERY = pytest.mark.parametrize("how", ALL)


# -- a9a -----------------------------------------------------------------------------------------------------


@EVERY
def test_on_a9a_four_workers_reach_the_known_quality(how: str) -> None:
    """Linear models reach .848 accuracy and .900 area; stale or lost gradients, or a wrong mean, would lower both."""
    train = data_file("a9a/a9a_123d_train.libsvm")
    flow = Flow("read")
    records = flow.source(topic(f"file:{data_file('a9a/a9a_123d_test.dummy')}")).collect()
    flow.run()
    rows = SparseRows.from_rows(((record["indices"], record["values"]) for record in records.items), width=123)
    targets = np.array([float(record["label"] > 0) for record in records.items])

    flow = Flow("a9a")
    training = train_on_parameter_server(
        flow.source(topic(f"file:{train}")),
        ParameterServer(shards=2),
        features=123,
        labels="-1/1",
        consistency=ALL[how],
        workers=WORKERS,
        epochs=3,
    )
    models = training.models.collect()
    flow.run()
    [model] = models.items
    probabilities = 1 / (1 + np.exp(-(rows.dot(model.parameters["weights"]) + model.parameters["intercept"])))
    assert model.records == 3 * 32_561
    assert float(np.mean((probabilities >= 0.5) == targets)) >= 0.848
    area = area_under_curve(probabilities, targets, np.ones(len(targets)))
    assert area is not None
    assert area >= 0.900


# -- in step -------------------------------------------------------------------------------------------------


def in_step_by_numpy(features: Any, targets: Any, rule: str, *, batch: int, epochs: int) -> tuple[Any, float]:
    """Return weights and intercept, computed in numpy: row i belongs to worker i mod n."""
    with_ones = np.column_stack([features, np.ones(len(features))])
    parts = [(with_ones[worker::WORKERS], targets[worker::WORKERS]) for worker in range(WORKERS)]
    turns = [
        [(rows[at : at + batch], wanted[at : at + batch]) for at in range(0, len(rows), batch)] * epochs
        for rows, wanted in parts
    ]
    weights, squares = np.zeros(with_ones.shape[1]), np.zeros(with_ones.shape[1])
    for turn in range(max(map(len, turns))):
        gradient = np.zeros_like(weights)
        for mini_batches in turns:
            if turn < len(mini_batches):  # A worker that has ended adds no gradient.
                rows, wanted = mini_batches[turn]
                gradient += (1 / (1 + np.exp(-(rows @ weights))) - wanted) @ rows
        gradient /= batch * WORKERS
        if rule == "sgd":
            weights -= 0.5 * gradient
        else:
            squares += gradient**2
            there = gradient != 0
            weights[there] -= 0.3 * gradient[there] / (np.sqrt(squares[there]) + 1e-8)
    return weights[:-1], weights[-1]


@pytest.mark.parametrize(("count", "rule", "shards"), [(400, "sgd", 3), (403, "adagrad", 1), (403, "sgd", 3)])
def test_in_step_it_is_the_mean_of_all_workers_mini_batches(count: int, rule: str, shards: int) -> None:
    """A gradient was lost, counted twice or divided by a wrong number; one worker has one row more than the others."""
    rows = made_up_rows(count)
    optimizer = SGD(0.5) if rule == "sgd" else AdaGrad(0.3)
    [model], _ = trained(rows, BSP(), shards=shards, optimizer=optimizer)
    weights, intercept = in_step_by_numpy(*dense(rows), rule, batch=10, epochs=3)
    assert model.parameters["weights"] == pytest.approx(weights, rel=1e-12, abs=1e-12)
    assert model.parameters["intercept"] == pytest.approx(intercept, rel=1e-12, abs=1e-12)
    assert model.records == 3 * count


@pytest.mark.parametrize("seed", range(3))
def test_in_step_the_schedule_changes_the_last_digits_only(seed: int) -> None:
    """When a worker left before its last gradient was applied, the gradient was lost."""
    rows = made_up_rows(203)
    [expected], _ = trained(rows, BSP(), batch=5)
    [*versions, model], _ = trained(rows, BSP(), batch=5, seed=seed, publish_every=4)
    assert model.parameters["weights"] == pytest.approx(expected.parameters["weights"], rel=1e-9)
    # A version counts four more clocks of four workers; workers with 50 rows have a mini-batch less per epoch.
    assert [version.records for version in versions[:2]] == [80, 160]


@pytest.mark.parametrize("count", [1, 3, 10])
def test_workers_without_rows_delay_no_worker(count: int) -> None:
    """With fewer rows than workers the minimum clock stayed at 0, and the others waited for ever."""
    rows = made_up_rows(count)
    [model], _ = trained(rows, BSP(), batch=2, optimizer=SGD(0.5))
    weights, _ = in_step_by_numpy(*dense(rows), "sgd", batch=2, epochs=3)
    assert model.parameters["weights"] == pytest.approx(weights, rel=1e-12, abs=1e-12)


class SlowToEnd(ParameterServerWorker):
    """Delays the end of every worker except the first."""

    async def finish(self, out: Any) -> None:
        if self.context.subtask_index:
            for _ in range(50):
                await asyncio.sleep(0)
        await super().finish(out)


def test_the_last_gradient_of_a_worker_that_ends_first_is_applied() -> None:
    """The last gradient waited for the clock of workers that had left without a clock, and was lost."""
    rows = made_up_rows(WORKERS + 1)
    [model], _ = trained(rows, BSP(), batch=1, epochs=1, optimizer=SGD(0.5), worker=SlowToEnd)
    weights, _ = in_step_by_numpy(*dense(rows), "sgd", batch=1, epochs=1)
    assert model.parameters["weights"] == pytest.approx(weights, rel=1e-12, abs=1e-12)


# -- under every consistency -----------------------------------------------------------------------------------


@EVERY
def test_the_number_of_shards_changes_nothing(how: str) -> None:
    """A column must have the same values on any shard."""
    rows = made_up_rows(200)
    results = [trained(rows, ALL[how], shards=shards)[0][-1].parameters for shards in (1, 2, 5)]
    for other in results[1:]:
        assert other["weights"].tolist() == results[0]["weights"].tolist()
        assert other["intercept"] == results[0]["intercept"]


@EVERY
def test_a_second_run_gives_the_same_bits(how: str) -> None:
    """Results are equal even under ASP, because in one process the order of the calls is fixed."""
    rows = made_up_rows(200)
    first, second = (trained(rows, ALL[how], publish_every=3) for _ in range(2))
    assert [model.parameters["weights"].tolist() for model in first[0]] == [
        model.parameters["weights"].tolist() for model in second[0]
    ]
    first_losses, second_losses = ([(each["worker"], each["loss"]) for each in run[1]] for run in (first, second))
    assert first_losses == second_losses


@EVERY
def test_every_mini_batch_of_every_epoch_is_learned_from_once(how: str) -> None:
    """At the border between two epochs, a mini-batch was left out or repeated."""
    _, losses = trained(made_up_rows(203), ALL[how])
    clocks = {worker: [each["clock"] for each in losses if each["worker"] == worker] for worker in range(WORKERS)}
    assert clocks == {0: [*range(1, 19)], 1: [*range(1, 19)], 2: [*range(1, 19)], 3: [*range(1, 16)]}
    assert sum(each["records"] for each in losses) == 3 * 203
    assert all(0 < each["loss"] < 2 for each in losses)


@EVERY
def test_dense_rows_learn_the_same_as_sparse_ones(how: str) -> None:
    """FTRL changes no weight without a gradient, so the choice of pulled columns must not matter."""
    rows = made_up_rows(120)
    sparse, _ = trained(rows, ALL[how])
    full, _ = trained(rows, ALL[how], extract=dense_examples)
    assert full[-1].parameters["weights"] == pytest.approx(sparse[-1].parameters["weights"], rel=1e-9, abs=1e-12)


def test_only_columns_that_a_mini_batch_needs_are_pulled_and_pushed() -> None:
    """A mini-batch names a hundred of a million weights, but the whole model was sent in both directions."""
    server = ParameterServer(shards=2)
    rows, wide = made_up_rows(40), 1_000_000
    trained(rows, ASP(), server=server, features=wide, epochs=1)
    [*counts] = [matrix for shard in server.statistics().shards for matrix in shard.matrices]
    needed = sum(  # the columns of each mini-batch, and the intercept
        len(np.unique(np.concatenate([row["indices"] for row in rows[worker::WORKERS]]))) + 1
        for worker in range(WORKERS)
    )
    assert sum(matrix.numbers_added for matrix in counts) == needed
    # Each worker reads one more number when it leaves, and the last version reads all numbers.
    assert sum(matrix.numbers_read for matrix in counts) == needed + WORKERS + wide + 1


def test_linear_regression_finds_the_plane() -> None:
    """With the squared loss, predictions are the margins themselves."""
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(400, 3))
    wanted = rows @ [1.0, -2.0, 0.5] + 3.0
    models, _ = trained(
        np.column_stack([rows, wanted]),
        SSP(staleness=1),
        features=3,
        loss="squared",
        optimizer=SGD(0.1),
        epochs=20,
        extract=lambda records: Examples(np.array(records)[:, :3], np.array(records)[:, 3]),
    )
    parameters = models[-1].parameters
    assert parameters["weights"] == pytest.approx([1.0, -2.0, 0.5], abs=1e-6)
    assert (parameters["intercept"], parameters["link"]) == (pytest.approx(3.0, abs=1e-6), "identity")


def test_sample_weights_count_rows_twice_or_not_at_all() -> None:
    """A mini-batch whose rows all have weight 0 must not make a step."""
    rows = made_up_rows(60)
    times = [2.0 if number % 3 == 0 else 0.0 if number % 3 == 1 else 1.0 for number in range(60)]

    def weighted(records: Any) -> Examples:
        features, targets = dense([row for row, _ in records])
        return Examples(features, targets, [weight for _, weight in records])

    [model], losses = trained(list(zip(rows, times, strict=True)), ASP(), extract=weighted, batch=1, workers=1)
    repeated = [row for row, weight in zip(rows, times, strict=True) for _ in range(int(weight > 0))]
    [expected], _ = trained(repeated, ASP(), extract=dense_examples, batch=1, workers=1)
    assert model.parameters["weights"] == pytest.approx(expected.parameters["weights"], rel=1e-12)
    assert model.records == 3 * 40 == sum(each["records"] for each in losses)


def test_a_step_changes_only_weights_of_present_features() -> None:
    """With l2, every mini-batch of every worker would otherwise shrink the whole sparse model."""
    rows = made_up_rows(60)
    optimizer = SGD(0.5, l2=0.1)
    [model], _ = trained(rows, ASP(), workers=1, optimizer=optimizer, intercept=False)
    expected = LogisticRegression(40, optimizer=optimizer, intercept=False)
    for _ in range(3):
        for start in range(0, 60, 10):
            some = rows[start : start + 10]
            features = SparseRows.from_rows(((row["indices"], row["values"]) for row in some), width=40)
            expected.learn(features, [row["label"] for row in some])
    assert model.parameters["weights"] == pytest.approx(expected.weights, rel=1e-12)
    assert model.parameters["intercept"] == 0.0


def test_another_flow_continues_with_the_matrices_of_the_server() -> None:
    """One epoch today and two tomorrow must equal three epochs."""
    rows, server = made_up_rows(200), ParameterServer(shards=2)
    trained(rows, BSP(), server=server, epochs=1)
    [model], _ = trained(rows, BSP(), server=server, epochs=2)
    [expected], _ = trained(rows, BSP(), epochs=3)
    assert model.parameters["weights"] == pytest.approx(expected.parameters["weights"], rel=1e-12)
    assert model.records == 400


# -- refused input ---------------------------------------------------------------------------------------------


def test_rows_that_are_no_examples_are_left_out_and_the_others_learned_from() -> None:
    """One damaged row removed the 99 other rows of its mini-batch."""
    rows = made_up_rows(40)
    damaged = [*rows[:5], {**rows[5], "label": 7.0}, {**rows[6], "indices": np.arange(41, 47)}, *rows[7:]]
    [model], _ = trained(damaged, ASP(), workers=1, on_error="skip", epochs=2)
    assert model.records == 2 * 38


def test_without_examples_the_job_fails_with_a_clear_error() -> None:
    """A model of zeros would be published and served."""
    with pytest.raises(JobFailed, match="train_on_parameter_server: expected examples to learn from, given none"):
        trained([], BSP())


def test_diverging_weights_end_the_job_with_a_remedy() -> None:
    """NaN in a weight makes every later prediction NaN."""
    rows = [{"label": 1.0, "indices": [0], "values": [1e200]}]
    with pytest.raises(JobFailed, match="lower the learning rate, or scale the features"):
        trained(rows, ASP(), loss="squared", optimizer=SGD(1.0), epochs=3, workers=1)


def test_two_trainings_share_no_server() -> None:
    """Each training waited for ever for the clocks of the other's workers."""
    flow, server = Flow("two"), ParameterServer(name="shared")
    settings: dict[str, Any] = {"features": 3, "consistency": BSP()}
    train_on_parameter_server(flow.from_items([1]), server, **settings)
    message = "expected a server of its own, given 'shared', which step 'train' uses"
    with pytest.raises(GraphError, match=message):
        train_on_parameter_server(flow.from_items([1]), server, matrix="v", **settings)
    train_on_parameter_server(flow.from_items([1]), ParameterServer(name="other"), **settings)


class Endless(Source):
    bounded = False


def test_an_option_that_the_training_does_not_have_is_a_type_error() -> None:
    """The error of a misspelt option named a class that the user had not called, or the flow kept its first steps."""
    flow = Flow("flow")
    rows = flow.from_items([1])
    options: dict[str, Any] = {"features": 2, "consistency": BSP(), "wokrers": 2}
    message = r"^train_on_parameter_server\(\) got an unexpected .* 'wokrers'; its options are .*mean 'workers'"
    with pytest.raises(TypeError, match=message):
        train_on_parameter_server(rows, ParameterServer(), **options)
    assert len(flow.steps) == 1


def test_an_endless_stream_is_read_once() -> None:
    """The second pass would wait for ever for the end of the first."""
    endless = Flow("endless").from_source(Endless)
    settings: dict[str, Any] = {"features": 3, "consistency": BSP()}
    with pytest.raises(GraphError, match=r"\(epochs=\): expected 1 for 'Endless', which never ends, given 2"):
        train_on_parameter_server(endless, ParameterServer(), epochs=2, **settings)
    assert train_on_parameter_server(endless, ParameterServer(), **settings).models is not None
