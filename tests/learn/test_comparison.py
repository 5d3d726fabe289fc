"""Several learners on one stream: they are compared on the same rows, and the best one is published and served."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from iteration.iteration_support import cut_items, run
from learn import late_label_support
from learn.online_support import DELAYED, FEATURES, LABELS, Record, trips
from learn.test_foreign_models import mean
from learn.test_late_labels import delayed_events

from streamiter import Flow, topic
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import JobFailed
from streamiter.learn import (
    SGD,
    AdaptiveLinearModel,
    ComparisonTable,
    DelayedLabels,
    LinearModel,
    LogisticRegression,
    ProgressiveValidation,
    QuantileLoss,
    SparseRows,
    SquaredLoss,
    compare_online,
)
from streamiter.learn.online.comparison import BEST, Compare
from streamiter.models import LinearPredictor, ModelSnapshot, ServedModel, model_updates
from streamiter.testing import RestoreProcess, check_restore


class Compared:
    """What a comparison emits: predictions by learner, reports and versions of the best learner."""

    def __init__(self, flow: Flow, stream: Any, learners: Any, **options: Any) -> None:
        comparison = compare_online(stream, learners, **options)
        own = {name: training.validation for name, training in comparison.trainings.items()}
        self._own = {name: stream.collect() for name, stream in own.items()}
        predictions = {name: training.predictions for name, training in comparison.trainings.items()}
        self._predictions = {name: stream.collect() for name, stream in predictions.items()}
        self._metrics, self._best = comparison.metrics.collect(), comparison.best.collect()

    @property
    def own(self) -> dict[str, dict[str, float]]:
        """The last metrics of each training on all rows that it predicted itself."""
        return {name: each.items[-1] for name, each in self._own.items()}

    @property
    def reports(self) -> list[Any]:
        return self._metrics.items

    @property
    def best(self) -> list[ModelSnapshot]:
        return self._best.items

    def rows(self, name: str) -> dict[int, tuple[float, float, float]]:
        """Prediction, target and weight of a learner by number of the record."""
        return {
            int(number): (float(prediction), float(target), float(weight))
            for rows in self._predictions[name].items
            for number, prediction, target, weight in zip(
                rows["numbers"], rows["predictions"], rows["targets"], rows["weights"], strict=True
            )
        }


def compared(records: Any, learners: Any, *, seed: int = 0, limit: int = 100, **options: Any) -> Compared:
    """Run a comparison under the schedule of a seed."""
    flow = Flow("f")
    found = Compared(flow, cut_items(flow, records, seed=seed), learners, **options)
    run(flow, seed=seed, limits=ChannelLimits(records=limit))
    return found


FEW_FIELDS = {"features": ["km"], "mini_batch": 37}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_learners_are_compared_on_all_rows_whatever_the_schedule(mode: Any, label: str) -> None:
    """A fast learner was compared on later rows than a slow one, so the slow one seemed worse after a drift."""
    records = trips(300)
    learners = {"few": FEW_FIELDS, "all": None}
    seen = []
    for seed in (0, 2) if mode == "asynchronous" else (1, 3):
        options = {"label": label, "features": FEATURES, "weight": "weight", "mode": mode, "mini_batch": 20 + seed}
        result = compared(records, learners, seed=seed, limit=3 + 30 * seed, report_every=70, window=100, **options)
        counts = [report["learners"]["few"]["count"] + (label == "minutes") for report in result.reports]
        assert counts == [70, 140, 210, 280, 300]  # Nothing is known of the first number.
        for name, metrics in result.reports[-1]["learners"].items():
            alone = ProgressiveValidation(window=300, kind=_kind(label))
            alone.update(*np.array(list(result.rows(name).values())).T)
            assert metrics["loss"] == pytest.approx(alone.metrics()["loss"], rel=1e-12)
        seen.append(result.reports)
    assert seen[1:] == seen[:-1]
    assert result.reports[-1]["best"] == "all"


def _kind(label: str) -> Any:
    return {"late": "classification", "minutes": "regression", "kind": "classes"}[label]


def matrix(rows: Any) -> Any:
    return np.array([[row["km"] / 1_000 - 5] for row in rows])


PLAIN = {"model": lambda: LogisticRegression(1, optimizer=SGD(0.1)), "features": matrix}


@pytest.mark.parametrize("mini_batch", [5, 64])
def test_rows_that_a_learner_did_not_predict_do_not_count(mini_batch: int) -> None:
    """One learner refused rows, or was not asked before it had learned: from then on other rows were compared."""
    records = trips(400)
    for n in range(50, 400, 9):
        records[n] = records[n] | {"town": 5.0}  # Only a learner with this field refuses it.
    learners = {"all": None, "share": mean(task="classification"), "plain": PLAIN}
    result = compared(
        records, learners, label="late", features=FEATURES, mini_batch=mini_batch, on_error="skip", report_every=90
    )
    rows = {name: result.rows(name) for name in learners}
    assert [len(each) for each in rows.values()] == [400 - 39, 399, 400]
    both = sorted(rows["share"].keys() & rows["all"].keys())
    assert all(records[n]["town"] != 5.0 for n in both)
    for name, metrics in result.reports[-1]["learners"].items():
        assert metrics["count"] == len(both)
        validation = ProgressiveValidation()
        validation.update(*np.array([rows[name][n] for n in both]).T)
        assert metrics["loss"] == pytest.approx(validation.metrics()["loss"])
    for n in both:
        assert {rows[name][n][1] for name in learners} == {float(records[n]["late"])}


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_late_labels_are_compared_by_the_answer(mode: Any) -> None:
    """Questions from before the first label were compared for one learner, and for the other not."""
    events = delayed_events(300, "late")
    labels = DelayedLabels(DELAYED.key_of, DELAYED.is_answer, FEATURES, DELAYED.target_of, waiting_max=10_000)
    plain = DelayedLabels(DELAYED.key_of, DELAYED.is_answer, sparse, DELAYED.target_of, waiting_max=10_000)
    learners = {"rows": {"labels": labels, "mini_batch": 30}, "plain": {"model": PLAIN["model"], "labels": plain}}
    result = compared(events, learners, mode=mode, on_error="skip", report_every=100)
    rows, others = result.rows("rows"), result.rows("plain")
    assert len(rows) > 200
    assert rows.keys() == others.keys()
    for n, (_, target, _) in rows.items():
        assert others[n][1] == target == float(events[n]["answer"])
    assert {m["count"] for m in result.reports[-1]["learners"].values()} == {len(rows)}


@pytest.mark.parametrize("schedule", ["end", "weighted"])
def test_waits_that_end_without_an_answer_are_compared_whatever_the_cut(schedule: Any) -> None:
    """A record ends several waits, so rows with its number were taken for one another, and such labels were refused."""
    given = late_label_support.events(120)
    labels = replace(late_label_support.LABELS, schedule=schedule)
    plain = replace(labels, features=lambda rows: SparseRows.from_dense(np.array([[row["x"]] for row in rows])))
    learners: Any = {
        "all": {"labels": labels},
        "few": {"labels": replace(labels, features=["x"])},
        "plain": {"model": lambda: LogisticRegression(1, optimizer=SGD(0.1)), "labels": plain},
    }
    seen = []
    for rows, mini_batch in ((3, 4), (1_000, 50)):
        flow = Flow("f")
        source = late_label_support.source_of(given, rows)
        events = flow.from_source(source, parallelism=1).event_time("at", unit="ms")
        options = {"on_error": "skip", "mini_batch": mini_batch, "report_every": 50}
        found = Compared(flow, events, learners, **options)
        run(flow, seed=mini_batch)
        assert {metrics["count"] for metrics in found.reports[-1]["learners"].values()} == {120}
        seen.append([{name: each["learners"][name] for name in ("all", "few")} for each in found.reports])
    assert seen[1:] == seen[:-1]


def sparse(rows: Any) -> Any:
    return SparseRows.from_dense(matrix(rows), keep_zeros=True)


def turning(count: int) -> list[Record]:
    """Return records whose label follows ``a`` in the first half, then ``b``."""
    random = np.random.default_rng(3)
    return [
        {"a": a, "b": b, "label": bool((a if n < count / 2 else b) > 0)}
        for n, (a, b) in enumerate(random.normal(size=(count, 2)).tolist())
    ]


def test_the_best_learner_changes_once_when_another_is_better_by_the_margin() -> None:
    """Two learners of the same quality took turns, and each turn published the whole model again."""
    options = {"label": "label", "window": 200, "report_every": 50, "mode": "synchronous", "mini_batch": 50}
    learners = {"a": {"features": ["a"]}, "again": {"features": ["a"]}, "b": {"features": ["b"]}}
    result = compared(turning(1_200), learners, publish_state=True, **options)
    names = [report["best"] for report in result.reports]
    turn = names.index("b")
    assert 12 <= turn <= 16
    assert names == ["a"] * turn + ["b"] * (len(names) - turn)
    published = [model.parameters["learner"] for model in result.best]
    assert published[0] == "a"
    assert published[-1] == "b"
    assert sorted(published) == published
    assert published.count("a") + published.count("b") >= 24
    started = AdaptiveLinearModel()
    started.start_from(result.best[-1].parameters)
    assert started.records == result.best[-1].records == 1_200
    never = compared(turning(600), learners, margin=0.99, **options)
    assert {report["best"] for report in never.reports} == {"a"}


async def test_a_consumer_follows_a_stream_whose_kind_of_model_changes() -> None:
    """The served model stayed the first champion: the updates of the next one had lower versions, or no weights."""
    updates = topic("memory://best")
    await updates.create()
    flow = Flow("served")
    share = mean(task="classification")
    learners = {
        "share": share,
        "plain": {"model": lambda: LogisticRegression(2, optimizer=SGD(1.0)), "features": both_of},
        "all": None,
    }
    stream = flow.from_items(turning(2_000)[:1_000], parallelism=1)
    comparison = compare_online(stream, learners, label="label", report_every=250, mini_batch=50)
    comparison.best.publish_model(updates, model="best")
    job = await flow.start()
    await job.wait()
    seen: list[tuple[int, str]] = []
    async with model_updates(updates, "best", start="earliest") as every:
        async for update in every:
            seen.append((update.version, update.parameters["learner"]))
            if update.records == 1_000 and update.parameters["learner"] != "share":
                break
    assert [version for version, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[0][1] == "share"
    assert seen[-1][1] == "all"

    def load(parameters: Any) -> Any:
        return (share.predictor if parameters["learner"] == "share" else LinearPredictor)(parameters)

    async with ServedModel(updates, "best", load=load) as served:
        await served.ready()
        assert served.predict({"a": 2.0, "b": 0.0}).value > 0.9
        assert served.predict({"a": -2.0, "b": 0.0}).value < 0.1


def both_of(rows: Any) -> Any:
    return np.array([[row["a"], row["b"]] for row in rows])


# ---- the operator


def predicted(learner: str, numbers: Any, error: float = 0.2) -> Record:
    numbers = np.array(numbers)
    rows = {
        "task": "classification",
        "predictions": np.where(numbers % 3 == 0, 1.0 - error, error),
        "targets": (numbers % 3 == 0).astype(float),
        "weights": np.ones(len(numbers)),
        "numbers": numbers,
    }
    return {"learner": learner, "rows": rows}


def versioned(learner: str, version: int) -> Record:
    return {"learner": learner, "model": ModelSnapshot({"weights": np.full(2, float(version))}, version)}


def compare() -> Compare:
    return Compare(["a", "b", "c"], margin=0.1, window=12, report_every=10)


TOLD = [
    record
    for n in range(8)
    for record in (
        predicted("a", range(5 * n, 5 * n + 5), 0.3),
        versioned("a", n),
        predicted("b", range(5 * n + n % 2, 5 * n + 5), 0.1 if n > 3 else 0.5),
        *([predicted("c", range(10 * (n // 2), 10 * (n // 2) + 9), 0.28)] if n % 2 else []),
        versioned("b", n),
    )
]


def test_a_restored_comparison_continues_as_one_that_was_never_stopped(restore_process: RestoreProcess) -> None:
    """After a restart rows that waited for a slow learner were lost, and the first learner was published again."""
    check_restore("learn.test_comparison:compare", TOLD, tags=[BEST], cuts=9, process=restore_process)


class Heard:
    """Records what an operator emits."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.best: list[Any] = []

    def emit(self, record: Any, tag: Any = None) -> None:
        (self.reports if tag is None else self.best).append(record)


def settled(learner: str, at: range, wait: int) -> Record:
    """Return the rows of the questions that a learner settles with these events, ``wait`` events after they came."""
    told = predicted(learner, np.array(at) - wait)
    return {**told, "rows": {**told["rows"], "numbers": np.array(at), "questions": np.array(at) - wait}}


LATE_TOLD = [
    settled(learner, range(start, start + 5), wait)
    for start in range(50, 200, 5)
    for learner, wait in (("a", 1), ("b", 35), ("c", 12))
]
LATE_TOLD += [settled("c", range(200, 211), 12), settled("b", range(200, 234), 35)]


def test_learners_that_wait_for_different_times_are_compared_by_question(restore_process: RestoreProcess) -> None:
    """A learner that waited longer than a block was compared with nobody, until the end, where it alone had rows."""
    operator, heard = compare(), Heard()
    for told in LATE_TOLD:
        operator.process(told, cast(Any, heard))
    operator.finish(cast(Any, heard))
    assert len(heard.reports) > 10
    assert {report["best"] for report in heard.reports} == {"a"}
    # The questions that each of them has settled: a begins with 49, and ends with 198.
    assert {metrics["count"] for metrics in heard.reports[-1]["learners"].values()} == {150}
    check_restore("learn.test_comparison:compare", LATE_TOLD, tags=[BEST], cuts=9, process=restore_process)


def test_rows_that_wait_too_long_for_the_labels_of_others_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows that the others did not have yet, the oldest left in silence."""
    operator, heard = compare(), Heard()
    for told in LATE_TOLD[:3]:  # From here on, all learners are at the same event.
        operator.process(told, cast(Any, heard))
    monkeypatch.setattr("streamiter.learn.online.comparison._AHEAD_MAX", 20)
    with caplog.at_level(logging.WARNING, logger="streamiter.learn"):
        for told in LATE_TOLD[3:]:
            operator.process(told, cast(Any, heard))
            assert all(len(rows) <= 20 for rows in operator._unpaired.values())
    [warning] = caplog.records
    assert "'a' is 20 records ahead of 'b', so these records are not compared" in warning.getMessage()


def test_a_learner_that_refuses_all_rows_is_left_behind(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictions of the other learners filled the memory, and no report came any more."""
    monkeypatch.setattr("streamiter.learn.online.comparison._AHEAD_MAX", 10_000)
    operator, heard = Compare(["a", "b"], margin=0.0, window=10, report_every=2_500), Heard()
    out: Any = heard
    operator.process(predicted("b", [0, 1]), out)
    with caplog.at_level(logging.WARNING, logger="streamiter.learn"):
        for start in range(0, 20_000, 2_500):
            operator.process(predicted("a", range(start, start + 2_500)), out)
            assert sum(each.shape[1] for each in operator._waiting["a"]) <= 15_000
    counts = [report["learners"]["a"]["count"] for report in heard.reports]
    assert counts[:2] == [2, 2_502]
    assert {report["best"] for report in heard.reports[1:]} == {"a"}
    [warning] = caplog.records
    assert "'a' is 10000 records ahead of 'b'" in warning.getMessage()
    operator.process(predicted("b", range(15_000, 20_000)), out)
    assert heard.reports[-1]["learners"]["b"]["count"] == 5_002


@pytest.mark.parametrize("mini_batch", [7, 50])
def test_rows_that_a_reader_refuses_do_not_shift_the_others(mini_batch: int) -> None:
    """After a record that one learner could not read, its predictions were compared with those of other records."""
    records = [row | {"town": [1] if n % 9 == 0 else row["town"]} for n, row in enumerate(trips(300))]
    learners = {"texts": {"features": ["town", "km"]}, "numbers": {"features": ["km"]}}
    result = compared(records, learners, label="minutes", mini_batch=mini_batch, on_error="skip", report_every=100)
    texts, numbers = result.rows("texts"), result.rows("numbers")
    # Nothing is known of the first number that a learner reads: of row 0, and of row 1.
    assert set(numbers) - set(texts) == {1, *range(9, 300, 9)}
    assert [row[1] for row in texts.values()] == [numbers[number][1] for number in texts]


def test_kinds_and_time_zone_are_options_of_a_learner_and_of_all() -> None:
    """What the default learner was told of its fields could not be tried against what it finds itself."""
    rows = [{"code": str(n % 3), "at": 1_700_000_000 + 3_600 * n, "late": n % 3 == 1} for n in range(400)]
    learners = {"as found": {"kinds": None}, "as told": None}
    found = compared(
        rows, learners, label="late", kinds={"code": "category", "at": "time"}, time_zone="UTC", report_every=400
    )
    assert found.reports[-1]["best"] == "as told"
    assert found.best[-1].parameters["kinds"] == {"code": "category", "at": "time"}


def test_late_labels_are_compared_in_a_flow_of_any_parallelism() -> None:
    """Two readers of a learner counted their records each from 0, and the job ended with an IndexError."""
    flow = Flow("f", parallelism=2)
    events = flow.from_items(delayed_events(400, "late"), parallelism=1)
    found = Compared(flow, events, {"all": None, "same": None}, labels=DELAYED, report_every=50, on_error="skip")
    run(flow)
    assert found.reports[-1]["learners"]["all"] == found.reports[-1]["learners"]["same"]


@pytest.mark.parametrize("label", LABELS)
def test_a_row_of_figures_for_each_learner_and_for_the_baseline(label: str) -> None:
    """Which learner is the best was known, and not whether it is any better than the share."""
    records = trips(400)
    found = compared(records, {"few": FEW_FIELDS, "all": None}, label=label, report_every=100, window=10_000)
    [*_, report] = found.reports
    table = ComparisonTable(report)
    assert list(table.rows) == ["few", "all", "baseline"]
    for learner in ("few", "all"):
        own = report["learners"][learner]
        assert table.rows[learner] == {name: own[name] for name in table.rows[learner]}
        assert table.rows[learner].keys() >= {"loss", "window_loss", "rmse"}
    shares = np.unique([record[label] for record in records], return_counts=True)[1] / len(records)
    mean_loss = -shares @ np.log(shares)
    if label == "minutes":  # Nothing is known of the first number.
        mean_loss = np.var([record[label] for record in records[1:]]) / 2
    assert table.rows["baseline"] == {"loss": pytest.approx(mean_loss), "window_loss": pytest.approx(mean_loss)}
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["few", "all", "baseline"]
    assert sum(" * " in line for line in lines) == 1
    assert f"{table.rows['baseline']['loss']:.3f}" in lines[-1]
    assert all(f"<td>{name}" in table._repr_html_() for name in ("few", "all", "baseline"))
    assert f"{report['best']} *" in table._repr_html_()


def test_learners_of_two_losses_are_refused() -> None:
    """A pinball loss was compared with a squared error, and the smaller figure won."""
    records = trips(60)

    def make(loss: Any) -> Any:
        return lambda: LinearModel(1, loss=loss, optimizer=SGD(0.01))

    learners = {"mean": {"model": make(SquaredLoss())}, "often": {"model": make(QuantileLoss(0.9))}}
    with pytest.raises(JobFailed, match=r"expected learners of one loss, given .* give them the same loss="):
        compared(records, learners, label="minutes", features=lambda rows: np.array([[row["id"] % 3] for row in rows]))


def test_learners_of_two_tasks_are_refused() -> None:
    """A log loss was compared with a squared error, and the smaller figure won."""
    records = trips(60)
    learners = {"yes": {"label": "late"}, "how many": {"label": "minutes"}}
    with pytest.raises(JobFailed, match=r"expected learners of one task, given .*; give task="):
        compared(records, learners, features=["km"])


def test_learners_of_two_comparisons_in_one_flow_have_names_of_their_own() -> None:
    """The second comparison took the state of the first after a restart."""
    flow = Flow("f")
    stream = flow.from_items(turning(100), parallelism=1)
    learners = {"a": {"features": ["a"]}, "b": partial(AdaptiveLinearModel, bits=10)}
    options: dict[str, Any] = {"label": "label", "report_every": 50}
    found = [Compared(flow, stream, learners, name=name, **options) for name in (None, "second")]
    statistics = run(flow)
    for name in ("compare", "second: compare", "a: learn", "second: a: learn"):
        assert statistics.step(name).records_in > 0, name
    assert found[0].reports == found[1].reports
