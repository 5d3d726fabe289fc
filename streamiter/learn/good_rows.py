"""Learning from a mini-batch without the rows that cannot be learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.errors import ModelError
from streamiter.learn.checks import BadRows
from streamiter.learn.gradient_worker import blame_rows, without
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["learn_from_good_rows"]


def learn_from_good_rows(
    learn: Callable[[Any], object], check: Callable[[Any], object], mini_batch: Batch, out: Output
) -> bool:
    """``learn(mini_batch)`` without the rows that are at fault, which follow the step's policy.

    Where it fails as a whole, those rows are at fault for which ``check`` fails alone. Gives whether any were left.
    """
    while len(mini_batch):
        try:
            try:
                learn(mini_batch)
            except BadRows:
                raise
            except ModelError as error:
                blame_rows(check, mini_batch, error)
                raise
        except BadRows as bad:
            mini_batch = without(mini_batch, bad, out)
        else:
            return True
    return False
