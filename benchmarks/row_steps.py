"""Learn row by row from arrays in memory: in a flow, without a flow, with the bare compiled steps, and with river."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Columns, Flow
from streamiter.learn import ProgressiveValidation, SparseRows, train_online
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.expert_weights import ExpertWeights
from streamiter.learn.ready_made.model_rows import ModelRows, RowSteps

__all__ = ["row_steps"]

Floats = npt.NDArray[np.float64]

_DENSE: Final = 10
_HASHED: Final = 20
_BITS: Final = 18
ROWS: Final = "rows/s"
BARE: Final = "bare compiled steps"
FLOW: Final = "train_online"
MODEL: Final = "AdaptiveLinearModel.learn_each"
LOSS: Final = "log loss"
RIVER: Final = "by hand: river, a row at a time"
RIVER_MANY: Final = "by hand: river, learn_many of 1,000 rows"

# river is so much slower that fewer rows are enough to measure it.
_PART_FOR_RIVER: Final = 50
_ROWS_OF_LEARN_MANY: Final = 1_000
_ROWS_AT_LEAST: Final = 500_000
_TIMES_RIVER: Final = 10.0
# The members with tables take some seven times as long.
_PART_WITH_SHAPES: Final = 5
_ROWS_WITH_SHAPES_AT_LEAST: Final = 60_000


def row_steps(session: Session) -> Iterator[Figure]:
    """A logistic model learns row by row: 1 M rows of 10 numbers, and 300,000 rows with 20 of 2**18 hashed features."""
    yield from _dense(session)
    yield from _hashed(session)


def _dense(session: Session) -> Iterator[Figure]:
    count = session.size(1_000_000, 5_000)
    drawn = np.random.default_rng(seed=1)
    matrix = drawn.normal(size=(count, _DENSE))
    labels = _labels(matrix @ drawn.normal(size=_DENSE), drawn)
    indices = np.tile(np.arange(1, _DENSE + 1), count)
    rows = ModelRows(np.arange(count + 1) * _DENSE, indices, matrix.ravel())
    records = Columns({"x": matrix, "label": labels})
    contenders = {
        BARE: lambda: _bare(rows, labels, hashed=0, numeric=_DENSE),
        MODEL: lambda: _model(matrix, labels),
        FLOW: lambda: _flow(records, shapes=False),
    }
    some = records[: count // _PART_WITH_SHAPES]
    with_shapes, other = f"{_DENSE} numbers, with shapes: {FLOW}", ""
    shaped: dict[str, Contender] = {with_shapes: lambda: _flow(some)}
    if find_spec("river") is not None:
        part = max(count // _PART_FOR_RIVER, 100)
        contenders[RIVER] = lambda: _river(matrix[:part], labels[:part])
        if find_spec("pandas") is not None:
            contenders[RIVER_MANY] = lambda: _river_many(matrix, labels)
        other = f"{_DENSE} numbers, beside it: {RIVER}"
        shaped[other] = contenders[RIVER]
    yield from _figures(f"{_DENSE} numbers", contenders, session.repeat, at_least=_ROWS_AT_LEAST)
    series = alternate(shaped, repeat=session.repeat, agree=_agree)
    target = Target("figure", at_least=_ROWS_WITH_SHAPES_AT_LEAST)
    yield series.figure(with_shapes, ROWS, compared_with=other, target=target)
    if other:
        yield series.figure(other, ROWS)


def _hashed(session: Session) -> Iterator[Figure]:
    count = session.size(300_000, 2_000)
    drawn = np.random.default_rng(seed=2)
    places = np.sort(drawn.integers(0, 2**_BITS, (count, _HASHED)), axis=1)
    labels = _labels(drawn.normal(size=2**_BITS)[places].sum(axis=1), drawn)
    # A place that a row has twice counts once, as in any SparseRows.
    rows = SparseRows.from_rows([(np.unique(row), np.ones(len(np.unique(row)))) for row in places], 2**_BITS)
    records = Columns({"row": np.arange(count), "label": labels})
    contenders = {
        BARE: lambda: _bare(ModelRows(rows.indptr, rows.indices, rows.values), labels, hashed=2**_BITS, numeric=0),
        MODEL: lambda: _model(rows, labels),
        FLOW: lambda: _flow(records, features=lambda mini_batch: rows[mini_batch["row"]]),
    }
    yield from _figures(f"{_HASHED} of 2**{_BITS} hashed features", contenders, session.repeat)


def _labels(scores: Floats, drawn: np.random.Generator) -> npt.NDArray[np.bool_]:
    return drawn.random(len(scores)) < 1.0 / (1.0 + np.exp(-scores))


def _figures(
    rows: str, contenders: Mapping[str, Contender], repeat: int, *, at_least: float | None = None
) -> Iterator[Figure]:
    def named(name: str) -> str:
        return f"{rows}: {name}"

    contenders[BARE]()  # Compiles what is not compiled yet.
    series = alternate({named(name): run for name, run in contenders.items()}, repeat=repeat, agree=_agree)
    for name in contenders:
        target = Target("figure", at_least=at_least) if name == FLOW and at_least is not None else None
        yield series.figure(named(name), ROWS, compared_with="" if name == BARE else named(BARE), target=target)
    for river in (RIVER, RIVER_MANY):
        if river in contenders:
            target = Target("ratio", at_least=_TIMES_RIVER) if river == RIVER else None
            yield series.figure(named(FLOW), ROWS, compared_with=named(river), target=target)
            note = "of its rows, the first ones" if river == RIVER else ""
            yield series.figure(named(river), LOSS, note=note)
    if RIVER in contenders:
        yield series.figure(named(FLOW), LOSS)


def _agree(first: float, other: float | None) -> bool:
    """Whether the losses are equal; river has another model, and no loss to compare."""
    return other is None or bool(np.isclose(first, other, rtol=1e-12))


def _log_loss(predictions: Floats, labels: npt.NDArray[np.bool_]) -> float:
    validation = ProgressiveValidation()
    validation.update(predictions, labels.astype(np.float64))
    return validation.metrics()["loss"]


def _bare(rows: ModelRows, labels: npt.NDArray[np.bool_], *, hashed: int, numeric: int) -> Trial:
    weights = ExpertWeights("binary", 1, hashed)
    weights.add_numeric(numeric)
    steps, targets = RowSteps.one_each(rows.length, learns=True), labels.astype(np.float64)
    with Stopwatch() as watch:
        predictions = weights.step(rows, steps, targets)
    return Trial(watch.rates(rows.length, "rows"), _log_loss(predictions[:, 0], labels))


def _model(features: Floats | SparseRows, labels: npt.NDArray[np.bool_]) -> Trial:
    model = AdaptiveLinearModel(shapes=False)
    with Stopwatch() as watch:
        predictions = model.learn_each(features, labels)
    return Trial(watch.rates(len(labels), "rows"), _log_loss(predictions, labels))


def _flow(
    records: Columns, features: Callable[[Columns], SparseRows] | None = None, *, shapes: bool | None = None
) -> Trial:
    flow = Flow("row steps")
    training = train_online(flow.from_items(records), label="label", features=features, shapes=shapes)
    reports = training.validation.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    assert reports.items[-1]["count"] == len(records)
    loss = reports.items[-1]["loss"]
    return Trial({**watch.rates(len(records), "rows"), LOSS: loss}, loss)


def _river(matrix: Floats, labels: npt.NDArray[np.bool_]) -> Trial:
    from river import linear_model, preprocessing

    model: Any = preprocessing.StandardScaler() | linear_model.LogisticRegression()
    rows = [dict(enumerate(row)) for row in matrix.tolist()]
    predictions = []
    with Stopwatch() as watch:
        for row, label in zip(rows, labels.tolist(), strict=True):
            predictions.append(model.predict_proba_one(row)[True])
            model.learn_one(row, label)
    return Trial({**watch.rates(len(rows), "rows"), LOSS: _log_loss(np.array(predictions), labels)})


def _river_many(matrix: Floats, labels: npt.NDArray[np.bool_]) -> Trial:
    """Learn in mini-batches: a step with the mean gradient of its rows. Before the first one there is no prediction."""
    import pandas
    from river import linear_model, preprocessing

    model: Any = preprocessing.StandardScaler() | linear_model.LogisticRegression()
    columns = [f"x{number}" for number in range(matrix.shape[1])]
    predictions = []
    with Stopwatch() as watch:
        for start in range(0, len(matrix), _ROWS_OF_LEARN_MANY):
            rows = slice(start, start + _ROWS_OF_LEARN_MANY)
            mini_batch = pandas.DataFrame(matrix[rows], columns=columns)
            found = model.predict_proba_many(mini_batch)
            predictions.append(found[True].to_numpy() if True in found else np.full(len(mini_batch), 0.5))
            model.learn_many(mini_batch, pandas.Series(labels[rows]))
    return Trial({**watch.rates(len(matrix), "rows"), LOSS: _log_loss(np.concatenate(predictions), labels)})
