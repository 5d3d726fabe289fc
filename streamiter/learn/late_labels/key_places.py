"""The keys of questions that wait, or are settled: each has a place in arrays until it is forgotten."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import compress
from types import ModuleType
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from streamiter.learn.late_labels.label_join_arrays import KeyWords
from streamiter.values.helpers.compiled import is_compiling
from streamiter.values.numbers import Array, Integers

# For fewer keys than this, a call of compiled code and an array of texts cost more than a dict.
_TOGETHER: Final = 256
# A longer text would make the rows of all others as long as its own. The digits of a SHA-256 hash have 64, and take as
# many bytes here as such a text with its entry in a dict.
_CHARACTERS_MAX: Final = 64


class KeyPlaces:
    """Gives each key a place, and takes it back. Equal keys have one place, other keys have others.

    Keys of any kind are in a dict. Texts, or whole numbers of arrays, are in a table of compiled code as soon as many
    come together; the first key of another kind moves all keys to the dict for good. Both are exact.

    >>> places = KeyPlaces()
    >>> found = places.of(["a", 7, "a"])
    >>> bool(found[0] == found[2] != found[1]), places.keys(found[:2])
    (True, ['a', 7])
    >>> places.forget(found[1:2])
    >>> list(places)
    ['a']
    """

    def __init__(self) -> None:
        self.room = 0
        """The number of places, with the free ones."""
        self._free: Integers = np.zeros(0, np.int64)
        self._free_count = 0
        """How many entries of ``_free`` are free places, from the first on; the last of these is taken first."""
        self._is_taken: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._by_key: dict[Hashable, int] | None = {}
        """The places in the dict; None: the keys are in the table."""
        self._names: npt.NDArray[np.object_] = np.empty(0, object)
        """The key at each place that is taken; only for the dict."""
        self._kind: str | None = "" if is_compiling() else None
        """The kind of numpy that the keys of the table have; "": not decided; None: all keys stay in the dict."""
        self._compiled: ModuleType
        self._words: KeyWords = np.zeros((0, 1), np.uint64)
        self._hashes: KeyWords = np.zeros(0, np.uint64)
        self._table: Integers = np.zeros(0, np.int64)
        """The place of each key, at its hash or behind it; -1 where there is none."""

    @staticmethod
    def compile() -> None:
        """Compile the functions of a table of keys, where that is needed."""
        places = KeyPlaces()
        places.forget(places.of(list(map(str, range(_TOGETHER)))))

    def __len__(self) -> int:
        return self.room - self._free_count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys(self._table[self._table >= 0]) if self._by_key is None else self._by_key)

    def of(self, keys: Sequence[Hashable] | Array) -> Integers:
        """Return the place of each key; a new key gets one."""
        if len(keys) > self._free_count:
            self.add_room(len(keys) + self.room)
        if (words := self._words_of(keys)) is None:
            return self._in_dict(keys.tolist() if isinstance(keys, np.ndarray) else keys)
        self._widen(words.shape[1])
        found = np.empty(len(words), np.int64)
        self._free_count = self._compiled.find_places(
            words, self._table, self._hashes, self._words, self._is_taken, self._free, self._free_count, found
        )
        return found

    def _in_dict(self, keys: Sequence[Hashable]) -> Integers:
        by_key = self._move_to_dict()
        first = self._free_count - len(keys)
        offered = self._free[first : self._free_count].copy()
        # A key that has a place leaves the one that it is offered free.
        found = np.fromiter(map(by_key.setdefault, keys, offered.tolist()), np.int64, len(keys))
        is_new = found == offered
        self._is_taken[found] = True
        self._names[offered[is_new]] = np.fromiter(compress(keys, is_new.tolist()), object)
        self._free_count = first
        self._add_free(offered[~is_new])
        return found

    def keys(self, places: Integers) -> list[Any]:
        """Return the keys at these places."""
        if self._by_key is not None:
            return cast(list[Any], self._names[places].tolist())
        words = self._words[places]
        dtype = np.dtype(np.int64 if self._kind == "i" else f"U{2 * words.shape[1]}")
        return cast(list[Any], words.view(dtype)[:, 0].tolist())

    def forget(self, places: Integers) -> None:
        """Forget the keys at these places; one without a key has no effect."""
        places = places[self._is_taken[places]]
        self._is_taken[places] = False
        if self._by_key is None:
            self._compiled.forget_places(places, self._table, self._hashes)
        else:
            deque(map(self._by_key.pop, self._names[places].tolist()), maxlen=0)
            self._names[places] = None
        self._add_free(places)

    def add_room(self, more: int) -> None:
        """Have more places."""
        before, self.room = self.room, self.room + more
        self._free, self._is_taken = np.pad(self._free, (0, more)), np.pad(self._is_taken, (0, more))
        self._add_free(np.arange(before, self.room))
        if self._by_key is None:
            self._words = np.pad(self._words, ((0, more), (0, 0)))
            self._hashes = np.pad(self._hashes, (0, more))
            self._make_table(self._table[self._table >= 0])
        else:
            self._names = np.append(self._names, np.full(more, None))

    def _add_free(self, places: Integers) -> None:
        self._free[self._free_count : self._free_count + len(places)] = places
        self._free_count += len(places)

    # ---- the table

    def _words_of(self, keys: Sequence[Hashable] | Array) -> KeyWords | None:
        """Return keys for the table as words; None for those that are, or must be, in the dict."""
        if self._kind is None or (self._by_key is not None and len(keys) < _TOGETHER):
            return None
        if not len(keys):
            return np.zeros((0, 1), np.uint64)
        array = _array_of_keys(keys)
        if array is not None and self._by_key is not None and not self._move_to_table(array.dtype.kind):
            return None
        if array is None or array.dtype.kind != self._kind:
            self._move_to_dict()
            self._kind = None
            return None
        return _words_of_array(array)

    def _move_to_table(self, kind: str) -> bool:
        """Move all keys to the table; return whether they are of this kind."""
        from streamiter.learn.late_labels import label_join_slots  # imports Numba

        assert self._by_key is not None
        names, places = list(self._by_key), np.fromiter(self._by_key.values(), np.int64)
        array = _array_of_keys(names) if names else np.zeros(0, kind)
        if array is None or array.dtype.kind != kind:
            self._kind = None
            return False
        self._compiled, self._kind = label_join_slots, kind
        self._by_key, self._names = None, np.empty(0, object)
        words = _words_of_array(array)
        self._words = np.zeros((self.room, words.shape[1]), np.uint64)
        self._words[places], self._hashes = words, np.zeros(self.room, np.uint64)
        self._compiled.hash_places(self._words, places, self._hashes)
        self._make_table(places)
        return True

    def _make_table(self, places: Integers) -> None:
        """Make a table of which at most half is full, of these places."""
        self._table = np.full(1 << (2 * self.room - 1).bit_length(), -1)
        self._compiled.insert_places(places, self._table, self._hashes)

    def _widen(self, width: int) -> None:
        if (more := width - self._words.shape[1]) > 0:
            self._words = np.pad(self._words, ((0, 0), (0, more)))

    def _move_to_dict(self) -> dict[Hashable, int]:
        if self._by_key is None:
            places = self._table[self._table >= 0]
            names = self.keys(places)
            self._by_key, self._names = dict(zip(names, places.tolist(), strict=True)), np.full(self.room, None)
            self._names[places] = np.fromiter(names, object, len(names))
        return self._by_key


def _array_of_keys(keys: Sequence[Hashable] | Array) -> Array | None:
    """Return keys as an array of texts or of whole numbers; None if that could not tell them apart, or is too large."""
    if isinstance(keys, np.ndarray):
        is_text = keys.dtype.kind == "U" and keys.itemsize <= 4 * _CHARACTERS_MAX
        return keys if keys.ndim == 1 and (is_text or keys.dtype.kind == "i") else None
    # An array has no NUL at the end of a text.
    if set(map(type, keys)) != {str} or max(map(len, cast(list[str], keys))) > _CHARACTERS_MAX:
        return None
    return None if "\0" in "".join(cast(list[str], keys)) else np.array(keys)


def _words_of_array(array: Array) -> KeyWords:
    if array.dtype.kind == "i":
        return array.astype(np.int64).view(np.uint64)[:, None]
    width = max(1, -(-array.itemsize // 8))
    texts = np.ascontiguousarray(array, f"=U{2 * width}")
    return texts.view(np.uint64).reshape(len(texts), width)
