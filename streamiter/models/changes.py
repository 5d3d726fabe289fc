"""Changes: what is different between two versions of parameters, and how a follower applies it.

:func:`changes_between` compares any parameters, and :func:`applied` gives the new ones back, equal to the last bit. A
change is a list of operations. Each has the ``path`` of a value: names in dicts, places in lists.

=========================================  =========================================================================
``{"path", "value"}``                      the value is replaced, or it is new
``{"path", "names"}``                      the dict has these names in this order; other names leave it, new names get
                                           their value from an operation that follows
``{"path", "rows", "values"}``             these rows of the array (parts along its first axis) get these values
``{"path", "removed", "inserted",
"rows", "values"}``                        first the rows ``removed`` leave; then new rows come, which have the places
                                           ``inserted`` in the new array; then ``rows``, all of ``inserted`` among
                                           them, get their values
``{"path", "head", "state"}``              the state of the learner: its first line, and the operations that change
                                           its content, in the encoding of checkpoints
=========================================  =========================================================================

Rows are found without a description of the parameters: an array of ascending integers, such as the features of a
network or the hashed places of a linear model, is a list of keys. Where it gains and loses keys, arrays that are as
long, or longer by the same number of rows in both versions, are compared key by key. Of several lists that fit
equally, the one with the fewest rows to set is taken. A wrong guess costs bytes and no bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import PlainDataError
from streamiter.models.documents import STATE, without_state
from streamiter.models.stored_rows import StoredRows
from streamiter.values.numbers import Array

Operation = dict[str, Any]
"""One step of a change; the docstring of the module has its forms."""

Changes = list[Operation]
"""The operations that make one version of another, in order."""

_Indices = npt.NDArray[np.integer[Any]]

# A row costs the bytes of its number beside its values. Consumers in all languages read signed numbers of 32 bits.
_SHORT: Final = np.dtype(np.int32)

# Arrays are compared in parts that fit into the cache of a core: twice as fast as in one.
_BYTES_AT_ONCE: Final = 1 << 18


def changes_between(old: Any, new: Any) -> Changes:
    """Return the operations that turn the parameters ``old`` into ``new``; none if they are equal to the last bit.

    >>> old, new = {"weights": np.zeros(4), "bits": 18}, {"weights": np.array([0.0, 0.5, 0.0, 0.0]), "bits": 18}
    >>> changes_between(old, new)
    [{'path': ['weights'], 'rows': array([1], dtype=int32), 'values': array([0.5])}]
    """
    return list(_Comparison(old, new).operations(old, new, ()))


def applied(parameters: Any, changes: Changes) -> Any:
    """Return the parameters after these changes. Read-only arrays are copied, others are changed in place.

    Raises ``ValueError`` with the reason for changes that do not fit.

    >>> applied(np.zeros(3), changes_between(np.zeros(3), np.array([0.0, 1.0, 2.0])))
    array([0., 1., 2.])
    """
    try:
        for operation in changes:
            parameters = _replaced(parameters, operation["path"], operation)
        return _put_in_order(parameters, {})
    except (KeyError, IndexError, TypeError, AttributeError, PlainDataError) as error:
        raise ValueError(f"the change does not fit the version before it: {error!r}") from error


# ---- comparing


class _Keys(NamedTuple):
    """A list of keys in both versions."""

    old: int
    new: int
    removed: _Indices
    inserted: _Indices


class _Comparison:
    """Compares two versions. The lists of keys are found first, wherever they are."""

    def __init__(self, old: Any, new: Any) -> None:
        self._keys: dict[tuple[int, ...], _Keys] = {}
        self._known: dict[bytes, _Indices] = {}
        """Places that several arrays have: a value with tensors stores them once."""
        self._find_keys(old, new)

    def operations(self, old: Any, new: Any, path: tuple[Any, ...]) -> Iterator[Operation]:
        """Yield the operations for the values below ``path``."""
        if type(old) is not type(new):
            yield {"path": list(path), "value": new}
        elif isinstance(new, np.ndarray):
            yield from self._of_arrays(old, new, path)
        elif isinstance(new, dict):
            if list(old) != list(new):
                yield {"path": list(path), "names": list(new)}
            for name, value in new.items():
                if name in old:
                    yield from self.operations(old[name], value, (*path, name))
                else:
                    yield {"path": [*path, name], "value": value}
        elif isinstance(new, (list, tuple)) and len(old) == len(new) and _has_parts(new) and _has_parts(old):
            for index, (before, after) in enumerate(zip(old, new, strict=True)):
                yield from self.operations(before, after, (*path, index))
        elif path == (STATE,) and isinstance(new, bytes) and old != new:
            yield _state_operation(old, new)
        elif not _are_same(old, new):
            yield {"path": list(path), "value": new}

    def _find_keys(self, old: Any, new: Any) -> None:
        if isinstance(new, np.ndarray) and isinstance(old, np.ndarray):
            if _are_keys(old) and _are_keys(new) and not np.array_equal(old, new):
                removed, inserted = self._shared(_not_in(old, new)), self._shared(_not_in(new, old))
                # Lists that lose and gain keys at the same places move rows alike, so one of them is enough.
                place = (len(old), len(new), id(removed), id(inserted))
                self._keys.setdefault(place, _Keys(len(old), len(new), removed, inserted))
        elif isinstance(new, dict) and isinstance(old, dict):
            for name in new:
                if name in old:
                    self._find_keys(old[name], new[name])
        elif isinstance(new, (list, tuple)) and type(new) is type(old):
            for before, after in zip(old, new, strict=False):
                self._find_keys(before, after)

    def _of_arrays(self, old: Array, new: Array, path: tuple[Any, ...]) -> Iterator[Operation]:
        if old.dtype != new.dtype or old.shape[1:] != new.shape[1:] or not _has_rows(old) or not _has_rows(new):
            if (old.dtype, old.shape, old.tobytes()) != (new.dtype, new.shape, new.tobytes()):
                yield {"path": list(path), "value": new}
            return
        removed, inserted, rows = min(self._ways(old, new), key=lambda way: len(way[2]))
        if not len(rows) and not len(removed):
            return
        row_bytes = new.nbytes // len(new) if len(new) else 0
        size = len(rows) * (row_bytes + _SHORT.itemsize) + (len(removed) + len(inserted)) * _SHORT.itemsize
        if size >= new.nbytes:
            yield {"path": list(path), "value": new}
            return
        moved = {"removed": removed, "inserted": inserted} if len(removed) or len(inserted) else {}
        yield {"path": list(path), **moved, "rows": self._shared(rows), "values": new[rows]}

    def _ways(self, old: Array, new: Array) -> Iterator[tuple[_Indices, _Indices, _Indices]]:
        """Yield rows that are removed, inserted and set, for each way to assign the old rows to the new ones."""
        # A list of keys is that of an array if at least half of the rows have a key, as many without in both versions.
        every = self._keys.values()
        fitting = [keys for keys in every if len(old) - keys.old == len(new) - keys.new in range(keys.new + 1)]
        others = min((len(new) - keys.new for keys in fitting), default=None)
        if others != 0:
            both, added = min(len(old), len(new)), self._shared(np.arange(len(old), len(new)))
            lost = self._shared(np.arange(len(new), len(old)))
            yield lost, added, np.concatenate([_different_rows(old[:both], new[:both]), added])
        for keys in fitting:
            if len(new) - keys.new != others:
                continue
            for first in dict.fromkeys([0, others]):  # The other rows are in front of those with keys, or behind them.
                removed, inserted = self._shared(keys.removed + first), self._shared(keys.inserted + first)
                kept = np.delete(np.arange(len(new)), inserted)
                moved = _different_rows(np.delete(old, removed, axis=0), np.delete(new, inserted, axis=0))
                yield removed, inserted, np.union1d(inserted, kept[moved])

    def _shared(self, rows: _Indices) -> _Indices:
        short = rows.astype(_SHORT) if not len(rows) or rows[-1] <= np.iinfo(_SHORT).max else rows.astype(np.int64)
        return self._known.setdefault(short.tobytes(), short)


def _has_rows(array: Array) -> bool:
    return array.ndim > 0 and array.dtype.kind in "biuf" and array.dtype.isnative


def _has_parts(value: Sequence[Any]) -> bool:
    return any(isinstance(part, (np.ndarray, dict, list, tuple, _MovedRows)) for part in value)


def _are_same(old: Any, new: Any) -> bool:
    if isinstance(new, np.generic):
        return bool(old.dtype == new.dtype and old.tobytes() == new.tobytes())
    # The texts tell −0.0 from 0.0, and 1 from 1.0 and True; of NaN they are equal.
    return bool(old == new) if isinstance(new, (str, bytes)) else repr(old) == repr(new)


def _are_keys(array: Array) -> bool:
    return array.ndim == 1 and array.dtype.kind in "iu" and bool((array[1:] > array[:-1]).all())


def _not_in(keys: Array, others: Array) -> _Indices:
    """Return the places of the keys that are not among the others; both are ascending."""
    places = others.searchsorted(keys)
    is_in = places < len(others)
    is_in[is_in] = others[places[is_in]] == keys[is_in]
    return np.flatnonzero(~is_in)


def _different_rows(old: Array, new: Array) -> _Indices:
    """Return the numbers of the rows whose bits are different, ascending."""
    if not new.size:
        return np.zeros(0, np.intp)
    bits = np.dtype(f"u{new.dtype.itemsize}")
    before, after = (np.ascontiguousarray(each).reshape(len(new), -1).view(bits) for each in (old, new))
    step = max(1, _BYTES_AT_ONCE // (after.shape[1] * bits.itemsize))
    found = [
        first + np.flatnonzero((before[first : first + step] != after[first : first + step]).any(axis=1))
        for first in range(0, len(new), step)
    ]
    return np.concatenate(found)


# ---- the state of the learner: a line of text, then plain data


def _state_operation(old: bytes, new: bytes) -> Operation:
    """Return the operation that changes the content of a state; its bytes as a whole if that is not shorter."""
    from streamiter.values.plain_data import PlainData  # Programs that predict have no use for it.

    whole: Operation = {"path": [STATE], "value": new}
    (_, _, before), (head, _, after) = old.partition(b"\n"), new.partition(b"\n")
    plain = PlainData()
    try:
        contents = plain.decode(before), plain.decode(after)
        if plain.encode(contents[1]) != after or not head.isascii():
            return whole
        # A path may have any keys, so it is plain data, too.
        state = plain.encode(changes_between(*contents))
    except PlainDataError:
        return whole
    return {"path": [STATE], "head": head.decode(), "state": state} if len(state) < len(new) else whole


def _changed_state(old: bytes, operation: Operation) -> bytes:
    from streamiter.values.plain_data import PlainData

    plain = PlainData()
    content = plain.encode(applied(plain.decode(old.partition(b"\n")[2]), plain.decode(operation["state"])))
    head = str(operation["head"])
    if hashlib.sha256(content).hexdigest() != head.rpartition(" ")[2]:
        raise ValueError("the state of the learner has another SHA-256 than its first line says")
    return head.encode("ascii") + b"\n" + content


def change_without_state(operation: Operation) -> Operation | None:
    """Return the part of an operation that is not about the state; None if nothing is left."""
    path = operation["path"]
    if path == [STATE]:
        return None
    if not path and "names" in operation:
        return {**operation, "names": [name for name in operation["names"] if name != STATE]}
    return {**operation, "value": without_state(operation["value"])} if not path and "value" in operation else operation


# ---- applying


def _replaced(value: Any, path: Sequence[Any], operation: Operation) -> Any:
    """Return the value after an operation on the part at ``path``; the dicts and lists on the way are new."""
    if not path:
        return _result(value, operation)
    name, *rest = path
    if isinstance(value, dict):
        old = value[name] if rest or "value" not in operation else value.get(name)
        return {**value, name: _replaced(old, rest, operation)}
    parts = list(value)
    parts[name] = _replaced(parts[name], rest, operation)
    return parts if isinstance(value, list) else tuple(parts)


def _result(old: Any, operation: Operation) -> Any:
    if "value" in operation:
        return operation["value"]
    if "names" in operation:
        return {name: old.get(name) for name in operation["names"]}
    if "state" in operation:
        return _changed_state(old, operation)
    rows, values = operation["rows"], operation["values"]
    if old.dtype != values.dtype or old.shape[1:] != values.shape[1:] or len(values) != len(rows):
        raise ValueError(
            f"{operation['path']}: expected rows of {old.dtype} and shape {old.shape[1:]}, "
            f"given {values.dtype} and shape {values.shape[1:]}"
        )
    if isinstance(old, StoredRows):
        order = _moved(old.numbers, operation)
        order = order.copy() if order is old.numbers else order
        new = np.arange(old.end, old.end + len(rows), dtype=order.dtype)
        return old.with_rows(_with_rows(order, rows, new), values)
    if isinstance(old, _MovedRows):
        return _MovedRows(old.array, [*old.operations, operation])
    if "removed" in operation or "inserted" in operation:
        return _MovedRows(old, [operation])
    return _with_rows(old if old.flags.writeable else old.copy(), rows, values)


class _MovedRows:
    """An array whose rows are moved at the end, by all operations at once: a late reader applies a hundred changes."""

    def __init__(self, array: Array, operations: Changes) -> None:
        self.array, self.operations = array, operations
        self.dtype, self.shape = array.dtype, array.shape

    def result(self, orders: dict[tuple[int, ...], _Indices]) -> Array:
        """Return the array after the operations; ``orders`` has the orders of rows of arrays that moved alike."""
        # Arrays that moved alike have the same places: each array of a value is decoded once.
        if len(self.operations) == 1 and len(self.array):
            [operation] = self.operations
            moves = (len(self.array), *(id(operation.get(name)) for name in ("removed", "inserted")))
            if moves not in orders:
                orders[moves] = _moved(np.arange(len(self.array)), operation)
            # Other threads run while numpy takes rows: a follower predicts while it copies a large model.
            return _with_rows(self.array.take(orders[moves], axis=0), operation["rows"], operation["values"])
        parts = [operation.get(name) for operation in self.operations for name in ("removed", "inserted", "rows")]
        key = (len(self.array), *map(id, parts))
        if key not in orders:
            orders[key] = self._order()
        values = [operation["values"] for operation in self.operations]
        return np.concatenate([self.array, *values]).take(orders[key], axis=0)

    def _order(self) -> _Indices:
        """Return for each row its number among those of the array, and then those that the operations bring."""
        order: _Indices = np.arange(len(self.array))
        end = len(order)
        for operation in self.operations:
            rows = operation["rows"]
            order = _with_rows(_moved(order, operation), rows, np.arange(end, end + len(rows)))
            end += len(rows)
        return order


def _put_in_order(value: Any, orders: dict[tuple[int, ...], _Indices]) -> Any:
    """Return the value with arrays in place of rows to move."""
    if isinstance(value, _MovedRows):
        return value.result(orders)
    if isinstance(value, dict):
        return {name: _put_in_order(part, orders) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and _has_parts(value):
        parts = [_put_in_order(part, orders) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _with_rows(array: Array, rows: _Indices, values: Array) -> Array:
    array[_within(rows, len(array))] = values
    return array


def _moved(old: Array, operation: Operation) -> Array:
    """Return an array without some rows and with room for others, whose values are not set yet."""
    removed, inserted = (operation.get(name, operation["rows"][:0]) for name in ("removed", "inserted"))
    if not len(removed) and not len(inserted):
        return old
    kept = len(old) - len(removed)
    new = np.zeros((kept + len(inserted), *old.shape[1:]), old.dtype)
    # How many rows are kept before each row that leaves, and before each that comes: between these, rows stay together.
    before_removed = _within(removed, len(old)) - np.arange(len(removed))
    before_inserted = _within(inserted, len(new)) - np.arange(len(inserted))
    cuts = np.unique(np.concatenate([[0], before_removed, before_inserted, [kept]]))[:-1]
    sources = (cuts + before_removed.searchsorted(cuts, side="right")).tolist()
    targets = (cuts + before_inserted.searchsorted(cuts, side="right")).tolist()
    for source, target, count in zip(sources, targets, np.diff(cuts, append=kept).tolist(), strict=True):
        new[target : target + count] = old[source : source + count]
    return new


def _within(rows: _Indices, count: int) -> _Indices:
    """Return ``rows``. Raises ``ValueError`` unless they are ascending numbers of ``count`` rows."""
    if rows.ndim != 1 or (len(rows) and not (rows[0] >= 0 and rows[-1] < count and (rows[1:] > rows[:-1]).all())):
        raise ValueError(f"expected ascending numbers of {count} rows, given {rows}")
    return rows
