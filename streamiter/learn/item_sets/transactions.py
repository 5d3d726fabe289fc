"""Transactions and sets of items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from streamiter.errors import ModelError
from streamiter.operators.rejection import shortened

__all__ = ["ItemSet", "as_transaction", "order_of_items"]

ItemSet = tuple[int | str, ...]
"""Items in ascending order, ints before texts."""


def as_transaction(given: Any) -> ItemSet:
    """Its items, each once, in ascending order."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise ModelError(
            f"apriori: expected a transaction to be a list of items, given {shortened(given)}; "
            "write [item, …], also for one item"
        )
    return tuple(sorted({_item(item) for item in given}, key=_order))


def _item(given: Any) -> int | str:
    if isinstance(given, str):
        return str(given)
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return int(given)
    raise ModelError(
        f"apriori: expected items to be whole numbers or texts, given {shortened(given)}; "
        "give each item a number or a name"
    )


def _order(item: int | str) -> tuple[bool, Any]:
    return isinstance(item, str), item


def order_of_items(items: ItemSet) -> list[tuple[bool, Any]]:
    return [_order(item) for item in items]
