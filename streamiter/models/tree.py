"""Parameters as a tree that JSON can hold, and back, exactly.

A float64 array is plain nested lists, so that any language reads the common case without a manual.
What JSON cannot tell apart carries a tag:

===============================================  =====================================================
``{"dtype", "shape", "values"}``                 any other array; values in row-major order, flat
``{"dtype", "value"}``                           a numpy scalar that is not of 64 bits
``{"tensor": name}``                             an array that lies beside the tree (safetensors)
``{"list": [...]}``, ``{"tuple": [...]}``        a list or tuple of values, which is not an array
``{"bytes": base64}``                            bytes
``{"dict": {...}}``                              a dict whose names happen to be those of a tag
===============================================  =====================================================

>>> to_tree({"w": np.array([[1.0, 0.1]]), "n": np.array([3], dtype=np.int32)}, inline_array)
{'w': [[1.0, 0.1]], 'n': {'dtype': 'int32', 'shape': [1], 'values': [3]}}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from streamiter.models.parameters import Array

__all__ = ["from_tree", "inline_array", "to_tree"]

PlaceArray = Callable[[str, Array], Any]
"""Gives the tree's node of an array, from its path ("layers.0.weights") and the array."""

_TAGS: Final = (
    frozenset({"dtype", "shape", "values"}),
    frozenset({"dtype", "value"}),
    frozenset({"tensor"}),
    frozenset({"list"}),
    frozenset({"tuple"}),
    frozenset({"bytes"}),
    frozenset({"dict"}),
)


def to_tree(value: Any, place_array: PlaceArray, path: str = "") -> Any:
    """The tree of checked parameters; ``place_array`` gives the node of each array."""
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


def inline_array(_path: str, array: Array) -> Any:
    """The node of an array that is written into the tree itself."""
    if array.dtype == np.float64 and array.ndim > 0 and array.size > 0:
        return array.tolist()
    return {"dtype": _dtype_name(array), "shape": list(array.shape), "values": array.ravel().tolist()}


def from_tree(node: Any, tensors: Mapping[str, Array]) -> Any:
    """What ``to_tree`` was given. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a broken tree."""
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
    # The name of a text type ("str160") is not understood when read back, its code ("<U5") is.
    return array.dtype.newbyteorder("<").str if array.dtype.kind == "U" else array.dtype.name
