"""The training of a service: labels in time, features by kind, settings that change."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed

from streamiter import Flow
from streamiter.errors import ConfigurationError, JobFailed, ModelError, StreamiterError
from streamiter.learn import BadRows
from streamiter.models import LinearPredictor, ModelSnapshot
from streamiter.service.learning import ServiceLearning, decoder_of
from streamiter.service.service import OnlineLearningService
from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.service.settings.labels import label_of, milliseconds_of, milliseconds_of_texts
from streamiter.service.settings.tables import (
    InputSettings,
    LabelSettings,
    LearnSettings,
    PublishSettings,
    ServiceSettings,
    WatchSettings,
)
from streamiter.testing import VirtualClock

LATE = FieldComparison("delay", ">", 15.0)
BY_CLOCK = LabelSettings(LATE, event="arrival", key="flight", within_s=100.0)
BY_EVENTS = LabelSettings(LATE, event="arrival", key="flight", within_s=100.0, time="at")
CLICKS = LabelSettings(
    FieldComparison("event", "==", "click"),
    event="click",
    key="view",
    within_s=60.0,
    time="at",
    otherwise=False,
    question="view",
)
START_S = 1_700_000_000


def question(flight: str, at: int = 0, **more: Any) -> dict[str, Any]:
    return {"event": "departure", "flight": flight, "at": START_S + at, **more}


def answer(flight: str, delay: Any = 20, at: int = 0) -> dict[str, Any]:
    return {"event": "arrival", "flight": flight, "delay": delay, "at": START_S + at}


class Learning:
    """A training with late labels: the labels that it learned, and how many records it refused."""

    def __init__(self, label: LabelSettings, on_error: str = "skip") -> None:
        learn = LearnSettings(
            "classification", label, {"km": "number"}, learner="ftrl", learner_settings={"mini_batch": 1}
        )
        source = InputSettings("memory://in", on_error=on_error)
        settings = ServiceSettings("s", source, learn, PublishSettings("memory://out", None, 1))
        self.flow, self.given, self.clock = Flow("f"), Fed(), VirtualClock()
        training = ServiceLearning(settings).train(self.flow.from_source(lambda: self.given))
        self._predicted = training.predictions.collect()

    async def __aenter__(self) -> Learning:
        self.job = await self.flow.start(clock=self.clock)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.job.stop("abort")

    async def give(self, *events: Any) -> None:
        """Give events, one batch each."""
        for event in events:
            self.given.give(event)
            await self.clock.advance(0)

    @property
    def refused(self) -> int:
        return sum(step.counts.rejected for task in self.job.statistics().tasks for step in task.steps)

    @property
    def labels(self) -> list[float]:
        return [float(label) for rows in self._predicted.items for label in rows["targets"]]


async def test_an_answer_without_a_question_ends_no_service() -> None:
    """A service that began in the middle of a topic failed at the first arrival of an older departure."""
    for on_error in ("fail", "skip"):
        async with Learning(BY_CLOCK, on_error) as learning:
            await learning.give(answer("old"), question("a"), answer("a"), answer("a", 1), answer("b"))
            assert learning.labels == [1.0]
            assert learning.refused == 3


async def test_a_question_that_waits_for_too_long_is_forgotten() -> None:
    """Cancelled flights were never answered, and filled the memory."""
    async with Learning(BY_CLOCK) as learning:
        await learning.give(question("a"), question("b"), question("c"))
        await learning.clock.advance(60)
        await learning.give(question("a"))  # Asked again: the wait begins again.
        await learning.clock.advance(39)
        await learning.give(answer("b", 1))
        await learning.clock.advance(2)
        await learning.give(answer("c"), answer("a"))
        assert learning.labels == [0.0, 1.0]
        assert learning.refused == 1


async def test_no_answer_in_time_is_a_label_where_the_file_says_so() -> None:
    """A view without a click was no example, so that each view in the training had a click."""
    async with Learning(replace(CLICKS, schedule="at once")) as learning:
        views = [{"event": "view", "view": n, "at": START_S + at} for n, at in enumerate((0, 1, 2, 62, 63))]
        await learning.give(*views[:3], {"event": "scroll"}, {"event": "click", "view": 1, "at": START_S + 50})
        assert learning.labels == [1.0]
        await learning.give(*views[3:])
        # Question 2 waits until the events are 60 s after it.
        assert learning.labels == [1.0, 0.0, 0.0]
        assert learning.refused == 0


def test_answers_may_have_a_topic_of_their_own() -> None:
    """Views and clicks were in two topics, as usual, and a program of one's own had to bring them into one."""
    views = [{"view": n, "km": n % 7, "at": START_S + n} for n in range(300)]
    clicks = [{"view": n, "at": START_S + n + 30.5} for n in range(0, 300, 3)]
    label = LabelSettings(
        FieldComparison("input.answers", "==", "answer"),
        event="answer",
        event_field="input.answers",
        key="view",
        within_s=60.0,
        time="at",
        otherwise=False,
    )
    found = []
    for settings in (label, replace(CLICKS, question=None)):
        is_apart = settings is label
        learn = LearnSettings("classification", settings, {"km": "number"})
        source = InputSettings("memory://in", on_error="skip")
        learning = ServiceLearning(ServiceSettings("s", source, learn, PublishSettings("memory://out", None, 1)))
        flow = Flow("f")
        # All of the views, then all of the clicks, or both in their order.
        given = [*views, *({"event": "click", **click} for click in clicks)]
        events = views if is_apart else sorted(given, key=lambda event: event["at"])
        answers = flow.from_items([*clicks, 7], name="answers") if is_apart else None
        training = learning.train(flow.from_items(events), answers=answers)
        predicted, models = training.predictions.collect(), training.models.collect()
        statistics = flow.run()
        found.append((np.concatenate([rows["targets"] for rows in predicted.items]), models.items[-1].parameters))
        refused = sum(step.counts.rejected for task in statistics.tasks for step in task.steps)
        assert refused == is_apart
    (labels, model), (expected, of_one) = found
    assert labels.tolist() == expected.tolist()
    assert labels.sum() == 100
    # The state counts mini-batches, too, and these depend on timing.
    for name in model.keys() - {"state"}:
        assert np.asarray(model[name]).tolist() == np.asarray(of_one[name]).tolist()


async def test_a_time_in_the_future_is_refused() -> None:
    """A clock of a sender was wrong by years, and from then on no view without a click was an example."""
    async with Learning(CLICKS) as learning:
        await learning.give(
            *({"event": "view", "view": n, "at": START_S + at} for n, at in enumerate((0, 1e9, 5, 70, 71)))
        )
        assert learning.labels == [0.0, 0.0]
        assert learning.refused == 1


@pytest.mark.parametrize(
    "record", [7, None, {"event": "departure"}, question("a", time=1) | {"at": "soon"}, question("a") | {"flight": [1]}]
)
async def test_a_record_that_is_no_event_follows_the_policy(record: Any) -> None:
    """One damaged record ended the service, or was left out without a trace."""
    async with Learning(BY_EVENTS) as learning:
        await learning.give(record, question("b"), answer("b"))
        assert learning.labels == [1.0]
        assert learning.refused == 1
    strict = Learning(BY_EVENTS, "fail")
    job = await strict.flow.start(clock=strict.clock)
    strict.given.give(record)
    with pytest.raises(JobFailed):
        await job.wait()


def test_times_of_all_forms_are_read() -> None:
    """Seconds were taken for milliseconds, and each question was too old."""
    assert milliseconds_of("2023-11-14T22:13:20Z") == milliseconds_of("2023-11-15T00:13:20+02:00") == START_S * 1000
    assert milliseconds_of(START_S) == milliseconds_of(START_S * 1000.0) == START_S * 1000
    for wrong in (True, None, float("nan"), [1], np.datetime64("NaT")):
        with pytest.raises(ValueError, match="expected a time as ISO 8601"):
            milliseconds_of(wrong)
    at = datetime(2026, 1, 31, 12, 0, 0, 1_000, tzinfo=UTC)
    tables = [np.datetime64("2026-01-31T12:00:00.001", unit) for unit in ("ms", "us", "ns")]
    assert {milliseconds_of(time) for time in (at, at.replace(tzinfo=None), *tables)} == {1769860800001}


def test_times_and_labels_of_a_batch_are_those_of_its_records() -> None:
    """Texts of a batch are read at once; half a millisecond, or another zone, must not make another time."""
    texts = ["2023-11-14", "2023-11-14T22:13:20.0005Z", "2023-11-14T22:13:20.001500", "20231115T001320+0200"]
    texts += ["0001-01-02T00:00", "9999-12-31T23:59:59.999999", "1969-12-31T23:59:59.999499-05:30"]
    assert milliseconds_of_texts(texts) == [milliseconds_of(text) for text in texts]
    for texts in (["1969-12-31T23:59Z", "2024-02-29T00:00Z"], ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]):
        assert milliseconds_of_texts(texts) == [milliseconds_of(text) for text in texts]
        assert milliseconds_of_texts([texts[0], texts[1][:-1]]) == [milliseconds_of(text) for text in texts]
    for wrong in ("2023-02-29T10:15Z", "0000-02-29T10:15Z", "2023-02-20T24:15Z", "2023-02-2\N{TAMIL DIGIT TWO}T10:15Z"):
        with pytest.raises(ValueError, match=r"range|isoformat|must be in"):
            milliseconds_of_texts([wrong])
    answers = [{"delay": delay} for delay in (20, 15, 15.5, True, -(10**30))]
    assert LATE.of_batch(answers) == [LATE(each) for each in answers]
    for other in ("20", float("nan")):
        with pytest.raises(ValueError, match="expected"):
            LATE.of_batch([*answers, {"delay": other}])
    # A flight whose delay was missing in a table was learned as one that was on time.
    with pytest.raises(ValueError, match="expected delay as in delay > 15, given None"):
        LATE({"delay": np.float32("nan")})
    assert LATE({"delay": np.float32(20.0)})
    assert [LATE({"delay": text}) for text in ("20", " 7.5")] == [True, False]
    with pytest.raises(ValueError, match="expected delay as in delay > 15, given 'much'"):
        LATE({"delay": "much"})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("classification", {0: False, True: True, "yes": "yes"}, [2, None, 0.5, [1]]),
        ("regression", {3: 3, -0.5: -0.5, "3.5": 3.5}, ["three", "3,5", "", None, float("nan"), float("inf")]),
        ("multiclass", {"red": "red", 3: 3}, [None, 0.5, ["red"]]),
    ],
)
def test_labels_fit_their_kind(kind: Any, good: dict[Any, Any], bad: list[Any]) -> None:
    """The text "false" was a label, and counted as true; or a learner that needs truth values got texts.

    The numbers of a file of CSV, which are texts, were refused as labels, and read as features. A whole history of
    Parquet became dead letters, since truth values and whole numbers of tables are those of numpy.
    """
    read = label_of(LearnSettings(kind, LabelSettings("late")))
    for given, expected in good.items():
        found = read({"late": np.array([given])[0]})
        assert found == expected
        assert not isinstance(found, np.generic)
    if kind == "classification":
        with pytest.raises(ValueError, match=r"given 'yes'; write value = .*== 'text'"):
            label_of(LearnSettings(kind, LabelSettings("late"), learner="ftrl"))({"late": "yes"})
    assert [read({"late": given}) for given in good] == list(good.values())
    for given in bad:
        with pytest.raises(ValueError, match=r"expected .* in the field 'late', given"):
            read({"late": given})


# ---- features

KINDS: dict[str, Any] = {"km": "number", "hour": "category", "title": "words", "id": "ignore"}


def features(**more: Any) -> FeatureRows:
    return FeatureRows(LearnSettings("classification", LabelSettings("late"), KINDS, **more))


def test_each_field_is_read_as_its_kind() -> None:
    """Hour 5 was a number in training and a text in predictions."""
    rows = features()([{"km": 3, "hour": 5, "title": "Heavy  RAIN, heavy", "id": 1}, {"km": None, "hour": "5"}])
    assert rows.fields == ("km",)
    assert rows.text_fields == ("hour", "title", "title")
    assert rows.places[0, 0] == rows.places[1, 0]
    assert (rows.places[1, 1:3] == -1).all()
    for wrong, reason in (
        (7, "expected records with named fields, given 7"),
        ({"title": 3}, "expected a text in the field 'title', given 3"),
        ({"km": "many"}, "numbers in the field 'km', as kinds= says, .* given 'many', a text that is no number; name"),
    ):
        with pytest.raises(BadRows, match=reason) as bad:
            features().check([{"km": 3}, {"km": "3"}, wrong])
        assert bad.value.rows == (2,)


def test_without_kinds_the_label_is_no_feature() -> None:
    """The label was among the features, and the model was perfect until it was used."""
    label = LabelSettings(LATE, event="arrival", key="flight", time="at", within_s=1.0)
    rows = FeatureRows(LearnSettings("classification", label))([{**question("a"), "km": 1, "delay": 20}])
    assert (rows.fields, rows.text_fields) == (("km",), ())


def learned(learn: LearnSettings, records: list[dict[str, Any]]) -> tuple[ServiceLearning, list[ModelSnapshot]]:
    settings = ServiceSettings("s", InputSettings("memory://in"), learn, PublishSettings("memory://out", None, 1))
    learning, flow = ServiceLearning(settings), Flow("s")
    models = learning.train(flow.from_items(records)).models.collect()
    assert flow.run().state == "finished"
    return learning, models.items


ROWS = [
    {"km": float(n % 7), "hour": n % 3, "title": "heavy rain" if n % 2 else "the sun", "id": n, "late": n % 2}
    for n in range(1200)
]


@pytest.mark.parametrize(
    ("learner", "settings"),
    [
        ("default", {}),
        ("ftrl", {"alpha": 1.0, "mini_batch": 20}),
        ("adam", {"learning_rate": 0.1, "scales": {"km": 0.1}, "bits": 10}),
    ],
)
def test_a_model_predicts_rows_as_they_are_in_the_topic(learner: str, settings: dict[str, Any]) -> None:
    """A published model could be used only by code that repeated the features of the training."""
    learn = LearnSettings("classification", LabelSettings("late"), KINDS, learner=learner, learner_settings=settings)
    learning, models = learned(learn, ROWS)
    predict = learning.features.predictor(models[-1].parameters, "model")
    rain, sun = {"km": 3, "hour": 1, "title": "Rain!"}, {"km": 3, "hour": "1", "title": "sun"}
    assert predict(rain) > 0.6 > 0.4 > predict(sun)
    assert predict([rain, sun]).tolist() == pytest.approx([predict(rain), predict(sun)])
    assert predict({}) == pytest.approx(0.5, abs=0.3)
    explained = predict.explain(rain)
    assert max(explained.contributions, key=lambda name: float(explained.contributions[name])) == "title"
    assert 1 / (1 + np.exp(-explained.score)) == pytest.approx(predict(rain))
    with pytest.raises(ModelError, match="expected a text in the field 'title', given 3"):
        predict([{"title": 3}])


def test_the_published_model_reads_rows_as_the_service_does() -> None:
    """The same row got .93 from the service and .41 from a program that followed the model, without an error."""
    start = datetime(2024, 3, 1, tzinfo=UTC)
    rows = [
        row | {"at": (start + timedelta(hours=5 * n)).isoformat(), "price": f"{n % 7}.5", "zip": f"0{n % 3}"}
        for n, row in enumerate(ROWS)
    ]
    label = LabelSettings("late")
    table: Any = {**KINDS, "at": "time", "price": "number", "title": "text"}  # text is another name of words
    for learn in (
        LearnSettings("classification", label, table, time_zone="Europe/Berlin"),
        LearnSettings("classification", label, kinds={"title": "words", "id": "ignore"}),
    ):
        learning, models = learned(learn, rows)
        parameters = models[-1].parameters
        assert (parameters["kinds"]["at"], parameters["kinds"]["price"]) == ("time", "number")
        assert "id" not in parameters["fields"]
        served, follower = learning.features.predictor(parameters, "model"), LinearPredictor(parameters)
        for row in rows[:4]:
            for given in (row, row | {"title": row["title"].split(), "price": float(row["price"])}):
                assert served(given) == follower(given) == pytest.approx(served([row])[0], rel=1e-12)
        for wrong in ({"price": "free"}, {"at": "soon"}, {"title": 7}):
            for predict in (served, follower):
                with pytest.raises(ModelError, match=f"in the field '{next(iter(wrong))}'"):
                    predict(wrong)


def test_a_version_from_before_versions_had_kinds_is_read_by_the_settings() -> None:
    """After an update of the service its last version was asked with whole texts where it had learned words."""
    learn = LearnSettings("classification", LabelSettings("late"), KINDS)
    learning, models = learned(learn, ROWS)
    older = {name: value for name, value in models[-1].parameters.items() if name != "kinds"}
    row = {"km": 3, "hour": 1, "title": "Rain!"}
    before, now = (learning.features.predictor(each, "model")(row) for each in (older, models[-1].parameters))
    assert before == now > 0.6


@pytest.mark.parametrize(("kind", "field"), [("regression", "km"), ("multiclass", "title")])
def test_numbers_and_classes_are_learned(kind: Any, field: str) -> None:
    """A multiclass model was trained as two classes."""
    learning, models = learned(LearnSettings(kind, LabelSettings(field)), ROWS)
    predicted = learning.features.predictor(models[-1].parameters, "model")([{"hour": 1}])
    assert predicted.shape == ((1,) if kind == "regression" else (1, 3))


@pytest.mark.parametrize(
    ("learner", "before", "after", "rate"),
    [
        ("sgd", {"learning_rate": 0.3}, {"learning_rate": 0.1}, 0.1),
        ("sgd", {"learning_rate": 0.3}, {}, 0.5),
        ("adam", {}, {"learning_rate": 0.1}, 0.1),
    ],
)
def test_a_learning_rate_changes_while_the_training_runs(learner: str, before: Any, after: Any, rate: float) -> None:
    """A new learning rate needed a restart; one that the file had not named before was told as changed, and was not."""
    learn = LearnSettings("classification", LabelSettings("late"), KINDS, learner=learner, learner_settings=before)
    settings = ServiceSettings("s", InputSettings("memory://in"), learn, PublishSettings("memory://out"))
    service = OnlineLearningService(settings)
    model: Any = service.learning._make_model()()
    [change] = service.apply(replace(settings, learn=replace(learn, learner_settings=after)))
    assert (change.key, change.needs) == ("learn.settings.learning_rate", None)
    assert model.optimizer.learning_rate.at(1) == rate
    assert service.settings.learn.learner_settings == after


def test_a_learning_rate_of_another_learner_needs_a_restart() -> None:
    """The rate of the new learner was told as changed, while the old learner, which has none, learned on."""
    learn = LearnSettings("classification", LabelSettings("late"), KINDS, learner="ftrl")
    settings = ServiceSettings("s", InputSettings("memory://in"), learn, PublishSettings("memory://out"))
    service = OnlineLearningService(settings)
    other = replace(learn, learner="adam", learner_settings={"learning_rate": 0.1})
    changes = service.apply(replace(settings, learn=other))
    assert {change.key for change in changes if change.needs} == {"learn.learner", "learn.settings.learning_rate"}
    assert len(changes) == 2
    assert service.settings.learn == learn


def test_a_decoder_of_ones_own_is_found_or_named() -> None:
    """A misspelt decoder was an AttributeError in the middle of the start."""
    assert decoder_of("default") is None
    assert decoder_of("streamiter.topics:Text") is not None
    for name in ("nowhere:Decoder", "streamiter.topics:Nothing"):
        with pytest.raises(ConfigurationError, match=f"given '{name}': .* add its folder to PYTHONPATH"):
            decoder_of(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def decode(", r"input.decoder: own:made cannot be imported: SyntaxError: .*own.py, line 1"),
        ("key = {}['key']", r"input.decoder: own:made cannot be imported: \S*own.py, line 1: KeyError: 'key'"),
        ("class made:\n def __init__(self, path): 0", r"input.decoder: own:made failed: TypeError: .*argument: 'path'"),
        ("made = 1", r"expected decode= to be a decoder such as Json\(\), given 1"),
    ],
)
def test_an_error_in_a_decoder_of_ones_own_is_no_bug_of_streamiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    """An error in the user's module asked the user to report it; --check accepted a decoder that was a number."""
    (tmp_path / "own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    with pytest.raises(StreamiterError, match=message):
        decoder_of("own:made")


def test_a_training_with_late_labels_ends_with_all_its_answers() -> None:
    """The step that matches answers left out or doubled examples of the training."""
    events = []
    for n in range(900):
        events.append({"event": "departure", "flight": n, "km": n % 5, "at": START_S + n})
        if n >= 40 and n % 10:
            events.append(answer(n - 40, 30 if (n - 40) % 5 > 2 else 0, at=n))  # type: ignore[arg-type]
    learn = LearnSettings("classification", BY_EVENTS, {"km": "number"})
    learning, models = learned(learn, events)
    assert models[-1].records == 860 - 86
    assert float(learning.features.predictor(models[-1].parameters, "model")({"km": 4})) > 0.8


def test_a_service_learns_the_quantile_that_its_file_names() -> None:
    """The setting was read, and the model predicted the mean."""
    learn = LearnSettings(
        "regression", LabelSettings("minutes"), None, learner_settings={"loss": "quantile", "quantile": 0.9}
    )
    settings = ServiceSettings("s", InputSettings("memory://in"), learn, PublishSettings("memory://out", None, 1))
    draw = np.random.default_rng(1)
    flow = Flow("f")
    rides = flow.from_items([{"km": km, "minutes": float(draw.exponential(4.0))} for km in draw.random(2_000).tolist()])
    predicted = ServiceLearning(settings).train(rides).predictions.collect()
    flow.run()
    rows = predicted.items[-1]
    assert rows["loss"] == ("quantile", (0.9,))
    assert np.mean(rows["targets"] <= rows["predictions"]) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("learner", ["default", "ftrl"])
def test_a_service_watches_each_question_once_unless_an_optimizer_learns(learner: str) -> None:
    """The answer of a question counted as a second row, in which all fields were missing."""
    features = {"km": "number", "plane": "category"}
    learn = LearnSettings("classification", BY_EVENTS, features, learner=learner)  # type: ignore[arg-type]
    source, out = InputSettings("memory://in", on_error="skip"), PublishSettings("memory://out", None, 1)
    settings = ServiceSettings("s", source, learn, out, watch=WatchSettings(reference=100, window=100, sample=1.0))
    flow = Flow("f")
    events = []
    for n in range(300):
        events.append(question(f"f{n}", n, km=float(n % 9), plane=None if n >= 200 else "jet"))
        events.append(answer(f"f{n}", 30 * (n % 2), n + 1))
    training = ServiceLearning(settings).train(flow.from_items(events, parallelism=1))
    reports, _ = training.fields.collect(), training.models.collect()
    flow.run()
    found = [
        (each["first_row"], each["rows"], {f["field"]: f["shifted"] for f in each["fields"]}) for each in reports.items
    ]
    expected = [(100, 100, {"km": [], "plane": []}), (200, 100, {"km": [], "plane": ["missing"]})]
    assert found == (expected if learner == "default" else [])


def test_warnings_of_a_service_name_keys_of_its_file(caplog: pytest.LogCaptureFixture) -> None:
    """Who had only a file was told to check arguments of train_online, which the file does not have."""
    for label in ("late", "never"):
        learn = LearnSettings(
            "classification",
            LabelSettings(label),
            {"km": "number"},
            learner="sgd",
            learner_settings={"learning_rate": 1.0},
        )
        rows = [{"km": 9.0 * (n % 97), "late": (n * 7919) % 10 > 7, "never": False} for n in range(3_000)]
        flow = Flow(f"service {label}")
        source, publish = InputSettings("memory://in"), PublishSettings("memory://out", None, 1)
        ServiceLearning(ServiceSettings("s", source, learn, publish)).train(flow.from_items(rows))
        flow.run()
    far, equal = caplog.messages
    assert "rows (in the file: look at field, event and key of learn.label, and at learn.features)" in far
    assert 'too high (in the file: learn.learner = "default" needs no scaling and no learning rate; an optimizer' in far
    assert equal.endswith("check learn.label in the file")
    assert not [name for name in ("train_online", "model=", "label=", "_of=") if name in far + equal]
