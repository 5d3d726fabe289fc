"""The fields that a label is made of are no features: functions of a label, and what they read."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learn.online_support import Record, trained

from streamiter import Columns, Flow
from streamiter.errors import GraphError
from streamiter.learn import DelayedLabels, ForeignModel, train_online
from streamiter.learn.ready_made.label_fields import LabelFields, texts_in
from streamiter.models import LinearPredictor


def trips(count: int) -> list[Record]:
    random = np.random.default_rng(7)
    return [
        {"km": float(random.normal()), "sky": "rs"[n % 2], "delay": float(random.uniform(0, 30))} for n in range(count)
    ]


TRIPS = trips(1_200)


def is_late(delay: float) -> bool:
    return delay > 15


def matched(trip: Any) -> bool:
    match trip:
        case {"delay": delay}:
            return is_late(delay)
    return False


def given_up(trip: Any) -> bool:
    return is_late(trip.pop("delay"))


def late(trip: Any) -> bool:
    return is_late(trip["delay"])


LATE: list[Callable[[Any], Any]] = [
    late,
    lambda trip: is_late(trip.get("delay", 0)),
    lambda trip: "delay" in trip and is_late(trip["delay"]),
    lambda trip: bool(eval("delay > 15", {}, trip)),
    lambda trip: is_late(itemgetter("delay")(trip)),
    matched,
    given_up,
]


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.mark.parametrize("label", LATE)
def test_fields_that_the_label_is_made_of_are_no_features(
    label: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The label was delay > 15, and the delay a feature: the AUC was 1.0, and .5 where the delay was not known."""
    caplog.set_level(logging.INFO, "streamiter.learn")
    expected = trained(TRIPS, label=late, features=["km", "sky"])
    assert not lines(caplog, "made of")
    found = trained([dict(trip) for trip in TRIPS], label=label)
    assert found.last == expected.last
    assert found.models[-1].parameters["fields"] == ["km"]
    assert found.metrics["auc"] == expected.metrics["auc"] < 0.6
    [said] = lines(caplog, "made of")
    assert said == (
        "AdaptiveLinearModel: the label is made of 'delay', so this is no feature; features= with the names of all "
        "decides otherwise"
    )


def test_cuts_workers_and_columns_change_no_feature() -> None:
    """Each reader of rows finds the fields of the label itself, in other rows."""
    given = TRIPS[:200]
    columns = Columns({name: np.array([trip[name] for trip in given]) for name in given[0]})
    expected = trained(given, label=late, features=["km", "sky"], mode="synchronous", mini_batch=7).last
    for records, workers, mini_batch in ((given, 1, 1), (given, 3, 7), (columns, 2, 100)):
        found = trained(records, label=late, mode="synchronous", workers=workers, mini_batch=mini_batch)
        assert found.last == expected


THE_FIELD = "delay"


class Judge:
    """A label with settings; it names no field that is none."""

    field = "delay"

    def __init__(self) -> None:
        self.features = ["km"]

    def late(self, trip: Any, *, is_rare: bool) -> bool:
        return is_rare and is_late(trip[self.field])

    def __call__(self, trip: Any) -> bool:
        return self.late(trip, is_rare=trip["n"] > 1_000)


def of_field(field: str) -> Callable[[Any], bool]:
    return lambda trip: trip["n"] > 1_000 and is_late(trip[field])


RARE: list[Callable[[Any], Any]] = [
    lambda trip: trip["n"] > 1_000 and late(trip),
    lambda trip: trip["n"] > 1_000 and any(is_late(trip[name]) for name in ["delay"]),
    lambda trip: trip["n"] > 1_000 and is_late(trip[THE_FIELD]),
    lambda trip, field="delay": trip["n"] > 1_000 and is_late(trip[field]),
    partial(lambda field, trip: trip["n"] > 1_000 and is_late(trip[field]), "delay"),
    of_field("delay"),
    Judge(),
    Judge().__call__,
    lambda trip: trip["n"] > 1_000 and trip.get("sky") != "km" and max(0, trip["delay"], key=is_late) > 15,
]


@pytest.mark.parametrize("label", RARE)
def test_a_field_of_a_branch_that_never_ran_is_no_feature_from_the_start(label: Callable[[Any], Any]) -> None:
    """A branch ran after the first 1,000 records for the first time: its field was a feature, and stayed one."""
    rows = [trip | {"n": n, "key": 1.0} for n, trip in enumerate(TRIPS)]
    named = texts_in(label)
    assert "delay" in named
    assert not {"km", "key", "features"} & named
    models = trained(rows[:20], label=label, mini_batch=1, workers=1).models
    assert [model.parameters["fields"] for model in (models[0], models[-1])] == [["km", "key"]] * 2


def test_a_changed_function_of_the_label_is_watched_again_after_a_restart() -> None:
    """The fields that the first run had noted were those of another function."""
    before, after = LabelFields(lambda trip: trip["km"] > 0), LabelFields(late)
    for trip in TRIPS:
        before(trip)
    after.restore(before.state())
    after(TRIPS[0])
    assert after.fields == ["km", "delay"]


def test_fields_of_a_weight_stay_features_as_long_as_the_label_is_not_made_of_them() -> None:
    """A weight by a price says nothing against the price as a feature; one by the label has fields of the label."""

    def weight(trip: Any) -> float:
        return 2.0 if is_late(trip["delay"]) else 1.0 + abs(trip["km"])

    assert trained(TRIPS[:50], label=late, weight=weight).models[-1].parameters["fields"] == ["km"]
    rows = [{**trip, "late": late(trip)} for trip in TRIPS[:50]]
    assert trained(rows, label="late", weight="delay").models[-1].parameters["fields"] == ["km"]


def test_a_field_that_is_read_of_later_rows_first_is_left_out_from_there_on() -> None:
    """The branch of a function that runs for the twentieth row reads another field, which had been learned by then.

    Its code does not name the field.
    """
    start = "wa"
    rows = [trip | {"wait": trip["delay"], "when": "2024-05-01T07:00", "note": "x"} for trip in TRIPS[:200]]

    def label(row: Any) -> bool:
        read = row["delay"] if row["km"] < 0 or row["sky"] == "r" else row[start + "it"]
        return is_late(read) or not row["".join(["w", "hen"])]

    rows[0]["km"] = -1.0
    model = trained(rows, label=label, mini_batch=1).models[-1].parameters
    assert (model["fields"], model["text_fields"]) == ([], ["note"])
    assert "kinds" not in model
    predictor = LinearPredictor(model)
    assert predictor({"note": "x", "wait": 1e9, "when": "7 o'clock"}) == predictor({"note": "x"})


def test_values_of_the_label_that_are_no_features_refuse_no_row() -> None:
    """A label of an object in the record: each row was refused for it."""
    rows = [{"km": trip["km"], "end": {"delay": trip["delay"]}} for trip in TRIPS[:50]]
    assert trained(rows, label=lambda trip: is_late(trip["end"]["delay"])).metrics["count"] == 50


@pytest.mark.parametrize(
    ("label", "kind", "fields"),
    [
        (lambda trip: is_late(SimpleNamespace(**trip).delay), dict, ["km", "delay"]),
        (lambda trip: is_late(list(trip.values())[-1]), dict, ["km", "delay"]),
        (lambda trip: len(trip) == 3, dict, ["km", "delay"]),
        (lambda trip: is_late(json.loads(json.dumps(trip))["delay"]), dict, ["km"]),
        (lambda trip: is_late((trip | {})["delay"]), dict, ["km"]),
        (lambda trip: is_late(trip.copy()["delay"]), dict, ["km"]),
        (late, OrderedDict, ["km"]),
    ],
)
def test_a_function_whose_fields_cannot_be_told_is_warned_of_once(
    label: Callable[[Any], Any], kind: type[dict[str, Any]], fields: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A function that makes an object of the whole record, or reads none: nothing told that the label was learned.

    A field that its code names is left out nevertheless.
    """
    found = trained([kind(trip) for trip in TRIPS[:100]], label=label, mini_batch=10, workers=1)
    assert found.models[-1].parameters["fields"] == fields
    [warning] = lines(caplog, "cannot be told")
    assert warning.startswith("step 'read': expected a label= that reads fields of the record by their names")
    assert warning.endswith("give features=, so that the label is not learned from itself")


LIMIT = "limit"


def labelled(trip: Record) -> Record:
    """Return a trip with the field late, and others that the label is not made of."""
    made = dict(trip)
    made["is_wet"] = trip["sky"] == "r"
    minutes, unit = trip["delay"], "min"
    made["late"] = f"{minutes > trip[LIMIT]}"
    return {**made, "unit": unit, "hour": made["km"] // 1}


@pytest.mark.parametrize(
    ("label", "told"),
    [
        (lambda trip: trip | {"late": trip["delay"] > 0}, ["delay"]),
        (lambda trip: {**trip, "fast": trip["km"] > 0, "late": late(trip)}, ["delay"]),
        (lambda trip: dict(trip, late=str(trip.get("delay") > trip["limit"]), fast=trip["km"]), ["delay", "limit"]),
        (labelled, ["delay", "limit"]),
        (lambda trip: {"km": trip["km"], "late": trip["delay"] > 0}, []),
        (lambda trip: {**trip, "late": trip.pop("delay") > 0}, ["delay"]),
        (lambda trip: trip | {"late": trip["sky"] == "delay"}, ["sky"]),
    ],
)
def test_a_label_that_a_map_makes_of_a_feature_is_warned_of_once(
    label: Callable[[Record], Record], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The model learned a label from the field that a map had made it of, with an AUC of 1.0, and nothing told."""
    for features in (None, ["km", "delay"]):
        flow = Flow("trips")
        trips = flow.from_items([trip | {"limit": 15.0} for trip in TRIPS[:200]]).map(label).filter(bool)
        train_online(trips.rebalance(), label="late", features=features, mini_batch=20, workers=2)
        flow.run()
    warnings = lines(caplog, "is a feature, and the function at ")
    assert [warning.split("'")[1] for warning in warnings] == told
    assert all(f"{__file__}:{label.__code__.co_firstlineno} makes the label 'late'" in each for each in warnings)


def test_fields_that_features_names_are_features() -> None:
    """A price that the label is compared with is known in time: the user names it."""
    found = trained(TRIPS, label=late, features=["km", "delay"])
    assert found.models[-1].parameters["fields"] == ["km", "delay"]
    with pytest.raises(GraphError, match=r"features=\): expected fields without the field of the label, given 'late'"):
        trained(TRIPS, label="late", features=["km", "late"])


@pytest.mark.parametrize("options", [{}, {"kinds": {"at": "time"}}, {"features": ["km", "at"]}])
def test_numbers_of_event_time_are_no_feature_unless_asked_for(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Milliseconds since 1970 were a number that only grows: each row was beyond all that the model had seen."""
    caplog.set_level(logging.INFO, "streamiter.learn")
    flow = Flow("times")
    rows = [trip | {"at": 1_700_000_000_000 + 1_000 * n} for n, trip in enumerate(TRIPS[:100])]
    timed = flow.from_items(rows, parallelism=1).event_time("at", unit="ms").filter(lambda row: row["km"] < 1)
    models = train_online(timed, label=late, **options).models.collect()
    flow.run()
    expected = ["km"] if not options else ["km", "at[trend]"] if "kinds" in options else ["km", "at"]
    assert sorted(models.items[-1].parameters["fields"]) == sorted(expected)
    said = lines(caplog, "the field 'at' is the event time, a number that only grows, so it is no feature; kinds={'at'")
    assert len(said) == (not options)


@pytest.mark.parametrize("is_joined", [False, True])
def test_the_same_is_true_of_labels_that_come_later(is_joined: bool) -> None:
    """A question has its own field of the label's name; a joined row has the fields of its answer."""
    questions = [{"id": n, "km": trip["km"], "at": 20 * n} for n, trip in enumerate(TRIPS[:300])]
    answers = [{"id": n, "delay": trip["delay"], "at": 20 * n + 50} for n, trip in enumerate(TRIPS[:300])]
    flow = Flow("late")
    if is_joined:
        left, right = (
            flow.from_items(events, parallelism=1, name=name)
            .event_time("at", unit="ms", check_unit=False, name=f"times of {name}")
            .key_by(itemgetter("id"))
            for name, events in (("questions", questions), ("answers", answers))
        )
        pairs = left.interval_join(right, lower_s=0, upper_s=1, how="left", name="join")
        rows = pairs.map(lambda pair: {"km": pair[0]["km"], "delay": pair[1]["delay"]}, name="rows")
        training = train_online(rows, label=late)
    else:
        asked = [question | {"delay": 0.0} for question in questions]
        events = sorted([*asked, *answers], key=itemgetter("at"))
        labels = DelayedLabels(itemgetter("id"), lambda event: "km" not in event, None, late, within_s=1)
        stream = flow.from_items(events, parallelism=1).event_time("at", unit="ms", check_unit=False)
        training = train_online(stream, labels=labels)
    models = training.models.collect()
    flow.run()
    assert models.items[-1].parameters["fields"] == (["km"] if is_joined else ["id", "km"])


def test_a_model_of_another_library_gets_no_field_of_the_label(caplog: pytest.LogCaptureFixture) -> None:
    """A model of river was given the delay, and seemed to be perfect."""
    seen: list[Any] = []
    model: ForeignModel[Any] = ForeignModel(
        make=dict,
        learn=lambda model, features, label: seen.append(features),
        predict=lambda model, features: 0.5,
        save=lambda model: b"",
        load=lambda data: {},
        task="regression",
    )
    flow = Flow("foreign")
    train_online(flow.from_items(TRIPS[:20]), model, label=lambda trip: trip["delay"]).models.collect()
    flow.run()
    assert [list(features) for features in seen] == [["km", "sky"]] * 20
    flow = Flow("foreign")
    train_online(flow.from_items(TRIPS[:20]).map(lambda trip: trip | {"late": trip["delay"]}), model, label="late")
    flow.run()
    assert len(lines(caplog, "the field 'delay' is a feature, and the function at ")) == 1
