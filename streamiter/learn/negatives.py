"""``sampled_negatives``: from choices alone, such as clicks, to rows with labels, from which learners learn to rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from streamiter.errors import GraphError, ModelError, shortened
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.operators.declared_state import COPIED, DeclaredOperator, Form, declared
from streamiter.operators.definitions import Definition
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.field_kinds import as_text
from streamiter.values.hashes import drawn_hashes, hash_of
from streamiter.values.numbers import Indices, whole_number

# A row costs as much as the choice itself, and more than this many were little better in four streams (decision 066).
_EACH: Final = 9
_EACH_MAX: Final = 1_000
# The fields of this many items take some 40 MB.
_ITEMS: Final = 100_000
_ITEMS_MAX: Final = 10_000_000


def _in_order(places: Mapping[str, int]) -> Indices:
    return np.fromiter(places.values(), np.int64, len(places))


class SampleNegatives(DeclaredOperator):
    """Emits each record with a true label, then copies with another item and a false label."""

    one_by_one = "always"  # A copy has the time of its record.

    _records = declared(0)
    """The number of records so far, from which the next draws are made."""
    _keys: list[str] = declared(made=list, form=COPIED)
    """The texts of the first fields of the items that can be drawn, by the places of these."""
    _values: list[tuple[Any, ...]] = declared(made=list, form=COPIED)
    """The fields of the items."""
    _places: OrderedDict[str, int] = declared(made=OrderedDict, form=Form(_in_order, lambda places: places))
    """The place of each item, the one that was chosen last behind the others."""

    def __init__(
        self, item: str | Sequence[str], *, each: int = _EACH, label: str = "chosen", items: int = _ITEMS, seed: int = 0
    ) -> None:
        fields = (item,) if isinstance(item, str) else tuple(item) if isinstance(item, (list, tuple)) else ()
        if not label or not isinstance(label, str):
            raise GraphError(f"sampled_negatives(label=): expected the name of a field, given {label!r}")
        if not fields or not all(isinstance(field, str) for field in fields) or label in fields:
            raise GraphError(
                f"sampled_negatives(item=): expected the field of the item, or several of its fields, and not the "
                f'label {label!r}, given {shortened(item)}; write "item", or ["item", "price"]'
            )
        self._fields, self._label = fields, label
        self._each = whole_number("sampled_negatives(each=)", each, 1, _EACH_MAX, error=GraphError)
        self._items_max = whole_number("sampled_negatives(items=)", items, 2, _ITEMS_MAX, error=GraphError)
        seed = whole_number("sampled_negatives(seed=)", seed, 0, error=GraphError)
        self._draws = np.arange(self._each, dtype=np.uint64) + np.uint64(hash_of(b"%d" % seed))

    def process(self, record: Any, out: Output) -> None:
        try:
            rows = self.rows_of(record)
        except ModelError as error:
            out.reject(record, error, origin=out.batch_origin)
            return
        for row in rows:
            out.emit(row)

    def rows_of(self, record: Any) -> list[dict[str, Any]]:
        """Return a record and its copies, and note its item. Raises ModelError for a record without one."""
        key, values = self._item_of(record)
        own = self._observe(key, values)
        rows = [{**record, self._label: True}]
        if others := len(self._keys) - 1:
            first = np.uint64(self._records * self._each)
            # The remainder of 64 bits is as good as equal chances.
            for place in (drawn_hashes(self._draws + first) % np.uint64(others)).tolist():
                other = zip(self._fields, self._values[place + (place >= own)], strict=True)
                rows.append({**record, **dict(other), self._label: False})
        self._records += 1
        return rows

    def _item_of(self, record: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the key of the item of a record, and the values of its fields."""
        if not isinstance(record, Mapping) or self._label in record or any(name not in record for name in self._fields):
            raise ModelError(
                f"sampled_negatives: expected a record with {' and '.join(map(repr, self._fields))}, and without the "
                f"field {self._label!r} of the label, given {shortened(record)}; name the fields of the item, or "
                "another label="
            )
        values = tuple(record[name] for name in self._fields)
        try:
            key = as_text(values[0])
        except TypeError:
            key = None
        if key is None:
            raise ModelError(
                f"sampled_negatives: expected a text or a number in {self._fields[0]!r}, which says which item it is, "
                f"given {shortened(values[0])}; leave out records without an item"
            )
        return key, values

    def _observe(self, key: str, values: tuple[Any, ...]) -> int:
        """Make an item the last one, in place of the oldest if there is no room for one more; return its place."""
        if (place := self._places.pop(key, len(self._keys))) == self._items_max:
            _, place = self._places.popitem(last=False)
        if place == len(self._keys):
            self._keys.append(key)
            self._values.append(values)
        self._places[key], self._keys[place], self._values[place] = place, key, values
        return place

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        keys, values, order = self._keys, self._values, state["places"].tolist()
        kept = order[-self._items_max :]
        # If some leave, since there is less room, the others move up.
        place_now = {place: now for now, place in enumerate(sorted(kept))}
        self._keys, self._values = [keys[place] for place in place_now], [values[place] for place in place_now]
        self._places = OrderedDict((keys[place], place_now[place]) for place in kept)

    def definition(self) -> Definition:
        return {**super().definition(), "fields": list(self._fields)}


@all_or_nothing
def sampled_negatives(
    positives: Stream,
    item: str | Sequence[str],
    *,
    each: int = _EACH,
    label: str = "chosen",
    items: int = _ITEMS,
    seed: int = 0,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Add rows of items that were not chosen to a stream of choices: clicks, purchases, plays.

    Where records only say what a user has chosen, a learner needs other items to compare with. This emits each record
    with ``label`` true, followed by ``each`` copies of it with ``label`` false, in which the fields of another item
    replace those of the chosen one. ``item`` is the field of the item, or several fields of it: the first one says
    which item it is, and all others, such as its price, are replaced with it.

    The other item is drawn from the ``items`` different ones that were chosen last, each with the same chance. So its
    features occur as often as it is drawn: they expire when it is no longer among these. What a model then
    predicts ranks items, and is no probability of a choice: the more negatives, the smaller it is.

    One subtask does all the work. Which items are drawn depends on ``seed`` and the order of the records. Records
    without one of the fields, or with one of the name of ``label``, follow ``on_error`` or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("plays")
    >>> plays = flow.from_items([{"user": "ann", "song": "a"}, {"user": "bo", "song": "b"}])
    >>> rows = sampled_negatives(plays, "song", each=1).collect()
    >>> flow.run().state
    'finished'
    >>> for row in rows.items:
    ...     print(row)
    {'user': 'ann', 'song': 'a', 'chosen': True}
    {'user': 'bo', 'song': 'b', 'chosen': True}
    {'user': 'bo', 'song': 'a', 'chosen': False}
    """
    check_stream("sampled_negatives", positives, "positives")
    make = partial(SampleNegatives, item, each=each, label=label, items=items, seed=seed)
    make()  # What cannot be used is refused at the user's line.
    return positives.process(
        make,
        name=step_names(positives.flow, name)("negatives"),
        parallelism=1,
        on_error=on_error,
        dead_letter=dead_letter,
    )
