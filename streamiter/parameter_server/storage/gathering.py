"""Reading numbers that lie here and there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.storage.block import Numbers

__all__ = ["gathered"]


def gathered(numbers: Numbers, at: npt.NDArray[np.integer[Any]], out: Numbers | None) -> Numbers:
    """``numbers[at]``, written to ``out`` if that is given; ``at`` is known to lie within."""
    if out is None:
        result: Numbers = numbers[at]
        return result
    # mode="raise" would gather into a buffer first, and copy that.
    numbers.take(at, out=out, mode="clip")
    return out
