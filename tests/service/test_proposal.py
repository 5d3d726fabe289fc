"""A file is proposed from the newest records of a topic: label, kinds of fields, and what the records do not tell."""

import tomllib
from random import Random
from typing import Any

import pytest
from support.costs import calls_of
from support.examples import random_examples

from streamiter.learn.flights import FlightEvents
from streamiter.service.settings.file import read_settings
from streamiter.service.settings.proposal import Proposal, TopicSample, proposal_of, sample_of_topic
from streamiter.service.settings.tables import LabelSettings
from streamiter.topics import MemoryBroker, OutgoingBatch


def proposed(records: list[Any], times_ms: list[int] | None = None) -> tuple[dict[str, Any], Proposal]:
    """Return the table ``[learn]`` of the proposed file, and the proposal."""
    sample = TopicSample(records, times_ms or [1_000 * n for n in range(len(records))])
    proposal = proposal_of(sample, "clicks", "memory://clicks", "memory://updates", "memory://dead-letters")
    read_settings(proposal.text)
    return tomllib.loads(proposal.text)["learn"], proposal


async def test_questions_and_answers_are_found_in_real_flights() -> None:
    """A user had to know of event, key, value and within before the first start."""
    topic = MemoryBroker().topic("flights")
    await topic.create()
    writer = await topic.open_writer()
    for batch in FlightEvents("delayed", 3_000).batches():
        await writer.write(batch)
    await writer.write(OutgoingBatch([b"{", None, b"7"]))
    await writer.close()
    sample = await sample_of_topic(topic)
    proposal = proposal_of(sample, "flights", "memory://flights", "memory://updates", "memory://dead-letters")
    learn = read_settings(proposal.text).learn
    assert learn.kind == "regression"
    assert learn.label == LabelSettings("delay", "arrival", key="flight", within_s=23 * 3600.0, time="time")
    assert learn.features is not None
    kinds = {"time": "ignore"} | dict.fromkeys(("carrier", "origin", "dest"), "category")
    assert learn.features == kinds | dict.fromkeys(("hour", "weekday", "month", "distance"), "number")
    assert proposal.notes[1:] == [
        "2 records are no JSON objects, and are not learned from",
        "the longest wait for an answer was 12h; a later answer than 23h does not count",
    ]
    assert "1 records are not read" in proposal.notes[0]


@pytest.mark.parametrize(
    ("field", "values", "kind", "reason"),
    [
        ("km", [1, 2.5, None], "number", "from 1 to 2.5"),
        ("sky", ["rain", "sun"], "category", '2 different texts, mostly "rain"'),
        ("title", ["a long text of six words", "and one more text here, too"], "words", "about 6 words"),
        ("price", ["1.5", "22", " 3e1"], "number", "texts that are numbers, from 1.5 to 30"),
        ("zip", ["00123", "04510"], "category", "2 different texts"),
        ("user", [f"u{n}" for n in range(40)], "ignore", "40 different texts in 40 records"),
        ("id", list(range(40)), "ignore", "a different number in each record"),
        ("at", ["2013-01-01T10:15Z", "2013-01-02"], "time", "its hour, weekday, month and trend"),
        ("at", [1_700_000_000, 1_700_000_000.5], "time", "its hour, weekday, month and trend"),
        ("none", [None], "ignore", "no value in the sample"),
        ("tags", [["a"], {"b": 1}], "ignore", "values of a kind that is not learned from: lists, objects"),
        ("month", [1, 1], "number", "always 1 so far"),
        ("km", [*range(999, 2, -1), "dry", "n/a", None], "number", "from 3 to 999; 1 value is no number, and refused"),
        ("at", ["2013-01-01T10:15Z"] * 300 + ["soon", "later"], "time", "its hour, weekday, month and trend; 2 values"),
        ("sky", ["rain", "sun", "rain"] * 100 + [7], "category", '2 different texts, mostly "rain"\n'),
        ("tags", ["a", "b", ["a"]], "ignore", "values of a kind that is not learned from: lists, texts"),
        ('a "b"\n.c', ["\x7f\u2028", "y"], "category", "2 different texts, mostly"),
        ("9999-99-99", ["9999-99-99", "9999-99-98"], "category", "2 different texts"),
    ],
)
def test_the_kind_of_a_field_has_its_reason(field: str, values: list[Any], kind: str, reason: str) -> None:
    """A kind was proposed without its reason, so that users could not correct it."""
    records = [{field: values[n % len(values)], "late": n % 2, "x": n % 3} for n in range(max(len(values), 4))]
    learn, proposal = proposed(records)
    assert learn["features"][field] == kind
    assert f"# {reason}" in proposal.text
    assert (learn["kind"], learn["label"]) == ("classification", {"field": "late"})


@pytest.mark.parametrize(
    ("records", "kind", "label", "note"),
    [
        ([], "classification", {"field": "label"}, "the topic has no record to look at"),
        ([7, "x"], "classification", {"field": "label"}, "2 records are no JSON objects"),
        ([{"at": "2013-01-01"}], "classification", {"field": "label"}, "no field looks like a label"),
        ([{"a": 1.5}, {"a": 2.5, "b": 3}], "regression", {"field": "a"}, "'a' is only a guess of the label"),
        ([{"color": "red"}, {"color": "blue"}], "multiclass", {"field": "color"}, "only a guess"),
        # Nothing was said, and for labels that are not true or false either it is a regression.
        ([{"fraud": False, "km": 2}] * 9, "classification", {"field": "fraud"}, "'fraud' is always false so far: its"),
        ([{"fraud": True, "km": 2}] * 9, "classification", {"field": "fraud"}, "'fraud' is always true so far: its"),
        ([{"fraud": 0, "km": 2}] * 9, "classification", {"field": "fraud"}, "'fraud' is always 0 so far: its kind is"),
        ([{"price": 5.5, "km": 2}] * 9, "regression", {"field": "price"}, "'price' is always 5.5 so far: its kind is"),
    ],
)
def test_what_is_not_known_is_told(records: list[Any], kind: str, label: dict[str, str], note: str) -> None:
    """A guess looked like a fact; labels that all were false so far made a regression."""
    learn, proposal = proposed(records)
    assert (learn["kind"], learn["label"]) == (kind, label)
    assert any(note in said for said in proposal.notes)


def test_clicks_on_views_are_a_late_label_with_other_events_beside_them() -> None:
    """Events of a third kind were questions without an answer."""
    records: list[Any] = []
    for n in range(60):
        records.append({"type": "view", "view": f"v{n}", "price": n % 7})
        records.append({"type": "login", "user": n % 3})
        if n % 2:
            records.append({"type": "purchase", "view": f"v{n}", "rating": n % 5})
    learn, _ = proposed(records)
    assert learn["label"] == {
        "event": "purchase",
        "event_field": "type",
        "key": "view",
        "field": "rating",
        "question": "view",
        "within": "60min",
    }
    assert learn["features"] == {"price": "number"}


@pytest.mark.parametrize(
    ("answer", "label", "note"),
    [
        (
            {},
            {"key": "view", "within": "60min", "time": "at", "otherwise": False},
            "the label is whether an answer comes",
        ),
        # Reports of frauds all say true: the file had a regression of a number that is always 1.
        (
            {"fraud": True},
            {"key": "view", "within": "60min", "time": "at", "otherwise": False},
            "the label is whether an answer comes",
        ),
        ({"rating": 3}, {"key": "view", "field": "rating", "within": "60min", "time": "at"}, "the longest wait"),
        ({"view": None}, {"key": "id", "within": "60min", "otherwise": False}, "key and within are examples"),
    ],
)
def test_answers_of_a_topic_of_their_own_are_found(answer: Any, label: dict[str, Any], note: str) -> None:
    """Views and clicks were in two topics, and --init proposed that each view has its label."""
    views = [{"view": f"v{n}", "kind": "ab"[n % 2], "km": n % 7, "at": 1_700_000_000 + n} for n in range(100)]
    # Answers are rare, so that their newest ones are older than all of the questions.
    clicks = [{"view": f"v{n}", "kind": "c", "at": 1_700_000_030 + n} | answer for n in range(-500, 100, 3)]
    clicks = [click | {"rating": n % 5} if "rating" in click else click for n, click in enumerate(clicks)]
    samples = [TopicSample(events, [1_000 * event["at"] for event in events]) for events in (views, clicks)]
    urls = ("memory://clicks", "memory://updates", "memory://dead-letters", "memory://answers")
    proposal = proposal_of(samples[0].with_answers(samples[1]), "clicks", *urls)
    settings = read_settings(proposal.text)
    assert settings.input.answers == "memory://answers"
    assert settings.learn.label.event_field == "input.answers"
    learn = tomllib.loads(proposal.text)["learn"]
    assert learn["label"] == label
    assert learn["features"].items() >= {"kind": "category", "km": "number"}.items()
    assert not learn["features"].keys() & {"input.answers", "rating"}
    assert any(note in said for said in proposal.notes)


@pytest.mark.parametrize("before_ms", [0, 5_000])
def test_the_key_of_answers_that_come_hours_later_is_found_by_its_name(before_ms: int) -> None:
    """The questions of chargebacks were older than the sample: the file had the key "id", and no time of events."""
    views = [{"tx": f"t{n}", "kind": "ab"[n % 2], "at": 1_700_000_000 + n} for n in range(2_000)]
    backs = [{"tx": f"t{n}", "at": 1_700_000_000 + n, "reason": "stolen"} for n in range(-2_000, 0, 7)]
    written_ms = 1_700_100_000_000  # All at once.
    samples = [TopicSample(views, [written_ms] * 2_000), TopicSample(backs, [written_ms - before_ms] * len(backs))]
    urls = ("memory://tx", "memory://updates", "memory://dead-letters", "memory://answers")
    proposal = proposal_of(samples[0].with_answers(samples[1]), "fraud", *urls)
    learn = read_settings(proposal.text).learn
    assert (learn.label.key, learn.label.time, learn.label.otherwise) == ("tx", "at", False)
    assert any("the key 'tx' is a guess by its name, and within is an example" in note for note in proposal.notes)


def test_answers_that_are_all_false_so_far_make_classes() -> None:
    """The file had a regression of answers that all were false, without a word."""
    views = [{"event": "view", "view": f"v{n}", "km": n % 7} for n in range(60)]
    answers = [{"event": "answer", "view": f"v{n}", "fraud": False} for n in range(0, 60, 3)]
    learn, proposal = proposed([*views, *answers])
    assert (learn["kind"], learn["label"]["field"]) == ("classification", "fraud")
    assert "the label 'fraud' is always false so far" in " ".join(proposal.notes)


@pytest.mark.parametrize("has_event", [True, False])
def test_answers_that_are_the_label_themselves_are_found(has_event: bool) -> None:
    """A click has no field but the view: each record was to have a label, which no record had."""
    views = [{"event": "view", "view": n, "km": n % 7, "at": 1_700_000_000 + n} for n in range(100)]
    clicks = [{"event": "click", "view": n, "at": 1_700_000_030 + n} for n in range(0, 100, 3)]
    records: list[Any] = sorted([*views, *clicks], key=lambda record: record["at"])
    if has_event:
        records[50]["at"] = "soon"
        learn, proposal = proposed(records)
        value = "event == 'click'"
        keys = {"event": "click", "key": "view", "value": value, "within": "60min", "time": "at", "otherwise": False}
        assert (learn["kind"], learn["label"]) == ("classification", keys)
        assert learn["features"] == {"km": "number", "at": "ignore"}
        assert "the label is whether a 'click' comes in time; without one it is false" in proposal.notes
        return
    unmarked = [{name: value for name, value in record.items() if name != "event"} for record in records]
    answers: list[Any] = [record if "km" in record else record | {"bought": record["view"] % 2} for record in unmarked]
    _, proposal = proposed(answers)
    assert "records with bought seem to be answers to others with the same view: let a field" in proposal.notes[-1]


def test_a_label_of_all_questions_is_not_proposed() -> None:
    """Each order has its receipt: the label was always true."""
    records = [{"event": ["order", "receipt"][n % 2], "order": n // 2, "late": n % 3 % 2} for n in range(60)]
    learn, _ = proposed(records)
    assert learn["label"] == {"field": "late"}


def test_the_cost_of_a_proposal_does_not_grow_with_the_kinds_of_events() -> None:
    """A proposal took 6 s for 20 kinds of events, of which each was compared with each from the beginning."""

    def records(kinds: int) -> list[Any]:
        return [{"event": f"e{n % kinds}"} | {f"f{field}": n * field for field in range(10)} for n in range(600)]

    assert calls_of(proposed, records(20)) < 2 * calls_of(proposed, records(2))


NAMES = ["a", "", "event", "ö b", 'x"y', "type", "late", "\n", "id", "time"]
VALUES: list[Any] = [
    0, 1, -1.5, 10**30, 1e308, True, None, "", "a", "b c d e f g", "2013-01-01", "2013-13-45",
    "\x00\x7f\u2028'\"\\", 1_700_000_000,
    [], ["a"], {"x": 1}, {},
]  # fmt: skip


def some_records(random: Random) -> list[Any]:
    names = random.choices(NAMES, k=random.randint(0, 4))
    values = [random.choice(VALUES) for _ in range(random.randint(1, 5))]
    return [
        random.choice([7, None, []])
        if random.random() < 0.05
        else {name: random.choice(values) for name in names if random.random() < 0.8}
        for _ in range(random.randint(0, 12))
    ]


@random_examples(some_records)
def test_a_proposal_is_a_file_without_errors(records: list[Any]) -> None:
    """A topic with strange names or values ended --init with a traceback, or with a file that serve refused."""
    proposed(records)
