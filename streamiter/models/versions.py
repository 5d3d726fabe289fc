"""Versions of published models: list, find and compare them, roll back to one, keep one as a file.

The command ``streamiter models`` and the service call these functions. :func:`model_difference` and
:func:`model_comparison` are pure; the others read the topic of the updates, and :func:`roll_back` writes to it.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.documents import (
    EMBEDDINGS,
    JSON_CONTENT_TYPE,
    SAFETENSORS_CONTENT_TYPE,
    SHAPES,
    Document,
    Parameters,
    decode_document,
    encode_document,
    without_state,
)
from streamiter.models.intake import Wanted, update_of_document
from streamiter.models.linear_predictor import LinearPredictor
from streamiter.models.publisher import ModelUpdateEncoder, next_run
from streamiter.models.reader import ModelUpdates, last_update, model_updates
from streamiter.models.update import (
    NO_RANK,
    ModelSnapshot,
    ModelUpdate,
    Rank,
    UpdateHeaders,
    check_model_name,
    rank_in,
    shown_rank,
)
from streamiter.topics.connecting import last_records, record_limit
from streamiter.topics.topic import ReadRequest, Topic
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.numbers import Array, Floats, whole_number_in

Kept = TypeVar("Kept")

# Search this many times further back if the last records have too few updates: the others are of other models, or
# updates consist of many chunks.
_FURTHER: Final = 8

# The number of last records that are searched for names of models.
_LOOKED_AT: Final = 1000

# A search for a version begins with this many records: updates of the last minutes.
_FIRST_WINDOW: Final = 256


class NoSuchVersion(ModelError):
    """The topic has no such version of the model, or no longer."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A published version, without its parameters."""

    model: str
    """The name of the model."""
    generation: int
    """The number of the run or rollback that the version follows."""
    version: int
    """The number within its generation."""
    created_at_ms: int
    """The publisher's clock, in milliseconds since 1970-01-01 UTC."""
    epoch: int | None
    """The epoch of the model, if the publisher named one."""
    records: int | None
    """The number of examples learned from, if the publisher named it."""
    metrics: dict[str, float]
    """Numbers by name, such as the loss."""
    rollback_to: str | None
    """The version that this one publishes again, such as ``"2.17"``; None if it is no rollback."""

    @staticmethod
    def of(update: ModelUpdate) -> ModelVersion:
        """Return the version of an update."""
        return ModelVersion(
            update.model,
            update.generation,
            update.version,
            update.created_at_ms,
            update.epoch,
            update.records,
            update.metrics,
            None if update.rollback_to is None else shown_rank(update.rollback_to),
        )

    @property
    def name(self) -> str:
        """Generation and version as commands take them, such as ``"2.17"``."""
        return shown_rank((self.generation, self.version))


_log = logging.getLogger("streamiter.models")


# ---- finding versions


async def model_names(topic: Topic) -> list[str]:
    """Return the names of the models in the last 1,000 records of each partition, sorted."""
    start = last_records((await topic.describe()).offsets, _LOOKED_AT)
    reader = await topic.open_reader(ReadRequest(start=start, stop="latest"))
    names: set[str] = set()
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            headers = [value or b"" for fields in batch.headers for name, value in fields if name == "model"]
            names.update(value.decode(errors="backslashreplace") for value in headers)
    return sorted(names)


async def model_versions(topic: Topic, model: str, count: int = 100) -> list[ModelVersion]:
    """Return the last ``count`` versions of a model, the newest last; none if the topic has no update of it.

    Where a topic is compacted, or its retention is over, older versions are gone.
    """
    found, _ = await last_updates(topic, model, count, ModelVersion.of)
    return found


async def last_updates(
    topic: Topic,
    model: str,
    count: int,
    keep: Callable[[ModelUpdate], Kept],
    *,
    wanted: Wanted | None = None,
    first_window: int | None = None,
) -> tuple[list[Kept], dict[int, int]]:
    """Return what ``keep`` returns for each of the last ``count`` wanted updates, and offsets shortly before them.

    The search begins with the last ``first_window`` records of each partition.
    """
    check_model_name(model)
    ends = (await topic.describe()).offsets
    back = first_window or count
    while True:
        start = last_records(ends, back)
        updates = ModelUpdates(topic, model, start, False, "skip", SystemClock(), wanted)
        found = deque([keep(update) async for update in updates], count)
        if len(found) == count or all(offset == ends[partition][0] for partition, offset in start.items()):
            return list(found), start
        back *= _FURTHER


async def find_update(topic: Topic, model: str, version: str | None = None) -> ModelUpdate:
    """Return an update of a model: ``"2.17"``, the last of generation ``"2"``, or None for the newest.

    It reads back from the end of the topic, so an old version of a long topic takes longer. Raises
    :class:`NoSuchVersion` for a version that the topic does not have, or no longer, and for a text that is none.
    """
    if version is None:
        update = await last_update(topic, model, on_error="skip")
        if update is None:
            raise await _no_updates(topic, model)
        return update
    generation, number = _parsed(version)
    seen = _Seen(generation, number)
    found, _ = await last_updates(
        topic, model, 1, lambda update: update, wanted=seen.is_wanted, first_window=_FIRST_WINDOW
    )
    if found and seen.is_it(found[0].rank):
        return found[0]
    if seen.first is None:
        raise await _no_updates(topic, model)
    raise NoSuchVersion(
        f"{topic.url}: expected version {version} of model {model!r}, given those from {shown_rank(seen.first)} to "
        f"{shown_rank(seen.last)}; older ones are dropped by the topic's retention or compaction"
    )


class _Seen:
    """Wants the updates of a generation, or one of them; knows the first and last rank of all updates.

    If that one is a change, its base is needed, too. It comes before it.
    """

    def __init__(self, generation: int, version: int | None) -> None:
        self._generation, self._version = generation, version
        self.first: Rank | None = None
        self.last = NO_RANK

    def is_wanted(self, headers: UpdateHeaders) -> bool:
        """Whether the update is the wanted update, or one of the wanted generation."""
        self.first, self.last = min(self.first or headers.rank, headers.rank), max(self.last, headers.rank)
        begins_chain = headers.chain is not None and headers.link is None
        may_be_base = begins_chain and headers.generation == self._generation and headers.version < (self._version or 0)
        return may_be_base or self.is_it(headers.rank)

    def is_it(self, rank: Rank) -> bool:
        """Whether it is the rank of a wanted update."""
        return rank[0] == self._generation and self._version in (None, rank[1])


def _parsed(version: str) -> tuple[int, int | None]:
    if (rank := rank_in(version)) is not None:
        return rank
    if (generation := whole_number_in(version)) is None:
        raise NoSuchVersion(f"expected a version such as 2.17, or a generation such as 2, given {version!r}")
    return generation, None


async def _no_updates(topic: Topic, model: str) -> NoSuchVersion:
    names = await model_names(topic)
    given = f"only of {', '.join(names)}" if names else "none of any model"
    return NoSuchVersion(f"{topic.url}: expected updates of model {model!r}, given {given}")


# ---- rolling back

# Another writer may begin a generation between the search for the last one and the write, but not again and again.
_ATTEMPTS: Final = 5

# A trainer with checkpoints ends its transaction once a second.
_LOG_AFTER_S: Final = 5.0

_WAITING: Final = (
    "%s: the rollback of model %r is written, and consumers can read it when the open transaction in front of it ends: "
    "at the next checkpoint of the trainer, or if the trainer is dead, when it is started again or its transaction "
    "times out"
)


async def roll_back(topic: Topic, model: str, version: str, *, clock: Clock | None = None) -> ModelUpdate:
    """Publish an earlier version again, as a new version that is later than all others; return the new update.

    ``version`` is as for :func:`find_update`. The update begins a new generation, so consumers take it over although
    the trainer still publishes versions of the earlier one, and a trainer that follows rollbacks resumes from it. Its
    last record closes it, so consumers get all of it or nothing. If another writer begins the same generation at the
    same time, the rollback is written again with a later one. It returns when consumers can read the update; records of
    an open transaction in front of it delay that until the transaction ends.

    >>> import asyncio
    >>> from streamiter.topics.memory import MemoryBroker
    >>> async def main():
    ...     topic = MemoryBroker().topic("models")
    ...     await topic.create()
    ...     encoder, writer = ModelUpdateEncoder("ctr", 1, clock=SystemClock()), await topic.open_writer()
    ...     await writer.write(encoder.encode([np.array([0.5]), np.array([1e9])]))
    ...     update = await roll_back(topic, "ctr", "1.1")
    ...     print(update.rank, update.rollback_to, update.parameters)
    >>> asyncio.run(main())
    (2, 1) (1, 1) [0.5]
    """
    update = await find_update(topic, model, version)
    return await publish_again(topic, update, update.rank, clock or SystemClock())


async def publish_again(topic: Topic, update: ModelUpdate, rollback_to: Rank | None, clock: Clock) -> ModelUpdate:
    """Publish an update as the newest version of its model; ``rollback_to`` is its earlier rank, if it has one."""
    for _ in range(_ATTEMPTS):
        if (written := await _publish_again(topic, update, rollback_to, clock)) is not None:
            return written
    raise ModelError(
        f"{topic.url}: expected to be the only one that begins generations of model {update.model!r}, given another "
        f"writer in each of {_ATTEMPTS} attempts; stop the trainers that restart all the time, then try again"
    )


async def _publish_again(
    topic: Topic, update: ModelUpdate, rollback_to: Rank | None, clock: Clock
) -> ModelUpdate | None:
    """Write the update with the next generation; None if consumers have taken another update of that rank."""
    run = await next_run(topic, update.model)
    limit = record_limit(await topic.describe())
    encoder = ModelUpdateEncoder(
        update.model, run.generation, clock=clock, record_bytes_max=limit, leftovers=run.leftovers
    )
    model = ModelSnapshot(update.parameters, update.records, update.metrics, update.epoch)
    async with model_updates(topic, update.model, start="latest_model", on_error="skip", clock=clock) as updates:
        writer = await topic.open_writer()
        async with closed_after(writer.close):
            await writer.write(encoder.encode([model], rollback_to=rollback_to, replaces=True))
            await writer.flush()
        timer = clock.call_later(_LOG_AFTER_S, lambda: _log.warning(_WAITING, topic.url, update.model))
        try:
            async for written in updates:
                if written.rank >= (run.generation, 1):
                    is_this = written.rank == (run.generation, 1) and written.rollback_to == rollback_to
                    return written if is_this else None
        finally:
            timer.cancel()
    return None


# ---- files


def exported(update: ModelUpdate, form: Literal["json", "safetensors"]) -> bytes:
    """Return an update as the content of a file, for :func:`read_model` and for programs in other languages.

    It is the value that a record has, in JSON or as safetensors, and the time of creation.

    >>> exported(ModelUpdate("ctr", 2, 17, None, 1700000000000, 900, {}, np.array([0.5])), "json").decode()[:60]
    '{"model":"ctr","generation":2,"version":17,"epoch":null,"rec'
    """
    same = {name: getattr(update, name) for name in Document.__struct_fields__ if hasattr(update, name)}
    return encode_document(Document(**same, created_at=update.created_at_ms), form)[1]


def read_model(path: str | os.PathLike[str]) -> ModelUpdate:
    """Return the update in a file of ``streamiter models export``: ``LinearPredictor(read_model(path).parameters)``.

    Raises ModelError for a file that has none, and ``OSError`` for one that cannot be read.
    """
    value = Path(path).read_bytes()
    try:
        document = decode_document(JSON_CONTENT_TYPE if value[:1] == b"{" else SAFETENSORS_CONTENT_TYPE, value)
        return update_of_document(document, document.created_at or 0)
    except (ValueError, ModelError) as error:
        raise ModelError(f"{os.fspath(path)}: expected a model of `streamiter models export`: {error}") from error


# ---- comparing versions


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
