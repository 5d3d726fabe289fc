"""``Admission``: which of many features get numbers of their own, and when they lose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from streamiter.errors import ConfigurationError
from streamiter.values.numbers import positive, whole_number
from streamiter.values.settings import WrongValue, duration_of, size_of
from streamiter.values.times import Seconds, duration_ms, in_seconds

_ADMIT_MAX: Final = 1_000_000
# The vectors of some thousand features.
BYTES_MIN: Final = 1_000_000

UNKNOWN_TIME: Final = 1 << 61
"""The time of features for whose rows no time is known: after all others, until the feature is the oldest in order."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which features get numbers of their own: those that occur often enough, and not too long ago.

    A feature is *admitted*, and gets its numbers, when it has occurred in ``admit`` learned rows. ``expire`` is a
    duration in seconds, a ``timedelta`` or a text such as ``"30d"``: a feature that has not occurred for so long begins
    anew. The time of a row is that of its field ``time``; without ``expire`` features do not expire. ``at_most`` is the
    memory for features in bytes, or a text such as ``"2 GB"``: where there is no room, those whose last occurrence is
    the oldest leave first. The memory is reserved at once, and used as features come.

    Raises ConfigurationError for values that cannot be used.

    >>> Admission(admit=2, expire="30d", time="at").expire_ms
    2592000000
    """

    admit: int = 3
    expire: Seconds | str | None = None
    at_most: int | str = "1 GB"
    time: str | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        whole_number(f"{owner}(admit=)", self.admit, 1, _ADMIT_MAX)
        if self.time is not None and not isinstance(self.time, str):
            raise ConfigurationError(f"{owner}(time=): expected the name of a field, given {self.time!r}")
        if self.time is not None and self.expire is None:
            raise ConfigurationError(
                f"{owner}(time=): expected expire=, the time after which a feature begins anew, given only "
                f"time={self.time!r}; give both, or leave time= out"
            )
        if self.size_bytes < BYTES_MIN:
            raise ConfigurationError(
                f'{owner}(at_most=): expected at least "1 MB", given {self.at_most!r}; give more memory'
            )
        self.expire_ms  # noqa: B018  # It is checked.

    @cached_property
    def expire_ms(self) -> int:
        """The time in milliseconds after which a feature expires; 0: never."""
        if self.expire is None:
            return 0
        option = f"{type(self).__name__}(expire=)"
        given = _parsed(option, self.expire, duration_of) if isinstance(self.expire, str) else self.expire
        return duration_ms(option, positive(option, in_seconds(given)))

    @cached_property
    def size_bytes(self) -> int:
        """The memory for features in bytes."""
        option = f"{type(self).__name__}(at_most=)"
        if isinstance(self.at_most, str):
            return int(_parsed(option, self.at_most, size_of))
        return whole_number(option, self.at_most, 1)


def _parsed(option: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return float(parse(text))
    except WrongValue as wrong:
        raise ConfigurationError(f"{option}: expected {wrong.expected}, given {text!r}; {wrong.remedy}") from None
