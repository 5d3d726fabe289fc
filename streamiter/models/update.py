"""Model updates: a training step emits a ``ModelSnapshot``, a reader gets a ``ModelUpdate``.

An update is a record of a topic. Its headers name the model, the generation and the version (:class:`UpdateHeaders`),
and its parameters are checked (:func:`checked_parameters`). An update that is larger than a record is cut into chunks,
which the reader joins again.

All chunks except the last have their own keys (model, generation, version, index), so that compaction keeps each of
them. The last chunk has the model's key, like an update in one record: it closes the update, and compaction drops it
when a newer update is closed. Then the publisher deletes the chunks of the previous update by their keys. So in a
compacted topic the last closed update is complete at any time, and a crash while chunks are written harms no earlier
update.

The value of an update is a JSON document, or safetensors with the same document and the arrays.
Parameters become a *tree* that JSON can hold, and that gives back the same parameters exactly. A float64 array is plain
nested lists, so that programs in any language can read the common case. Other values, which JSON cannot tell apart,
carry a tag:

===============================================  =====================================================
``{"dtype", "shape", "values"}``                 any other array; values in row-major order, flat
``{"dtype", "value"}``                           a numpy scalar that is not of 64 bits
``{"tensor": name}``                             an array that is stored next to the tree (safetensors)
``{"list": [...]}``, ``{"tuple": [...]}``        a list or tuple of values, which is not an array
``{"bytes": base64}``                            bytes
``{"dict": {...}}``                              a dict with the same names as a tag
===============================================  =====================================================
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import orjson
import safetensors.numpy
from safetensors import SafetensorError

from streamiter.clock import Clock
from streamiter.errors import ModelError
from streamiter.records import Array
from streamiter.topics.topic import Headers

Rank = tuple[int, int]
"""Generation and version; updates of one model are ordered by it."""

ChunkSet = tuple[int, int, int]
"""Generation, version and number of chunks of an update that was written in chunks."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """A model with the properties of its training, for a training step to emit; bare parameters may be emitted, too.

    >>> ModelSnapshot({"weights": [0.5]}, records=1000, metrics={"loss": 0.31}).records
    1000
    """

    parameters: Any
    """An array, or a dict of names to arrays, numbers and strings."""
    records: int | None = None
    """The number of examples that the model has learned from so far."""
    metrics: dict[str, float] = {}
    """Numbers by name, such as the loss."""
    epoch: int | None = None
    """The epoch of the model; None: the epoch in which it is published."""
    since_rollback: tuple[int, int] | None = None
    """The generation and version of the last rollback that the trainer has taken over, ``(0, 0)`` before the first;
    the update gets a later version than that. None: the trainer follows no rollbacks."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelUpdate:
    """One published state of a model, exactly as it was published; its arrays are read-only."""

    model: str
    """The name of the model."""
    generation: int
    """The number of the run or rollback that the update follows; a run that restores no checkpoint begins a new one."""
    version: int
    """The number of the update within its generation."""
    epoch: int | None
    """The epoch of the model, None if the publisher named none."""
    created_at_ms: int
    """The publisher's clock, in milliseconds since 1970-01-01 UTC."""
    records: int | None
    """The number of examples learned from, None if the publisher named none."""
    metrics: dict[str, float]
    """Numbers by name, such as the loss."""
    parameters: Parameters
    """An array, or a dict of names to arrays, numbers and strings."""
    since_rollback: Rank | None = None
    """The rank of the last rollback before this update; a rollback has its own rank here. None: there was none."""
    rollback_to: Rank | None = None
    """The rank of the update that this one publishes again; None if it is no rollback."""

    @property
    def rank(self) -> Rank:
        """``(generation, version)``; of two updates the one with the higher rank is newer."""
        return (self.generation, self.version)

    def age_s(self, clock: Clock) -> float:
        """Return the seconds since the update was made; 0 if the publisher's clock is ahead of this one."""
        return max(0, clock.now_ms() - self.created_at_ms) / 1000


# Records of this format carry no header of it: docs/model-updates.md.
_FORMAT: Final = "1"

# It separates a model's name from the rest of a chunk's key, so a model's name must not contain this character.
_KEY_SEPARATOR: Final = "#"

# Generation and version of up to 64 bits, and the point between them; Python refuses numbers of thousands of digits.
_RANK_BYTES: Final = 2 * 20 + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of an update's value that a record holds."""

    index: int
    """The number of the chunk, from 0."""
    count: int
    """The number of chunks of the update."""
    sha256: str
    """The SHA-256 of the whole value, hexadecimal."""


@dataclass(frozen=True, slots=True)
class UpdateHeaders:
    """The headers of one record of an update.

    >>> headers = UpdateHeaders("ctr", 1, 7, None, 1700000000000, "application/json")
    >>> UpdateHeaders.parse(headers.encoded()) == headers
    True
    """

    model: str
    generation: int
    version: int
    epoch: int | None
    created_at_ms: int
    content_type: str
    chunk: Chunk | None = None
    since_rollback: Rank | None = None
    rollback_to: Rank | None = None

    @property
    def rank(self) -> Rank:
        """Generation and version."""
        return (self.generation, self.version)

    @property
    def is_last(self) -> bool:
        """Whether the record closes its update: it is the only record, or the last chunk."""
        return self.chunk is None or self.chunk.index == self.chunk.count - 1

    def encoded(self) -> Headers:
        """Return the headers as a record carries them: texts and decimal numbers; a field of None is left out."""
        fields: list[tuple[str, str | int]] = [
            ("model", self.model),
            ("generation", self.generation),
            ("version", self.version),
            ("created_at", self.created_at_ms),
            ("content_type", self.content_type),
        ]
        if self.epoch is not None:
            fields.append(("epoch", self.epoch))
        if self.chunk is not None:
            fields += [("chunk_index", self.chunk.index), ("chunk_count", self.chunk.count)]
            fields.append(("sha256", self.chunk.sha256))
        ranks = (("since_rollback", self.since_rollback), ("rollback_to", self.rollback_to))
        fields += [(name, shown_rank(rank)) for name, rank in ranks if rank is not None]
        return tuple((name, str(value).encode()) for name, value in fields)

    @staticmethod
    def parse(headers: Headers) -> UpdateHeaders:
        """Return the parsed headers of a record; ``ValueError`` with the reason for headers of no update."""
        fields = {name: value.decode() for name, value in headers}
        if fields.get("format", _FORMAT) != _FORMAT:
            raise ValueError(
                f"expected an update of format {_FORMAT}, which has no header format, given {fields['format']!r}; "
                "install the version of streamiter that publishes it"
            )
        try:
            return UpdateHeaders(
                model=fields["model"],
                generation=int(fields["generation"]),
                version=int(fields["version"]),
                epoch=int(fields["epoch"]) if "epoch" in fields else None,
                created_at_ms=int(fields["created_at"]),
                content_type=fields["content_type"],
                chunk=_parse_chunk(fields),
                since_rollback=_parse_rank(fields, "since_rollback"),
                rollback_to=_parse_rank(fields, "rollback_to"),
            )
        except KeyError as error:
            raise ValueError(f"header {error} is missing") from error


def _parse_chunk(fields: dict[str, str]) -> Chunk | None:
    if "chunk_index" not in fields:
        return None
    chunk = Chunk(int(fields["chunk_index"]), int(fields["chunk_count"]), fields["sha256"])
    if not 0 <= chunk.index < chunk.count:
        raise ValueError(f"expected 0 <= chunk_index < chunk_count, given {chunk.index} of {chunk.count}")
    return chunk


def shown_rank(rank: Rank) -> str:
    """Return a rank as headers and messages have it.

    >>> shown_rank((2, 17))
    '2.17'
    """
    return f"{rank[0]}.{rank[1]}"


def _parse_rank(fields: dict[str, str], name: str) -> Rank | None:
    if name not in fields:
        return None
    generation, separator, version = fields[name].partition(".")
    if not separator or len(fields[name]) > _RANK_BYTES:
        raise ValueError(f"expected header {name} as generation.version, given {fields[name]!r}")
    return int(generation), int(version)


def model_of(headers: Headers) -> bytes | None:
    """Return the model that a record names, or None; cheap enough for every record of a shared topic."""
    for name, value in headers:
        if name == "model":
            return value
    return None


def update_key(model: str) -> bytes:
    """Return the key of an update; compaction keeps the last update with it."""
    return model.encode()


def chunk_key(model: str, rank: Rank, index: int) -> bytes:
    """Return the key of a chunk. Each chunk has its own key, or compaction would keep only one chunk of many.

    >>> chunk_key("ctr", (2, 17), 0)
    b'ctr#2.17.0'
    """
    return f"{model}{_KEY_SEPARATOR}{rank[0]}.{rank[1]}.{index}".encode()


def deletion_headers(model: str, rank: Rank) -> Headers:
    """Return the headers of a record without a value, which deletes a chunk of the update ``rank``."""
    return (("model", model.encode()), ("deletes", shown_rank(rank).encode()))


def deleted_rank(headers: Headers) -> Rank | None:
    """Return the rank of the update whose chunk a record deletes, or None.

    >>> deleted_rank(deletion_headers("ctr", (2, 17)))
    (2, 17)
    """
    for name, value in headers:
        generation, separator, version = value.partition(b".")
        is_rank = separator and generation.isdigit() and version.isdigit() and len(value) <= _RANK_BYTES
        if name == "deletes" and is_rank:
            return int(generation), int(version)
    return None


def is_key_of(model: str, key: bytes | None) -> bool:
    """Whether a record with this key belongs to ``model``."""
    return key is not None and key.partition(_KEY_SEPARATOR.encode())[0] == model.encode()


def check_model_name(model: str) -> None:
    """Raise ``ModelError`` for a name that cannot be part of a key."""
    if not model or _KEY_SEPARATOR in model or not model.isprintable():
        raise ModelError(
            f"model {model!r}: expected a name of printable characters without {_KEY_SEPARATOR!r}, which"
            " separates it from the rest of a key"
        )


Parameters = Array | dict[str, Any]
"""One array, or a dict of names to arrays, numbers, strings (and lists, tuples and dicts of these)."""

# bool, signed and unsigned integers, floats, text: both JSON and safetensors can hold these exactly.
_KINDS: Final = "biufU"
# JSON has no limit, but its readers have: all of them can read 64 bits.
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**64 - 1
# Wider floats (80 and 128 bits) have neither a JSON number nor a safetensors type.
_FLOAT_BYTES_MAX: Final = 8


def checked_parameters(given: object, subject: str) -> Parameters:
    """Return the parameters as they are stored; they are checked before they are written and after they are read.

    A bare number becomes an array without axes, numpy scalars of 64 bits become Python numbers, and arrays get the
    machine's byte order; nothing else changes. Raises :class:`~streamiter.errors.ModelError`, whose message begins with
    ``subject``, for a value that is NaN or infinite or cannot be stored exactly.

    >>> checked_parameters({"weights": np.zeros(2), "intercept": np.float64(0.5)}, "model 'ctr'")
    {'weights': array([0., 0.]), 'intercept': 0.5}
    """
    if isinstance(given, Mapping):
        return _checked_dict(given, "", subject)
    if isinstance(given, (np.ndarray, np.generic, int, float)):
        return _checked_array(np.asarray(given), "", subject)
    raise ModelError(
        f"{subject}: expected a numpy array, a dict of them or a ModelSnapshot, given {type(given).__name__}"
    )


def freeze_arrays(value: object) -> None:
    """Make every array in ``value`` read-only, for all readers of a model share its update."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    elif isinstance(value, dict):
        for part in value.values():
            freeze_arrays(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            freeze_arrays(part)


def _checked(value: object, path: str, subject: str) -> object:
    if isinstance(value, np.ndarray):
        return _checked_array(value, path, subject)
    if isinstance(value, np.generic):
        return _checked_scalar(value, path, subject)
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, (int, float)):
        return _checked_number(value, path, subject)
    if isinstance(value, (list, tuple)):
        parts = [_checked(part, f"{path}[{index}]", subject) for index, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        return _checked_dict(value, path, subject)
    raise ModelError(
        f"{subject}: {_named(path)}: expected an array, a number, a string or a list, tuple or dict of these,"
        f" given {type(value).__name__}"
    )


def _checked_dict(given: Mapping[Any, object], path: str, subject: str) -> dict[str, Any]:
    for name in given:
        if not isinstance(name, str):
            raise ModelError(f"{subject}: {_named(path)}: expected names that are str, given {name!r}")
    return {name: _checked(value, f"{path}.{name}" if path else name, subject) for name, value in given.items()}


def _checked_number(value: float, path: str, subject: str) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        raise _not_finite(path, subject, f"is {value}")
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        raise ModelError(f"{subject}: {_named(path)}: expected an integer of 64 bits, given {value}")
    return value


def _checked_scalar(value: np.generic, path: str, subject: str) -> object:
    _checked_array(np.asarray(value), path, subject)
    is_plain = value.dtype.kind in "bU" or value.dtype in (np.dtype(np.int64), np.dtype(np.float64))
    return value.item() if is_plain else value


def _checked_array(array: Array, path: str, subject: str) -> Array:
    if array.dtype.kind not in _KINDS or (array.dtype.kind == "f" and array.itemsize > _FLOAT_BYTES_MAX):
        raise ModelError(
            f"{subject}: {_named(path)}: expected an array of bool, integers, floats of up to 64 bits or text"
            f", given dtype {array.dtype}"
        )
    if array.dtype.kind == "f":
        _refuse_not_finite(array, path, subject)
    return np.asarray(array, dtype=array.dtype.newbyteorder("="))


def _refuse_not_finite(array: Array, path: str, subject: str) -> None:
    bad = ~np.isfinite(array)
    if not bad.any():
        return
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    where = f" (the first at {list(first)})" if first else ""
    raise _not_finite(path, subject, f"holds {int(bad.sum())} of {array.size} values as NaN or infinity{where}")


def _not_finite(path: str, subject: str, what: str) -> ModelError:
    return ModelError(
        f"{subject}: {_named(path)} {what}; expected finite numbers, for a broken model must not be served:"
        " look at the learning rate and at the examples before this update"
    )


def _named(path: str) -> str:
    return f"parameter {path!r}" if path else "the parameters"


# Larger updates are refused. A topic is the wrong place for them, and a reader that holds an update, its joined bytes
# and the update before needs three times as much memory.
UPDATE_BYTES_MAX: Final = 512 * 1024 * 1024


UpdateFormat = Literal["auto", "json", "safetensors"]
"""How updates are written; ``"auto"`` writes large arrays as safetensors, other parameters as JSON."""

JSON_CONTENT_TYPE: Final = "application/json"

SAFETENSORS_CONTENT_TYPE: Final = "application/vnd.safetensors"

# Only one entry of metadata: safetensors writes several entries in an order that differs from run to run.
_METADATA_NAME: Final = "streamiter.model_update"

# A safetensors file begins with the length of its JSON header as 64 bits, little endian.
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Document:
    """The contents of an update's value; ``ModelUpdate`` describes the fields."""

    model: str
    generation: int
    version: int
    epoch: int | None
    records: int | None
    metrics: dict[str, float]
    parameters: Parameters
    created_at_ms: int | None = None
    """In files only; a record has it in its headers."""


def encode_document(document: Document, form: UpdateFormat, json_bytes_max: int) -> tuple[str, bytes]:
    """Return content type and value of ``document``; equal documents give equal bytes.

    With ``"auto"`` arrays of more than ``json_bytes_max`` bytes in total are written as safetensors.
    """
    is_small = array_bytes(document.parameters) <= json_bytes_max
    if form == "json" or (form == "auto" and is_small):
        return JSON_CONTENT_TYPE, _json(document, to_tree(document.parameters, inline_array))
    return SAFETENSORS_CONTENT_TYPE, _safetensors(document)


def decode_document(content_type: str, value: bytes) -> Document:
    """Return the document in ``value``. Raises ``ValueError`` with the reason for a value that is no document."""
    try:
        if content_type == JSON_CONTENT_TYPE:
            return _document(orjson.loads(value), {})
        if content_type == SAFETENSORS_CONTENT_TYPE:
            return _from_safetensors(value)
    except KeyError as error:
        raise ValueError(f"{error} is missing") from error
    except (TypeError, AttributeError, OverflowError, RecursionError, SafetensorError) as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"expected content type {JSON_CONTENT_TYPE} or {SAFETENSORS_CONTENT_TYPE}, given {content_type!r}")


def array_bytes(value: object) -> int:
    """Return the number of bytes of all arrays in ``value``.

    >>> array_bytes({"weights": np.zeros(10), "classes": [np.zeros(2)]})
    96
    """
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(array_bytes(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(array_bytes(part) for part in value)
    return 0


def _json(document: Document, tree: object) -> bytes:
    fields = {
        "model": document.model,
        "generation": document.generation,
        "version": document.version,
        "epoch": document.epoch,
        "records": document.records,
        "metrics": document.metrics,
        "parameters": tree,
    }
    if document.created_at_ms is not None:
        fields["created_at"] = document.created_at_ms
    try:
        return orjson.dumps(fields)
    except TypeError as error:  # Only a text that is not valid Unicode passes the checks before.
        raise ModelError(
            f"model {document.model!r}, update {document.generation}.{document.version}: cannot be written as"
            f" JSON: {error}"
        ) from error


class _Tensors:
    """Collects the arrays of a tree, each named by its path."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def place(self, path: str, array: Array) -> object:
        if array.dtype.kind == "U":  # safetensors cannot hold texts.
            return inline_array(path, array)
        name = self._free_name(path or "parameters")
        self.arrays[name] = np.asarray(array, order="C")
        return {"tensor": name}

    def _free_name(self, name: str) -> str:
        is_taken = name in self.arrays or name == "__metadata__"  # the only name that safetensors reserves
        return self._free_name(f"{name}'") if is_taken else name


def _safetensors(document: Document) -> bytes:
    tensors = _Tensors()
    tree = to_tree(document.parameters, tensors.place)
    text = _json(document, tree).decode()
    return bytes(safetensors.numpy.save(tensors.arrays, metadata={_METADATA_NAME: text}))


def _from_safetensors(value: bytes) -> Document:
    length = int.from_bytes(value[:_LENGTH_BYTES], "little")
    header = orjson.loads(value[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return _document(orjson.loads(header["__metadata__"][_METADATA_NAME]), safetensors.numpy.load(value))


def _document(fields: object, tensors: Mapping[str, Array]) -> Document:
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, given {type(fields).__name__}")  # noqa: TRY004
    parameters = from_tree(fields["parameters"], tensors)
    if not isinstance(parameters, (np.ndarray, dict)):
        raise ValueError(f"expected parameters as arrays, given {type(parameters).__name__}")  # noqa: TRY004
    return Document(
        model=_expected(fields, "model", str),
        generation=_expected(fields, "generation", int),
        version=_expected(fields, "version", int),
        epoch=_optional_count(fields, "epoch"),
        records=_optional_count(fields, "records"),
        metrics=_metrics(fields.get("metrics") or {}),
        parameters=parameters,
        created_at_ms=_optional_count(fields, "created_at"),
    )


def _expected(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
        raise ValueError(f"expected {name} as {kind.__name__}, given {fields[name]!r}")  # noqa: TRY004
    return fields[name]


def _optional_count(fields: dict[str, Any], name: str) -> int | None:
    if fields.get(name) is None:
        return None
    value: int = _expected(fields, name, int)
    return value


def _metrics(given: Any) -> dict[str, float]:
    metrics = {str(name): float(value) for name, value in given.items()}
    if not all(math.isfinite(value) for value in metrics.values()):
        raise ValueError("a metric is not a finite number")
    return metrics


PlaceArray = Callable[[str, Array], object]
"""Returns the tree's node for an array, from its path ("layers.0.weights") and the array."""

_TAGS: Final = (
    frozenset({"dtype", "shape", "values"}),
    frozenset({"dtype", "value"}),
    frozenset({"tensor"}),
    frozenset({"list"}),
    frozenset({"tuple"}),
    frozenset({"bytes"}),
    frozenset({"dict"}),
)


def to_tree(value: object, place_array: PlaceArray, path: str = "") -> object:
    """Return the tree of checked parameters; ``place_array`` returns the node of each array.

    >>> to_tree({"w": np.array([[1.0, 0.1]]), "n": np.array([3], dtype=np.int32)}, inline_array)
    {'w': [[1.0, 0.1]], 'n': {'dtype': 'int32', 'shape': [1], 'values': [3]}}
    """
    if isinstance(value, np.ndarray):
        return place_array(path, value)
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.name, "value": value.item()}
    if isinstance(value, dict):
        nodes = {name: to_tree(part, place_array, _below(path, name)) for name, part in value.items()}
        return {"dict": nodes} if frozenset(nodes) in _TAGS else nodes
    if isinstance(value, (list, tuple)):
        nodes_in_order = [to_tree(part, place_array, _below(path, index)) for index, part in enumerate(value)]
        return {type(value).__name__: nodes_in_order}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    return value


def _below(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def inline_array(_path: str, array: Array) -> object:
    """Return the node of an array that is written into the tree itself."""
    if array.dtype == np.float64 and array.ndim > 0 and array.size > 0:
        return array.tolist()
    return {"dtype": _dtype_name(array), "shape": list(array.shape), "values": array.ravel().tolist()}


def from_tree(node: Any, tensors: Mapping[str, Array]) -> Any:
    """Return the parameters of a tree. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a broken tree."""
    if isinstance(node, list):
        return np.array(node, dtype=np.float64)
    if not isinstance(node, dict):
        return node
    tag = frozenset(node)
    if tag not in _TAGS:
        return {name: from_tree(part, tensors) for name, part in node.items()}
    if "tensor" in tag:
        return tensors[node["tensor"]]
    if "dtype" in tag:
        return _typed(node)
    if "bytes" in tag:
        return base64.b64decode(node["bytes"], validate=True)
    if "dict" in tag:
        return {name: from_tree(part, tensors) for name, part in node["dict"].items()}
    return _sequence(node, tensors)


def _sequence(node: dict[str, Any], tensors: Mapping[str, Array]) -> list[Any] | tuple[Any, ...]:
    [(kind, nodes)] = node.items()
    parts = [from_tree(part, tensors) for part in nodes]
    return parts if kind == "list" else tuple(parts)


def _typed(node: dict[str, Any]) -> Array | np.generic:
    dtype = np.dtype(node["dtype"])
    if "value" in node:
        scalar: np.generic = dtype.type(node["value"])
        return scalar
    return np.array(node["values"], dtype=dtype).reshape(node["shape"])


def _dtype_name(array: Array) -> str:
    # numpy cannot read the name of a text type ("str160"), but its code ("<U5").
    return array.dtype.newbyteorder("<").str if array.dtype.kind == "U" else array.dtype.name
