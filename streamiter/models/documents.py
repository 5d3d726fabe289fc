"""The value of an update: parameters, their checks, and the document that holds them.

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
``{"bytes_tensor": name}``                       bytes that are stored next to the tree, as an array of ``uint8``
``{"dict": {...}}``                              a dict with the same names as a tag
===============================================  =====================================================
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Literal

import msgspec
import numpy as np
import orjson
import safetensors.numpy
from safetensors import SafetensorError

from streamiter.errors import ModelError, OtherModel, shortened
from streamiter.values.numbers import Array, Floats

Parameters = Array | dict[str, Any]
"""One array, or a dict of names to arrays, numbers, strings (and lists, tuples and dicts of these)."""

# bool, signed and unsigned integers, floats, text: both JSON and safetensors can hold these exactly.
_KINDS: Final = "biufU"
_NAMES_SHOWN: Final = 20
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
    for array in arrays_in(value):
        array.flags.writeable = False


def own_copy(value: Any) -> Any:
    """Return the value with copies of all its arrays, also of those in dicts, lists and tuples.

    >>> weights = np.zeros(1)
    >>> copied = own_copy([{"weights": weights}])
    >>> weights[:] = 1.0
    >>> copied
    [{'weights': array([0.])}]
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {name: own_copy(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [own_copy(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def arrays_in(value: object) -> Iterator[Array]:
    """Yield every array in ``value``, also in dicts, lists and tuples."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(part)


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
    if array.dtype.kind == "f" and np.count_nonzero(good := np.isfinite(array)) != array.size:
        raise _holds_not_finite(array, ~good, path, subject)
    return np.asarray(array, dtype=None if array.dtype.isnative else array.dtype.newbyteorder("="))


def _holds_not_finite(array: Array, bad: Array, path: str, subject: str) -> ModelError:
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    where = f" (the first at {list(first)})" if first else ""
    return _not_finite(path, subject, f"holds {int(bad.sum())} of {array.size} values as NaN or infinity{where}")


def _not_finite(path: str, subject: str, what: str) -> ModelError:
    return ModelError(
        f"{subject}: {_named(path)} {what}; expected finite numbers, for a broken model must not be served:"
        " look at the learning rate and at the examples before this update"
    )


def _named(path: str) -> str:
    return f"parameter {path!r}" if path else "the parameters"


def are_names(value: object) -> bool:
    """Whether the value is a list of texts."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_count(value: object) -> bool:
    """Whether the value is a whole number above 0."""
    return isinstance(value, int) and value > 0


def parameter_of(
    given: Mapping[str, Any], name: str, subject: str, expected: str, fits: Callable[[object], bool]
) -> Any:
    """Return a parameter of a learner, if it fits. Raises ModelError, whose message begins with ``subject``."""
    value = given.get(name)
    if not fits(value):
        raise ModelError(
            f"{subject}: expected {name!r} as {expected}, given {shortened(value)}; publish the parameters of an "
            "AdaptiveLinearModel as they are"
        )
    return value


def array_of_numbers(given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...]) -> Floats:
    """Return a copy, in float64, of an array of numbers of this shape; None in the shape stands for any length."""
    return checked_array(given, name, subject, shape).astype(np.float64)


def checked_array(
    given: Mapping[str, Any], name: str, subject: str, shape: tuple[int | None, ...], *, whole: bool = False
) -> Array:
    """Return an array of numbers, or of ``whole`` numbers, as it is; the shape is as for :func:`array_of_numbers`."""
    array = np.asarray(given.get(name))
    lengths = zip(shape, array.shape, strict=False)
    fits = array.ndim == len(shape) and all(wanted in (None, length) for wanted, length in lengths)
    if array.dtype.kind not in ("iu" if whole else "iuf") or not fits:
        wanted_shape = ", ".join("any" if length is None else str(length) for length in shape)
        raise ModelError(
            f"{subject}: expected {name!r} as {'whole numbers' if whole else 'numbers'} of shape ({wanted_shape}), "
            f"given shape {array.shape} of {array.dtype}; publish the parameters of an AdaptiveLinearModel as they are"
        )
    return array


SHAPES: Final = "shapes"
"""The parameter with the members of a model beside its linear one: see ``streamiter.models.shapes``."""

EMBEDDINGS: Final = "embeddings"
"""The parameter with the member that has a vector for each feature: see ``streamiter.models.published_embeddings``."""


def members_in(parameters: object, name: str) -> Mapping[str, Any] | None:
    """Return the parameter :data:`SHAPES` or :data:`EMBEDDINGS` of a published ``AdaptiveLinearModel``.

    None for a model without it, and for other models, which may have a parameter of this name, too.
    """
    given = parameters.get(name) if isinstance(parameters, Mapping) and "center" in parameters else None
    return given if isinstance(given, Mapping) else None


# ---- the state of a learner

STATE: Final = "state"
"""The parameter with the state of the learner, as bytes: a line of text, then the plain data of a checkpoint."""

_STATE: Final = "streamiter state"
_STATE_FORMAT: Final = "1"
_WITHOUT: Final = "or start without it, with new learning rates: initial_model(state=False)"


def with_state(parameters: object, learner: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of a version with the state of its learner, of which ``learner`` is the name.

    >>> parameters = with_state({"weights": np.zeros(1)}, "Mean", {"rows": 3})
    >>> parameters["state"][:24], state_in(parameters, "Mean", "Mean.start_from")
    (b'streamiter state 1 Mean ', {'rows': 3})
    """
    from streamiter.values.plain_data import PlainData  # Programs that predict have no use for it.

    content = PlainData().encode(dict(state), name=f"state of {learner}")
    head = f"{_STATE} {_STATE_FORMAT} {learner} {hashlib.sha256(content).hexdigest()}\n"
    given = parameters if isinstance(parameters, dict) else {"parameters": parameters}
    return given | {STATE: head.encode() + content}


def names_of(parameters: object) -> str:
    """Return the names of parameters as a text, the first ones of many; their arrays may have millions of numbers.

    >>> names_of({"weights": [0.5], "intercept": 1.0})
    '{weights, intercept}'
    """
    if not isinstance(parameters, dict):
        return shortened(parameters)
    more = [f"… ({len(parameters):,} names)"] if len(parameters) > _NAMES_SHOWN else []
    return f"{{{', '.join([*map(str, islice(parameters, _NAMES_SHOWN)), *more])}}}"


def without_state(parameters: Parameters) -> Parameters:
    """Return parameters without the state of the learner: the part that predictions need."""
    if not isinstance(parameters, dict) or not isinstance(given := parameters.get(STATE), bytes):
        return parameters
    is_of_learner = given.startswith(_STATE.encode())
    return {name: value for name, value in parameters.items() if name != STATE} if is_of_learner else parameters


def state_in(parameters: object, learner: str, subject: str) -> dict[str, Any] | None:
    """Return the state of the learner that parameters carry; None if they carry none.

    Raises ModelError, whose message begins with ``subject``, for a state that is damaged, or of another learner.
    """
    given = parameters.get(STATE) if isinstance(parameters, Mapping) else None
    if given is None:
        return None
    from streamiter.values.plain_data import PlainData

    expected = f"{subject}: expected the state of a {learner} in format {_STATE_FORMAT}"
    head, _, content = bytes(given).partition(b"\n") if isinstance(given, bytes) else (b"", b"", b"")
    words = head.decode("ascii", "replace").split(" ")
    if " ".join(words[:2]) != _STATE or len(words) != len(_STATE.split()) + 3:
        raise ModelError(f"{expected}, given another value; give the parameters of a version as they are")
    form, whose, digest = words[2:]
    if (form, whose) != (_STATE_FORMAT, learner):
        raise OtherModel(
            f"{expected}, given the state of a {whose} in format {form}; use the learner and the release that "
            f"published it, {_WITHOUT}"
        )
    if hashlib.sha256(content).hexdigest() != digest:
        raise ModelError(f"{expected}, given a damaged one, of another SHA-256; use another version, {_WITHOUT}")
    return dict(PlainData().decode(content))


def refused_state(subject: str, why: object) -> OtherModel:
    """Return the error for a state that does not fit a learner."""
    return OtherModel(f"{subject}: the state of the version does not fit: {why}, {_WITHOUT}")


# ---- documents

UpdateFormat = Literal["auto", "json", "safetensors"]
"""How updates are written; ``"auto"`` writes large arrays as safetensors, other parameters as JSON."""

JSON_CONTENT_TYPE: Final = "application/json"

SAFETENSORS_CONTENT_TYPE: Final = "application/vnd.safetensors"

# Only one entry of metadata: safetensors writes several entries in an order that differs from run to run.
_METADATA_NAME: Final = "streamiter.model_update"

# Larger arrays are written as safetensors: 8,192 float64 are about 160 KB of JSON, which takes a reader more than a
# millisecond, and people do not read this many numbers.
_JSON_BYTES_MAX: Final = 64 * 1024

# A safetensors file begins with the length of its JSON header as 64 bits, little endian.
_LENGTH_BYTES: Final = 8


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an update's value; ``ModelUpdate`` describes the fields."""

    model: str
    generation: int
    version: int
    epoch: int | None = None
    records: int | None = None
    metrics: dict[str, float] = {}
    parameters: Any = None
    """The parameters, as they are or as a tree; None for a change."""
    changes: Any = None
    """The operations of a change (``streamiter.models.changes``), as they are or as a tree; None for a whole model."""
    created_at: int | None = None
    """The publisher's clock, in milliseconds since 1970-01-01 UTC; in files only: records have it in headers."""

    @property
    def rank(self) -> tuple[int, int]:
        """Generation and version."""
        return (self.generation, self.version)

    @property
    def content(self) -> Any:
        """The parameters, or the operations of a change."""
        return self.parameters if self.changes is None else self.changes


def encode_document(document: Document, form: UpdateFormat) -> tuple[str, bytes]:
    """Return content type and value of ``document``; equal documents give equal bytes.

    With ``"auto"`` arrays of more than 64 KiB in total are written as safetensors.
    """
    if form == "json" or (form == "auto" and array_bytes(document.content) <= _JSON_BYTES_MAX):
        return JSON_CONTENT_TYPE, _json(document, to_tree(document.content, inline_array))
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
    return sum(array.nbytes for array in arrays_in(value))


def _json(document: Document, tree: object) -> bytes:
    fields = msgspec.structs.asdict(document) | {_content_name(document): tree}
    fields = {name: value for name, value in fields.items() if value is not None or name not in _LEFT_OUT}
    try:
        return orjson.dumps(fields)
    except TypeError as error:  # Only a text that is not valid Unicode passes the checks before.
        raise ModelError(
            f"model {document.model!r}, update {document.generation}.{document.version}: cannot be written as"
            f" JSON: {error}"
        ) from error


def _content_name(document: Document) -> str:
    return "parameters" if document.changes is None else "changes"


# Other fields are null where they have no value.
_LEFT_OUT: Final = ("created_at", "parameters", "changes")


class _Tensors:
    """Collects the arrays of a tree, each named by its path, and each once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._names: dict[int, str] = {}

    def place(self, path: str, array: Array | bytes) -> object:
        if not isinstance(array, bytes) and array.dtype.kind == "U":  # safetensors cannot hold texts.
            return inline_array(path, array)
        if isinstance(array, bytes):
            name = self._free_name(path or "parameters")
            self.arrays[name] = np.frombuffer(array, np.uint8)
            return {"bytes_tensor": name}
        if (name := self._names.setdefault(id(array), self._free_name(path or "parameters"))) not in self.arrays:
            self.arrays[name] = np.asarray(array, order="C")
        return {"tensor": name}

    def _free_name(self, name: str) -> str:
        is_taken = name in self.arrays or name == "__metadata__"  # the only name that safetensors reserves
        return self._free_name(f"{name}'") if is_taken else name


def _safetensors(document: Document) -> bytes:
    tensors = _Tensors()
    tree = to_tree(document.content, tensors.place)
    text = _json(document, tree).decode()
    return bytes(safetensors.numpy.save(tensors.arrays, metadata={_METADATA_NAME: text}))


def _from_safetensors(value: bytes) -> Document:
    length = int.from_bytes(value[:_LENGTH_BYTES], "little")
    header = orjson.loads(value[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return _document(orjson.loads(header["__metadata__"][_METADATA_NAME]), safetensors.numpy.load(value))


def _document(fields: object, tensors: Mapping[str, Array]) -> Document:
    document = msgspec.convert(fields, Document)
    name, content = _content_name(document), from_tree(document.content, tensors)
    if not isinstance(content, (np.ndarray, dict) if name == "parameters" else list):
        raise ValueError(f"expected {name} as arrays, given {type(content).__name__}")  # noqa: TRY004
    if not all(map(math.isfinite, document.metrics.values())):
        raise ValueError("a metric is not a finite number")
    return msgspec.structs.replace(document, **{name: content})


PlaceArray = Callable[[str, Array | bytes], object]
"""Returns the tree's node for an array or for bytes, from its path ("layers.0.weights") and the value."""

_TAGS: Final = (
    frozenset({"dtype", "shape", "values"}),
    frozenset({"dtype", "value"}),
    frozenset({"tensor"}),
    frozenset({"list"}),
    frozenset({"tuple"}),
    frozenset({"bytes"}),
    frozenset({"bytes_tensor"}),
    frozenset({"dict"}),
)


def to_tree(value: object, place_array: PlaceArray, path: str = "") -> object:
    """Return the tree of checked parameters; ``place_array`` returns the node of each array, and of bytes.

    >>> to_tree({"w": np.array([[1.0, 0.1]]), "n": np.array([3], dtype=np.int32)}, inline_array)
    {'w': [[1.0, 0.1]], 'n': {'dtype': 'int32', 'shape': [1], 'values': [3]}}
    """
    if isinstance(value, (np.ndarray, bytes)):
        return place_array(path, value)
    if isinstance(value, np.generic):
        return {"dtype": value.dtype.name, "value": value.item()}
    if isinstance(value, dict):
        nodes = {name: to_tree(part, place_array, _below(path, name)) for name, part in value.items()}
        return {"dict": nodes} if frozenset(nodes) in _TAGS else nodes
    if isinstance(value, (list, tuple)):
        nodes_in_order = [to_tree(part, place_array, _below(path, index)) for index, part in enumerate(value)]
        return {type(value).__name__: nodes_in_order}
    return value


def _below(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def inline_array(_path: str, array: Array | bytes) -> object:
    """Return the node of an array, or of bytes, that is written into the tree itself."""
    if isinstance(array, bytes):
        return {"bytes": base64.b64encode(array).decode("ascii")}
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
    if "bytes_tensor" in tag:
        return tensors[node["bytes_tensor"]].tobytes()
    if "bytes" in tag:
        return base64.b64decode(node["bytes"], validate=True)
    if "dict" in tag:
        return {name: from_tree(part, tensors) for name, part in node["dict"].items()}
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
