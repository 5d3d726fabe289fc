"""Late labels in event time: questions, answers and ends of waits are handled one by one, whatever the batches are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from flow.small_flows import Fed
from flow.test_topics_in_flows import made
from iteration.iteration_support import cut_items, run
from learn.frozen_states import frozen
from learn.late_label_support import (
    FEATURES,
    LABELS,
    SCHEDULES,
    Loop,
    SmallJoin,
    Trained,
    distinct,
    events,
    source_of,
    start_of,
    timed,
)
from learn.online_support import Record

from streamiter import Columns, Flow, Stream
from streamiter.errors import GraphError
from streamiter.learn import (
    AdaptiveLinearModel,
    ForeignModel,
    LogisticRegression,
    SparseRows,
    compare_online,
    train_online,
)
from streamiter.learn.online.gradient_workers import DelayedLabelsWorker, OnlineWorkerOptions
from streamiter.operators import Source, SourceBatch
from streamiter.operators.functions import field_values
from streamiter.parameter_server.optimizers import SGD
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bound_ms", [0, 700])
def test_events_are_learned_one_by_one_whatever_the_batches_are(schedule: Any, bound_ms: int) -> None:
    """Waits ended once for each transport batch: on a backlog thousands of equal labels were learned at a time."""
    count = 1_250 if schedule == "expected" else 200  # It begins after 1,000 questions.
    given = events(count, disorder_ms=bound_ms)
    loop = Loop(given, schedule, bound_ms=bound_ms)
    assert min(loop.late, len(given) - loop.late) > 30
    assert (len(loop.assumed) > 100) == (schedule in ("expected", "weighted"))
    labels = replace(LABELS, schedule=schedule)

    def check(found: Trained) -> None:
        assert found.bits == frozen(loop.model.parameters(state=False))
        assert found.targets.tolist() == [float(label) for label in loop.labels]
        known = [not math.isnan(prediction) for prediction in loop.predictions]
        assert np.array_equal(found.predictions[known], np.array(loop.predictions)[known])
        assert found.metrics["count"] == len(loop.labels) == count
        assert (found.late, found.records) == (loop.late, count)

    for rows in (7 if bound_ms else 1 if count == 200 else 20, len(given)):
        check(Trained(labels, lambda flow, n=rows: timed(flow.from_source(source_of(given, n)), bound_ms)))
    cuts: list[dict[str, Any]] = [{"mini_batch": 1}] if schedule == "weighted" and not bound_ms else []
    cuts += [{"mini_batch": 50, "mode": "synchronous", "workers": 2} if bound_ms else {"mini_batch": 13, "workers": 3}]
    for seed, options in enumerate(cuts, start=bound_ms):
        check(
            Trained(labels, lambda flow, s=seed: timed(cut_items(flow, given, seed=s), bound_ms), seed=seed, **options)
        )


def test_large_batches_of_a_source_are_learned_as_small_ones() -> None:
    """In a block of 8,000 events the waits of thousands of questions end; the next ages depend on each of them."""
    given = events(5_500)
    assert len(given) > 8_000
    found = [
        Trained(LABELS, lambda flow, n=rows: timed(flow.from_source(source_of(given, n))))
        for rows in (2_000, len(given))
    ]
    assert found[0].bits == found[1].bits
    assert all(each.predictions.tobytes() == found[0].predictions.tobytes() for each in found)


def test_partitions_and_streams_are_merged_in_the_order_of_event_time() -> None:
    """All views of a backlog were predicted before the first click was learned, or after, as the topics were read."""
    given = events(500)
    loop = Loop(given, "end")
    questions = [event for event in given if "label" not in event]
    answers = [event for event in given if "label" in event]

    def union(flow: Flow, rows: tuple[int, int]) -> Stream:
        parts = [
            timed(flow.from_source(source_of(events, size), name=f"part {size} {place}"))
            for place, (events, size) in enumerate(zip((questions, answers), rows, strict=True))
        ]
        return parts[0].union(parts[1])

    found = [
        Trained(replace(LABELS, schedule="end"), lambda flow, rows=rows: union(flow, rows)).bits  # type: ignore[misc]
        for rows in [(1, 50), (50, 1), (2_000, 2_000), (7, 2_000)]
    ]
    assert found == [found[0]] * len(found)
    # Equal times of two streams have no order, and few are equal here: the same labels, and nearly the same model.
    assert loop.model.records == 500


def keeps_order(stream: Stream) -> Stream:
    """Return the same events, through steps of all kinds."""
    return (
        stream.map(lambda event: event)
        .filter(lambda event: event["id"] != 3 or True)
        .map_batch(lambda batch: batch)
        .filter_batch(lambda batch: [True] * len(batch))
        .flat_map(lambda event: [event])
        .key_by(lambda event: event["id"] % 5)
        .stateful_map(lambda state, event: (state, event), 0, parallelism=1)
    )


def test_steps_before_the_training_keep_the_order() -> None:
    """Where a step had been between event time and training, batches counted again."""
    given = events(400, disorder_ms=500)
    loop = Loop(given, "at once", bound_ms=500)

    def chain(flow: Flow, rows: int) -> Stream:
        return keeps_order(timed(flow.from_source(source_of(given, rows)), 500))

    for rows in (7, 10_000):
        found = Trained(replace(LABELS, schedule="at once"), lambda flow, n=rows: chain(flow, n))
        assert found.bits == frozen(loop.model.parameters(state=False))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_that_learns_by_mini_batches_sees_the_same_events(schedule: Any) -> None:
    """Workers ended waits once for each transport batch, too, so their mini-batches had other rows."""
    given = events(800, disorder_ms=300)
    labels = replace(
        LABELS, features=lambda rows: SparseRows.from_dense([[row["x"], 1.0] for row in rows]), schedule=schedule
    )
    found = [
        Trained(
            labels,
            lambda flow, n=rows: timed(flow.from_source(source_of(given, n)), 300),
            model=lambda: LogisticRegression(2, optimizer=SGD(0.5)),
            workers=1,
            mini_batch=10,
            mode="synchronous",
        )
        for rows in (7, 10_000)
    ]
    assert found[0].bits == found[1].bits
    assert found[0].metrics["count"] == 800
    share = found[0].targets.mean()
    assert abs(found[0].predictions[200:].mean() - share) < 0.05


async def test_the_timestamps_of_a_topic_are_the_time() -> None:
    """A backlog of a week was joined by the clock: all of its questions and answers belonged to the same second."""
    given = distinct(events(400))
    loop = Loop(given, "end")
    broker = MemoryBroker()
    backlog = await made(broker, "backlog", partitions=2)
    writer = await backlog.open_writer()
    for number, event in enumerate(given):
        await writer.write(OutgoingBatch([orjson.dumps(event)], timestamps_ms=[event["at"]], partition=number % 2))
    await writer.close()
    for parallelism in (1, 2):
        flow = Flow("f")
        stream = flow.source(backlog, stop="latest", parallelism=parallelism)
        training = train_online(stream, labels=LABELS)
        models, metrics = training.models.collect(), training.validation.collect()
        await (await flow.start()).wait()
        assert frozen(models.items[-1].parameters) == frozen(loop.model.parameters(state=False))
        assert metrics.items[-1]["count"] == 400
    with pytest.raises(GraphError, match=r"put \.event_time\(…\) right behind flow.source\(…\)"):
        train_online(flow.source(backlog, name="again").map(lambda event: event), labels=LABELS, name="again")
    by_clock = replace(LABELS, time="processing")
    train_online(flow.source(backlog, name="third").map(lambda event: event), labels=by_clock, name="third")


@pytest.mark.parametrize("rows", [(1, 300), (300, 1), (5_000, 5_000)])
def test_a_training_behind_a_join_predicts_at_the_time_of_the_question(rows: tuple[int, int]) -> None:
    """A join ended waits once for each transport batch, and a loss of .005 was reported in place of .22.

    The labels of a batch were equal for thousands of rows, and the model followed the last ones.
    """
    given = distinct(start_of({"a": 0.5, "b": 0.1}, (1, 40), 800))
    questions, answers = ([e for e in given if ("label" in e) is is_answer] for is_answer in (False, True))

    def joined(flow: Flow) -> Stream:
        left, right = (
            timed(flow.from_source(source_of(side, size), name=str(place))).key_by(lambda event: event["id"])
            for place, (side, size) in enumerate(zip((questions, answers), rows, strict=True))
        )
        pairs = left.interval_join(right, lower_s=0, upper_s=60, how="left", one_to_one=True)
        return pairs.map(lambda pair: {name: pair[0][name] for name in FEATURES} | {"label": pair[1] is not None})

    found = Trained(None, joined, label="label")
    # The same rows in the order of their times: asked at the question, learned at the answer or after the wait.
    times = {event["id"]: event["at"] for event in questions}
    known = {event["id"]: event["at"] for event in answers}
    moments = [(at, 0, key) for key, at in times.items()]
    moments += [(known.get(key, at + 60_000), 1, key) for key, at in times.items()]
    fields = {event["id"]: {name: event[name] for name in FEATURES} for event in questions}
    in_order = [{"id": key, **({"label": key in known} if kind else fields[key])} for _, kind, key in sorted(moments)]
    labels = replace(LABELS, within_s=None, otherwise=None)
    expected = Trained(labels, lambda flow: flow.from_items(in_order, parallelism=1))
    assert found.bits == expected.bits
    assert found.metrics["count"] == 800
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"])


def test_several_subtasks_and_hidden_partitions_keep_the_order() -> None:
    """Records of one millisecond came through two subtasks: the faster one decided which was learned first."""
    draw = Random(2)
    sides: list[list[Record]] = [[], []]
    for n in range(400):
        event = {"id": n // 2, "at": 10 * (n // 8), "kind": draw.choice("ab"), "x": draw.random()}
        sides[n % 3 > 0].append(event if n % 2 == 0 else {"id": n // 2, "at": event["at"], "label": n % 5 > 2})
    found: dict[str, list[Any]] = {"subtasks": [], "filter": []}
    for seed, rows in enumerate((1, 7, 400)):
        flow = Flow("f", parallelism=2)
        one = timed(
            flow.from_source(source_of(sorted([*sides[0], *sides[1]], key=itemgetter("at")), rows), parallelism=1)
        )
        several = one.map(dict, parallelism=2)
        parts = [
            timed(flow.from_source(source_of(side, size), name=f"side {size}", parallelism=1))
            for side, size in zip(sides, (rows, 401 - rows), strict=True)
        ]
        hidden = parts[0].union(parts[1].filter(lambda event: event["at"] > 150))
        results = {
            name: train_online(stream, labels=LABELS, name=name, workers=2).models.collect()
            for name, stream in (("subtasks", several), ("filter", hidden))
        }
        run(flow, seed=seed, processes=1)
        for name, models in results.items():
            found[name].append(frozen(models.items[-1].parameters))
    assert all(each == [each[0]] * 3 for each in found.values())


def test_huge_features_of_a_question_that_waits_are_kept() -> None:
    """A model by gradients learned a question without its largest feature: huge is missing only for the default."""
    model = LogisticRegression(2, optimizer=SGD(0.2))
    labels = replace(LABELS, features=lambda rows: SparseRows.from_dense([[row["x"], 1.0] for row in rows]))
    worker = DelayedLabelsWorker(OnlineWorkerOptions(lambda: model, None, synchronous=False), labels)  # type: ignore[arg-type]
    worker.open(
        SimpleNamespace(name="join", epoch=0, parallelism=1, subtask_index=0, clock=VirtualClock(), set_timer=print)
    )  # type: ignore[arg-type]
    out: Any = SimpleNamespace(emit=lambda *_, **__: None)
    worker.process_model(model.parameters(state=False), out)
    worker.process_examples([{"id": 1, "x": 1e200}], out)
    rows = worker._join.questions.rows(worker._join.question_slots())
    assert rows.values.tolist() == [1e200, 1.0]


async def test_waits_end_on_a_quiet_stream(tmp_path: Path) -> None:
    """A model of a fixed width learned the last questions of an evening in the morning, and some lost them."""
    features = lambda rows: SparseRows.from_dense([[0.5, 1.0]] * len(rows))  # noqa: E731
    for model in (None, lambda: LogisticRegression(2, optimizer=SGD(0.2))):
        clock, given, flow = VirtualClock(), Fed(), Flow("f")
        stream = flow.from_source(lambda given=given: given).event_time(
            "at", unit="ms", check_unit=False, idle_after_s=5, when_idle="advance"
        )
        labels = replace(LABELS, features=features)
        options: Any = {} if model is None else {"model": model, "workers": 1}
        predictions = train_online(stream, labels=labels, mini_batch=1, **options).predictions.collect()
        job = await flow.start(clock=clock)
        for n in range(5):
            given.give({"id": n, "at": 100 * n, "kind": "a", "x": 0.5})
            await clock.advance(0.1)
        await clock.advance(30.0)
        assert sum(len(rows["targets"]) for rows in predictions.items) == 5
        await job.stop("abort")
    by_clock = SmallJoin(replace(LABELS, schedule="end", otherwise=None), is_timed=False)
    by_clock.reach(1_000)
    by_clock.ask("a", None, "question")
    by_clock.answer("a", None, True)
    assert by_clock.end() == [("question", True)]


def test_events_that_cannot_be_joined_are_refused() -> None:
    """Answers without event time beside questions with it were joined by the clock; keys that are None met."""
    flow = Flow("f")
    questions = timed(flow.from_items([{"id": 1, "at": 1}]))
    with pytest.raises(
        GraphError, match=r"expected event time of all of the events, given .* of which a part has none"
    ):
        train_online(questions.union(flow.from_items([{"id": 1, "label": True}])), labels=LABELS)
    given = [{"id": None, "at": n, "kind": "a", "x": 0.1} for n in range(3)] + [
        {"id": 5, "at": 9, "kind": "a", "x": 0.1}
    ]
    found = Trained(LABELS, lambda flow: timed(flow.from_items(given, parallelism=1)), on_error="skip")
    assert found.metrics["count"] == 1


def test_a_stream_that_ends_without_event_time_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Views and clicks of hours were read in a second: the log loss was 1.35, and that of the share 0.61."""
    for labels in (LABELS, replace(LABELS, time="processing")):
        train_online(Flow("f").from_items([{"id": 1, "at": 1}], name="views"), labels=labels)
    views = Flow("f").from_items([{"id": 1, "at": 1}], name="views")
    compare_online(views, {"a": None, "b": None}, labels=replace(LABELS, otherwise=None))
    [told, once_for_all_learners] = caplog.messages
    assert told.startswith("DelayedLabels: the stream 'views' ends and has no event time")
    assert once_for_all_learners == told


def test_labels_of_a_join_that_cannot_be_put_in_order_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A union with other rows, and models of other libraries, knew labels from after the question, without a word."""
    flow = Flow("f")
    sides = [timed(flow.from_items([{"id": 1, "at": 1}])).key_by(itemgetter("id")) for _ in range(2)]
    pairs = sides[0].interval_join(sides[1], lower_s=0, upper_s=9, how="left").map(lambda pair: {"x": 1.0, "y": True})
    others = timed(flow.from_items([{"at": 1, "x": 1.0, "y": False}]))
    train_online(pairs.union(others), label="y")
    options: Any = {"make": dict, "learn": print, "predict": print, "save": repr, "load": eval}
    foreign: ForeignModel[Any] = ForeignModel(**options, task="regression")
    train_online(pairs, foreign, label="y")
    union, other = (text for text in caplog.messages if "knows labels that came after the question" in text)
    assert union.endswith("give label= and no other rows, or labels=DelayedLabels(…)")
    assert other.endswith("only the model that train_online makes itself predicts them at their question")


@pytest.mark.parametrize("schedule", ["end", "weighted"])
def test_columns_are_learned_as_dicts_are(schedule: Any) -> None:
    """Columns stay columns from the order of event time to the rows of the model, and a source may give both."""
    asked = [event | {"label": False, "is_answer": False} for event in events(400) if "label" not in event]
    answered = [event | {"kind": "", "x": 0.0, "is_answer": True} for event in events(400) if "label" in event]
    given = sorted(asked + answered, key=itemgetter("at"))
    names = ["id", "at", "kind", "x", "label", "is_answer"]
    columns = [
        Columns({name: [event[name] for event in given[start : start + 50]] for name in names})
        for start in range(0, len(given), 50)
    ]
    dicts = [
        [dict(zip(names, row, strict=True)) for row in zip(*(part[name].tolist() for name in names), strict=True)]
        for part in columns
    ]
    mixed = [part if number % 2 else rows for number, (part, rows) in enumerate(zip(columns, dicts, strict=True))]

    class Batches(Source):
        batches: Sequence[Any] = ()

        def open(self, context: Any, positions: Mapping[str, Any]) -> None:
            self.left = list(self.batches)

        def read(self) -> SourceBatch | None:
            return SourceBatch(self.left.pop(0), {}) if self.left else None

    by_field = replace(
        LABELS,
        is_answer=itemgetter("is_answer"),
        target_of=itemgetter("label"),
        key_of=itemgetter("id"),
        schedule=schedule,
    )
    found = []
    for batches in (dicts, columns, mixed):
        source = type("Given", (Batches,), {"batches": batches})
        for labels, rows in ((by_field, 500), (replace(by_field, is_answer=lambda event: event["is_answer"]), 33)):
            trained = Trained(labels, lambda flow, source=source: timed(flow.from_source(source)), mini_batch=rows)
            found.append((trained.bits, trained.predictions.tobytes(), trained.targets.tobytes(), trained.late))
    assert found.count(found[0]) == len(found)
    assert found[0][-1] > 10
    # With a model that is given, columns became dicts before the training.
    seen, given_models = list[type](), []
    for batches in (dicts, columns):

        def features(rows: Any) -> Any:
            seen.append(type(rows))
            return np.array(field_values(itemgetter("x"), rows))[:, None]

        flow, source = Flow("given"), type("Given", (Batches,), {"batches": batches})
        labels = replace(by_field, features=features)
        stream = timed(flow.from_source(source))
        models = train_online(stream, AdaptiveLinearModel, labels=labels, mini_batch=500).models.collect()
        flow.run()
        given_models.append(frozen(models.items[-1].parameters))
        assert set(seen) == {type(batches[0])}
        seen.clear()
    assert given_models[0] == given_models[1]
