"""Arguments and results of functions that operators refuse, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/operators/test_refusals.py`` writes the texts as they are now.
"""

from pathlib import Path

import numpy as np
from operators.operator_harness import Driven
from support.refusals import refusals_test, write

from streamiter import Flow, operators
from streamiter.errors import GraphError
from streamiter.operators.output import RecordFailure
from streamiter.values.records import Columns

FILE = Path(__file__).with_name("refusals.txt")


async def times_two(record: int) -> int:
    return 2 * record


async def with_two(record: int, factor: int) -> int:
    return record * factor


def calls(f: object = times_two, **options: object) -> object:
    try:
        return Flow("calls").from_items([1]).map_async(f, **options)  # type: ignore[arg-type]
    except GraphError as error:
        error.where = "the user's line"
        raise


NAMES = {each: getattr(operators, each) for each in operators.__all__}
NAMES |= {"np": np, "Columns": Columns, "calls": calls, "times_two": times_two, "with_two": with_two}


async def when_made(code: str) -> object:
    return eval(code, dict(NAMES))


async def when_fed(code: str) -> object:
    """Feed the operator with a batch of four rows; return nothing, because the error of a record is its cause."""
    driven = Driven(eval(code, dict(NAMES)))
    try:
        return driven.feed(Columns({"x": np.arange(4)})).records
    except RecordFailure as failure:
        raise failure.__cause__ or failure from None


CALLS = {"arguments": when_made, "results of functions": when_fed}

test_wrong_arguments_and_results_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
