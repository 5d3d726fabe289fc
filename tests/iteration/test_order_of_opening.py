"""The members of a loop have the numbers of the placement, in whichever order their tasks are opened."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from iteration.iteration_support import ended

from streamiter import Flow, IterationBodyResult, Operator, connect, iterate_bounded_streams_until_termination, replayed
from streamiter.engine.job.job import Job
from streamiter.iteration import all_reduce, terminate_after
from streamiter.operators import Output


class OpensLate(Operator):
    """Opens after this many turns of the event loop. The operators before it in its task are opened after it."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def open(self, context: Any) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)

    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


class Average(Operator):
    """Moves the variable by the numbers of an epoch; the result depends on their order."""

    epochs_in_order = True

    def __init__(self) -> None:
        self._value = 0.0

    def process_variable(self, value: float, out: Output) -> None:
        self._value = self._value * 0.7 + value
        out.emit(self._value)

    def process_number(self, number: float, out: Output) -> None:
        self._value = self._value * 0.9 + number
        out.emit(self._value)


def averaging(seed: int) -> tuple[Flow, Any]:
    """Return a loop of nine heads and three entrances; the seed decides the order in which they are opened."""
    drawn = random.Random(seed)
    flow = Flow("averages", parallelism=3)
    numbers = [random.Random(1).uniform(-1, 1) * 10**n for n in range(-8, 8)]

    def body(variables: Any, data: Any) -> IterationBodyResult:
        [late, later] = [each.process(lambda: OpensLate(drawn.randrange(9))) for each in variables]
        number = data[0].process(lambda: OpensLate(drawn.randrange(9)))
        values = connect(variable=late, number=number).process(Average, name="average")
        total = all_reduce(values, lambda a, b: a + b)
        feedback = total.rebalance().map(lambda value: value / 3)
        return IterationBodyResult([feedback, later.filter(lambda _: False)], [total], terminate_after(later, rounds=4))

    starts = [flow.from_items([0.5, 0.25, 1 / 3]), flow.from_items([1.0])]
    [totals] = iterate_bounded_streams_until_termination(starts, [replayed(flow.from_items(numbers))], body)
    return flow, totals.collect()


async def started(seed: int) -> tuple[Job, Any, dict[int, str]]:
    flow, totals = averaging(seed)
    job = await flow.start()
    [loop] = job._loops
    members = loop._members(job._scope)  # type: ignore[attr-defined]
    return job, totals, {each.number: f"{each.context.name}[{each.context.subtask_index}]" for each in members}


@pytest.mark.parametrize("seed", range(1, 6))
async def test_neither_numbers_nor_results_depend_on_the_order_of_opening(seed: int) -> None:
    """Heads were numbered as they opened, so each process would have given the same head another number."""
    expected_job, expected, _ = await started(0)
    job, totals, numbers = await started(seed)
    heads = [f"variable {stream}[{subtask}]" for stream in range(2) for subtask in range(3)]
    entrances = [f"data 0[{subtask}]" for subtask in range(3)]
    criteria = [numbers[number] for number in range(6, len(numbers) - 3)]
    assert all(name.startswith("termination criteria[") for name in criteria)
    assert dict(enumerate([*heads, *criteria, *entrances])) == numbers
    assert list(numbers) != sorted(numbers)  # They were opened in another order.
    await ended(expected_job)
    await ended(job)
    assert totals.items == expected.items
    assert len(totals.items) > 3
