"""Records that inboxes set aside fill at most a few channels, or wait on disk and are read back one batch at a time."""

import asyncio
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import CutItems, Dawdle, ended, run, run_shuffled
from support.soak import ForEachSeed, in_soak
from support.waiting import PATIENCE_S

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
)
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import ConfigurationError
from streamiter.operators.source import Source, SourceBatch

ITEMS = 600
"""The number for each input is far above the size of all channels of a program."""

LARGEST_BATCH = 5
"""The largest batch that ``CutItems`` gives or steps here emit: a batch passes a channel alone."""


class Choosy(Operator):
    """Wants one input for some records, then another or all; a timer changes the wish if no record comes; is slow."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self._seed = seed
        self._names = names
        self._handled = 0

    def open(self, context: Any) -> None:
        self._context = context
        self._random = random.Random(self._seed * 1_000 + context.subtask_index)
        self._wish: tuple[str, ...] | None = None
        self._left = 0
        context.set_timer(0.002, "choose again")

    def wanted_inputs(self) -> tuple[str, ...] | None:
        if self._left == 0:
            self._left = self._random.randint(1, 6)
            self._wish = self._random.choice([None, (), *((name,) for name in self._names)])
        self._left -= 1
        return self._wish

    def on_timer(self, payload: Any, out: Any) -> None:
        self._left = 0
        self._context.set_timer(0.002, payload)

    async def process_a(self, record: Any, out: Any) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        out.emit(record)

    process_b = process_a


class Learner(Operator):
    """Uses two examples with each model, and then waits for the next model."""

    def __init__(self) -> None:
        self._examples = 2

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("model",) if self._examples >= 2 else None

    def process_model(self, model: Any, out: Any) -> None:
        self._examples = 0

    def process_example(self, example: Any, out: Any) -> None:
        self._examples += 1
        out.emit(example)

    def snapshot(self) -> int:
        return self._examples

    def restore(self, state: int) -> None:
        self._examples = state


class Program:
    """A flow made from a seed, and the records that its learner must receive."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        chosen = random.Random(seed)
        self.flow = Flow("program")
        self._chosen = chosen
        self._expected: list[Any] = []
        self._hops = 0
        self._is_fed_back = False
        step = chosen.choice([self._with_two_inputs, self._that_learns, self._that_goes_round])
        self._collected = step().collect()

    def _with_two_inputs(self) -> Stream:
        inputs = {name: self._steps(self._input(name)) for name in ("a", "b")}
        return self._choosing(inputs)

    def _choosing(self, inputs: dict[str, Stream]) -> Stream:
        parallelism, names = self._chosen.randint(1, 2), list(inputs)
        rebalanced = {name: stream.rebalance() for name, stream in inputs.items()}
        return connect(**rebalanced).process(lambda: Choosy(self._seed, names), name="learn", parallelism=parallelism)

    def _that_learns(self) -> Stream:
        """Add a loop as `train_online` does: the model is fed back, the examples come from outside."""

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            examples = self._steps(data[0]).rebalance()
            both = connect(model=variables[0].broadcast(), example=examples)
            seen = both.process(Learner, name="learn", parallelism=1)
            return IterationBodyResult([seen.map(lambda example: "model")], [seen])

        start = self.flow.from_items(["model"], parallelism=1)
        [seen] = iterate_unbounded_streams([start], [self._input("example")], body)
        return seen

    def _that_goes_round(self) -> Stream:
        """Add a loop whose feedback reaches the learner from the head, which never blocks."""

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            met = self._choosing({"a": self._steps(variables[0]), "b": data[0]})
            back = met.filter(lambda record: record[0] == "b").map(lambda record: ("a", *record[1:]))
            return IterationBodyResult([back.rebalance()], [met])

        self._is_fed_back = True
        data = self._input("b")
        self._expected += [("a", number) for _, number in self._expected]
        [seen] = iterate_unbounded_streams([self.flow.from_items([])], [data], body)
        return seen

    def _input(self, name: str) -> Stream:
        items = [(name, number) for number in range(ITEMS)]
        self._expected += items
        return self.flow.from_source(lambda: CutItems(items, self._seed), parallelism=self._chosen.randint(1, 2))

    def _steps(self, stream: Stream) -> Stream:
        hops = self._chosen.randint(0, 3)
        self._hops = max(self._hops, hops)
        for _ in range(hops):
            parallelism = self._chosen.randint(1, 2)
            stream = stream.rebalance().process(lambda: Dawdle(self._seed), parallelism=parallelism)
        return stream

    def check_room(self, job: Job) -> None:
        """Check that few channels are set aside, and of feedback at most all records.

        The path has the channels of the hops, the channel of the entrance, and the last one. Each may be twice full,
        and once more in the lane before it; and the learner has two inputs, each from two subtasks.
        """
        held = max(task.held_records for task in job.statistics().tasks)
        assert held <= (2 * ITEMS if self._is_fed_back else 2 * 2 * 2 * (self._hops + 2) * LARGEST_BATCH)

    def check_outcome(self) -> None:
        """Check that no record is lost or doubled."""
        assert sorted(self._collected.items) == sorted(self._expected)


def check_program(seed: int) -> None:
    """Take snapshots at random moments, restart from some of them, and check the bound at each."""
    chosen = random.Random(-seed - 1)
    limit = chosen.randint(1, 3)

    async def main() -> None:
        snapshot: JobSnapshot | None = None
        for _ in range(chosen.randint(1, 3)):
            program = Program(seed)
            job = await program.flow.start(channel_limits=ChannelLimits(records=limit), snapshot=snapshot)
            for _ in range(12):
                for _ in range(chosen.randint(0, 200)):
                    await asyncio.sleep(0)
                try:
                    snapshot = await asyncio.wait_for(job.snapshot(), PATIENCE_S)
                except ConfigurationError:  # The job has ended.
                    break
                program.check_room(job)
            await job.stop("abort")
        program = Program(seed)
        await ended(await program.flow.start(channel_limits=ChannelLimits(records=limit), snapshot=snapshot))
        program.check_outcome()

    run_shuffled(main(), seed)


@pytest.mark.parametrize("seed", [*range(4), *in_soak(*range(4, 8))])
def test_any_program_sets_aside_a_few_channels_and_loses_nothing(seed: int) -> None:
    """The records set aside grew with each checkpoint, or a job stalled because it waited for room that never came."""
    check_program(seed)


@pytest.mark.soak
def test_untested_programs_set_aside_a_few_channels(for_each_soak_seed: ForEachSeed) -> None:
    """Only one program in ten thousand stalls."""
    for_each_soak_seed(check_program)


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
