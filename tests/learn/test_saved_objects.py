"""All public objects that learn or predict can be copied, pickled, saved and loaded; the copy continues to the bit."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from learn.frozen_states import frozen
from support.waiting import PATIENCE_S

import streamiter.learn
import streamiter.models
import streamiter.networks
from streamiter.errors import ModelError
from streamiter.learn import (
    ADWIN,
    FTRL,
    SGD,
    Adam,
    AdaptiveLinearModel,
    BadRows,
    DecisionTree,
    DriftWatch,
    FeatureHasher,
    ForeignModel,
    HuberLoss,
    InverseSquareRoot,
    KMeans,
    LinearModel,
    LinearRegression,
    LogisticRegression,
    OnlineKMeans,
    Optimizer,
    PageHinkley,
    ProgressiveValidation,
    QuantileLoss,
    SquaredLoss,
    StandardScaler,
)
from streamiter.models import LinearPredictor, ModelSnapshot, ModelUpdate
from streamiter.models.saved_objects import Savable
from streamiter.networks import Network, NetworkPredictor

X = np.random.default_rng(1).normal(size=(240, 3))
YES = X[:, 0] + 0.3 * X[:, 1] > 0
NUMBERS = X @ [1.0, -2.0, 0.5]
ROWS = [
    {"a": float(a), "word": "xyz"[n % 3], "tags": ["p", "q"][: n % 3], "b": None if n % 5 == 0 else float(b)}
    for n, (a, b, _) in enumerate(X)
]
CLASSES = np.array(["low", "middle", "high"])[np.digitize(NUMBERS, [-1.0, 1.0])]


@dataclass(frozen=True)
class Halving(SGD):
    """A rule of a user's module."""


def learns(*labels: Any) -> Callable[[Any, slice], object]:
    """Return the function that teaches a part of the rows."""
    return lambda model, part: model.learn(X[part], *(label[part] for label in labels))


def learns_records(labels: Any) -> Callable[[Any, slice], object]:
    return lambda model, part: model.learn(ROWS[part], labels[part].tolist())


def predicted(part: slice) -> Any:
    return {
        "task": "classification",
        "predictions": np.abs(np.sin(X[part, 0])),
        "targets": YES[part] * 1.0,
        "weights": np.ones(len(X[part])),
    }


def a_scaled_model() -> LinearModel:
    model = LinearModel(3, loss=HuberLoss(2.0), optimizer=Adam(InverseSquareRoot(0.1, 0.01)))
    scaler = StandardScaler()
    scaler.learn(X)
    model.scale(scaler.moments)
    return model


def a_fitted(model: Any, *data: Any) -> Any:
    model.fit(*data, progress=False)
    return model


def a_predictor(labels: Any, **options: Any) -> LinearPredictor:
    model = AdaptiveLinearModel(**options)
    model.learn(ROWS, labels.tolist())
    return LinearPredictor(model.parameters())


def predicts_records(predictor: Any) -> Any:
    return predictor(ROWS[:9])


def predicts(model: Any) -> Any:
    return model.predict(X[:9])


def nothing(model: Any, part: slice) -> None:
    """Learn nothing: the object was fitted, or has settings only."""


Case = tuple[Callable[[], Any], Callable[[Any, slice], object], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "adaptive, new": (AdaptiveLinearModel, learns_records(YES), lambda model: model.predict(ROWS[:9])),
    "adaptive, crosses": (
        lambda: AdaptiveLinearModel(crosses=[("a", "word"), ("a", "b")], bits=12, rates=(0.5,)),
        learns_records(YES),
        lambda model: model.predict(ROWS[:9]),
    ),
    "adaptive, numbers": (AdaptiveLinearModel, learns(NUMBERS, YES + 0.5), predicts),
    "adaptive, quantiles": (lambda: AdaptiveLinearModel(loss="quantile", quantile=0.9), learns(NUMBERS), predicts),
    "adaptive, huber": (lambda: AdaptiveLinearModel(loss="huber"), learns(NUMBERS), predicts),
    "adaptive, counts": (lambda: AdaptiveLinearModel(loss="poisson"), learns(np.floor(NUMBERS**2)), predicts),
    "adaptive, classes": (AdaptiveLinearModel, learns_records(CLASSES), lambda model: model.predict(ROWS[:9])),
    "adaptive, given classes": (
        lambda: AdaptiveLinearModel(classes=["high", "low", "middle"]),
        learns_records(CLASSES),
        lambda model: model.predict(ROWS[:9]),
    ),
    "LinearRegression": (
        lambda: LinearRegression(3, optimizer=Halving(0.1, l2=0.1), initial_weights=[1.0, 2.0, 3.0]),
        learns(NUMBERS),
        predicts,
    ),
    "LogisticRegression": (lambda: LogisticRegression(3, labels="-1/1"), learns(YES * 2 - 1), predicts),
    "LogisticRegression, fitted": (
        lambda: a_fitted(LogisticRegression(3, optimizer=FTRL(0.1, 0.1, l1=0.1)), X, YES),
        learns(YES),
        predicts,
    ),
    "LinearModel": (
        lambda: LinearModel(3, loss=QuantileLoss(0.9), optimizer=Adam(0.1), intercept=False),
        learns(NUMBERS),
        predicts,
    ),
    "LinearModel, scaled": (
        a_scaled_model,
        lambda model, part: model.apply(model.gradient(X[part], NUMBERS[part])),
        predicts,
    ),
    "OnlineKMeans": (lambda: OnlineKMeans(3, decay=0.9), learns(), lambda model: model.parameters()),
    "KMeans": (lambda: a_fitted(KMeans(clusters=3, seed=4), X), nothing, predicts),
    "KMeans, new": (lambda: KMeans(clusters=2, initial=X[:2]), nothing, lambda model: model.rounds_made),
    "DecisionTree": (lambda: a_fitted(DecisionTree(maximum_depth=3), X, CLASSES), nothing, predicts),
    "DecisionTree, numbers": (lambda: a_fitted(DecisionTree("regression"), X, NUMBERS), nothing, predicts),
    "DecisionTree, new": (lambda: DecisionTree(feature_names=["a", "b", "c"]), nothing, repr),
    "StandardScaler": (StandardScaler, learns(), lambda scaler: scaler.parameters()),
    "FeatureHasher": (
        lambda: FeatureHasher(["word"], numeric={"a": 0.5}, crosses=[("word", "b")], bits=8, seed=3),
        nothing,
        lambda hasher: hasher.rows(ROWS).to_dense(),
    ),
    "ADWIN": (
        lambda: ADWIN(confidence=0.1, check_every=4),
        lambda adwin, part: adwin.watch(X[part, 0] + part.start),
        lambda adwin: adwin.width,
    ),
    "PageHinkley": (
        lambda: PageHinkley(threshold=2.0, rows_min=5),
        lambda test, part: test.watch(X[part, 0] + part.start),
        lambda test: test.state(),
    ),
    "DriftWatch": (
        lambda: DriftWatch(PageHinkley(threshold=2.0)),
        lambda watch, part: watch.add(predicted(part)),
        lambda watch: watch.metrics(),
    ),
    "ProgressiveValidation": (
        lambda: ProgressiveValidation(window=50),
        lambda validation, part: validation.update(*list(predicted(part).values())[1:]),
        lambda validation: validation.metrics(),
    ),
    "LinearPredictor": (lambda: a_predictor(YES), nothing, predicts_records),
    "LinearPredictor, classes": (lambda: a_predictor(CLASSES), nothing, predicts_records),
    "LinearPredictor, crosses": (lambda: a_predictor(NUMBERS, crosses=[("a", "word")]), nothing, predicts_records),
    "LinearPredictor, plain": (
        lambda: LinearPredictor(LogisticRegression(3).parameters(), "bought"),
        nothing,
        lambda predictor: predictor(X[:9]),
    ),
    "LinearPredictor, bare": (lambda: LinearPredictor(np.ones(3)), nothing, lambda predictor: predictor(X[:9])),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def by_file(thing: Any, tmp_path: Any) -> Any:
    thing.save(tmp_path / "thing")
    return type(thing).load(tmp_path / "thing")


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "copy": lambda thing, _: copy.copy(thing),
    "deepcopy": lambda thing, _: copy.deepcopy(thing),
    "pickle": lambda thing, _: pickle.loads(pickle.dumps(thing)),
    "pickle protocol 2": lambda thing, _: pickle.loads(pickle.dumps(thing, protocol=2)),
    "file": by_file,
}


def seen(case: Case, thing: Any) -> Any:
    """Return what a user sees of the object, and its state, as data that is equal if all bits are."""
    settings = {
        name: value.get_params() if isinstance(value, Savable) else value for name, value in thing.get_params().items()
    }
    return frozen(case[2](thing)), frozen(thing.state()), repr(settings)


@cases
def test_a_copy_continues_as_the_original_would(case: Case, tmp_path: Any) -> None:
    """Neither learners nor predictors could be pickled, so no pool of processes and no web server could use them."""
    make, learn, _ = case
    original, undisturbed = make(), make()
    for thing in (original, undisturbed):
        learn(thing, slice(0, 120))
    twins = {way: copied(original, tmp_path) for way, copied in WAYS.items()}
    assert {type(twin) for twin in twins.values()} == {type(original)}
    at_first = seen(case, original)
    for way, twin in twins.items():
        assert seen(case, twin) == at_first, way
        learn(twin, slice(120, 240))
    assert seen(case, original) == at_first
    for thing in (original, undisturbed):
        learn(thing, slice(120, 240))
    expected = seen(case, undisturbed)
    assert seen(case, original) == expected
    assert [way for way, twin in twins.items() if seen(case, twin) != expected] == []


@cases
def test_an_object_that_has_learned_nothing_can_be_copied(case: Case, tmp_path: Any) -> None:
    """The state before the first row is another one: a model without weights, a scaler without a width."""
    make, learn, _ = case
    new, original = make(), make()
    twins = {way: copied(new, tmp_path) for way, copied in WAYS.items()}
    for thing in (*twins.values(), original):
        learn(thing, slice(0, 240))
    expected = seen(case, original)
    assert [way for way, twin in twins.items() if seen(case, twin) != expected] == []


def test_every_public_object_with_a_state_is_in_the_list() -> None:
    """A learner that is added must be copied and saved, too."""
    rooms = (streamiter.learn, streamiter.models)
    classes = {name: getattr(room, name) for room in rooms for name in room.__all__}
    classes = {name: each for name, each in classes.items() if isinstance(each, type)}
    # They are the steps, or the ends, of a topic, and have connections.
    connected = {"InitialModel", "ModelPublisher", "ModelUpdateEncoder", "ModelUpdates", "RollbackWatch", "ServedModel"}
    connected |= {"ParameterServerTraining", "ParameterServerWorker"}
    with_state = {name for name, each in classes.items() if hasattr(each, "restore") or issubclass(each, Savable)}
    tried = {type(make()).__name__ for make, _, _ in CASES.values()}
    assert with_state - connected == tried


DATA: dict[str, Callable[[], Any]] = {
    "a refusal": lambda: BadRows([3, 4], "expected numbers", {3: "expected a number"}),
    "sparse rows": lambda: streamiter.learn.SparseRows.from_dense(X[:2]),
    "a gradient": lambda: LogisticRegression(3).gradient(X, YES),
    "a snapshot": lambda: ModelSnapshot(LogisticRegression(3).parameters(), records=3),
    "an update": lambda: ModelUpdate("ctr", 2, 17, None, 1700000000000, 900, {}, np.ones(2)),
    "an explanation": lambda: LinearPredictor(np.ones(3)).explain(X[0]),
    "a rule": lambda: Adam(InverseSquareRoot(0.1, 0.01)),
    "a loss": lambda: QuantileLoss(0.9),
}


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_results_can_be_copied(make: Any, way: str) -> None:
    """BadRows broke the pool of processes in which it was raised: it could not be pickled."""
    original = make()
    twin = WAYS[way](original, None)
    assert type(twin) is type(original)
    assert str(twin) == str(original)
    if isinstance(original, BadRows):
        assert (twin.rows, twin.reason, dict(twin.reasons)) == ((3, 4), "expected numbers", {3: "expected a number"})


def test_a_network_that_has_predicted_can_be_pickled() -> None:
    """Layers keep functions of their last mini-batch, which cannot be pickled."""
    network = Network.from_json(
        {
            "data": {"format": "dummy", "indexrange": 3},
            "layers": {
                "wide": {"type": "simpleinputlayer", "outputdim": 1},
                "loss": {"type": "simplelosslayer", "lossfunc": "logloss", "inputlayer": "wide"},
            },
        }
    )
    predict = NetworkPredictor(network, network.initial_parameters(seed=1))
    expected = predict(X)
    assert pickle.loads(pickle.dumps(predict))(X).tolist() == expected.tolist()


def test_a_model_of_river_can_be_pickled_with_its_predictor() -> None:
    """The functions of ``of_river`` were made inside a function, where pickle does not find them."""
    linear_model = pytest.importorskip("river.linear_model")
    functions = ForeignModel.of_river(linear_model.LogisticRegression, save=pickle.dumps, load=pickle.loads)
    model = functions.make()
    functions.learn(model, {"a": 1.0}, True)
    saved = {"saved": np.frombuffer(functions.save(model), dtype=np.uint8)}
    predict = pickle.loads(pickle.dumps(functions)).predictor(saved)
    assert pickle.loads(pickle.dumps(predict))({"a": 2.0}) == functions.predict(model, {"a": 2.0})


def test_a_fresh_process_continues_from_the_file_and_from_the_pickle(tmp_path: Any) -> None:
    """A file that only its own process can read is no file: classes must be found by name, and be imported."""
    model = AdaptiveLinearModel(crosses=[("a", "word")])
    model.learn(ROWS[:120], YES[:120].tolist())
    model.save(tmp_path / "model")
    (tmp_path / "pickle").write_bytes(pickle.dumps(model))
    model.learn(ROWS[120:], YES[120:].tolist())
    (tmp_path / "rows").write_text(repr((ROWS, YES.tolist())))
    program = """
import pickle, sys
from pathlib import Path
from streamiter.learn import AdaptiveLinearModel
folder = Path(sys.argv[1])
rows, labels = eval((folder / "rows").read_text())
for model in (AdaptiveLinearModel.load(folder / "model"), pickle.loads((folder / "pickle").read_bytes())):
    model.learn(rows[120:], labels[120:])
    print(model.predict(rows[:9]).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout == f"{model.predict(ROWS[:9]).tolist()}\n" * 2


def test_settings_are_kept_as_they_were() -> None:
    """A list that its owner changed later gave a copy with other fields than its original had."""
    fields, start = ["word"], np.ones(3)
    hasher, model = FeatureHasher(fields, bits=8), LinearRegression(3, initial_weights=start)
    fields.append("a")
    start += 1.0
    assert copy.copy(hasher).categorical == ("word",)
    assert copy.copy(model).weights.tolist() == [1.0, 1.0, 1.0]


def test_the_settings_make_an_equal_object() -> None:
    """``get_params`` has the defaults, and the options that a class passes on to its base."""
    model = LogisticRegression(3, optimizer=SGD(0.25), intercept=False)
    settings = model.get_params()
    assert settings == {"width": 3, "optimizer": SGD(0.25), "labels": "0/1", "intercept": False}
    assert type(model)(**settings).get_params() == settings


class RuleByHand(Optimizer):
    """A rule that is no dataclass, so nothing describes its settings."""

    name = "by hand"

    def __init__(self) -> None:
        self.factor = 2.0

    def update(self, weights: Any, gradient: Any, slots: Any, step: int) -> None:
        weights -= self.factor * gradient


def test_settings_that_are_not_plain_data_are_refused(tmp_path: Any) -> None:
    """Half of a model in a file is worse than none."""
    model = LinearModel(1, loss=SquaredLoss(), optimizer=RuleByHand())
    with pytest.raises(ModelError, match=r"LinearModel\.save: .*\"optimizer\".*; pickle it"):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_loaded_say_why(tmp_path: Any) -> None:
    """Damage must not become another model, and a file of another kind must not become an error of numpy."""
    path = tmp_path / "scaler"
    StandardScaler().save(path)
    with pytest.raises(ModelError, match=r"expected a KMeans, given a StandardScaler; write StandardScaler\.load\(…\)"):
        KMeans.load(path)
    good = path.read_bytes()
    for place in range(20, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ModelError, match="expected the bytes that save"):
            StandardScaler.load(path)
    path.write_bytes(good[:-1])
    with pytest.raises(ModelError, match="damaged"):
        StandardScaler.load(path)
    path.write_bytes(b'{"model": "ctr"}')
    with pytest.raises(ModelError, match="expected a file that save"):
        StandardScaler.load(path)
    with pytest.raises(FileNotFoundError):
        StandardScaler.load(tmp_path / "none")


def test_a_class_of_a_users_module_must_be_imported(tmp_path: Any) -> None:
    """A file must not make a process import any module, whose code would run."""
    path = tmp_path / "model"
    LinearRegression(1, optimizer=Halving(0.1)).save(path)
    program = "import sys; from streamiter.learn import LinearRegression; LinearRegression.load(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "ModelError" in done.stderr.splitlines()[-1]
    assert f"import {Halving.__module__} first" in done.stderr.splitlines()[-1]
