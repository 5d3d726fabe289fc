"""The keys of one object of a configuration file, each taken with its type and its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from streamiter.networks.configuration.where import Where, did_you_mean

__all__ = ["Keys"]

_MISSING: Final = object()

# Keys begin alike (decayalpha, decaybeta): what is no more like one than that is no typing error.
_LIKE_A_TYPING_ERROR: Final = 0.75


class Keys:
    """What an object holds; what nobody asked for is unknown, and told as a warning.

    Keys are lower case, but for a few of older files (``blockSize``, ``loadPath``): case does not count. Two spellings
    of one key are an error, for which of them counts would be a guess.
    """

    def __init__(self, given: Any, where: Where) -> None:
        if not isinstance(given, Mapping):
            raise where.wrong_kind("an object", given)
        self.where = where
        self._values: dict[str, tuple[str, Any]] = {}
        self._asked: dict[str, None] = {}
        for spelled, value in given.items():
            if not isinstance(spelled, str):
                raise where.error(f"expected keys that are texts, given {spelled!r}")
            known = self._values.setdefault(spelled.lower(), (spelled, value))
            if known[0] != spelled:
                raise where.key(spelled).error(
                    f"expected each key once, given {known[0]!r} and {spelled!r}; keep one"
                )

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not _MISSING

    def raw(self, key: str, default: Any = None) -> Any:
        """Whatever stands there."""
        value = self._value(key)
        return default if value is _MISSING else value

    def place(self, key: str) -> Where:
        """Where it stands, as the file spells it."""
        spelled, _ = self._values.get(key.lower(), (key, None))
        return self.where.key(spelled)

    def text(self, key: str, default: str | None) -> str | None:
        """A text that is not empty."""
        if key not in self:
            return default
        value = self.raw(key)
        if not isinstance(value, str) or not value:
            raise self.place(key).wrong_kind("a text that is not empty", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.place(key).wrong_kind("true or false", value)
        return value

    def whole(self, key: str, default: int, least: int, *, off: int | None = None) -> int:
        """A whole number of at least ``least``, or the one that means that there is none."""
        if key not in self:
            return default
        return self.whole_at(self.place(key), self.raw(key), least, off=off)

    @staticmethod
    def whole_at(where: Where, value: Any, least: int, *, off: int | None = None) -> int:
        """The same for a value that stands elsewhere, in an array."""
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if is_whole and (value >= least or value == off):
            return int(value)
        expected = f"a whole number of at least {least}"
        raise where.wrong_kind(expected if off is None else f"{expected}, or {off}", value)

    def number(self, key: str, default: float, expected: str, is_allowed: Callable[[float], bool]) -> float:
        """A finite number that is allowed; ``expected`` says which are."""
        value = self.raw(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = _as_float(value) if is_number else math.nan
        if math.isfinite(number) and is_allowed(number):
            return number
        raise self.place(key).wrong_kind(expected, value)

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """One of some names, whatever its case, as it is spelled among the choices."""
        value, names = self.raw(key, default), list(choices)
        if not isinstance(value, str):
            raise self.place(key).wrong_kind(f"one of {', '.join(map(repr, names))}", value)
        for name in names:
            if name.lower() == value.lower():
                return name
        expected = f"expected one of {', '.join(map(repr, names))}, given {value!r}"
        raise self.place(key).error(expected + did_you_mean(value, names))

    def listed(self) -> str:
        """All keys, as the file spells them, for messages."""
        return ", ".join(repr(spelled) for spelled, _ in self._values.values()) or "no keys"

    def unknown(self) -> list[str]:
        """A warning for each key that was not asked for."""
        return [
            self._unknown(spelled) for key, (spelled, _) in self._values.items() if key not in self._asked
        ]

    def _unknown(self, spelled: str) -> str:
        meant = did_you_mean(spelled, self._asked, likeness=_LIKE_A_TYPING_ERROR)
        return f"{self.where.key(spelled)}: unknown, and left out{meant}"

    def _value(self, key: str) -> Any:
        self._asked[key.lower()] = None
        return self._values.get(key.lower(), (key, _MISSING))[1]


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer may be too large for a float
        return math.inf
