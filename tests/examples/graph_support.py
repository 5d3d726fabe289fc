"""Functions that the tests of the graph examples share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from iteration.iteration_support import ended
from support.processes import forked_run
from support.waiting import PATIENCE_S, until

from streamiter import Columns, Flow, Stream
from streamiter.operators.source import Collected

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    """Load an example, and return its module."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def printed_by(name: str) -> list[str]:
    """Run the example as a user does, and return the lines that it prints."""
    done = forked_run([sys.executable, str(EXAMPLES / f"{name}.py")], limit_s=PATIENCE_S, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


async def interrupted_and_restored(make: Callable[[], tuple[Flow, Collected]]) -> list[Any]:
    """Stop a flow's job after some rounds, resume it from a snapshot, and return its result."""
    first, _ = make()
    job = await first.start()
    await until(lambda: job.statistics().loops[0].epoch_complete >= 3)
    snapshot = await job.snapshot()
    await job.stop("abort")
    second, collected = make()
    await ended(await second.start(snapshot=snapshot))
    return collected.items


def links(pairs: Any) -> Columns:
    """Return columns of pairs (from, to)."""
    array = np.array(pairs, dtype=int).reshape(-1, 2)
    return Columns({"from": array[:, 0], "to": array[:, 1]})


def stream_of(flow: Flow, columns: Columns, schedule: int | None) -> Stream:
    """Return a stream of the records; with a schedule, in a random order, in random pieces and in two subtasks."""
    if schedule is None:
        return flow.from_items(columns)
    order = np.random.default_rng(schedule).permutation(len(columns))
    pieces = [columns[part] for part in np.array_split(order, min(len(order), 7))]
    return flow.from_items(pieces, parallelism=2).flat_map(list).map_batch(as_columns)


def as_columns(records: Any) -> Columns:
    """Return the rows as columns."""
    return Columns({name: np.array([record[name] for record in records]) for name in records[0]})
