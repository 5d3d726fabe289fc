"""Results of all compiled arithmetic, as they are with a compiler or without."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from learn import embedded_streams, shaped_streams
from learn.feature_histories import digest_of_histories
from learn.late_label_support import SCHEDULES, learned_at_random
from learn.row_streams import check_extreme_rows, extreme_rows, vector_predictions


def rows() -> dict[str, Any]:
    """Return the predictions of the test vectors; extreme numbers must overflow nowhere."""
    for seed in range(40):
        check_extreme_rows(extreme_rows(Random(seed)), bits=2)
    return vector_predictions()


RESULTS: dict[str, Callable[[], Any]] = {
    "rows": rows,
    "embeddings": embedded_streams.uncompiled_results,
    "tables": shaped_streams.uncompiled_results,
    "features": lambda: digest_of_histories(300),
    "late labels": lambda: list(map(learned_at_random, SCHEDULES)),
}


def results(names: Sequence[str]) -> dict[str, Any]:
    """Return these results as plain data."""
    return {name: RESULTS[name]() for name in names}
