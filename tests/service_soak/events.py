"""The events and the questions of the soak test: each follows from its number, so that the oracle knows all of them."""

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.values.field_kinds import Kind
from streamiter.values.subtasks import mixed

__all__ = ["FEATURES", "MODEL", "ROWS", "event", "example", "good_numbers", "is_good", "number_of", "question"]

MODEL: Final = "late"
FEATURES: Final[dict[str, Kind]] = {"distance": "number", "hour": "number", "carrier": "category"}
ROWS: Final = 10
"""The number of rows of a request."""

_CARRIERS: Final = ("AA", "B6", "DL", "EV", "MQ", "UA", "US", "WN")
_OFTEN_LATE: Final = ("EV", "UA")
# Two primes: every kind of bad event comes early, and hardly ever two of them together.
_NO_JSON_EVERY: Final = 1999
_NO_LABEL_EVERY: Final = 997
_MASK: Final = (1 << 64) - 1
# The step between two numbers of splitmix64.
_GAMMA: Final = 0x9E3779B97F4A7C15


def event(number: int) -> bytes:
    """Return the event of this number; some are no JSON, and some have no label."""
    if number % _NO_JSON_EVERY == _NO_JSON_EVERY - 1:
        return b"number: %d, which is no JSON" % number
    values, is_late = example(number)
    label = "unknown" if number % _NO_LABEL_EVERY == _NO_LABEL_EVERY - 1 else is_late
    return msgspec.json.encode({"number": number, **values, "late": label})


def is_good(number: int) -> bool:
    """Whether the model learns from the event; otherwise it is a dead letter."""
    return (number + 1) % _NO_JSON_EVERY != 0 and (number + 1) % _NO_LABEL_EVERY != 0


def good_numbers(count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the good ones among the first ``count`` events."""
    after = np.arange(1, count + 1)
    return np.flatnonzero((after % _NO_JSON_EVERY != 0) & (after % _NO_LABEL_EVERY != 0))


def example(number: int) -> tuple[dict[str, Any], bool]:
    """Return the features and the label of the event of this number."""
    bits = mixed(number * _GAMMA + _GAMMA)
    hour, carrier = (bits >> 16) % 24, _CARRIERS[(bits >> 24) % len(_CARRIERS)]
    chance = 100 + 20 * hour + 200 * (carrier in _OFTEN_LATE)
    values = {"distance": 100 + bits % 2400, "hour": hour, "carrier": carrier}
    return values, (bits >> 32) % 1000 < chance


def question(number: int) -> list[dict[str, Any]]:
    """Return the rows of the request of this number."""
    return [example(~(number * ROWS + row) & _MASK)[0] for row in range(ROWS)]


def number_of(value: bytes) -> int:
    """Return the number of an event."""
    return int(value.partition(b"number")[2].lstrip(b'": ').partition(b",")[0])
