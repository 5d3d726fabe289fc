"""Options, settings and rows that learners refuse, with the texts in ``refusals.txt``; the learners stay as they were.

``PYTHONPATH=tests python tests/learn/test_refusals.py`` writes the texts as they are now.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars
from learn.linear_cases import LABELS, ROWS
from learn.online_support import DELAYED
from support.refusals import refusals_test, write

from streamiter import Columns, Flow, IterationConfig, OperatorLifeCycle, learn, topic
from streamiter.learn.on_parameter_server import CentroidRows, MoveCentroids
from streamiter.models import LinearPredictor
from streamiter.parameter_server import BSP, Matrix, ParameterServer

FILE = Path(__file__).with_name("refusals.txt")
NAMES: dict[str, Any] = {name: getattr(learn, name) for name in learn.__all__}
NAMES |= {"math": math, "np": np, "polars": polars, "replace": replace, "BSP": BSP, "ParameterServer": ParameterServer}
NAMES |= {"IterationConfig": IterationConfig, "OperatorLifeCycle": OperatorLifeCycle, "DELAYED": DELAYED}
NAMES |= {"ROWS": ROWS, "LABELS": LABELS, "topic": topic}
NAMES |= {"Matrix": Matrix, "MoveCentroids": MoveCentroids, "CentroidRows": CentroidRows}


class Made(learn.LinearRegression):
    """A model whose text is the same in each run."""

    def __repr__(self) -> str:
        return "a model"


NAMES["made"] = Made(3)
NAMES["foreign"] = learn.ForeignModel(make=dict, learn=max, predict=max, save=len, load=len, task="regression")
NAMES["FUNCTIONS"] = {"key_of": len, "is_answer": bool, "features": None, "target_of": float}


def scaler_of(width: int) -> learn.StandardScaler:
    scaler = learn.StandardScaler()
    scaler.learn(np.ones((1, width)))
    return scaler


def learned() -> learn.AdaptiveLinearModel:
    model = learn.AdaptiveLinearModel()
    model.learn([{"km": 1.0, "town": town, "day": day} for town in "ab" for day in "cd"], [0, 1, 1, 0])
    return model


def other_parameters(name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return parameters that no model has published."""
    parameters = learned().parameters()
    return parameters | {name: change(parameters[name])}


NAMES |= {"scaler_of": scaler_of, "other_parameters": other_parameters}
TEN = learn.SparseRows.from_rows([([9], [1.0])], 10)
NAMES |= {"TEN": TEN, "LinearPredictor": LinearPredictor, "Columns": Columns, "date": date}
NAMES["RECORD"] = {"city": "Zürich", "hour": 7, "price": 12.5, "rush": True}


async def of_a_stream(code: str) -> object:
    """Evaluate a call with rows, and rows with event time, to which it must not have added a step."""
    flow = Flow("f")
    rows = flow.from_items([{"id": 1, "at": 1}])
    timed = rows.event_time("at", unit="ms", check_unit=False)
    endless = Flow("endless").source(topic("memory://endless"))
    before = repr(flow)
    try:
        return eval(code, {**NAMES, "rows": rows, "timed": timed, "endless": endless})
    finally:
        assert repr(flow) == before


async def where_written(code: str) -> object:
    return eval(code, NAMES)


async def of_a_fitted_model(code: str) -> object:
    """Evaluate a call with linear models without a version, a learned one, and trees that were fitted."""
    model, scaled, adaptive = learn.LogisticRegression(2), learn.LogisticRegression(2), learned()
    scaled.scale(learn.StandardScaler().moments)
    of_sparse, crossed = learn.AdaptiveLinearModel(), learn.AdaptiveLinearModel(crosses=[("0", "1")], shapes=False)
    of_sparse.learn(TEN, [1])
    crossed.learn([[1.0, 2.0]], [True])
    validation, adwin = learn.ProgressiveValidation(), learn.ADWIN()
    validation.update([0.5], [1])
    hasher = learn.FeatureHasher(["city", "hour", "rush"], numeric=["price"], crosses=[("city", "hour")])
    learned_ones = {"adaptive": adaptive, "of_sparse": of_sparse, "crossed": crossed, "adwin": adwin}
    learned_ones["validation"] = validation
    before = repr([each.state() for each in learned_ones.values()])
    tree, numbers = (learn.DecisionTree(task).fit([[0], [1]], [3, 4]) for task in ("classification", "regression"))
    try:
        others = {"model": model, "scaled": scaled, "tree": tree, "numbers": numbers, "hasher": hasher}
        return eval(code, {**NAMES, **learned_ones, **others})
    finally:
        assert repr([each.state() for each in learned_ones.values()]) == before
        assert (model.version, model.weights.tolist()) == (0, [0.0, 0.0])
        assert tree.predict([[0], [1]]).tolist() == numbers.predict([[0], [1]]).tolist() == [3, 4]


CALLS = {
    "streams, before a flow is started": of_a_stream,
    "settings, where they are written": where_written,
    "rows, for models that stay as they were": of_a_fitted_model,
}

test_wrong_options_and_rows_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
