"""What is different between versions of a model, or between models: :func:`model_difference`, :func:`model_comparison`.

Both are pure. The columns of linear models are compared by name; of other models, the elements of their arrays.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.documents import EMBEDDINGS, SHAPES, Parameters, without_state
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.update import ModelUpdate
from streamiter.models.versions import ModelVersion
from streamiter.values.hashes import place_of_missing
from streamiter.values.known_fields import of_reader, published_fields
from streamiter.values.named_rows import FieldReader
from streamiter.values.numbers import Array, Floats


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A weight of two versions."""

    name: str
    """The field; ``place 1234`` for a hashed text; ``layers.0.weights[3, 4]`` for an element of an array."""
    label: Any
    """The class that the weight is for; None for a model without classes."""
    old: float | None
    """The weight in the old version; None if it did not have the column."""
    new: float | None
    """The weight in the new version; None if it does not have the column."""
    moved: float
    """The change of the score where the feature is at its limit, or one deviation from its mean."""


@dataclass(frozen=True, slots=True)
class ScaleChange:
    """The scale of a column in two versions: its center, and the limit or deviation."""

    name: str
    """The field."""
    old_center: float | None
    """The center or mean in the old version; None if it did not have the column."""
    new_center: float | None
    """The center or mean in the new version."""
    old_scale: float | None
    """The limit or deviation in the old version."""
    new_scale: float | None
    """The limit or deviation in the new version."""


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """What is different between two versions."""

    old: ModelVersion
    """The old version."""
    new: ModelVersion
    """The new version."""
    metrics: dict[str, tuple[float | None, float | None]]
    """Old and new value of each metric; None where a version does not have it."""
    intercepts: list[tuple[Any, float | None, float | None]]
    """Class, old and new intercept; the class is None for a model without classes, and the list is empty for a model
    that is not linear."""
    weights: list[WeightChange]
    """The weights that moved most, the largest change first; weights that are equal are left out."""
    scales: list[ScaleChange]
    """The scales that changed most, the largest change first; a change is compared with the scale."""
    other: list[str]
    """Names of other parameters that are different."""


def model_difference(old: ModelUpdate, new: ModelUpdate, count: int = 20) -> ModelDifference:
    """Return what changed between two versions, with at most ``count`` weights and scales.

    Weights of fields have the fields' names. Of a model that is not linear, the elements of its arrays are compared.

    >>> old, new = {"weights": np.array([1.0, 2.0]), "intercept": 0.5}, {"weights": np.array([1.0, 4.0])}
    >>> first = ModelUpdate("ctr", 1, 1, None, 0, 10, {"loss": 0.5}, old)
    >>> changed = model_difference(first, ModelUpdate("ctr", 1, 2, None, 0, 20, {"loss": 0.25}, new))
    >>> changed.metrics, changed.intercepts, [(each.name, each.old, each.new) for each in changed.weights]
    ({'loss': (0.5, 0.25)}, [(None, 0.5, 0.0)], [('weights[1]', 2.0, 4.0)])
    """
    names = [*old.metrics, *(name for name in new.metrics if name not in old.metrics)]
    before, after = _LinearColumns.of(old.parameters), _LinearColumns.of(new.parameters)
    weights: list[WeightChange] = []
    scales: list[ScaleChange] = []
    intercepts: list[tuple[Any, float | None, float | None]] = []
    handled: frozenset[str] = frozenset()
    if before is not None and after is not None:
        pair = _Pair(before, after)
        weights, scales, intercepts = pair.weights(count), pair.scales(count), pair.intercepts()
        handled = _LINEAR
    arrays = dict(_arrays(without_state(old.parameters))), dict(_arrays(without_state(new.parameters)))
    if before is None or after is None:
        weights, handled = _moved_elements(*arrays, count)
    return ModelDifference(
        ModelVersion.of(old),
        ModelVersion.of(new),
        {name: (old.metrics.get(name), new.metrics.get(name)) for name in names},
        intercepts,
        weights,
        scales,
        sorted({_whole(name) for name in _different(*arrays) if name not in handled}),
    )


TextsAt = Callable[[Collection[int]], Mapping[int, str]]
"""Returns the texts that are known at these places, with their fields: ``carrier = UA``."""


def with_texts(difference: ModelDifference, texts_at: TextsAt) -> ModelDifference:
    """Return the difference with texts in place of the places of their weights and scales, where they are known."""
    changed = [each.name for each in difference.weights] + [each.name for each in difference.scales]
    names = names_with_texts(changed, texts_at)
    return replace(
        difference,
        weights=[replace(each, name=names.get(each.name, each.name)) for each in difference.weights],
        scales=[replace(each, name=names.get(each.name, each.name)) for each in difference.scales],
    )


def names_with_texts(names: Iterable[str], texts_at: TextsAt) -> dict[str, str]:
    """Return for each name the same name with the text in place of its place, if the text is known.

    >>> names_with_texts(["place 7 (2 more)", "place 8", "km"], lambda places: {7: "carrier = UA"})
    {'place 7 (2 more)': 'carrier = UA (2 more)'}
    """
    found = {name: match for name in names if (match := _PLACE.match(name))}
    places = {name: int(match[match.lastindex or 0]) for name, match in found.items()}
    texts = texts_at(places.values())
    return {name: texts[places[name]] + name[match.end() :] for name, match in found.items() if places[name] in texts}


_PLACE: Final = re.compile(r"place (\d+)|weights\[(\d+)\]")


def texts_of_records(records: Iterable[Any], parameters: Parameters) -> TextsAt:
    """Return what tells the texts of records by their places, as a model of named fields reads them.

    Missing values of the model's fields are told, too. Records that the model would refuse are left out.

    >>> given = {"bits": 8, "fields": ["km"], "text_fields": ["carrier"]}
    >>> texts_of_records([{"carrier": "UA"}, "no record"], given)([219, 7])
    {219: 'carrier = UA'}
    """
    if not isinstance(parameters, dict) or "bits" not in parameters or "text_fields" not in parameters:
        return lambda _: {}
    bits = int(parameters["bits"])
    known = published_fields("texts", bits, parameters)
    reader = FieldReader(bits=bits, kinds=of_reader(known.kinds), time_zone=known.zone)
    for record in records:
        with contextlib.suppress(ModelError):
            reader.rows([record])
    names = {*parameters["fields"], *parameters["text_fields"]}
    missing = {place_of_missing(name, bits): f"{name} is missing" for name in sorted(names)}
    return lambda places: {place: missing[place] for place in places if place in missing} | reader.texts_at(places)


def model_comparison(updates: Sequence[ModelUpdate | ModelVersion]) -> dict[str, list[float | None]]:
    """Return the metrics of several models or versions side by side: for each name a value for each of them, or None.

    The number of ``records`` comes first.

    >>> champion = ModelUpdate("ctr", 1, 7, None, 0, 900, {"loss": 0.5}, np.zeros(1))
    >>> challenger = ModelUpdate("ctr-2", 1, 3, None, 0, 400, {"loss": 0.25, "auc": 0.75}, np.zeros(1))
    >>> model_comparison([champion, challenger])
    {'records': [900, 400], 'loss': [0.5, 0.25], 'auc': [None, 0.75]}
    """
    names = dict.fromkeys(name for update in updates for name in update.metrics)
    records: dict[str, list[float | None]] = {"records": [update.records for update in updates]}
    return records | {name: [update.metrics.get(name) for update in updates] for name in names}


# Parameters of linear models that are compared column by column.
_LINEAR: Final = frozenset(
    ["weights", "intercept", "center", "limit", "mean", "deviation", "places", "fields", "records"]
)


@dataclass(frozen=True, slots=True)
class _LinearColumns:
    """A linear model as columns: those with names, then hashed places."""

    names: list[str]
    places: Array
    labels: list[Any]
    weights: Floats
    """(columns, scores)"""
    intercepts: Floats
    center: Floats
    scale: Floats
    has_scales: bool

    @staticmethod
    def of(parameters: Parameters) -> _LinearColumns | None:
        """Return the columns of a linear model; None for other parameters."""
        fields = parameters if isinstance(parameters, dict) else {"weights": parameters}
        is_standardized = "center" in fields
        others = [value for name, value in fields.items() if name not in _LINEAR]
        if not is_standardized and any(isinstance(value, np.ndarray) for value in others):
            return None  # Centroids have weights, too.
        try:
            LinearPredictor(fields)
        except ModelError:
            return None
        weights = fields["weights"]
        count = len(weights)
        names = list(fields["fields"]) if is_standardized else [f"weights[{column}]" for column in range(count)]
        places = np.asarray(fields["places"] if is_standardized else [], dtype=np.intp)
        center, scale = ("center", "limit") if is_standardized else ("mean", "deviation")
        matrix = weights.reshape(count, -1).astype(np.float64)
        labels: list[Any] = list(fields["classes"]) if is_standardized and matrix.shape[1] > 1 else [None]
        labels += ["(other)"] * (matrix.shape[1] - len(labels))
        return _LinearColumns(
            names,
            places,
            labels,
            matrix,
            np.atleast_1d(np.asarray(fields.get("intercept", 0.0), dtype=np.float64)),
            np.asarray(fields.get(center, np.zeros(count)), dtype=np.float64),
            np.asarray(fields.get(scale, np.ones(count)), dtype=np.float64),
            scale in fields,
        )


class _Pair:
    """Two linear models with the same columns and scores; NaN where one of them does not have a column or score."""

    def __init__(self, old: _LinearColumns, new: _LinearColumns) -> None:
        self._names = list(dict.fromkeys([*new.names, *old.names]))
        self._places = np.union1d(old.places, new.places)
        self._labels = list(dict.fromkeys([*new.labels, *old.labels]))
        self._models = old, new

    def _spread(self, model: _LinearColumns, values: Floats) -> Floats:
        """Return the values of a model's columns, in the order of the columns of both models."""
        position = {name: at for at, name in enumerate(self._names)}
        at = [position[name] for name in model.names]
        spread = np.full((len(self._names) + len(self._places), *values.shape[1:]), np.nan)
        spread[at] = values[: len(at)]
        spread[len(self._names) + np.searchsorted(self._places, model.places)] = values[len(at) :]
        return spread

    def _by_label(self, model: _LinearColumns, values: Floats) -> Floats:
        spread = np.full((*values.shape[:-1], len(self._labels)), np.nan)
        spread[..., [self._labels.index(label) for label in model.labels]] = values
        return spread

    def _name(self, column: int) -> str:
        named = len(self._names)
        return self._names[column] if column < named else f"place {self._places[column - named]}"

    def weights(self, count: int) -> list[WeightChange]:
        old, new = (self._spread(each, self._by_label(each, each.weights)) for each in self._models)
        reach_of = [self._spread(each, each.scale)[:, None] for each in self._models]
        moved = np.nan_to_num(new * reach_of[1]) - np.nan_to_num(old * reach_of[0])
        return [
            WeightChange(
                self._name(column),
                self._labels[score],
                _number(old[column, score]),
                _number(new[column, score]),
                float(moved[column, score]),
            )
            for column, score in _largest(moved, count)
        ]

    def scales(self, count: int) -> list[ScaleChange]:
        if not any(each.has_scales for each in self._models):
            return []
        centers = [self._spread(each, each.center) for each in self._models]
        scales = [self._spread(each, each.scale) for each in self._models]
        # Changes are compared in units of the larger scale, so that a field of large numbers is not always first.
        unit = np.fmax(scales[0], scales[1])
        change = np.abs(centers[1] - centers[0]) + np.abs(scales[1] - scales[0])
        relative = np.divide(change, unit, out=np.zeros(len(unit)), where=unit > 0)
        return [
            ScaleChange(self._name(column), *(_number(each[column]) for each in (*centers, *scales)))
            for (column,) in _largest(np.nan_to_num(relative, nan=np.inf), count)
        ]

    def intercepts(self) -> list[tuple[Any, float | None, float | None]]:
        old, new = (self._by_label(each, each.intercepts) for each in self._models)
        values = zip(self._labels, old, new, strict=True)
        return [(label, _number(before), _number(after)) for label, before, after in values]


def _number(value: np.floating[Any]) -> float | None:
    return None if math.isnan(value) else float(value)


def _largest(values: Floats, count: int) -> list[tuple[int, ...]]:
    """Return the places of the ``count`` largest absolute values that are not 0, the largest first."""
    sizes = np.abs(values).ravel()
    some = np.argpartition(sizes, -count)[-count:] if count < len(sizes) else np.arange(len(sizes))
    first = some[np.lexsort((some, -sizes[some]))]
    return [tuple(int(at) for at in np.unravel_index(place, values.shape)) for place in first if sizes[place] > 0]


def _arrays(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of parameters with their paths."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _arrays(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)) and any(isinstance(part, (dict, list, np.ndarray)) for part in value):
        for index, part in enumerate(value):
            yield from _arrays(part, f"{path}.{index}" if path else str(index))
    else:
        yield path or "parameters", value


def _moved_elements(
    old: Mapping[str, object], new: Mapping[str, object], count: int
) -> tuple[list[WeightChange], frozenset[str]]:
    """Return the elements of floating-point arrays that moved most, and the paths of these arrays."""
    changes: list[WeightChange] = []
    handled = []
    for path, before in old.items():
        after = new.get(path)
        if not (isinstance(before, np.ndarray) and isinstance(after, np.ndarray)) or before.shape != after.shape:
            continue
        if before.dtype.kind != "f" or after.dtype.kind != "f":
            continue
        handled.append(path)
        moved = after.astype(np.float64) - before
        for place in _largest(moved, count):
            name = path + (f"[{', '.join(map(str, place))}]" if place else "")
            changes.append(WeightChange(name, None, float(before[place]), float(after[place]), float(moved[place])))
    changes.sort(key=lambda change: -abs(change.moved))
    return changes[:count], frozenset(handled)


def _whole(path: str) -> str:
    """Return the path of an array, but for all tables of a model one name, and for its embeddings, too."""
    return next((name for name in (SHAPES, EMBEDDINGS) if path.startswith(f"{name}.")), path)


def _different(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for path in {**old, **new}:
        if path not in old or path not in new or not np.array_equal(np.asarray(old[path]), np.asarray(new[path])):
            yield path
