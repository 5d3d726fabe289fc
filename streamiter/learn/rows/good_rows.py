"""Going on without the rows of a mini-batch that cannot be learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from streamiter.errors import ConfigurationError
from streamiter.learn.rows.checks import BadRows
from streamiter.operators.output import Output
from streamiter.records import Batch, take

__all__ = ["blaming_rows", "of_good_rows", "without"]

Result = TypeVar("Result")


def of_good_rows(function: Callable[[Any], Result], mini_batch: Batch, out: Output) -> Result | None:
    """``function(mini_batch)`` without the rows that it names in ``BadRows``; None where no row is left.

    Those rows follow the policy of the step that ``out`` belongs to.
    """
    while len(mini_batch):
        try:
            return function(mini_batch)
        except BadRows as bad:
            mini_batch = without(mini_batch, bad, out)
    return None


def blaming_rows(
    function: Callable[[Any], Result], mini_batch: Batch, check: Callable[[Any], object]
) -> Result:
    """``function(mini_batch)``; where it fails as a whole, ``BadRows`` names those for which ``check`` fails alone.

    What is configured wrongly is nobody's fault among the rows.
    """
    try:
        return function(mini_batch)
    except (BadRows, ConfigurationError):
        raise
    except Exception as error:
        if bad := [row for row in range(len(mini_batch)) if _fails(check, take(mini_batch, [row]))]:
            raise BadRows(bad, f"{type(error).__name__}: {error}") from error
        raise


def _fails(check: Callable[[Any], object], row: Batch) -> bool:
    try:
        check(row)
    except Exception:
        return True
    return False


def without(mini_batch: Batch, bad: BadRows, out: Output) -> Batch:
    """The other rows; the bad ones follow the policy of the step."""
    rows = set(bad.rows)
    for row in bad.rows:
        out.reject(mini_batch[row], bad)
    return take(mini_batch, [row for row in range(len(mini_batch)) if row not in rows])
