"""An error explains why a job cannot resume with another parallelism, and what to do."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, Stops, new_broker, numbers
from checkpoints_jobs.test_other_parallelism import LeftFirst
from checkpoints_jobs.test_other_parallelism_of_loops import in_rounds
from iteration.iteration_support import Dawdle
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    Stream,
    connect,
    epochs_every,
    feedback_through,
    iterate_unbounded_streams,
)
from streamiter.engine.checkpointing.commit import JobSnapshot
from streamiter.engine.checkpointing.redistribute import redistribute_states
from streamiter.engine.checkpointing.shares import OldJob
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader
from streamiter.errors import CheckpointError
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.topics import MemoryBroker

MakeFlow = Callable[[MemoryBroker, int], Flow]


async def refused(make_flow: MakeFlow, before: int, after: int, *, records_in: tuple[str, int]) -> str:
    """Stop after a step has handled this number of records; return the error of a start with another parallelism."""
    broker, stops = await new_broker(), Stops(0)
    job = await stops.start(make_flow(broker, before))
    step, count = records_in
    await until(lambda: job.statistics().step(step).records_in >= count)
    await stops.suspend(job)
    with pytest.raises(CheckpointError) as raised:
        await stops.start(make_flow(broker, after))
    return str(raised.value)


class Kept(Operator):
    """Keeps state without a ``redistribute``."""

    def __init__(self, shared: Any = None) -> None:
        if shared is not None:
            self.redistribute = lambda states, parallelism: shared
        self._seen = 0

    def process(self, record: Any, out: Output) -> None:
        self._seen += 1

    def snapshot(self) -> int:
        return self._seen

    def restore(self, state: int) -> None:
        self._seen = state


def keeping(shared: Any = None) -> MakeFlow:
    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("kept", parallelism=parallelism)
        flow.source(broker.topic("in"), name="in").process(lambda: Kept(shared), name="keep")
        return flow

    return make_flow


async def test_state_that_cannot_be_redistributed() -> None:
    """A counter started again at some subtasks, and continued at others."""
    message = await refused(keeping(), 3, 2, records_in=("keep", NUMBERS))
    assert message == (
        "flow 'kept', checkpoint 1, step 'keep': expected the parallelism 3 that it had, given 2; its state cannot be "
        "redistributed: keep parallelism=3, or define redistribute(states, parallelism) in Kept"
    )


@pytest.mark.parametrize(("shared", "given"), [([1], "1 of them"), (7, "int"), ("ab", "str")])
async def test_a_wrong_number_of_states(shared: Any, given: str) -> None:
    """The states of some subtasks were lost."""
    message = await refused(keeping(shared), 3, 2, records_in=("keep", NUMBERS))
    assert message == (
        "flow 'kept', checkpoint 1, step 'keep': Kept.redistribute: expected a list of 2 states, one for each subtask, "
        f"given {given}"
    )


class Ones(Source):
    """A source of ones, from its position."""

    bounded = False

    def __init__(self, shared: Any = None) -> None:
        if shared is not None:
            self.redistribute = lambda positions, parallelism: shared
        self._read = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self._read = (positions or {}).get("read", 0)

    async def read(self) -> SourceBatch:
        await asyncio.sleep(0)
        self._read += 1
        return SourceBatch([1], {"read": self._read})


def reading(shared: Any = None) -> MakeFlow:
    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("ones", parallelism=parallelism)
        flow.from_source(lambda: Ones(shared), name="ones").sink(broker.topic("out"))
        return flow

    make_flow.bounded = False  # type: ignore[attr-defined]
    return make_flow


async def test_positions_that_cannot_be_redistributed() -> None:
    """A user's source read everything again from its beginning."""
    message = await refused(reading(), 1, 2, records_in=("sink out", 5))
    assert message == (
        "flow 'ones', checkpoint 1, step 'ones': expected the parallelism 1 that it had, given 2; its positions cannot "
        "be redistributed: keep parallelism=1, or define redistribute(positions, parallelism) in its Source"
    )


@pytest.mark.parametrize(("shared", "given"), [([{}], "1 of them"), (7, "int")])
async def test_a_wrong_number_of_positions(shared: Any, given: str) -> None:
    """A subtask had no positions, and read nothing."""
    message = await refused(reading(shared), 1, 2, records_in=("sink out", 5))
    assert message == (
        "flow 'ones', checkpoint 1, step 'ones': redistribute of its Source: expected a list of 2 positions, one for "
        f"each subtask, given {given}"
    )


class Listener(Operator, IterationListener):
    """Listens for epochs."""

    def process(self, record: Any, out: Output) -> None:
        out.emit(record)


def listening(*, at_listener: bool) -> MakeFlow:
    """Return a flow of 100 numbers; the first subtask has 67 in two partitions, and as many epochs, the other 33."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("listening", parallelism=2)
        stamped = epochs_every(flow.source(broker.topic("in"), name="in"), records=1, name="stamp")
        passed = stamped.process(lambda: Dawdle(0), name="pass", parallelism=2 if at_listener else parallelism)
        heard = passed.process(Listener, name="listen", parallelism=parallelism if at_listener else 2)
        heard.map(lambda x: x, name="last", parallelism=1).sink(broker.topic("out"), parallelism=1)
        return flow

    return make_flow


async def test_listeners_with_different_last_epochs() -> None:
    """A listener received the same epoch twice, or missed some epochs."""
    message = await refused(listening(at_listener=True), 2, 3, records_in=("last", NUMBERS))
    assert message == (
        "flow 'listening', checkpoint 1, step 'listen': its 2 subtasks cannot become 3 here: they have heard of "
        "different epochs as the last (66, 32); start it with parallelism=2 as it was, and take another checkpoint, as "
        'stop("suspend") does'
    )


async def test_a_step_ahead_of_its_input() -> None:
    """Records of an epoch arrived at a listener that had already received the end of this epoch."""
    message = await refused(listening(at_listener=False), 2, 3, records_in=("last", NUMBERS))
    assert message == (
        "flow 'listening', checkpoint 1, step 'listen': it has reached epoch 66, but some of the subtasks of 'pass' "
        "only to epoch 32; start 'pass' with the parallelism that it had, and take another checkpoint, as "
        'stop("suspend") does'
    )


def held_back(between: str | None) -> MakeFlow:
    """Return a flow in which records of the right input wait before the step ``between`` (None: without this step)."""

    def make_flow(broker: MemoryBroker, parallelism: int) -> Flow:
        flow = Flow("held back")
        left = flow.source(broker.topic("in"), name="in")
        right = numbers(flow, broker, "in2")
        name = "first" if parallelism == 1 else between
        if name is None:
            left.union(right).sink(broker.topic("out"))
        else:
            mapped = right.map(lambda x: x, name=name)
            connect(left=left, right=mapped).process(LeftFirst, name="left first").sink(broker.topic("out"))
        return flow

    return make_flow


async def test_records_that_wait_before_a_step_with_another_input() -> None:
    """The records were sent to the input with the same number, although it had become another input."""
    message = await refused(held_back("second"), 1, 2, records_in=("left first", NUMBERS))
    assert message == (
        "flow 'held back', checkpoint 1, step 'left first': records from 'first' wait before it, which it does not "
        "read any more; restore the flow as it was, and stop it where less waits"
    )


async def test_records_that_wait_before_a_step_that_was_removed() -> None:
    """The records were lost with the step."""
    message = await refused(held_back(None), 1, 2, records_in=("left first", NUMBERS))
    assert message == (
        "flow 'held back', checkpoint 1, step 'left first': records wait before it, which is now chained to another or "
        "gone; restore the flow as it was, and stop it where less waits"
    )


async def test_feedback_in_another_topic() -> None:
    """Records in the old topic were never read."""
    broker, stops = await new_broker(), Stops(0)
    for name in ("loop", "other loop"):
        await broker.topic(name).create(partitions=4)

    def make_flow(parallelism: int, loop: str) -> Flow:
        flow = Flow("tokens")

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            more = variables[0].map(lambda n: n + 1, parallelism=parallelism).rebalance()
            return IterationBodyResult([feedback_through(more, broker.topic(loop))], [more])

        initial = flow.from_items([0, 100, 200], name="initial", parallelism=parallelism)
        [passed] = iterate_unbounded_streams([initial], [], body)
        passed.sink(broker.topic("out"))
        return flow

    job = await stops.start(make_flow(3, "loop"))
    await until(lambda: job.statistics().step("sink out").records_in > 100)
    await stops.suspend(job)
    with pytest.raises(CheckpointError) as raised:
        await stops.start(make_flow(2, "other loop"))
    assert str(raised.value) == (
        "flow 'tokens', checkpoint 1, step 'variable 0': its feedback is in topic 'loop', dealt out for 3 "
        "subtasks; keep the parallelism of the loop, and its topic"
    )


# -- states that a job rarely stops in -------------------------------------------------------------------


async def taken(make_flow: MakeFlow, parallelism: int) -> JobSnapshot:
    """Return a snapshot of a running job of this flow."""
    job = await make_flow(await new_broker(), parallelism).start()
    await asyncio.sleep(0)
    snapshot = await job.snapshot()
    await job.stop("abort")
    return snapshot


async def share_out(make_flow: MakeFlow, snapshot: JobSnapshot, parallelism: int) -> str:
    """Return the error of a start with this parallelism."""
    with pytest.raises(CheckpointError) as raised:
        await redistributed(make_flow, snapshot, parallelism)
    return str(raised.value)


async def redistributed(make_flow: MakeFlow, snapshot: JobSnapshot, parallelism: int) -> dict[str, Any]:
    """Return the states of the tasks of a start with this parallelism."""
    states: dict[str, Any] = {}
    for task, state in snapshot.items():
        states[f"task {task}"] = state
        subtask = task[task.rindex("[") :]
        states.update({f"step {step}{subtask}": of_step for step, of_step in state["operators"].items()})
    flow = make_flow(await new_broker(), parallelism)
    old = OldJob.from_states(SnapshotHeader(flow.name, CheckpointId(1, "run"), created_at_ms=0, steps={}), states)
    job = Job(flow.name, flow.steps, flow.plain_data, JobOptions())
    return await redistribute_states(old, job._tasks, flow.plain_data)


async def test_feedback_that_was_received_brings_no_watermark_along() -> None:
    """A new head reported epochs as received that one old head had received, while feedback to another still waited."""
    make_flow = in_rounds(per_round=False)
    snapshot = await taken(make_flow, 3)
    for task, state in snapshot.items():
        state["watermark"] = 9
        for port in state["inbox"]:
            if port["origin"] is not None:
                port["reached"] = 8
            if task.startswith("variable 0") and port["origin"][0] == "feedback":
                port["reached"] = 9
                port["later"] = [[("data", 12, 1, [int(task[-2])])]]
    states = await redistributed(make_flow, snapshot, 2)
    kinds = {
        entry[0]
        for task in ("variable 0[0]", "variable 0[1]")
        for port in states[task]["inbox"]
        for frame in port["later"] or ()
        for entry in frame
    }
    assert kinds == {"data"}


async def test_an_iteration_of_which_some_subtasks_have_ended() -> None:
    """Some of the subtasks never ended, because their heads had ended."""
    make_flow = in_rounds(per_round=False)
    snapshot = await taken(make_flow, 3)
    snapshot["variable 0[1]"]["ended"] = True
    assert await share_out(make_flow, snapshot, 2) == (
        "flow 'rounds', checkpoint 1, step 'variable 0': its 3 subtasks cannot become 2 here: some of them have ended "
        "with their iteration and others have not; start it with parallelism=3 as it was, and take another checkpoint, "
        'as stop("suspend") does'
    )


async def test_heads_of_which_one_has_received_the_end() -> None:
    """The end of the iteration was decided a second time, in another epoch."""
    make_flow = in_rounds(per_round=False)
    snapshot = await taken(make_flow, 3)
    snapshot["variable 0[1]"]["operators"]["variable 0"]["operator"]["ended in"] = 4
    assert await share_out(make_flow, snapshot, 2) == (
        "flow 'rounds', checkpoint 1, step 'variable 0': its 3 subtasks cannot become 2: the iteration was about to "
        "end, and only some of them had been told; keep parallelism=3, or take another checkpoint with it"
    )


async def test_replayers_that_are_further_than_others() -> None:
    """Two epochs were replayed at the same time, and one of them was sent twice or never."""
    make_flow = in_rounds(per_round=False)
    snapshot = await taken(make_flow, 3)
    for subtask, replayed in ((0, 1), (1, 3), (2, 2)):
        state = snapshot[f"data 0[{subtask}]"]["operators"]["data 0"]["operator"]
        state["replayed"], state["cache"] = replayed, [[(1, 128, b"")]]
    assert await share_out(make_flow, snapshot, 2) == (
        "flow 'rounds', checkpoint 1, step 'data 0': its 3 subtasks cannot become 2: some of them have sent more of "
        "the replayed data than others; keep parallelism=3, or take another checkpoint with it"
    )


async def test_rounds_that_are_further_than_others() -> None:
    """The state of one round was used for another round."""
    make_flow = in_rounds(per_round=True)
    snapshot = await taken(make_flow, 3)
    for subtask in range(3):
        snapshot[f"total[{subtask}]"]["round"] = {"epoch": subtask, "told": [], "instance": {}}
    assert await share_out(make_flow, snapshot, 2) == (
        "flow 'rounds', checkpoint 1, step 'total': its 3 subtasks cannot become 2 here: some of them are further in "
        "their rounds than others; start it with parallelism=3 as it was, and take another checkpoint, as "
        'stop("suspend") does'
    )


class HearsEnds(LeftFirst):
    """Records the ends of its inputs."""

    def input_ended(self, name: str, out: Output) -> None:
        out.emit(name)


def hearing_ends(broker: MemoryBroker, parallelism: int) -> Flow:
    flow = Flow("ends", parallelism=parallelism)
    left, right = numbers(flow, broker), numbers(flow, broker, "in2")
    connect(left=left, right=right.broadcast()).process(HearsEnds, name="hear").sink(broker.topic("out"))
    return flow


async def test_inputs_whose_end_some_subtasks_have_received() -> None:
    """A step received the end of an input twice, and emitted an incomplete result."""
    snapshot = await taken(hearing_ends, 3)
    for port in snapshot["hear[1]"]["inbox"]:
        port["data ended"] = port["origin"][0] == "left"
    assert await share_out(hearing_ends, snapshot, 2) == (
        "flow 'ends', checkpoint 1, step 'hear': its 3 subtasks cannot become 2 here: some of them have heard that the "
        "input 'left' has ended and others have not; start it with parallelism=3 as it was, and take another "
        'checkpoint, as stop("suspend") does'
    )


async def test_broadcast_records_that_some_subtasks_have_not_handled() -> None:
    """A subtask received the same model twice, or never."""
    snapshot = await taken(hearing_ends, 3)
    port = next(port for port in snapshot["hear[1]"]["inbox"] if port["origin"][0] == "right")
    port["held"] = [*port["held"], ("data", 0, 1, [0])]
    assert await share_out(hearing_ends, snapshot, 2) == (
        "flow 'ends', checkpoint 1, step 'hear': its 3 subtasks cannot become 2 here: each of them has handled other "
        "records from 'in2', although all get the same; start it with parallelism=3 as it was, and take another "
        'checkpoint, as stop("suspend") does'
    )
