"""The ready-made model with embeddings: cuts, states, versions, labels of other kinds; what it learns, and what not."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from learn.embedded_streams import EXPIRING, SMALL, Record, labels_of, log_loss, loss_of_classes, views, visits
from learn.frozen_states import frozen
from learn.late_label_support import LABELS, Loop, Trained, events, source_of, timed
from learn.online_support import trained

from streamiter import Flow
from streamiter.errors import OtherModel
from streamiter.learn import AdaptiveLinearModel, Embeddings, compare_online, train_online
from streamiter.learn.ready_made.embedding_steps import begin_vectors
from streamiter.models import LinearPredictor, model_updates
from streamiter.models.changes import changes_between
from streamiter.models.documents import arrays_in, own_copy
from streamiter.topics import MemoryBroker

ROWS = 1_200


def new(embeddings: Embeddings | None = SMALL, **options: Any) -> AdaptiveLinearModel:
    return AdaptiveLinearModel(embeddings=embeddings, **options)


def vectors_of(model: AdaptiveLinearModel) -> Any:
    """Return the parameter ``embeddings`` of the model's version."""
    return model.parameters(state=False)["embeddings"]


# ---- cuts and states


@pytest.mark.parametrize(
    ("kind", "embeddings", "shapes"),
    [
        *[("binary", SMALL, True), ("number", SMALL, False), ("texts", SMALL, True), ("classes", SMALL, False)],
        *[("binary", EXPIRING, False), ("number", EXPIRING, True), ("classes", EXPIRING, True)],
    ],
    ids=str,
)
def test_no_cut_and_no_restart_changes_a_bit(kind: str, embeddings: Embeddings, shapes: bool) -> None:
    """Fields got their numbers batch by batch, so keys, and the order of sums, depended on where a stream was cut."""
    records, draw = views(ROWS), Random(3)
    labels = labels_of(records, kind)
    weights = np.array([draw.choice([0.0, 1.0, 1.0, 2.0, 30.0]) for _ in records])
    whole, cut, at, made = new(embeddings, shapes=shapes), new(embeddings, shapes=shapes), 0, []
    expected = whole.learn_each(records, labels, weights)
    while at < ROWS:
        stop = min(ROWS, at + draw.choice([1, 5, 64, 200, 400]))
        made.append(cut.learn_each(records[at:stop], labels[at:stop], weights[at:stop]))
        cut, at, state = new(embeddings, shapes=shapes), stop, cut.state()
        cut.restore(state)
    assert np.array_equal(np.concatenate(made), expected)
    assert frozen(cut.parameters(state=False)) == frozen(whole.parameters(state=False))
    before = frozen(whole.state())
    whole.predict(records)
    assert frozen(whole.state()) == before


@pytest.mark.parametrize("kind", ["binary", "number", "classes"])
def test_the_other_members_are_unchanged_to_the_last_bit(kind: str) -> None:
    """Keys of 62 bits are folded to the places of the linear member, crosses of texts among them."""
    records = views(ROWS)
    labels, crosses = labels_of(records, kind), [("user", "item"), ("price", "user"), ("price", "at")]
    states: list[Any] = []
    for embeddings in (None, SMALL):
        model = new(embeddings, crosses=crosses)
        model.learn(records, labels)
        states.append(model.state())
    alone, beside = (state["weights"] for state in states)
    mixed = {"shapes", "embeddings"}
    assert frozen({name: value for name, value in beside.items() if name not in mixed}) == frozen(
        {name: value for name, value in alone.items() if name not in mixed}
    )
    for name in ("columns", "members"):
        assert frozen(beside["shapes"][name]) == frozen(alone["shapes"][name])
    assert frozen(states[0]["categories"]) == frozen(states[1]["categories"])


@pytest.mark.parametrize(
    ("embeddings", "kind"),
    [
        *[(SMALL, "binary"), (SMALL, "number"), (SMALL, "classes")],
        *[(replace(SMALL, kind="wide and deep"), "binary"), (EXPIRING, "number"), (EXPIRING, "classes")],
    ],
    ids=str,
)
def test_a_version_predicts_as_the_learner_and_continues_exactly(embeddings: Embeddings, kind: str) -> None:
    """What is served was learned: known and new texts, lists, missing values and numbers out of range."""
    records, options = views(ROWS), {"crosses": [("user", "item"), ("price", "at")]}
    labels = labels_of(records, kind)
    model = new(embeddings, **options)
    model.learn(records, labels)
    parameters = model.parameters()
    asked: list[Record] = [*records[-200:], {"user": "new", "tags": ["a", "zz"]}, {}, {"price": 1e300, "shop": None}]
    assert LinearPredictor(parameters)(asked) == pytest.approx(model.predict(asked), rel=1e-6, abs=1e-6)
    resumed, without = new(embeddings, **options), new(embeddings, **options)
    resumed.start_from(parameters)
    without.start_from(model.parameters(state=False), records=ROWS)
    assert without.predict(asked) == pytest.approx(model.predict(asked), rel=1e-5, abs=1e-5)
    more = views(600, seed=8)
    of_more = labels_of(more, kind)
    assert np.array_equal(resumed.learn_each(more, of_more), model.learn_each(more, of_more))
    again = without.learn_each(more, of_more)
    assert np.isfinite(again).all()
    if kind == "binary":
        assert log_loss(again, of_more) < log_loss(new(embeddings).learn_each(more, of_more), of_more)


# ---- late labels


@pytest.mark.parametrize("schedule", ["expected", "end", "weighted", "at once"])
def test_late_labels_are_learned_one_by_one_whatever_the_batches_are(schedule: Any) -> None:
    """A question that is learned as False, and taken back, must leave the same vectors for all cuts; the features of a
    question are as old as the question.
    """
    embeddings = replace(SMALL, expire=1.0)
    given = events(1_200 if schedule == "expected" else 120)
    loop = Loop(given, schedule, make_model=lambda: new(embeddings))
    for rows in (29 if schedule == "expected" else 7, len(given)):
        found = Trained(
            replace(LABELS, schedule=schedule),
            lambda flow, rows=rows: timed(flow.from_source(source_of(given, rows))),
            embeddings=embeddings,
        )
        assert found.bits == frozen(loop.model.parameters(state=False))
        known = ~np.isnan(loop.predictions)
        assert np.array_equal(found.predictions[known], np.array(loop.predictions)[known])
    assert loop.model.parameters(state=False)["embeddings"]["time_ms"] > 0


def test_labels_that_come_right_after_their_questions_are_as_labels_at_once() -> None:
    """A question is predicted, and its row learned later, in two steps with the arithmetic of one."""
    draw = Random(5)
    rows = [{"kind": draw.choice("abcde"), "x": draw.random()} for _ in range(300)]
    labels = [row["kind"] in "ab" for row in rows]
    given: list[Record] = []
    for n, (row, label) in enumerate(zip(rows, labels, strict=True)):
        given += [{"id": n, "at": 10 * n, **row}, {"id": n, "at": 10 * n + 1, "label": label}]
    late = replace(LABELS, otherwise=None, schedule="at once")
    found = Trained(late, lambda flow: timed(flow.from_items(given)), embeddings=SMALL)
    model = new()
    model.learn(rows, labels)
    own = vectors_of(model)
    for published in (found.parameters["embeddings"], own):
        for expert in published["experts"]:
            del expert["share"]  # No member had predicted the first question.
    assert frozen(found.parameters["embeddings"]) == frozen(own)


def test_a_slope_that_is_taken_back_leaves_no_trend() -> None:
    """With "weighted", all labels True were first learned as False; the vectors must tend to True in the end."""
    given: list[Record] = []
    for n in range(400):
        given.append({"id": n, "at": 10 * n, "kind": "ab"[n % 2], "x": 0.5})
        given.append({"id": n, "at": 10 * n + 5, "label": n % 2 == 0})
    labels = replace(LABELS, schedule="weighted")
    found = Trained(labels, lambda flow: timed(flow.from_items(given)), embeddings=SMALL, shapes=False)
    asked = LinearPredictor(found.parameters)([{"kind": "a", "x": 0.5}, {"kind": "b", "x": 0.5}])
    assert asked[0] > 0.8
    assert asked[1] < 0.2


# ---- features come and go


def test_a_feature_has_its_own_vector_from_its_third_row_on() -> None:
    """An id that is seen once needs a weight only, and most ids are seen once."""
    model = new(shapes=False)
    rows = [{"user": name, "item": "i"} for name in ("once", "twice", "twice", "often", "often", "often")]
    model.learn(rows, [True, False] * 3)
    published = vectors_of(model)
    counts = {(int(key) >> 52): 0 for key in published["keys"]}
    for key in published["admitted"].tolist():
        counts[key >> 52] += 1
    assert published["text_fields"] == ["item", "user"]
    assert (counts[2], counts[1]) == (1, 1)
    assert len(published["experts"][0]["weights"]) == 4
    assert all(expert["vectors"].shape == (2, SMALL.factors) for expert in published["experts"])


def test_a_change_has_only_learned_rows_also_where_features_come_and_are_admitted() -> None:
    """An admitted feature moved the positions of all vectors behind it, so a change had two thirds of a version."""
    model = new(replace(SMALL, kind="fm"), shapes=False)
    records = views(6_000, users=1_000, items=900)
    model.learn(records, labels_of(records))
    before = own_copy(vectors_of(model))
    model.learn([{"user": "new", "item": "i1"}] * 3 + [{"user": "once", "item": "i2"}], [True] * 4)
    after = vectors_of(model)
    assert all(len(after[name]) > len(before[name]) for name in ("keys", "admitted"))
    changes = changes_between(before, after)
    in_all, changed = (sum(array.nbytes for array in arrays_in(each)) for each in (after, changes))
    assert changed < 0.02 * in_all


def test_a_feature_gets_its_vectors_once_whatever_admit_was_before() -> None:
    """A run with a larger ``admit`` drew learned vectors again; with a smaller one, they began as the common ones, or
    without what their first rows had said.
    """
    rows, labels = [{"user": f"u{n % 3}", "item": "i"} for n in range(12)], [True, False] * 6
    learned, waiting = new(replace(SMALL, admit=2), shapes=False), new(replace(SMALL, admit=20), shapes=False)
    for model in (learned, waiting):
        model.learn(rows, labels)
    made = {}
    for admit, earlier in ((2, learned), (5, learned), (3, waiting)):
        model = made[admit] = new(replace(SMALL, admit=admit), shapes=False)
        model.restore(earlier.state())
        model.learn(rows[:3], [True] * 3, [1e-9] * 3)
    same, raised, lowered = (vectors_of(made[admit]) for admit in (2, 5, 3))
    for expert, other in zip(raised["experts"], same["experts"], strict=True):
        assert np.array_equal(expert["vectors"], other["vectors"])
    drawn = np.zeros((len(lowered["keys"]), 2 * SMALL.factors), np.float32)
    for row, key in zip(drawn, lowered["keys"].tolist(), strict=True):
        begin_vectors(row, 0, key, 2 * SMALL.factors)
    assert np.array_equal(lowered["admitted"], lowered["keys"])
    found = np.hstack([expert["vectors"] for expert in lowered["experts"]])
    users = lowered["keys"] >> 52 == 1 + lowered["text_fields"].index("user")
    distances = np.abs(found[users] - drawn[users])
    assert distances.max() < 0.2 * 1.01  # One step of AdaGrad.
    assert (distances > 1e-3).any(axis=1).all()


def test_features_that_were_learned_without_times_are_as_new_as_the_first_row_with_one() -> None:
    """A run that got ``expire``, or whose first rows had no time, began all features anew."""
    records = views(600)
    earlier, timed_later = new(shapes=False), new(replace(SMALL, expire=2_000, time="at"), shapes=False)
    for model in (earlier, timed_later):
        model.learn([{**record, "at": None} for record in records], labels_of(records))
    expiring = new(replace(SMALL, expire=2_000, time="at"), shapes=False)
    expiring.restore(earlier.state())
    for model in (expiring, timed_later):
        assert np.array_equal(model.predict(records), earlier.predict(records))
        model.learn(records, labels_of(records))
        assert vectors_of(model)["expired"] == 0
        model.learn([{"user": f"late{n}", "at": 90_000 + 10 * n} for n in range(400)], [True, False] * 200)
        assert vectors_of(model)["expired"] >= 100


def test_features_expire_by_the_times_of_records() -> None:
    """A table of users that only grows needs memory for all users of all time."""
    days = [
        {"user": f"u{day}-{n % 20}", "item": f"i{n % 5}", "at": f"2024-03-{1 + day:02d}T12:00:00Z"}
        for day in range(20)
        for n in range(100)
    ]
    embeddings = Embeddings(kind="fm", expire="3d", time="at", at_most="2 MB")
    labels = [record["user"][-1] in "02468" for record in days]
    given = [record | {"label": label} for record, label in zip(days, labels, strict=True)]
    result = trained(given, label="label", features=["user", "item"], embeddings=embeddings)
    last = result.models[-1].parameters
    own = last["embeddings"]
    assert "at" not in last["text_fields"]
    users = int(np.count_nonzero(own["keys"] >> 52 == 1 + own["text_fields"].index("user")))
    assert 3 * 20 <= users <= 5 * 20
    assert int(np.count_nonzero(own["keys"] >> 52)) == users + 5
    assert own["time_ms"] == 1_710_936_000_000
    unlimited = trained(given, label="label", features=["user", "item"], embeddings=Embeddings(at_most="2 MB"))
    assert len(unlimited.models[-1].parameters["embeddings"]["keys"]) >= 20 * 20 + 5


def test_the_features_of_the_last_rows_stay_where_there_is_no_room() -> None:
    """Without a bound, a stranger who sends new ids ends the process."""
    model = new(Embeddings(kind="fm", factors=8, at_most="1 MB"), shapes=False)
    rows = [{"user": f"u{n}"} for n in range(20_000)]
    model.learn(rows, [n % 2 == 0 for n in range(20_000)])
    keys = vectors_of(model)["keys"]
    assert 5_000 < len(keys) < 19_000
    last = AdaptiveLinearModel(embeddings=SMALL).reader("test").rows(rows[-4_000:]).places[:, 0]
    assert np.isin(last | (1 << 52), keys).all()


def test_rows_without_a_time_are_as_old_as_the_row_before() -> None:
    """A record without the field would have made all of its features expire."""
    rows: list[Record] = [{"user": "a", "at": 1_000.0 + n} for n in range(5)]
    model = new(replace(EXPIRING, expire=60), shapes=False)
    model.learn([*rows, {"user": "a"}, {"user": "a", "at": None}], [True] * 7)
    assert len(vectors_of(model)["admitted"])
    assert vectors_of(model)["time_ms"] == 1_004_000


# ---- other labels and settings


@pytest.mark.parametrize("rows_before", [300, 1_500])
@pytest.mark.parametrize("shapes", [True, False])
def test_a_third_label_makes_a_model_of_classes_with_their_embeddings(rows_before: int, shapes: bool) -> None:
    """Members for two labels left the mixture, and with them what they had learned; another cut changed the fields of
    new classes.
    """
    records = views(rows_before + 400)
    labels: list[Any] = labels_of(records, "texts")
    for at in range(rows_before, len(labels), 3):
        labels[at] = "maybe"
    labels[-50] = "never"
    for record in records[-250:]:
        record["late"] = f"l{len(record['tags'])}"
    whole, alone = new(shapes=shapes), new(None, shapes=shapes)
    made = whole.learn_each(records, labels)
    alone.learn(records, labels)
    assert whole.classes == alone.classes
    assert sorted(whole.classes or []) == ["maybe", "never", "no", "yes"]
    two_labels = new(shapes=shapes)
    two_labels.learn(records, labels_of(records, "texts"))
    for name in ("keys", "admitted"):
        assert np.array_equal(vectors_of(whole)[name], vectors_of(two_labels)[name])
    assert len(vectors_of(whole)["experts"]) == 10
    asked = records[-50:]
    assert LinearPredictor(whole.parameters())(asked) == pytest.approx(whole.predict(asked), rel=1e-6, abs=1e-6)
    parts, at = new(shapes=shapes), 0
    for stop in (100, 350, len(records) - 120, len(records)):
        parts.learn(records[at:stop], labels[at:stop])
        parts, at, state = new(shapes=shapes), stop, parts.state()
        parts.restore(state)
    assert frozen(parts.parameters(state=False)) == frozen(whole.parameters(state=False))
    assert made.shape == (len(records), 5)


def test_a_class_that_comes_late_begins_as_the_class_that_had_not_come() -> None:
    """The linear member began it as the class that had not come; another beginning made the members disagree."""
    model, records = new(shapes=False), views(400)
    model.learn(records, labels_of(records, "classes"))
    before = vectors_of(model)["experts"]
    assert model._weights is not None
    model._weights.split_last_score()
    expected = [before[4 * expert + min(score, 3)] for expert in range(2) for score in range(5)]
    assert frozen(vectors_of(model)["experts"]) == frozen(expected)


def test_a_third_label_keeps_what_the_second_one_has_learned() -> None:
    """The vectors of two labels were lost with the third one: the loss of the next rows was that of a new model."""
    records = views(8_000)
    labels: list[Any] = labels_of(records, "texts")
    losses = []
    for embeddings in (None, replace(SMALL, kind="fm")):
        model = new(embeddings, shapes=False)
        model.learn(records[:7_000], labels[:7_000])
        found = model.learn_each(records[7_000:], ["maybe", *labels[7_001:]])
        losses.append(loss_of_classes(found[1:], labels[7_001:], model.classes or []))
    assert losses[1] < 0.85 * losses[0]


def test_a_third_label_of_questions_that_wait_is_learned_whatever_the_batches_are() -> None:
    """Questions kept the predictions of one score, and the model had three."""
    given = [{**event, "label": "ab"[event["label"]]} if "label" in event else event for event in events(300)]
    for event in [event for event in given if "label" in event][-40:]:
        event["label"] = "c"
    labels = replace(LABELS, otherwise="a", schedule="end")
    found = [
        Trained(labels, lambda flow, rows=rows: timed(flow.from_source(source_of(given, rows))), embeddings=SMALL)
        for rows in (7, len(given))
    ]
    assert found[0].parameters["classes"] == ["a", "b", "c"]
    assert found[0].parameters["embeddings"]["scores"] == 4
    assert found[0].bits == found[1].bits


def test_embeddings_may_come_and_go_between_two_runs(caplog: pytest.LogCaptureFixture) -> None:
    """A service whose settings got embeddings lost what its linear model had learned, or its questions."""
    records = views(ROWS)
    labels = labels_of(records)
    plain, embedded = new(None), new()
    for model in (plain, embedded):
        model.learn(records, labels)
    gone, come = new(None), new()
    assert [model.reads_as(embedded.state()) for model in (gone, come)] == [False, True]
    column_of = gone.adopt(embedded.state())
    assert column_of is not None
    for state in (True, False):
        new(None).start_from(embedded.parameters(state=state))
    # They left without a word, and the log said that the training resumes exactly.
    assert caplog.text.count("the earlier model had embeddings=, and this one is without") == 3
    # How much of the weight is shared at each row was judged with embeddings.
    assert gone.predict(records) == pytest.approx(plain.predict(records), abs=1e-2)
    rows, of_plain = embedded.rows(records[-1:]), plain.rows(records[-1:])
    assert sorted(map(column_of, rows.indices.tolist())) == sorted(of_plain.indices.tolist())
    column_of = come.adopt(plain.state())
    assert column_of is not None
    assert come.predict(records) == pytest.approx(plain.predict(records), abs=3e-3)
    assert column_of(5) == (1_023 << 52 | 5)
    more = views(5_000, seed=5)
    found = come.learn_each(more, labels_of(more))
    assert LinearPredictor(come.parameters())(more) == pytest.approx(come.predict(more), rel=1e-6, abs=1e-6)
    assert log_loss(found[-1_000:], labels_of(more)[-1_000:]) < log_loss(
        plain.predict(more[-1_000:]), labels_of(more)[-1_000:]
    )


def test_embeddings_of_other_settings_begin_anew_only_if_that_is_asked_for() -> None:
    """Vectors of eight numbers were taken for vectors of four."""
    records = views(400)
    model = new()
    model.learn(records, labels_of(records))
    other = replace(SMALL, factors=8)
    for take_on in (
        lambda made: made.restore(model.state()),
        lambda made: made.start_from(model.parameters(state=False)),
    ):
        with pytest.raises(OtherModel, match='the same embeddings, or with other_settings="keep"'):
            take_on(new(other))
        made = new(other, other_settings="keep")
        take_on(made)
        made.learn(records, labels_of(records))
        assert vectors_of(made)["factors"] == 8
    roomier = new(replace(SMALL, admit=5, at_most="3 MB"))
    roomier.restore(model.state())
    assert np.array_equal(roomier.predict(records), model.predict(records))


def test_a_drift_raises_the_rates_of_embeddings() -> None:
    """The option promises larger steps for the ready-made model, whatever its members are."""
    records = views(ROWS)
    model, raised = new(shapes=False), new(shapes=False)
    for each in (model, raised):
        each.learn(records, labels_of(records))
    raised.raise_rates()
    before = vectors_of(model)["experts"][1]["vectors"].copy()
    steps = []
    for each in (model, raised):
        each.learn(records[:200], labels_of(records)[:200])
        steps.append(np.abs(vectors_of(each)["experts"][1]["vectors"][: len(before)] - before).mean())
    assert steps[1] > 2 * steps[0]


# ---- quality


def test_users_who_like_items_are_learned() -> None:
    """A linear model adds up what users and items are like, and tables have bins of too few ids."""
    records = views(12_000)
    labels = labels_of(records)
    losses = {}
    for name, embeddings in (("without", None), ("fm", replace(SMALL, kind="fm")), ("deepfm", SMALL)):
        made = new(embeddings).learn_each(records, labels)
        losses[name] = log_loss(made[2_000:], labels[2_000:])
    assert max(losses["fm"], losses["deepfm"]) < 0.85 * losses["without"]


def test_users_who_like_items_are_learned_of_several_classes() -> None:
    """Vectors that all classes share, or a field of the class, had learned little."""
    records = views(8_000)
    labels, losses = labels_of(records, "classes"), []
    for embeddings in (None, SMALL):
        model = new(embeddings, shapes=False)
        made = model.learn_each(records, labels)
        losses.append(loss_of_classes(made[2_000:], labels[2_000:], model.classes or []))
    assert losses[1] < 0.9 * losses[0]


def test_admission_costs_little_where_users_come_and_go() -> None:
    """What the first two of a user's twenty rows said was lost with ``admit=3``: the loss was 3 % larger."""
    losses = []
    for admit in (1, 3):
        embeddings = Embeddings(kind="fm", factors=4, admit=admit, at_most="8 MB")
        streams = (visits(20_000, seed) for seed in (1, 2))
        made = [log_loss(new(embeddings, shapes=False).learn_each(*each), each[1]) for each in streams]
        losses.append(sum(made))
    assert losses[1] < 1.015 * losses[0]


def test_embeddings_cost_little_where_effects_add_up() -> None:
    """A mixture is hardly worse than its best member."""
    records = views(6_000)
    labels = labels_of(records, interaction=0.0)
    losses = [log_loss(new(embeddings).learn_each(records, labels), labels) for embeddings in (None, SMALL)]
    assert losses[1] < 1.01 * losses[0]


# ---- through train_online


@pytest.mark.parametrize(("seed", "kind"), [(1, "binary"), (2, "classes")])
def test_a_training_has_the_same_bits_however_its_stream_is_cut(seed: int, kind: str) -> None:
    """Workers read hashes of 52 bits, and one owner gives the fields their numbers."""
    records = views(900)
    given = [record | {"bought": label} for record, label in zip(records, labels_of(records, kind), strict=True)]
    options: dict[str, Any] = {"label": "bought", "embeddings": EXPIRING}
    expected = trained(given, **options).models[-1].parameters
    options |= {"mini_batch": 40, "mode": "synchronous", "workers": 2}
    found = trained(given, seed=seed, **options).models[-1].parameters
    assert frozen(found) == frozen(expected)


def test_a_comparison_has_a_learner_with_embeddings() -> None:
    """``compare_online`` knows the options of ``train_online`` by a list of its own."""
    records = views(6_000)
    given = [record | {"bought": label} for record, label in zip(records, labels_of(records), strict=True)]
    flow = Flow("f")
    learners: dict[str, Any] = {"linear": {"shapes": False}, "vectors": {"embeddings": SMALL}}
    comparison = compare_online(flow.from_items(given), learners, label="bought", report_every=2_000, window=2_000)
    reports = comparison.metrics.collect()
    flow.run()
    assert reports.items[-1]["best"] == "vectors"


def test_rows_that_wait_follow_a_model_with_other_numbers_of_fields() -> None:
    """After a roll back, a waiting view of a user became one of an item with the same hash."""
    first, other = new(shapes=False), new(shapes=False)
    first.learn([{"user": "a"}, {"item": "b"}, {"shop": "c"}], [True, False, True])
    other.learn([{"item": "b"}, {"user": "a"}], [True, False])
    waiting = first.rows([{"user": "a", "item": "b", "shop": "c", "price": None}])
    moved = [other.columns_from(first)(index) for index in waiting.indices.tolist()]
    own = other.rows([{"user": "a", "item": "b", "price": None}]).indices.tolist()
    assert set(own) < set(moved)
    [unknown] = set(moved) - set(own)
    assert unknown is not None
    assert unknown >> 52 == 1_023


@pytest.mark.parametrize("kind", ["binary", "classes"])
async def test_versions_as_changes_are_the_versions_to_the_last_bit(kind: str) -> None:
    """Keys come and go in the middle of their array, and rows move with them."""
    records, topic = views(1_500), MemoryBroker().topic("models")
    given = [record | {"bought": label} for record, label in zip(records, labels_of(records, kind), strict=True)]
    await topic.create()
    flow = Flow("f")
    training = train_online(
        flow.from_items(given, parallelism=1), label="bought", embeddings=EXPIRING, mini_batch=300, publish_every=1
    )
    versions = training.models.collect()
    training.models.publish_model(topic, model="m", changes=True)
    await (await flow.start()).wait()
    found = [frozen(update.parameters) async for update in model_updates(topic, "m", follow=False)]
    assert len(found) >= 5
    assert found == [frozen(version.parameters) for version in versions.items]
