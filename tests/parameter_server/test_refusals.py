"""Wrong settings and calls are refused with the text in ``refusals.txt``, and change nothing.

``PYTHONPATH=tests python tests/parameter_server/test_refusals.py`` writes the texts as they are now.
"""

import asyncio
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from parameter_server.psf.on_blocks import Fixture, OnBlocks
from support.refusals import refusals_test, sections, write
from support.waiting import PATIENCE_S

from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, consistency, psf
from streamiter.parameter_server.admission import Admission
from streamiter.parameter_server.calls import Heartbeats
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.optimizers import SGD, Adam
from streamiter.parameter_server.psf import GetFunction
from streamiter.testing import VirtualClock

FILE = Path(__file__).with_name("refusals.txt")


def fail(x: Any) -> Any:
    raise ValueError("not for these")


def fail_above_9(x: Any) -> Any:
    return x if x.max() < 9 else fail(x)


NAMES = {
    **{"np": np, "math": math, "psf": psf, "SGD": SGD, "Adam": Adam, "ASP": ASP, "BSP": BSP, "SSP": SSP},
    **{"Admission": Admission, "ParameterServer": ParameterServer, "Heartbeats": Heartbeats},
    **{"consistency": consistency, "clock": VirtualClock(), "Matrix": Matrix, "fail": fail, "above_9": fail_above_9},
    "split": MatrixPartitioning(Matrix("w", rows=3, columns=300, block=(2, 200)), shards=2),
}


async def where_written(code: str) -> object:
    return eval(code, NAMES)


async def for_a_matrix(code: str, **settings: Any) -> object:
    """Run a function on a matrix in blocks, which must stay as it is."""
    function: Any = eval(code, NAMES)
    driver = OnBlocks(Fixture("dense", **{"dtype": "int64", **settings}), (5, 50))
    try:
        return driver.aggregate(function) if isinstance(function, GetFunction) else driver.update(function)
    finally:
        assert driver.values().tobytes() == driver.initial.tobytes()


async def of_a_client(code: str) -> object:
    """Call a client whose matrix must stay as it is, and which must not have to wait."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=4, columns=6, block=(2, 3))
        await server.create_matrix("whole", rows=1, columns=2, dtype="int64")
        client = server.client(worker=0)
        await client.add("w", rows=[0, 1], columns=[0, 5], values=[[1.0, 2.0], [3.0, 9.0]])
        before = await client.get("w", rows=range(4))
        try:
            result = eval(code, {**NAMES, "client": client, "server": server})
            return await asyncio.wait_for(result, PATIENCE_S) if inspect.isawaitable(result) else result
        finally:
            assert np.array_equal(await client.get("w", rows=range(4)), before)
            assert not (await client.get("whole", row=0)).any()
            assert server.statistics().matrix("w").clocks == {"0": 0}
            assert server.workers == [0]


async def of_a_new_matrix(code: str) -> object:
    """Make a matrix of 2 × 4 with other settings; if that is refused, no shard may have it."""
    async with ParameterServer(shards=2) as server:
        settings = eval(code, {**NAMES, "new": dict})
        try:
            return await server.create_matrix("w", **{"rows": 2, "columns": 4, **settings})
        finally:
            assert server.matrices == []
            assert not any(shard.matrices for shard in server.statistics().shards)


async def of_workers(code: str) -> object:
    """Call a model whose workers are at some clocks, or its tracker, which must stay as they are."""
    made: list[tuple[Any, str]] = []

    def model(kind: consistency.Consistency, clocks: dict[int, int]) -> Any:
        asked: Any = consistency.ConsistencyModel(kind, clocks, name="matrix 'w'")
        for worker, clock in clocks.items():
            asked.tracker.raise_to(worker, clock)
        made.append((asked, repr(asked.state())))
        return asked

    try:
        return eval(code, {**NAMES, "model": model})
    finally:
        [(asked, before)] = made
        assert (repr(asked.state()), asked.waiting_gets) == (before, 0)


CALLS = {
    "functions, where they are written": where_written,
    "functions, for a matrix of 10 × 100 whole numbers in blocks of 5 × 50": for_a_matrix,
    "rows and columns, for a matrix of 3 × 300": where_written,
    "calls of a client and of its server": of_a_client,
    "settings of a new matrix": of_a_new_matrix,
    "calls of workers that take no part, or are out of turn": of_workers,
    "settings of everything else": where_written,
}

test_wrong_settings_and_calls_are_refused_with_their_texts = refusals_test(FILE, CALLS)


def test_each_refusal_says_what_was_expected_and_what_was_given() -> None:
    """An error said "invalid value", and the user had to read the source."""
    assert sections(FILE).keys() == CALLS.keys()
    for text in sections(FILE).values():
        for error in re.findall(r"(?m)(?:^ .*\n?)+", text):
            assert re.search(r"(?s)^    \w+: .*(takes no part: expected|expected\s.*given)\s", error), error


if __name__ == "__main__":
    write(FILE, CALLS)
