"""``train_online`` with the model that learns row by row: the flow adds nothing to a plain loop, and loses nothing."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
import pytest
from learn.frozen_states import frozen
from learn.online_support import BINARY, FEATURES, LABELS, Record, chosen, letters_of, trained, trips, without
from support.waiting import PATIENCE_S

from streamiter import Columns, Flow
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed
from streamiter.learn import (
    SGD,
    AdaptiveLinearModel,
    DelayedLabels,
    Examples,
    ForeignModel,
    LogisticRegression,
    ProgressiveValidation,
    SparseRows,
    StandardScaler,
    train_online,
)
from streamiter.learn.quality.validation import PredictedRows
from streamiter.learn.quality.validation_step import MeanComparison
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.helpers.compiled import is_compiling


def inputs(records: list[Record]) -> list[Record]:
    return [{name: value for name, value in r.items() if name not in (*LABELS, "weight", "id")} for r in records]


def by_a_loop(records: list[Record], label: str, weights: Any = None) -> tuple[AdaptiveLinearModel, Any]:
    model = AdaptiveLinearModel()
    labels = [record[label] for record in records]
    return model, model.learn_each(inputs(records), labels, weights)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_training_equals_a_plain_loop_for_any_mini_batch_and_schedule(mode: Any, label: str) -> None:
    """The quality depended on the mini-batch: with 1,000 rows the model learned far less than with ten."""
    records = trips(100)
    model, _ = by_a_loop(records, label)
    losses = set()
    for seed, (mini_batch, workers) in enumerate([(1, 1), (50, 1), (1_000, 1), (7, 3), (50, 2)]):
        if mode == "asynchronous" and workers > 1:
            continue
        options = {"label": label, "features": FEATURES, "mini_batch": mini_batch, "workers": workers}
        options["publish_every"] = 1
        result = trained(records, mode=mode, seed=seed, **options)
        assert result.last == frozen(model.parameters(state=False)), options
        assert result.models[-1].records == 100
        assert result.metrics["count"] == 100 - (label == "minutes")  # Nothing is known of the first number.
        losses.add(result.metrics["loss"])
        versions = -(-100 // mini_batch)
        assert len(result.models) == versions or (mode == "asynchronous" and len(result.models) > versions)
    assert len(losses) == 1


def test_in_step_two_subtasks_of_the_source_give_one_result() -> None:
    """A training must be repeatable: the result depended on the subtask that was first."""
    records = trips(400)
    results = []
    for seed in range(3):
        options = {"label": "kind", "features": FEATURES, "mini_batch": 9, "workers": 1 + seed % 3}
        limits = ChannelLimits(records=3 + 10 * seed)
        result = trained(records, seed=seed, parallelism=2, limits=limits, mode="synchronous", **options)
        results.append([frozen(model.parameters) for model in result.models])
        assert result.models[-1].records == 400
    assert results[1:] == results[:-1]


@pytest.mark.parametrize("workers", [2, 4])
def test_asynchronous_workers_change_the_order_of_mini_batches_only(workers: int) -> None:
    """With more workers, the gradients of old parameters made the loss a third larger."""
    records = trips(4_000)
    alone = trained(records, label="late", features=FEATURES, mini_batch=20, workers=1)
    many = trained(records, label="late", features=FEATURES, mini_batch=20, workers=workers)
    assert many.models[-1].records == 4_000
    assert many.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=0.05)


def as_columns(records: list[Record]) -> Columns:
    return Columns(
        {
            "km": np.array([r["km"] for r in records]),
            "wind": np.array([np.nan if r["wind"] is None else r["wind"] for r in records]),
            "late": np.array([r["late"] for r in records]),
            "weight": np.array([r["weight"] for r in records]),
        }
    )


def matrix(rows: Any) -> Any:
    return np.array([[row["km"], row["weight"]] for row in rows])


def sparse(rows: Any) -> SparseRows:
    return SparseRows.from_dense(matrix(rows))


WAYS: dict[str, tuple[Record, Callable[[list[Record]], Any], str | None]] = {
    "all fields": ({"label": "late"}, lambda rows: [without(row, "late") for row in rows], None),
    "fields": ({"label": "late", "features": ["km", "town"]}, lambda rows: chosen(rows, "km", "town"), None),
    "weight": (
        {"label": "late", "features": FEATURES, "weight": "weight"},
        lambda rows: chosen(rows, *FEATURES),
        "weight",
    ),
    "functions": (
        {"label": lambda row: row["late"], "features": matrix, "weight": lambda row: row["weight"]},
        matrix,
        "weight",
    ),
    "sparse": ({"label": "late", "features": sparse}, sparse, None),
    "extract": (
        {"extract": lambda rows: Examples(matrix(rows), [r["late"] for r in rows], [r["weight"] for r in rows])},
        matrix,
        "weight",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_name_label_features_and_weight_reads_the_same_rows(way: str) -> None:
    """The label or the weight was among the features, or the weight did not count."""
    records = trips(200)
    options, features, weight = WAYS[way]
    model = AdaptiveLinearModel()
    weights = None if weight is None else [row[weight] for row in records]
    labels = [row["late"] for row in records]
    found = model.learn_each(features(records), labels, weights)
    result = trained(records, seed=1, mini_batch=30, workers=1, **options)
    assert result.last == frozen(model.parameters(state=False))
    validation = ProgressiveValidation()
    validation.update(found, labels, weights)
    assert result.metrics["loss"] == pytest.approx(validation.metrics()["loss"], rel=1e-12)


def test_columns_are_read_without_records() -> None:
    """A stream of Columns was turned into dicts, or its label was looked up in each row."""
    columns = as_columns(trips(200))
    names = ["km", "wind"]
    model = AdaptiveLinearModel()
    model.learn(Columns({name: columns[name] for name in names}), columns["late"], columns["weight"])
    result = trained(columns, label="late", features=names, weight="weight", mini_batch=30)
    assert result.last == frozen(model.parameters(state=False))
    message = r"train_online\(label=\): expected a field 'lat', given km, wind, late, weight; did you mean 'late'\?"
    with pytest.raises(JobFailed, match=message):
        trained(columns, label="lat")
    with pytest.raises(JobFailed, match=r"train_online\(features=\): expected the fields 'kn', given Columns without"):
        trained(columns, label="late", features=["kn"])


def test_the_task_and_the_model_can_be_given() -> None:
    """Labels 3 and 4 are numbers, unless they are said to be classes."""
    records = [{"x": float(n % 3), "y": 3 + n % 2} for n in range(60)]
    assert trained(records, label="y").models[-1].parameters["link"] == "clipped"
    for task, link in (("classification", "logit"), ("binary", "logit"), ("multiclass", "softmax")):
        assert trained(records, label="y", task=task).models[-1].parameters["link"] == link
    given = trained(records, model=partial(AdaptiveLinearModel, classes=[4, 3, 5], bits=3), label="y")
    assert given.models[-1].parameters["bits"] == 3
    assert given.models[-1].parameters["classes"] == [4, 3, 5]


def test_training_starts_from_published_parameters() -> None:
    """A service that was started again without a checkpoint began at zero."""
    records = trips(900)
    first = trained(records[:600], label="late", features=FEATURES).models[-1].parameters
    started, zero = AdaptiveLinearModel(), AdaptiveLinearModel()
    started.start_from(first)
    losses = []
    for model, initial in ((started, first), (zero, None)):
        model.learn(chosen(records[600:], *FEATURES), [row["late"] for row in records[600:]])
        result = trained(records[600:], label="late", features=FEATURES, initial=[initial])
        assert result.last == frozen(model.parameters(state=False))
        losses.append(result.metrics["loss"])
    assert losses[0] < losses[1]


def test_each_version_has_its_loss_and_its_missing_values() -> None:
    """A source that sent no values any more was noticed weeks later, by the quality."""
    records = trips(250)
    result = trained(records, label="late", features=FEATURES, mini_batch=100, mode="synchronous")
    _, found = by_a_loop(records, "late")
    rows = [slice(0, 100), slice(100, 200), slice(200, 250)]
    for model, part in zip(result.models, rows, strict=True):
        validation = ProgressiveValidation()
        validation.update(found[part], [row["late"] for row in records[part]])
        assert model.metrics["loss"] == pytest.approx(validation.metrics()["loss"], rel=1e-12)
        missing = sum(value is None for row in chosen(records[part], *FEATURES) for value in row.values())
        assert model.metrics["missing_values"] == missing > 0


# ---- how often versions are published


class StoppedClock(SystemClock):
    """A clock whose time never changes; timers fire as always."""

    def monotonic_s(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("options", "columns", "versions"),
    [({}, 20, 20), ({}, 4_000, 5), ({"publish_every": 1}, 4_000, 20), ({"publish_every": 5}, 20, 4)],
    ids=["few columns", "many columns", "many columns, each", "few columns, each fifth"],
)
async def test_a_version_of_many_columns_waits_for_more_rows(options: Record, columns: int, versions: int) -> None:
    """A model of hashed features was published after each mini-batch, which took four fifths of the time."""

    def many(rows: list[Record]) -> SparseRows:
        places = [(20 * row["n"] + np.arange(20)) % columns for row in rows]
        return SparseRows.from_rows([(row.tolist(), [1.0] * 20) for row in places], columns)

    records = [{"n": n, "late": n % 2} for n in range(200)]
    flow = Flow("f")
    training = train_online(
        flow.from_items(records, parallelism=1), label="late", features=many, mini_batch=10, **options
    )
    models = training.models.collect()
    await (await flow.start(clock=StoppedClock())).wait()
    assert len(models.items) == versions
    assert models.items[-1].records == 200


# ---- records that are no rows


GOOD = [{"km": float(n % 7), "town": "Rome", "late": n % 7 > 3, "w": 1.0} for n in range(60)]


BAD_RECORDS: list[tuple[Any, str, str]] = [
    (
        {"km": 1.0, "w": 1.0},
        "read",
        "train_online(label=): expected a record with the field 'late', given one with 'km', 'w'",
    ),
    (
        {"km": 1.0, "late": True},
        "read",
        "train_online(weight=): expected a record with the field 'w', given one with 'km', 'late'",
    ),
    (None, "read", "train_online(label=): expected a record with the field 'late', given None, which has no fields"),
    ({"km": [1], "late": True, "w": 1.0}, "read", "expected a number, a text or None in the field 'km', given [1]"),
    ({"km": 1.0, "late": True, "w": -1.0}, "read", "expected finite sample weights of 0 or more, given -1.0"),
    ({"km": 1.0, "late": True, "w": "x"}, "read", "expected sample weights as numbers"),
    ({"km": 1.0, "late": True, "w": 1e31}, "learn", "expected sample weights of at most 1e+30, given 1e+31"),
    ({"km": "far", "late": True, "w": 1.0}, "learn", "expected numbers in the field 'km'"),
    ({"town": 3.0, "late": True, "w": 1.0}, "learn", "expected texts in the field 'town'"),
    ({"km": 1.0, "late": 2, "w": 1.0}, "learn", f"{BINARY} 2; give task="),
    ({"km": 1.0, "late": None, "w": 1.0}, "learn", f"{BINARY} None"),
]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("mini_batch", [1, 9, 1_000])
async def test_records_that_are_no_rows_become_dead_letters_and_all_others_are_learned(
    mode: Any, mini_batch: int
) -> None:
    """One bad record took its whole mini-batch with it, or its letter had another record or no reason."""
    dirty: list[Any] = list(GOOD)
    for number, (record, _, _) in enumerate(BAD_RECORDS):
        dirty.insert(5 * number + 3, record)
    letters, result = await letters_of(dirty, label="late", weight="w", mode=mode, mini_batch=mini_batch)
    found = {(step, value): error for step, error, value in letters}
    assert len(letters) == len(found) == len(BAD_RECORDS)
    for record, step, message in BAD_RECORDS:
        assert message in found[step, b"" if record is None else orjson.dumps(record)]
    model = AdaptiveLinearModel()
    model.learn([without(row, "late", "w") for row in GOOD], [row["late"] for row in GOOD])
    assert result.last == frozen(model.parameters(state=False))
    assert result.metrics["count"] == len(GOOD)


async def test_a_large_mini_batch_is_learned_and_refused_as_many_small_ones() -> None:
    """Mini-batches of 1,000 rows and more are learned in a thread, whose output and refused rows must not be lost."""
    dirty: list[Any] = [{**row, "km": row["km"] + n % 5, "w": 1.0 + n % 3} for n, row in enumerate(50 * GOOD)]
    for number, (record, _, _) in enumerate(BAD_RECORDS):
        dirty.insert(90 * number + 70, record)
    results = []
    for mini_batch in (100, 1_000, 3_011):
        letters, result = await letters_of(dirty, label="late", weight="w", mini_batch=mini_batch, window=100)
        refused = sorted((step, value) for step, _, value in letters)
        results.append((refused, result.last, result.metrics))
    assert len(results[0][0]) == len(BAD_RECORDS)
    assert results[0][2]["count"] == 3_000
    assert results[1:] == results[:-1]


def test_without_a_policy_a_bad_row_ends_the_job_with_its_reason() -> None:
    """The step, the record and the reason are what an operator of a service needs at night."""
    for (record, step, message), mode in zip(BAD_RECORDS, ["synchronous", "asynchronous"] * 6, strict=False):
        with pytest.raises(JobFailed) as caught:
            trained([*GOOD[:20], record, *GOOD[20:]], label="late", weight="w", mode=mode, mini_batch=50)
        text = str(caught.value)
        assert f"step '{step}'" in text
        assert message in text


def test_a_function_that_fails_for_one_record_refuses_this_record_only() -> None:
    """A label function raised KeyError for one record, and 999 good records were refused with it."""
    records = [{"x": float(n), "y": n % 2} if n != 30 else {"x": 30.0} for n in range(100)]
    functions: Any = {"label": lambda row: row["y"], "features": lambda rows: [[row["x"]] for row in rows]}
    result = trained(records, on_error="skip", **functions)
    assert (result.records[-1], result.statistics.step("read").rejected) == (99, 1)
    with pytest.raises(JobFailed, match=r"features=\): expected a row for each of 3 records, given 2"):
        trained(GOOD[:3], label="late", features=lambda rows: [[1.0], [2.0]])
    with pytest.raises(JobFailed, match=r"extract=\): expected a row for each of 3 records, given 2"):
        trained(GOOD[:3], extract=lambda rows: Examples([[1.0], [2.0]], [0, 1]))


@pytest.mark.parametrize("model", [None, lambda: LogisticRegression(1, optimizer=SGD(0.1))], ids=["own", "given"])
@pytest.mark.parametrize("option", ["label", "weight"])
def test_an_error_of_a_function_of_labels_names_option_record_and_line(option: str, model: Any) -> None:
    """The error said only KeyError: 'y', and not which function had asked for it."""
    functions: Any = {"label": lambda row: row["x"] > 1.0, option: lambda row: row["y"]}
    rows = [{"x": float(n), "y": 1} for n in range(3)]
    with pytest.raises(JobFailed) as caught:
        trained([*rows, {"x": 3.0}], model=model, features=lambda rows: [[row["x"]] for row in rows], **functions)
    assert f"on record {{'x': 3.0}}: train_online({option}=) failed in test_online_rows.py:" in str(caught.value)
    assert "KeyError: 'y'; let it take such a record" in str(caught.value)


# ---- options


# ---- a bad loss


def predicted(kind: str, count: int, quality: str, seed: int = 0) -> PredictedRows:
    """Return predictions that are good, those of the mean, or far worse; numbers are epoch seconds."""
    random = np.random.default_rng(seed)
    weights = random.choice([0.5, 1.0, 2.0], count)
    if kind == "regression":
        targets = 1.7e9 + random.normal(size=count)
        wrong = {
            "good": targets + 0.1,
            "mean": np.full(count, 1.7e9),
            "bad": targets + 2 * random.choice([-1, 1], count),
        }
        return {"task": "regression", "predictions": wrong[quality], "targets": targets, "weights": weights}
    classes = random.choice([0, 1, 4], count, p=[0.05, 0.8, 0.15])
    share = np.array([0.05, 0.8, 0, 0, 0.15])[classes]
    if kind == "classes":
        chances = {"good": np.sqrt(share), "mean": share, "bad": share / 4}[quality]
        return {
            "task": "classes",
            "predictions": chances,
            "targets": (classes == 1).astype(float),
            "weights": weights,
            "classes": classes,
        }
    targets = (classes == 1).astype(float)
    found = {"good": 0.1 + 0.8 * targets, "mean": np.full(count, 0.8), "bad": np.full(count, 0.05)}[quality]
    return {"task": "classification", "predictions": found, "targets": targets, "weights": weights}


def far_above(comparison: MeanComparison, rows: PredictedRows) -> tuple[int, float, float] | None:
    loss = ProgressiveValidation(kind=rows["task"]).count_rows(rows["predictions"], rows["targets"], rows["weights"])
    return comparison.far_above(rows, loss)


@pytest.mark.parametrize("kind", ["classification", "classes", "regression"])
@pytest.mark.parametrize("length", [1, 300, 2_500])
def test_only_a_loss_far_above_that_of_the_mean_is_told_and_only_once(kind: str, length: int) -> None:
    """A warning for each young model, or for each model of hard data, is a warning that is not read."""
    for quality in ("good", "mean"):
        comparison = MeanComparison()
        count = 10_000 if length > 1 else 1_200
        assert [far_above(comparison, predicted(kind, length, quality, n)) for n in range(count // length)] == [
            None
        ] * (count // length)
    comparison = MeanComparison()
    assert all(far_above(comparison, predicted(kind, 250, "bad", n)) is None for n in range(7)), "the first rows"
    found = far_above(comparison, predicted(kind, 250, "bad", 7))
    assert found is not None
    rows, loss, of_mean = found
    assert rows == 1_000
    assert loss > 1.5 * of_mean > 0.0
    expected = {"classification": 0.5, "classes": 0.61, "regression": 0.5}[kind]
    assert of_mean == pytest.approx(expected, rel=0.15)
    assert all(far_above(comparison, predicted(kind, 250, "bad", n)) is None for n in range(40))


def test_equal_labels_are_no_reason_for_a_warning() -> None:
    """Where all labels are equal the loss of the mean is 0, and each other loss is far above it."""
    for rows in (
        {"task": "classification", "predictions": np.full(1_000, 0.02), "targets": np.zeros(1_000)},
        {"task": "regression", "predictions": np.full(1_000, 5.0 + 1e-12), "targets": np.full(1_000, 5.0)},
        {"task": "regression", "predictions": np.ones(1_000), "targets": np.zeros(1_000)}
        | {"weights": np.zeros(1_000)},
    ):
        given: Any = {"weights": np.ones(1_000)} | rows
        comparison = MeanComparison()
        assert [far_above(comparison, given) for _ in range(5)] == [None] * 5


def test_labels_that_are_all_equal_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A function of late labels looked for a field that no event had: the log loss was 0.006, as of a good model."""
    caplog.set_level(logging.WARNING, "streamiter.learn")
    trained([{"km": n, "late": n % 2 == 1} for n in range(300)], label="late")
    assert caplog.messages == []
    trained([{"km": n, "late": False} for n in range(300)], label="late", name="learn it")
    assert caplog.messages == [
        "step 'learn it: validate': expected several labels, given 300 equal ones, from which nothing is learned; "
        "check label=, or target_of= and is_answer="
    ]


def test_a_field_that_no_record_has_is_told_once_with_similar_names(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt field was missing in each row, and the model learned without it for a month, silently."""
    caplog.set_level(logging.WARNING, "streamiter.learn")
    records = [{"kilometres": n % 7, "late": n % 7 > 3, "fee": 1.0} for n in range(300)]
    del records[0]["fee"]
    features = ["kilometers", "fee", "weather"]
    expected = [
        f"expected the field {name!r} of features=, and none of the first 100 records has it, so the model learns "
        f"without it; {remedy}"
        for name, remedy in (("kilometers", "similar fields: 'kilometres'"), ("weather", "check its name"))
    ]
    last_label = ForeignModel(
        make=list,
        learn=lambda model, features, label: model.append(label),
        predict=lambda model, features: float(model[-1]),
        save=lambda model: b"",
        load=lambda data: [],
        task="classification",
    )
    questions = [event | {"key": n, "asks": asks} for n, event in enumerate(records) for asks in (True, False)]
    delayed = DelayedLabels(itemgetter("key"), lambda event: not event["asks"], features, itemgetter("late"))
    for given, step, options in (
        (records, "learn it: read", {"label": "late", "features": features}),
        (records, "learn it: learn", {"label": "late", "features": features, "model": last_label}),
        (questions, "learn it: read", {"labels": delayed}),
    ):
        trained(given, mini_batch=50 if given is records else 100, name="learn it", **options)
        assert caplog.messages == [f"step {step!r}: {told}" for told in expected]
        caplog.clear()
    trained(records, label="late", features=["kilometres", "fee"])
    options: Any = {"kinds": {"fee": "number", "sky": "category"}, "crosses": [("at[hour]", "fee"), ("size[m]", "fee")]}
    table = Columns(
        {name: np.ones(300) for name in ("kilometres", "fee", "size[m]")} | {"late": np.arange(300) % 2 > 0}
    )
    for given in ([record | {"size[m]": 1.0} for record in records], table):
        trained(given, label="late", **options)
        assert [message.partition(", and none")[0] for message in caplog.messages] == [
            f"step 'read': expected the field {name!r} of {option}="
            for name, option in (("sky", "kinds"), ("at", "crosses"))
        ]
        caplog.clear()
    with pytest.raises(JobFailed, match="expected the fields 'kilometers', 'fee', 'weather', given Columns without"):
        trained(
            Columns({"kilometres": np.ones(300), "late": np.ones(300)}),
            label="late",
            features=features,
            on_error="skip",
        )
    assert caplog.messages == []


def test_the_event_loop_runs_while_the_arithmetic_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ten seconds, the broker of the job's topics heard nothing from it, and dealt out its partitions again."""
    has_run = threading.Event()

    def compile_slowly(*_arguments: Any, **_options: Any) -> None:
        assert has_run.wait(PATIENCE_S), "the event loop did not run meanwhile"

    async def run_meanwhile() -> None:
        flow = Flow("compiling")
        train_online(flow.from_items(trips(50)), label="late", features=FEATURES)
        asyncio.get_running_loop().call_later(0.01, has_run.set)
        await (await flow.start()).wait()

    monkeypatch.setattr(AdaptiveLinearModel, "compile", compile_slowly)
    asyncio.run(run_meanwhile())


@pytest.mark.skipif(not is_compiling(), reason="only compiled arithmetic runs in a thread")
def test_the_event_loop_runs_while_a_large_mini_batch_is_learned() -> None:
    """Predictions over HTTP waited for 4 ms, while 4,000 rows were learned, and the second core was idle."""
    has_run = threading.Event()

    class Waits(AdaptiveLinearModel):
        def step(self, *arguments: Any, **options: Any) -> Any:
            assert has_run.wait(PATIENCE_S), "the event loop did not run meanwhile"
            return super().step(*arguments, **options)

    async def run_meanwhile() -> None:
        flow = Flow("learning")
        train_online(flow.from_items(trips(1_000)), Waits, label="late", features=FEATURES, mini_batch=1_000)
        asyncio.get_running_loop().call_later(0.01, has_run.set)
        await (await flow.start()).wait()

    asyncio.run(run_meanwhile())


def test_a_model_far_worse_than_the_mean_is_told_with_the_step_the_reason_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A learning rate that was too high for a column of large numbers gave a bad model for a month, silently."""
    records = trips(6_000)
    caplog.set_level(logging.WARNING, "streamiter.learn")
    for label in LABELS:
        trained(records, label=label, features=FEATURES)
    own = {"label": lambda row: float(row["late"]), "features": lambda rows: [[row["km"]] for row in rows]}
    trained(records, model=lambda: LogisticRegression(1, optimizer=SGD(0.3)), scaler=StandardScaler(), **own)
    assert caplog.messages == []
    trained(records, model=lambda: LogisticRegression(1, optimizer=SGD(1.0)), name="ctr", **own)
    [message] = caplog.messages
    assert message.startswith("step 'ctr: validate': the loss of the last 1000 predictions is ")
    assert "labels or features belong to other rows (check label=, extract= and key_of=)" in message
    assert "leave out model= in train_online: its own model needs no scaling and no learning rate" in message
    assert "or give model= a smaller rate and scaler=StandardScaler()" in message
