"""What a field is, a number, a category, words or a time, is decided by its first rows, or by the user."""

import datetime as dt
import logging
import math
import zoneinfo
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
from flow.test_topics_in_flows import content, made
from learn.frozen_states import frozen, learned
from learn.online_support import DELAYED, trained
from support.examples import random_examples

from streamiter import Columns, Flow, topic
from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.learn import AdaptiveLinearModel, BadRows, Embeddings, LogisticRegression, train_online
from streamiter.models import LinearPredictor
from streamiter.topics import MemoryBroker
from streamiter.values import field_states
from streamiter_files import Csv

LOG = "streamiter.learn"
Rows = list[dict[str, Any]]


def numbers(count: int = 600) -> tuple[Rows, list[bool]]:
    """Return rows with numbers, some of them missing, and labels that depend on them."""
    draw = np.random.default_rng(1)
    rows: Rows = [
        {"km": float(km), "n": int(n), "sky": "sun" if n % 2 else "rain"}
        for km, n in zip(draw.normal(500, 90, count), draw.integers(-5, 50, count), strict=True)
    ]
    for n, missing in enumerate((math.nan, math.inf, -math.inf)):
        rows[200 + 7 * n]["km"] = missing
    return rows, [bool(row["km"] > 500) ^ (row["n"] > 40) for row in rows]


def as_texts(rows: Rows) -> Rows:
    return [{name: str(value) for name, value in row.items()} for row in rows]


def model_of(rows: Any, labels: Any, **options: Any) -> AdaptiveLinearModel:
    model = AdaptiveLinearModel(**options)
    model.learn(rows, labels)
    return model


def same_model(first: AdaptiveLinearModel, other: AdaptiveLinearModel) -> bool:
    names = ("weights", "center", "limit", "places", "fields", "text_fields")
    ours, theirs = first.parameters(), other.parameters()
    return bool(frozen([ours[name] for name in names]) == frozen([theirs[name] for name in names]))


# ---- numbers


def test_texts_that_are_numbers_are_learned_as_the_numbers_to_the_bit(caplog: pytest.LogCaptureFixture) -> None:
    """Each number of a CSV file was a category of its own: AUC .53 where the numbers reach .98."""
    rows, labels = numbers()
    expected = model_of(rows, labels)
    with caplog.at_level(logging.INFO, LOG):
        model = model_of(as_texts(rows), labels)
        model.learn(as_texts(rows), labels)
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "'km' is read as a number; kinds={'km': …} decides otherwise" in text] == said[:1]
    assert len(said) == 2  # One line for each field, once.
    expected.learn(rows, labels)
    assert same_model(model, expected)
    table = {name: np.array([row[name] for row in as_texts(rows)]) for name in rows[0]}
    for given in (Columns(table), pandas.DataFrame(table), as_texts(rows)):
        assert same_model(model_of(given, labels), model_of(rows, labels))


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["12", "-7", " 1e5", "0.5", "+3", ".5", "1e999", "NA"], "number"),
        (["00123", "04510", "90210"], "category"),
        (["12", "A7", "B9", "14"], "category"),
        (["1,5", "2,25"], "category"),
        (["true", "false"], "category"),
        (["1_000", "１８", "0x10", "1e", "--1"], "category"),
        (["2024-05-01", "2024-05-01T10:00:00.5+02:00", "2024-12-31 23:59Z"], "time"),
        (["2024-05-01", "2024-13-01", "2024"], "category"),
        (["", "nan", "None"], "category"),
    ],
)
def test_the_first_texts_of_a_field_decide_its_kind(texts: list[str], kind: str) -> None:
    """Ids such as 00123 became the number 123, or numbers with a missing one among them became categories."""
    count = 2 * field_states.TEXTS_THAT_DECIDE
    model = model_of([{"f": texts[n % len(texts)]} for n in range(count)], [n % 3 == 0 for n in range(count)])
    state: Any = model.fields.state()["field states"]
    assert state["f"][0] in (kind, None)
    parameters = model.parameters()
    fields = {"number": ["f"], "time": ["f[trend]"], "category": []}[kind]
    assert parameters["fields"] == fields
    assert ("f" in parameters["text_fields"]) == (kind == "category")
    assert parameters.get("kinds", {}) == ({} if kind == "category" else {"f": kind})


def test_texts_that_are_no_numbers_do_not_change(caplog: pytest.LogCaptureFixture) -> None:
    """A category of which one value in a thousand looked like a number had other weights than before."""
    count = 400
    texts = ["Rome", "Kyiv", "", "9E", "x 1"]
    given = [{"t": texts[n % 5]} for n in range(count)]
    labels = [n % 4 == 0 for n in range(count)]
    with caplog.at_level(logging.INFO, LOG):
        model = model_of(given, labels)
    assert not caplog.records
    assert model.parameters()["fields"] == []
    # A list of one text is a text that can be nothing else.
    assert same_model(model, model_of([{"t": [row["t"]]} for row in given], labels))
    late = [*given, {"t": "7"}, {"t": "2024-05-01"}]
    assert model_of(late, [*labels, True, False]).parameters()["fields"] == []


def test_a_few_other_texts_among_numbers_are_told_and_then_refused(caplog: pytest.LogCaptureFixture) -> None:
    """One damaged value in the first rows made a category of a field of numbers, or later ones were skipped."""
    rows = [{"km": str(n)} for n in range(150)]
    rows[30]["km"] = "unknown"
    with caplog.at_level(logging.INFO, LOG):
        model = model_of(rows, [n % 2 for n in range(150)])
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "AdaptiveLinearModel: the field 'km': 1 of its first 100 values are no numbers; from here on it refuses such "
        "texts; kinds={'km': …} decides otherwise"
    ]
    before = frozen(model.state())
    reason = (
        "expected numbers in the field 'km', as in its first rows, given 'unknown', a text that is no number; "
        "kinds={'km': 'category'}, in a service learn.kinds, reads all of its texts as categories"
    )
    with pytest.raises(BadRows, match=reason) as caught:
        model.learn([{"km": "3"}, {"km": "unknown"}, {"km": ""}, {"km": "2024-05-01"}], [1, 0, 1, 0])
    assert caught.value.rows == (1, 3)
    assert frozen(model.state()) == before
    model.learn([{"km": "003"}, {"km": 4}, {"km": "NA"}], [1, 0, 1])
    with pytest.raises(ModelError, match=r"expected a number in the field 'km'.* given 'unknown'"):
        LinearPredictor(model.parameters())({"km": "unknown"})


def test_a_field_of_many_other_texts_becomes_a_category(caplog: pytest.LogCaptureFixture) -> None:
    """Street numbers, of which every third has a letter, were refused one by one."""
    texts = [f"{n % 40}{'a' if n % 3 else ''}" for n in range(400)]
    with caplog.at_level(logging.INFO, LOG):
        model = model_of([{"house": text} for text in texts], [n % 2 for n in range(400)])
    assert "of its first 100 values 34 are numbers, 0 times and 66 other texts, so it is a category" in caplog.text
    parameters = model.parameters()
    assert (parameters["fields"], parameters["text_fields"]) == ([], ["house"])
    assert len(parameters["center"]) == len(parameters["places"])
    with pytest.raises(BadRows, match="expected texts in the field 'house'"):
        model.learn([{"house": 7}], [1])
    with caplog.at_level(logging.INFO, LOG):
        caplog.clear()
        model_of([{"price": f"{n},50"} for n in range(200)], [n % 2 for n in range(200)])
    assert "it is a category, and 100 of its first 100 values look like numbers, with a comma, a" in caplog.text


@pytest.mark.parametrize("shape", ["{} km", "{}.5 kg", "€{}.99", "{} %", "{}km", "{} km/h", "1,{}00 USD"])
def test_numbers_with_a_unit_are_told(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """Distances such as "27.2 km" became 600 categories without a word, and the model learned nothing from them."""
    model_of([{"km": shape.format(n)} for n in range(200)], [n % 2 for n in range(200)])
    assert "100 of its first 100 values look like numbers, with a comma, a unit or zeros before" in caplog.text


@pytest.mark.parametrize("shape", ["{}b", "A {}", "192.168.0.{}", "1.2.{}", "{}:30", "{} {}", "{}rd"])
def test_ids_addresses_and_versions_are_not_told(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning about each field of ids hides the warning that matters."""
    model_of([{"id": shape.format(n, n)} for n in range(100, 300)], [n % 2 for n in range(200)])
    assert "look like numbers" not in caplog.text


def test_the_user_decides_what_a_field_is(caplog: pytest.LogCaptureFixture) -> None:
    """Zip codes and hours were learned as numbers, because their texts are numbers."""
    rows = [{"zip": 90_000 + n % 5, "hour": f"{n % 24}", "id": f"00{n}", "note": "Gift card" if n % 2 else "a CARD"}
            for n in range(300)]  # fmt: skip
    labels = [n % 5 == 0 for n in range(300)]
    kinds: Any = {"zip": "category", "hour": "category", "id": "number", "note": "words"}
    with caplog.at_level(logging.INFO, LOG):
        model = model_of(rows, labels, kinds=kinds)
    assert not caplog.records
    parameters = model.parameters()
    assert (parameters["fields"], parameters["kinds"]) == (["id"], kinds)
    assert parameters["text_fields"] == ["hour", "note", "zip"]
    by_hand = [
        {"zip": [str(row["zip"])], "hour": [row["hour"]], "id": float(row["id"]), "note": row["note"].lower().split()}
        for row in rows
    ]
    expected = model_of(by_hand, labels)
    assert same_model(model, expected)
    assert model.predict(rows[:3]).tolist() == expected.predict(by_hand[:3]).tolist()
    for wrong in ({"zip": {}}, {"note": 7}, {"id": "A7"}, {"id": dt.date(2024, 5, 1)}):
        with pytest.raises(BadRows, match=f"in the field '{next(iter(wrong))}'"):
            model.learn([wrong], [1])
        with pytest.raises(ModelError, match=f"in the field '{next(iter(wrong))}'"):
            LinearPredictor(parameters)(wrong)
    with pytest.raises(
        ConfigurationError, match=r"kinds=\): expected a dict .* number, category, words, last 20, time, given"
    ):
        AdaptiveLinearModel(kinds={"km": "text"})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"time_zone=\): expected the name of a time zone of the IANA"):
        AdaptiveLinearModel(time_zone="Mars/Olympus")


# ---- any cut, any restart


class Stream(NamedTuple):
    """Records, and where to cut them."""

    records: Rows
    cuts: list[int]
    crosses: list[tuple[str, str]]


VALUES: list[Any] = [
    "1.5", "-2", "7", "007", "1,5", "", "NA", "x", "2024-05-01", "2024-05-01T10:00", ["x"], [], None,
    4.0, math.nan, dt.datetime(2024, 5, 2, 3), np.datetime64("2024-05-01T10"), np.datetime64("NaT"),
]  # fmt: skip


def a_stream(random: Random) -> Stream:
    count = random.randint(2, 12)
    of_field = {name: random.sample(VALUES, random.randint(1, 4)) for name in "abc"}
    records = [
        {name: random.choice(values) for name, values in of_field.items() if random.random() < 0.8}
        for _ in range(count)
    ]
    cuts = [0, *sorted(random.sample(range(1, count), random.randrange(count))), count]
    return Stream(records, cuts, random.choice([[], [("a", "b")], [("a[hour]", "c"), ("b", "b")]]))


def learn(model: AdaptiveLinearModel, records: Rows) -> list[Any]:
    """Learn as one batch, without rows that are refused; return the prediction for each row."""
    left = list(range(len(records)))
    while left:
        try:
            found = model.learn_each([records[row] for row in left], [row % 2 for row in left])
        except BadRows as bad:
            left = [row for place, row in enumerate(left) if place not in bad.rows]
        else:
            known = dict(zip(left, found.tolist(), strict=True))
            return [known.get(row, "refused") for row in range(len(records))]
    return ["refused"] * len(records)


@pytest.fixture
def few_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_states, "TEXTS_THAT_DECIDE", 4)
    monkeypatch.setattr(field_states, "OTHERS_MAX", 1)


@random_examples(a_stream, examples=2_000, fewest=20)
def check_cuts(stream: Stream) -> None:
    single, cut, again = (AdaptiveLinearModel(bits=5, crosses=stream.crosses) for _ in range(3))
    by_row = []
    for number, record in enumerate(stream.records):
        restored = AdaptiveLinearModel(bits=5, crosses=stream.crosses)
        restored.restore(again.state())
        again = restored
        # Labels as in the batch from which the row comes.
        start = max(each for each in stream.cuts if each <= number)
        label = (number - start) % 2
        for learner in (single, again):
            try:
                found = learner.learn_each([record], [label]).tolist()
            except BadRows:
                found = ["refused"]
        by_row += found
    by_batch = [
        prediction
        for start, stop in zip(stream.cuts, stream.cuts[1:], strict=False)
        for prediction in learn(cut, stream.records[start:stop])
    ]
    assert by_batch == by_row
    assert learned(cut) == learned(single)
    assert frozen(single.state()) == frozen(again.state())


@pytest.mark.parametrize("embeddings", [None, Embeddings(kind="fm", factors=4, admit=1, at_most="2 MB")])
def test_of_a_sequence_only_the_last_texts_count_for_learner_and_versions(embeddings: Embeddings | None) -> None:
    """A user of many years was like a thousand items, and no more like those of today."""
    draw = np.random.default_rng(3)
    whole: Rows = [{"last": [f"i{item}" for item in draw.integers(9, size=length)]} for length in range(8)] * 40
    cut: Rows = [{"last": row["last"][-3:]} for row in whole]
    labels = ["i4" in row["last"] for row in cut]
    options: dict[str, Any] = {"kinds": {"last": "last 3"}, "embeddings": embeddings, "shapes": False}
    first = model_of(whole, labels, **options)
    assert same_model(first, model_of(cut, labels, **options))
    version = LinearPredictor(first.parameters())
    assert version([whole[7], cut[7]]).tolist() == pytest.approx(first.predict([cut[7]]).tolist() * 2, abs=1e-6)
    again = model_of([], [], **options)
    again.start_from(first.parameters())
    assert again.predict([whole[7]]).tolist() == pytest.approx(first.predict([cut[7]]).tolist(), abs=1e-6)
    with pytest.raises(ModelError, match=r"kinds: 'last' \(last 3\) is gone"):
        model_of([], [], embeddings=embeddings, shapes=False).start_from(first.parameters())


def test_neither_cuts_nor_restarts_change_what_a_field_is(few_decide: None) -> None:
    """With other transport batches, or after a restart, the same field was of another kind, and the model another."""
    check_cuts()


def a_day(count: int) -> Rows:
    start = dt.datetime(2024, 3, 1, tzinfo=dt.UTC)
    return [
        {
            "km": f"{n * 7 % 90}.5",
            "at": (start + dt.timedelta(minutes=11 * n)).isoformat(),
            "zip": f"{n % 7:05}",
            "late": n * 7 % 90 > 40,
        }
        for n in range(count)
    ]


def test_workers_and_mini_batches_do_not_decide_what_a_field_is() -> None:
    """Each worker decided for itself, by the rows that it happened to read first."""
    rows = a_day(300)
    model = model_of([{k: v for k, v in row.items() if k != "late"} for row in rows], [row["late"] for row in rows])
    assert model.parameters()["kinds"] == {"km": "number", "at": "time"}
    for seed, (mini_batch, workers) in enumerate([(7, 1), (7, 3), (100, 2), (1_000, 1)]):
        result = trained(rows, label="late", mini_batch=mini_batch, workers=workers, mode="synchronous", seed=seed)
        assert result.last == frozen(model.parameters(state=False)), (mini_batch, workers)


def test_late_labels_do_not_change_what_a_field_is() -> None:
    """The row of a question is made when it comes, and its field was of another kind when the answer came."""
    asked = [
        {"id": n, **{name: value for name, value in row.items() if name != "late"}} for n, row in enumerate(a_day(300))
    ]
    answers = [{"id": n, "answer": row["late"]} for n, row in enumerate(a_day(300))]
    events = [
        *asked[:40],
        *(event for both in zip(asked[40:], answers, strict=False) for event in both),
        *answers[260:],
    ]
    labels = replace(DELAYED, features=["km", "at", "zip"], waiting_max=1_000)
    results = [
        trained(events, labels=labels, mini_batch=mini_batch, seed=seed, workers=1, publish_every=100)
        for seed, mini_batch in enumerate([1, 7, 100, 1_000])
    ]
    assert [result.last for result in results[1:]] == [results[0].last] * 3
    assert results[0].models[-1].parameters["kinds"] == {"km": "number", "at": "time"}
    assert [round(result.metrics["loss"], 9) for result in results[1:]] == [round(results[0].metrics["loss"], 9)] * 3


async def test_a_text_that_is_no_number_follows_the_policy_of_the_training() -> None:
    """A field that stops being numbers after a while lost its rows without a word."""
    rows = [{"km": str(n % 9), "late": n % 9 > 4} for n in range(200)] + [{"km": "many", "late": True}]
    dead = await made(MemoryBroker(), "dead")
    flow = Flow("f")
    train_online(flow.from_items(rows, parallelism=1), label="late", dead_letter=dead)
    await (await flow.start()).wait()
    [letter] = await content(dead)
    headers = {name: value.decode() for name, value in letter.headers}
    assert "numbers in the field 'km', as in its first rows, given 'many', a text that is no number" in headers["error"]
    assert letter.value == b'{"km":"many","late":true}'


def test_the_options_of_train_online_are_those_of_its_own_model() -> None:
    """kinds= was given together with a model that never read it."""
    rows = [{"code": str(n % 3), "at": 1_700_000_000 + 3_600 * n, "late": n % 3 == 1} for n in range(200)]
    kinds: Any = {"code": "category", "at": "time"}
    result = trained(rows, label="late", kinds=kinds, time_zone="Europe/Berlin")
    assert result.models[-1].parameters["kinds"] == kinds
    assert result.models[-1].parameters["text_fields"] == ["at[hour]", "at[month]", "at[weekday]", "code"]
    assert result.metrics["accuracy"] > 0.9
    stream = Flow("f").from_items(rows)
    for options in (
        {"model": lambda: LogisticRegression(3), "kinds": kinds},
        {"features": lambda rows: np.ones((len(rows), 1)), "time_zone": "UTC"},
    ):
        with pytest.raises(
            GraphError, match=r"expected (no model=|the ready-made model and fields as features), given .*lambda: A"
        ):
            train_online(stream, label="late", **options)  # type: ignore[arg-type]


def test_a_csv_file_without_types_is_learned_as_one_with_types(tmp_path: Any) -> None:
    """Each column of a file was text, and each number a category: AUC .53 instead of .98."""
    rows, _ = numbers()
    lines = [f"{row['km']:.3f},{row['n']},{row['sky']},{'yes' if row['km'] > 500 else 'no'}\n" for row in rows]
    file = tmp_path / "trips.csv"
    file.write_text("km,n,sky,late\n" + "".join(lines))
    losses = []
    for as_columns in (False, True):
        for types in (None, {"km": "float64", "n": "int64"}):
            flow = Flow("f")
            stream = flow.source(topic(f"file:{file}"), decode=Csv(types, as_columns=as_columns))
            metrics = train_online(stream, label="late").validation.collect()
            flow.run()
            losses.append(metrics.items[-1]["loss"])
    assert losses == [losses[0]] * 4


# ---- times


def at_times(times: Any, **options: Any) -> AdaptiveLinearModel:
    return model_of([{"at": time} for time in times], [n % 2 for n in range(len(times))], **options)


def test_a_time_of_any_form_becomes_hour_weekday_month_and_trend() -> None:
    """Times were refused, and their texts were a feature each: RMSE 8.0, with hour and weekday 5.5."""
    moments = [dt.datetime(2024, 2, 28, 22) + dt.timedelta(hours=7 * n) for n in range(150)]
    expected = at_times(moments)
    parameters = expected.parameters()
    assert parameters["kinds"] == {"at": "time"}
    assert (parameters["fields"], parameters["text_fields"]) == (
        ["at[trend]"],
        ["at[hour]", "at[month]", "at[weekday]"],
    )
    by_hand = [
        {
            "at[hour]": [str(at.hour)],
            "at[weekday]": [str(at.isoweekday())],
            "at[month]": [str(at.month)],
            "at[trend]": (at - dt.datetime(1970, 1, 1)) / dt.timedelta(days=1),
        }
        for at in moments
    ]
    linear = {"shapes": False}  # Tables have the hours in their order, and texts in the order in which they come.
    assert same_model(at_times(moments, **linear), model_of(by_hand, [n % 2 for n in range(150)], **linear))
    forms: list[Any] = [
        [at.isoformat() for at in moments],
        [f"{at:%Y-%m-%d %H:%M}" for at in moments],
        [at.replace(tzinfo=dt.UTC) for at in moments],
        [at.replace(tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo")) for at in moments],  # Its own hour.
        [np.datetime64(at) for at in moments],
        [pandas.Timestamp(at) for at in moments],
    ]
    for form in forms:
        assert same_model(at_times(form), expected), form[0]
    labels = [n % 2 for n in range(150)]
    for table in (pandas.DataFrame({"at": moments}), Columns({"at": np.array(moments, "M8[s]")})):
        assert same_model(model_of(table, labels), expected)
    dates = at_times([at.date() for at in moments])
    assert dates.parameters()["text_fields"] == ["at[month]", "at[weekday]"]  # A date has no hour.
    assert same_model(dates, at_times([at.date().isoformat() for at in moments]))
    with pytest.raises(BadRows, match="expected times in the field 'at'"):
        dates.learn([{"at": "soon"}], [1])
    missing = at_times([*moments, None, pandas.NaT, np.datetime64("NaT")])
    assert same_model(missing, at_times([*moments, None, None, None]))


def test_hours_are_those_of_the_zone() -> None:
    """Hours were those of UTC, and the evening of a town was learned as its afternoon, in summer only."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    instants = [
        dt.datetime(2024, 3, 30, 22, tzinfo=dt.UTC) + dt.timedelta(hours=n) for n in range(48)
    ]  # Summer begins.
    local = [at.astimezone(zone) for at in instants]
    expected = at_times([at.replace(tzinfo=None) for at in local])
    seconds = [at.timestamp() for at in instants]
    for form in (
        instants,
        local,
        [at.isoformat() for at in instants],
        [at.isoformat().replace("+00:00", "Z") for at in instants],
        [at.isoformat() for at in local],
        [np.datetime64(at.replace(tzinfo=None)) for at in instants],  # datetime64 is in UTC.
        [at.replace(tzinfo=None) for at in local],  # One without a zone is in this one.
    ):
        assert same_model(at_times(form, time_zone="Europe/Berlin"), expected), form[0]
    for form in (seconds, [1000 * at for at in seconds], [str(at) for at in seconds]):
        model = at_times(form, time_zone="Europe/Berlin", kinds={"at": "time"})
        assert same_model(model, expected), form[0]


def test_times_are_learned_nearly_as_well_as_is_possible() -> None:
    """The texts of times had an RMSE of 8.0, and so had their seconds, where the noise is 5."""
    draw = np.random.default_rng(3)
    times = [dt.datetime(2024, 1, 1) + dt.timedelta(minutes=15 * n) for n in range(10_000)]
    hours, days = np.array([at.hour for at in times]), np.array([at.weekday() for at in times])
    labels = 100 + 30 * ((hours > 7) & (hours < 19)) - 25 * (days > 4) + 5 * draw.normal(size=10_000)
    model = AdaptiveLinearModel(task="regression")
    errors = model.learn_each([{"at": at.isoformat()} for at in times], labels) - labels
    assert math.sqrt(np.square(errors).mean()) < 5.7
    assert math.sqrt(np.square(errors[5_000:]).mean()) < 5.3


# ---- starting from a published version


def test_a_version_says_what_its_fields_are_to_the_next_training(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer that started from a version read its fields anew, by other first rows."""
    rows = a_day(300)
    labels = [row.pop("late") for row in rows]
    model = model_of(rows, labels, kinds={"zip": "words"})
    version = model.parameters(state=False)
    started = AdaptiveLinearModel(kinds={"zip": "words"})
    started.start_from(version)
    assert started.predict(rows).tolist() == pytest.approx(model.predict(rows).tolist(), rel=1e-6)
    with pytest.raises(BadRows, match="expected numbers in the field 'km'"):
        started.learn([{"km": "A7"}], [True])
    with pytest.raises(ModelError, match=r"expected kinds=\{'zip': 'words'\}, as in the published model; give them"):
        AdaptiveLinearModel().start_from(version)
    with pytest.raises(ModelError, match="expected time_zone=None, as in the published model, given 'Asia/Tokyo'"):
        AdaptiveLinearModel(kinds={"zip": "words"}, time_zone="Asia/Tokyo").start_from(version)
    other = AdaptiveLinearModel(kinds={"zip": "words", "km": "category"})
    with caplog.at_level(logging.WARNING, LOG):
        other.start_from(version)
    assert "read in another way now, so what it has learned of them is not used, or does not fit: 'km'" in caplog.text
    other.learn([{"km": "A7"}, {"km": 7}], [True, False])
    assert "km" not in other.parameters()["fields"]


@pytest.mark.parametrize("form", ["version", "version with its state", "state"])
def test_a_model_keeps_what_fits_when_kinds_change(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """A service whose file gave a field another kind did not start any more, or used weights of its old kind."""
    rows = a_day(400)
    labels = [row.pop("late") for row in rows]
    model = model_of(rows, labels, kinds={"zip": "words"})
    other = AdaptiveLinearModel(kinds={"zip": "number"}, time_zone="Asia/Tokyo", other_settings="keep")
    with caplog.at_level(logging.WARNING, LOG):
        if form == "state":
            other.restore(model.state())
        else:
            other.start_from(model.parameters(state=form != "version"))
    assert "does not fit: 'zip', 'at'" in caplog.text
    same = [{"km": row["km"]} for row in rows]
    assert other.predict(same).tolist() == pytest.approx(model.predict(same).tolist(), rel=1e-6)
    other.learn([{"zip": "7", "km": "3"}, {"zip": 5}], [True, False])
    parameters = other.parameters()
    assert ("zip" in parameters["fields"], "zip" in parameters["text_fields"]) == (True, False)
    assert parameters["kinds"] == {"zip": "number", "km": "number", "at": "time"}
    np.testing.assert_allclose(LinearPredictor(parameters)(rows), other.predict(rows), rtol=1e-6)
    strict = AdaptiveLinearModel(kinds={"zip": "number"})
    with pytest.raises(ModelError, match=r"restore: expected the state of .*: kinds: 'zip' was words, now number;"):
        strict.restore(model.state())
