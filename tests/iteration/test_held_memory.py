"""Records that wait on disk for their epoch, or for another input, are read back one batch at a time."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import run

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    replayed,
)
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.operators.source import Source, SourceBatch

MIB = 1 << 20
BLOCKS = 60
ROUNDS = 3
LIMITS = FeedbackLimits(memory_bytes=2 * MIB)


class Blocks(Source):
    """Gives arrays of 1 MiB, each filled with its own number."""

    _given = 0

    async def read(self) -> SourceBatch | None:
        if self._given == BLOCKS:
            return None
        self._given += 1
        return SourceBatch(np.full((1, MIB // 8), float(self._given)), {"given": self._given})


class GoRound(Operator):
    """Records its input and feeds it back in all rounds but the last; the step has its own task."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self._seen = seen

    def open(self, context: Any) -> None:
        self._context = context

    async def process_batch(self, batch: Any, out: Any) -> None:
        self._seen += [(self._context.epoch, int(row[0])) for row in batch]
        if self._context.epoch < ROUNDS - 1:
            out.emit_batch(batch)


class VariableFirst(GoRound):
    """Reads the variable of an epoch before its data."""

    epochs_in_order = True

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("variable",)

    def process_variable(self, record: int, out: Any) -> None:
        pass

    process_data_batch = GoRound.process_batch


def feedback_that_is_held(flow: Flow, seen: list[tuple[int, int]]) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult([variables[0].process(lambda: GoRound(seen))], [])

    blocks = flow.from_source(Blocks)
    iterate_bounded_streams_until_termination([blocks], [], body, IterationConfig(feedback_limits=LIMITS))


def data_that_waits_for_a_variable(flow: Flow, seen: list[tuple[int, int]]) -> None:
    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        connect(variable=variables[0], data=data[0]).process(lambda: VariableFirst(seen))
        return IterationBodyResult([variables[0].map(lambda n: n + 1).filter(lambda n: n < ROUNDS)], [])

    config = IterationConfig(feedback_limits=LIMITS, replay_memory_bytes=0)
    blocks = replayed(flow.from_source(Blocks))
    iterate_bounded_streams_until_termination([flow.from_items([0])], [blocks], body, config)


@pytest.mark.parametrize("build", [feedback_that_is_held, data_that_waits_for_a_variable])
def test_records_that_waited_on_disk_are_never_all_in_memory(build: Any) -> None:
    """All records of an epoch were read back at once, and with more than 1 GiB of records the job failed."""
    flow, seen = Flow("loop"), list[tuple[int, int]]()
    build(flow, seen)
    tracemalloc.start()
    run(flow)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == [(epoch, number) for epoch in range(ROUNDS) for number in range(1, BLOCKS + 1)]
    assert peak_bytes < 30 * MIB
