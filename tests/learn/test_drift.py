"""Drift detectors are compared with river's, and with streams whose changes are known."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from learn.online_support import delayed
from support.examples import random_examples

from streamiter import Columns, Flow
from streamiter.learn import ADWIN, DriftWatch, ForeignModel, PageHinkley, train_online
from streamiter.learn.model_owner import MODELS, OwnerOptions, PublishSchedule
from streamiter.learn.online.row_training import RowOwner
from streamiter.learn.quality.drift import DRIFTS
from streamiter.learn.quality.validation import PREDICTIONS
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.row_reading import record_of_features
from streamiter.models import ModelSnapshot
from streamiter.testing import check_restore
from streamiter.values.named_rows import named_matrix
from streamiter.values.plain_data import PlainData

every_detector = pytest.mark.parametrize(
    "make", [ADWIN, lambda: ADWIN(check_every=7), PageHinkley], ids=["ADWIN", "ADWIN of 7", "PageHinkley"]
)


def coins(seed, *parts):
    """Return 0 and 1 with a mean for each part of 3,000 values."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.random(3_000) < mean for mean in parts]).astype(float)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, [3167, 6239]), (1, [3167, 6239]), (2, [3103, 6271]), (3, [3263, 6335]), (4, [3199, 6303])],
)
def test_adwin_finds_the_changes_that_river_finds(seed, expected):
    """A bound without the range of the values, or of the whole stream, found each of these changes later or never.

    River drops the whole window at a change; so only the first change is at the same position.
    """
    changes = ADWIN(confidence=0.002).watch(coins(seed, 0.1, 0.25, 0.1))
    assert [change.position for change in changes] == expected
    assert [(change.old_mean, change.new_mean) for change in changes] == [
        (pytest.approx(0.1, abs=0.02), pytest.approx(0.25, abs=0.08)),
        (pytest.approx(0.25, abs=0.02), pytest.approx(0.1, abs=0.08)),
    ]


def test_page_hinkley_finds_rises_where_river_finds_them():
    """The sum was not reset after a rise, so each later row was a rise, too."""
    losses = np.random.default_rng(0).exponential(np.repeat([0.3, 0.7, 0.3, 0.9], 3_000))
    rises = PageHinkley(threshold=50.0, allowance=0.05).watch(losses)
    assert [rise.position for rise in rises] == [3127, 9099]
    assert rises[0].old_mean == pytest.approx(0.3, abs=0.02)


def test_adwin_rarely_gives_a_false_alarm_and_rarely_misses():
    """The documented figures were measured with an earlier default."""
    still = [ADWIN().watch((np.random.default_rng(seed).random(20_000) < 0.2) * 1.0) for seed in range(100)]
    assert sum(map(len, still)) == 3
    delays = []
    for seed in range(100):
        random = np.random.default_rng(seed)
        values = np.append(random.random(5_000) < 0.1, random.random(5_000) < 0.25) * 1.0
        delays.append(next(c.position for c in ADWIN().watch(values) if c.position >= 5_000) - 5_000)
    assert np.median(delays) == 151


def through_bytes(value):
    plain = PlainData()
    return plain.decode(plain.encode(value))


def parts(random):
    """Return values, the places where they are cut, and the place of a restore."""
    mean = random.choice([0.1, 0.5, 1e-6, 1e6])
    values = [random.random() * mean * (1 if n < 60 else 30) for n in range(random.randrange(1, 130))]
    cuts = sorted(random.randrange(len(values) + 1) for _ in range(random.randrange(4)))
    return values, [0, *cuts, len(values)]


@every_detector
@random_examples(parts, examples=500)
def test_changes_depend_neither_on_cuts_nor_on_restores(example, make):
    """A restored detector counted the rows to its next check from the restore on."""
    values, cuts = example
    whole = [tuple(change) for change in make().watch(values)]
    found, mine = [], make()
    for start, stop in itertools.pairwise(cuts):
        found += [(start + place, *means) for place, *means in mine.watch(values[start:stop])]
        restored = make()
        restored.restore(through_bytes(mine.state()))
        mine.watch([1e9])  # the snapshot must not change with the detector
        mine = restored
    assert found == whole


def test_memory_of_adwin_does_not_grow_and_its_window_does():
    """Each level of the histogram was a new array."""
    adwin = ADWIN()
    size = len(json.dumps(adwin.state(), default=lambda array: array.shape))
    adwin.watch(np.tile([0.0, 1.0], 100_000))
    assert adwin.width == 200_000
    assert len(json.dumps(adwin.state(), default=lambda array: array.shape)) <= size + 5


@every_detector
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e12])
def test_constant_values_are_no_change(make, constant):
    """Rounding of the sums of 0.1 was a difference of two means, and the bound was 0."""
    assert make().watch(np.full(5_000, constant)) == []


# ---- a learner under watch


def rows(task, predictions, targets, weights=None):
    targets = np.asarray(targets, dtype=float)
    return {
        "task": task,
        "predictions": np.asarray(predictions, dtype=float),
        "targets": targets,
        "weights": np.ones(len(targets)) if weights is None else np.asarray(weights, dtype=float),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (rows("classification", [0.1] * 500, [0] * 500), rows("classification", [0.1] * 500, [1] * 500)),
        (rows("classes", [0.9] * 500, [1] * 500), rows("classes", [0.2] * 500, [0] * 500)),
        (
            rows("regression", np.tile([1e-9, 3e-9], 250), np.tile([1e-9, 3e-9], 250)),
            rows("regression", np.tile([3e-9, 1e-9], 250), np.tile([1e-9, 3e-9], 250)),
        ),
    ],
)
def test_a_larger_loss_is_a_drift_and_a_smaller_one_is_not(before, after):
    """A model that learned had a drift in each phase of its learning."""
    watch = DriftWatch(ADWIN())
    assert watch.add(before) == []
    [drift] = watch.add(after)
    assert drift["old_loss"] < 0.1 < 0.3 < drift["new_loss"]
    assert 500 < drift["row"] <= 532
    assert watch.metrics() == {"drifts": 1, "rows_since_drift": 1_000 - drift["row"]}
    assert watch.add(before) == []
    assert watch.metrics()["drifts"] == 1


@every_detector
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_watch_depends_neither_on_cuts_nor_on_restores(make, task):
    """The variance of the targets was that of the mini-batch, so the drift depended on its size."""
    random = np.random.default_rng(11)
    targets = random.normal(size=900) * 7.0 + 100.0 if task == "regression" else random.integers(0, 2, 900) * 1.0
    good = targets + random.normal(size=900) if task == "regression" else 0.2 + 0.6 * targets
    predictions = np.where(np.arange(900) < 600, good, np.roll(good, 1))
    weights = random.integers(0, 3, 900)
    results = set()
    for cut in (4, 37, 900):
        watch, found = DriftWatch(make()), []
        for start in range(0, 900, cut):
            part = slice(start, start + cut)
            found += watch.add(rows(task, predictions[part], targets[part], weights[part]))
            restored = DriftWatch(make())
            restored.restore(through_bytes(watch.state()))
            watch = restored
        results.add(json.dumps([found, watch.metrics()]))
    [result] = results
    assert json.loads(result)[1]["drifts"] == 1


def test_another_detector_keeps_the_counts():
    """A job that was restarted with PageHinkley read the buckets of ADWIN."""
    old, new = DriftWatch(ADWIN()), DriftWatch(PageHinkley())
    old.add(rows("classification", np.repeat([0.1, 0.9], 500), np.zeros(1_000)))
    new.restore(old.state())
    assert new.metrics() == old.metrics() != {"drifts": 0, "rows_since_drift": 1_000}


def stagger(seed):
    """Return rows of three fields with three values each, whose rule changes every 3,000 rows."""
    random = np.random.default_rng(seed)
    size, color, shape = random.integers(0, 3, (3, 12_000))
    rules = [(size == 0) & (color == 0), (color == 1) | (shape == 1), size > 0, (size == 0) & (color == 0)]
    label = np.concatenate([rule[3_000 * part : 3_000 * (part + 1)] for part, rule in enumerate(rules)])
    names = np.array(["a", "b", "c"])
    return Columns({"size": names[size], "color": names[color], "shape": names[shape], "label": label})


def run(records, **options):
    flow = Flow("watched")
    training = train_online(flow.from_items(records), mode="synchronous", **options)
    streams = [training.models, training.predictions, training.drifts, training.validation]
    collected = [stream.collect() for stream in streams]
    flow.run()
    return [each.items for each in collected]


@pytest.mark.parametrize("mini_batch", [100, 1_000])
def test_drifts_of_a_training_are_told_and_published(mini_batch):
    """STAGGER: each change of the rule is found within a hundred rows, whatever the mini-batches are."""
    models, _, drifts, _ = run(stagger(0), label="label", drift=ADWIN(), mini_batch=mini_batch)
    assert [drift["row"] for drift in drifts] == [3040, 6016, 9024]
    assert all(drift["detector"] == "ADWIN" and drift["old_loss"] < drift["new_loss"] for drift in drifts)
    assert models[-1].metrics.items() >= {"drifts": 3, "rows_since_drift": 12_000 - 9_024}.items()
    assert models[0].metrics.items() >= {"drifts": 0, "rows_since_drift": mini_batch}.items()


@pytest.mark.parametrize(("rates", "at_most"), [([0.5], 0.7), (None, 1.05)], ids=["one rate", "six rates"])
def test_raised_rates_follow_a_drift(rates, at_most):
    """The rate of AdaGrad had become so small that a new rule was learned slower than the first one."""

    def model():
        return AdaptiveLinearModel(rates=rates, shapes=False)

    records, losses, raised = stagger(0), {}, {"drift": ADWIN(), "on_drift": "raise rates"}
    for name, options in {"same": {}, "watched": {"drift": ADWIN()}, "raised": raised}.items():
        *_, reports = run(records, model=model, label="label", mini_batch=100, **options)
        losses[name] = reports[-1]["loss"]
    assert losses["same"] == losses["watched"]
    assert losses["raised"] < at_most * losses["same"]
    by_hand, watch, total = model(), DriftWatch(ADWIN()), 0.0
    for start in range(0, len(records), 100):
        part = records[start : start + 100]
        labels = part["label"]
        features = Columns({name: part[name] for name in ("size", "color", "shape")})
        found = by_hand.learn_each(features, labels)
        total -= np.log(np.where(labels, found, 1 - found)).sum()
        rows = {"task": "classification", "predictions": found, "targets": labels * 1.0, "weights": np.ones(len(found))}
        if watch.add(rows):
            by_hand.raise_rates()
    assert losses["raised"] == pytest.approx(total / len(records), rel=1e-9)
    AdaptiveLinearModel().raise_rates()  # Before the first label there are none.


@pytest.mark.parametrize(
    ("detector", "options"),
    [(ADWIN, {}), (PageHinkley, {"records": 130}), (ADWIN, {"raises_rates": True, "every_s": 2.5})],
    ids=["ADWIN", "PageHinkley", "raised rates"],
)
def test_an_owner_under_watch_resumes_exactly(detector, options):
    """After a restore the window was empty, so the drift was found a thousand rows later, or not at all."""
    random = np.random.default_rng(4)
    x = random.normal(size=(600, 1))
    label = np.where(np.arange(600) < 300, x[:, 0] > 0, x[:, 0] < 0)
    batches = [
        {
            "position": (0, start),
            "numbers": np.arange(start, start + 60),
            "records": list(range(start, start + 60)),
            "features": record_of_features(replace(named_matrix(x[start : start + 60]), fields=("x",))),
            "labels": label[start : start + 60].tolist(),
            "weights": None,
            "label_fields": [],
        }
        for start in range(0, 600, 60)
    ]

    raises = options.pop("raises_rates", False)

    def owner():
        return RowOwner(
            AdaptiveLinearModel, OwnerOptions(PublishSchedule(**options), drift=detector(), raises_rates=raises)
        )

    check_restore(
        owner,
        {"start": [None], "rows": batches},
        epochs=1,
        tags=[MODELS, PREDICTIONS, DRIFTS],
        structs=[ModelSnapshot],
        cuts=4,
        fresh_process=False,
    )


def test_an_owner_restores_a_snapshot_without_drift():
    """A running job could not be restarted with ``drift=``, because its snapshot had no state for it."""
    state = RowOwner(AdaptiveLinearModel, OwnerOptions()).snapshot()
    watched = RowOwner(AdaptiveLinearModel, OwnerOptions(drift=ADWIN()))
    fresh = repr(watched.snapshot())
    watched.restore(state)
    assert repr(watched.snapshot()) == fresh


def test_predictions_of_a_training_are_those_that_are_validated():
    """A user who computed a metric of his own got other rows than the validation."""
    models, predicted, drifts, metrics = run(stagger(1), label="label")
    assert [len(each["predictions"]) for each in predicted] == [1_000] * 12
    assert {each["task"] for each in predicted} == {"classification"}
    joined = {name: np.concatenate([each[name] for each in predicted]) for name in ("predictions", "targets")}
    squares = np.square(joined["predictions"] - joined["targets"])
    assert metrics[-1]["squared_error"] == pytest.approx(squares.mean(), rel=1e-12)
    features = stagger(1)
    label = features["label"]
    model = AdaptiveLinearModel()
    fields = [{name: features[name][row] for name in ("size", "color", "shape")} for row in range(12_000)]
    assert np.array_equal(joined["predictions"], model.learn_each(fields, label))
    assert np.array_equal(joined["targets"], label)
    assert drifts == []
    assert "drifts" not in models[-1].metrics


def test_first_predictions_of_questions_are_watched():
    """A question was predicted again when its answer came, so a late drift was hidden by what was learned since."""
    random = np.random.default_rng(3)
    asked = [{"id": n, "x": float(random.normal())} for n in range(6_000)]
    answers = [{"id": n, "y": bool((each["x"] > 0) == (n < 3_000))} for n, each in enumerate(asked)]
    events = asked[:50] + [event for both in zip(asked[50:], answers, strict=False) for event in both]
    labels = delayed(["x"], "y")
    _, predicted, drifts, _ = run(events, labels=labels, drift=ADWIN(), shapes=False)
    counted = sum(len(each["targets"]) for each in predicted)
    before_the_first_label = 5_950 - counted
    assert before_the_first_label <= 51
    assert [3_000 < drift["row"] + before_the_first_label < 3_100 for drift in drifts] == [True]


def test_a_model_of_another_library_is_watched():
    """Its owner emitted no drifts, so no training of such a model could be built."""
    last_label = ForeignModel(
        make=lambda: [0.0],
        learn=lambda model, features, label: model.__setitem__(0, label),
        predict=lambda model, features: model[0],
        save=lambda model: repr(model[0]).encode(),
        load=lambda data: [float(data)],
        task="regression",
    )
    labels = [*np.sin(np.arange(1_000) / 50), *np.random.default_rng(5).normal(size=500)]
    flow = Flow("last")
    records = flow.from_items([{"x": 0.0, "y": float(label)} for label in labels])
    training = train_online(records, last_label, label="y", drift=ADWIN())
    drifts, models = training.drifts.collect(), training.models.collect()
    flow.run()
    assert [1_000 < drift["row"] < 1_064 for drift in drifts.items] == [True]
    assert models.items[-1].metrics["drifts"] == 1
