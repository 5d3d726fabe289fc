"""The place in a configuration file that an error or a warning is about."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from streamiter.errors import ConfigurationError

__all__ = ["Where", "did_you_mean", "json_kind", "nearest"]

_JSON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a text"),
    (dict, "an object"),
    ((list, tuple), "an array"),
    (type(None), "null"),
)
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Where:
    """A file, and a part of it: a section, a layer, an object within a key.

    >>> str(Where("deepfm.json").layer("fclayer").key("outputdims"))
    "deepfm.json: layer 'fclayer', key 'outputdims'"
    """

    file: str
    part: str = ""
    path: str = ""
    """The key, below which others may lie: ``optimizer.momentum``."""

    def section(self, name: str) -> Where:
        """One of the objects at the top of the file."""
        return Where(self.file, repr(name))

    def layer(self, name: str) -> Where:
        """A layer by its name."""
        return Where(self.file, f"layer {name!r}")

    def nameless_layer(self, number: int) -> Where:
        """A layer of which only the position in the array is known, counted from 1."""
        return Where(self.file, f"layer number {number}")

    def key(self, name: str) -> Where:
        """A key here, or within the object at the key that this is."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> Where:
        """An item of the array at this key, counted from 0 as in JSON paths."""
        return replace(self, path=f"{self.path}[{index}]")

    def error(self, text: str) -> ConfigurationError:
        """What is wrong here, to be raised."""
        return ConfigurationError(f"{self}: {text}")

    def wrong_kind(self, expected: str, given: Any) -> ConfigurationError:
        """The error for a value of another JSON type than the key has."""
        return self.error(f"expected {expected}, given {json_kind(given)}")

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.part, f"key {self.path!r}" if self.path else "")))
        return f"{self.file}: {place}" if place else self.file


def json_kind(given: Any) -> str:
    """What it is in the words of JSON, with the value where that is short.

    >>> json_kind("8"), json_kind([1, 2]), json_kind(None), json_kind({"type": "relu"})
    ("the text '8'", 'the array [1, 2]', 'null', "the object {'type': 'relu'}")
    """
    kind = next((text for types, text in _JSON_KINDS if isinstance(given, types)), type(given).__name__)
    if given is None:
        return kind
    shown = str(given).lower() if isinstance(given, bool) else repr(given)
    if len(shown) > _LONGEST_SHOWN:
        return kind
    return shown if isinstance(given, (bool, int, float)) else f"the {kind.split()[-1]} {shown}"


def did_you_mean(given: str, known: Iterable[str], *, likeness: float = 0.6) -> str:
    """``; did you mean 'embedding'?``; nothing where no name is as like as that (from 0 to 1, the same).

    >>> did_you_mean("embeding", ["wide", "embedding"]), did_you_mean("x", ["wide", "deep"])
    ("; did you mean 'embedding'?", '')
    """
    lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given.lower(), lower, n=1, cutoff=likeness)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


def nearest(given: str, known: Iterable[str]) -> str:
    """The same, or all that there is where nothing is near.

    >>> nearest("x", ["wide", "deep"])
    "; there are 'wide', 'deep'"
    """
    names = list(known)
    there_are = f"; there are {', '.join(map(repr, names))}" if names else ""
    return did_you_mean(given, names) or there_are
