"""A field of a record compared with a number or a text, which gives its label."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

from streamiter.operators.functions import field_values
from streamiter.values.field_kinds import number_of_text
from streamiter.values.numbers import plain_scalar
from streamiter.values.records import Batch


def value_in(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field as JSON has it: that of a row of columns is numpy's, and NaN where it is missing.

    >>> from numpy import float32
    >>> value_in({"delay": float32(1.5)}, "delay"), value_in({"delay": float32("nan")}, "delay")
    (1.5, None)
    """
    value = plain_scalar(record[field])
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True)
class FieldComparison:
    """A field compared with a number or a text: ``delay > 15``, ``outcome == 'click'``; its result is a label.

    >>> late = FieldComparison.of("delay > 15")
    >>> late({"delay": 20}), late({"delay": "9.5"}), str(late)
    (True, False, 'delay > 15')
    """

    field: str
    operator: str
    """One of ``> >= < <= == !=``."""
    bound: float | str

    @classmethod
    def of(cls, text: str) -> FieldComparison | None:
        """Parse a comparison; None for any other text."""
        match = _COMPARISON.fullmatch(text)
        if match is None or (match["text"] is not None and match["operator"] not in ("==", "!=")):
            return None
        bound = match["text"] if match["text"] is not None else float(match["number"])
        return cls(match["field"], match["operator"], bound)

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Return the label of a record; raise KeyError for a record without the field, ValueError for another type."""
        given = value = value_in(record, self.field)
        if isinstance(given, str) and not isinstance(self.bound, str):
            value = number_of_text(given)
        if isinstance(value, str) is not isinstance(self.bound, str) or value is None:
            raise ValueError(f"expected {self.field} as in {self}, given {given!r}")
        return bool(_OPERATORS[self.operator](value, self.bound))

    def of_batch(self, records: Batch) -> list[bool]:
        """Return the labels of records; raise any error if one of them must be called alone."""
        values = field_values(itemgetter(self.field), records)
        if not set(map(type, values)) <= ({str} if isinstance(self.bound, str) else {int, float, bool}):
            raise ValueError(f"expected {self.field} as in {self}")
        if any(map(operator.ne, values, values)):
            raise ValueError(f"expected {self.field} as in {self}, given a value that is missing")
        return list(map(_OPERATORS[self.operator], values, repeat(self.bound)))

    def __str__(self) -> str:
        bound = f"'{self.bound}'" if isinstance(self.bound, str) else f"{self.bound:g}"
        return f"{self.field} {self.operator} {bound}"


_OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = MappingProxyType(
    {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
)
_COMPARISON: Final = re.compile(
    r"\s*(?P<field>[^\W\d][\w.-]*)\s*(?P<operator>[<>]=?|[=!]=)\s*"
    r"(?:(?P<number>[+-]?\d{1,300}(?:\.\d{1,300})?(?:[eE][+-]?\d{1,2})?)|'(?P<text>[^']*)')\s*",
    re.ASCII,
)
