"""Operators that run in threads, and operators that are awaited."""

import asyncio
import threading
from typing import Any

import pytest
from flow.small_flows import Fed
from runtime.probe import tasks_left, turns
from support.waiting import PATIENCE_S

from streamiter import Flow, IterationBodyResult, Operator, OutputTag, Stream, connect, iterate_unbounded_streams
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.errors import RejectRecords
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.testing import VirtualClock

TAG = OutputTag("side")


class Threaded(Operator):
    """Records the thread in which it is called; emits in each of its methods."""

    runs_in_thread = True

    def open(self, context: Context) -> None:
        self.context = context
        self.threads: set[str] = set()

    def process(self, record: Any, out: Output) -> None:
        self.threads.add(threading.current_thread().name)
        out.emit(record)
        out.emit(-record, tag=TAG)

    def input_ended(self, name: str, out: Output) -> None:
        out.emit("input ended")

    def finish(self, out: Output) -> None:
        out.emit("finish")
        assert all(name.startswith("f-step") for name in self.threads)
        assert len(self.threads) == 1


async def test_batches_are_handled_in_a_thread_and_continue_in_order() -> None:
    """A slow model stopped the event loop, or later steps ran in its thread."""
    receivers: set[str] = set()

    def note(record: Any) -> Any:
        receivers.add(threading.current_thread().name)
        return record

    flow = Flow("f")
    step = flow.from_items([1, 2, 3]).process(Threaded)
    main, side = step.map(note).collect(), step.side_output(TAG).collect()
    await (await flow.start()).wait()
    assert main.items == [1, 2, 3, "input ended", "finish"]
    assert side.items == [-1, -2, -3]
    assert receivers == {"MainThread"}


async def test_records_emitted_at_the_end_of_the_input_are_not_lost() -> None:
    """The last mini-batch of a threaded step stayed in the list in which the thread had collected it."""

    class Gathers(Operator):
        runs_in_thread = True

        def open(self, context: Context) -> None:
            self.kept: list[Any] = []

        def process_batch(self, batch: Any, out: Output) -> None:
            self.kept.extend(batch)

        def finish(self, out: Output) -> None:
            out.emit_batch(self.kept)

    flow = Flow("f", parallelism=2)
    got = flow.from_items(list(range(10))).process(Gathers).collect()
    await (await flow.start()).wait()
    assert sorted(got.items) == list(range(10))


async def test_several_inputs_may_be_handled_in_a_thread() -> None:
    """The output of one input was emitted only with the next batch of the other input."""

    class Both(Operator):
        runs_in_thread = True

        def process_a(self, record: Any, out: Output) -> None:
            out.emit(("a", record))

        def process_b_batch(self, batch: Any, out: Output) -> None:
            out.emit_batch([("b", record) for record in batch])

    a, b = Fed(), Fed()
    flow = Flow("f")
    got = connect(a=flow.from_source(lambda: a), b=flow.from_source(lambda: b)).process(Both).collect()
    job = await flow.start()
    for fed, record in ((a, 1), (b, 2), (a, 3)):
        fed.give(record)
        while len(got.items) < record:
            await asyncio.sleep(0)
    assert got.items == [("a", 1), ("b", 2), ("a", 3)]
    await job.stop("drain")


async def test_timers_can_be_set_in_a_thread() -> None:
    """``set_timer`` in a thread said that no event loop was running, because the clock belongs to the event loop."""

    class Timed(Threaded):
        def process(self, record: Any, out: Output) -> None:
            self.context.set_timer(record, record)

        def on_timer(self, payload: Any, out: Output) -> None:
            out.emit(payload)

    clock, fed, handled = VirtualClock(), Fed(), asyncio.Event()
    flow = Flow("f")
    step = flow.from_source(lambda: fed).process(Timed)
    got = step.collect()
    job = await flow.start(clock=clock)
    fed.give(2, 1)
    # The timers of the watchdog and of these two records; then the thread must return.
    while clock.timers < 3 or any(task.is_handling for task in job._tasks):
        await asyncio.sleep(0)
    await clock.advance(1)
    assert got.items == [1]
    await clock.advance(1)
    assert got.items == [1, 2]
    await job.stop("abort")
    assert not handled.is_set()


async def test_keys_rejections_and_snapshots_work_in_a_thread_too() -> None:
    """An operator with ``runs_in_thread`` had other results than the same operator without it."""

    class Count(Operator):
        runs_in_thread = True

        def open(self, context: Context) -> None:
            self.context = context

        def process(self, record: Any, out: Output) -> None:
            if record < 0:
                raise RejectRecords([0], "negative")
            self.context.state = (self.context.state or 0) + record
            out.emit((self.context.key, self.context.state))

    fed = Fed()
    flow = Flow("f")
    got = flow.from_source(lambda: fed).key_by(lambda x: x % 2).process(Count, on_error="skip", name="c").collect()
    job = await flow.start()
    fed.give(1, 2, -1, 3)
    while len(got.items) < 3:
        await asyncio.sleep(0)
    assert got.items == [(1, 1), (0, 2), (1, 4)]
    assert job.statistics().step("c").rejected == 1
    snapshot = await job.snapshot()
    [[keys, states]] = snapshot["c[0]"]["operators"]["c"]["keyed"]
    assert sorted(zip(keys, states, strict=True)) == [(0, 2), (1, 4)]
    await job.stop("drain")


def test_the_keyed_state_of_a_step_in_a_thread_is_snapshot_under_a_lock() -> None:
    """The event loop encoded the state while the thread changed it, and sometimes stored half a change."""

    class InLoop(Operator):
        def process(self, record: Any, out: Output) -> None:
            out.emit(record)

    class InThread(InLoop):
        runs_in_thread = True

    flow = Flow("f")
    keyed = flow.from_items([1]).key_by(int)
    keyed.process(InLoop, name="in loop")
    keyed.process(InThread, name="in thread")
    job = Job(flow.name, flow.steps, flow.plain_data, JobOptions())
    instances = {instance.step.name: instance for task in job._tasks for instance in task.instances}
    locks = [instances[name].keyed.snapshot()._lock for name in ("in loop", "in thread")]
    assert [hasattr(lock, "acquire") for lock in locks] == [False, True]


async def test_an_abort_waits_for_the_thread_before_it_closes_its_operator() -> None:
    """``close`` was called while ``process`` ran, and freed a model in use."""
    life: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    class Slow(Operator):
        runs_in_thread = True

        def process(self, record: Any, out: Output) -> None:
            entered.set()
            leave.wait(PATIENCE_S)
            life.append("processed")
            out.emit(record)

        def close(self) -> None:
            life.append("closed")

    flow = Flow("f")
    flow.from_items([1]).process(Slow).collect()
    job = await flow.start()
    while not entered.is_set():
        await asyncio.sleep(0)
    stopping = asyncio.create_task(job.stop("abort"))
    await turns()
    assert life == []
    leave.set()
    assert (await stopping).state == "aborted"
    assert life == ["processed", "closed"]
    assert tasks_left() == []


async def test_a_job_without_threaded_steps_starts_no_thread() -> None:
    """Each subtask of each flow in a service had a thread of its own, although no step needed one."""
    before = threading.active_count()
    flow = Flow("f", parallelism=4)
    flow.from_items(list(range(10))).rebalance().map(str)
    await (await flow.start()).wait()
    assert threading.active_count() == before


class TestAwaited:
    async def test_every_method_may_be_a_coroutine_function(self) -> None:
        """One of the operator's methods, all of which are documented to allow it, could not be a coroutine function."""
        life: list[str] = []

        class Everything(Operator):
            async def open(self, context: Context) -> None:
                await turns(2)
                self.context = context
                life.append("open")

            async def process(self, record: Any, out: Output) -> None:
                await turns(2)
                out.emit(record)
                self.context.set_timer(0.0, "payload")

            async def on_timer(self, payload: Any, out: Output) -> None:
                await turns(2)
                out.emit(payload)

            async def input_ended(self, name: str, out: Output) -> None:
                life.append(f"{name} ended")

            async def snapshot(self) -> str:
                await turns(2)
                return "state"

            async def restore(self, state: str) -> None:
                life.append(f"restored {state}")

            async def finish(self, out: Output) -> None:
                await turns(2)
                out.emit("finish")

            async def close(self) -> None:
                await turns(2)
                life.append("close")

        clock, fed = VirtualClock(), [Fed(), Fed()]
        sources = iter(fed)
        flow = Flow("f")
        got = flow.from_source(lambda: next(sources)).process(Everything).collect()
        job = await flow.start(clock=clock)
        fed[0].give(1)
        await clock.advance(1)
        assert got.items == [1, "payload"]
        snapshot = await job.snapshot()
        await job.stop("abort")
        job = await flow.start(clock=clock, snapshot=snapshot)
        await job.stop("drain")
        assert got.items == [1, "payload", "finish"]
        assert life == ["open", "close", "open", "restored state", "input ended", "close"]

    async def test_records_are_handled_one_after_the_other(self) -> None:
        """A second call started while the first call of the operator waited."""
        at_once = most = 0

        class Serial(Operator):
            async def process(self, record: Any, out: Output) -> None:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await turns(record % 5)
                at_once -= 1
                out.emit(record)

        flow = Flow("f")
        got = flow.from_items(list(range(30))).process(Serial).collect()
        await (await flow.start(channel_limits=ChannelLimits(records=2))).wait()
        assert (got.items, most) == (list(range(30)), 1)

    @pytest.mark.parametrize("limit", [1, 3])
    async def test_timers_do_not_interrupt_a_call(self, limit: int) -> None:
        """A timer changed the state while a call that used it waited."""
        busy = False

        class Busy(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            async def process(self, record: Any, out: Output) -> None:
                nonlocal busy
                busy = True
                self.context.set_timer(0.0, record)
                await turns(5)
                busy = False

            def on_timer(self, payload: Any, out: Output) -> None:
                assert not busy
                out.emit(payload)

        clock, fed = VirtualClock(), Fed()
        flow = Flow("f")
        got = flow.from_source(lambda: fed).process(Busy).collect()
        job = await flow.start(clock=clock, channel_limits=ChannelLimits(records=limit))
        for number in range(5):
            fed.give(number)
            await clock.advance(1)
        assert got.items == list(range(5))
        await job.stop("drain")


async def test_a_step_that_has_waited_begins_its_next_mini_batch_before_others_handle_its_output() -> None:
    """While other steps handled what a model had learned in a thread, the thread had nothing to do."""
    happened: list[str] = []

    class Waits(Operator):
        async def process_batches(self, batch: Any, out: Output) -> None:
            happened.append(f"begin {batch[0]}")
            await asyncio.sleep(0)
            out.emit(batch[0])

        def process_start(self, record: Any, out: Output) -> None:
            """Do nothing."""

    class InAnotherTask(Waits):
        def process_batches(self, record: Any, out: Output) -> None:  # type: ignore[override]
            happened.append(f"later {record}")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        made = connect(start=variables[0], batches=data[0].batch(1)).process(Waits)
        later = connect(start=variables[0], batches=made).process(InAnotherTask)
        return IterationBodyResult([later], [later])

    flow = Flow("f")
    iterate_unbounded_streams([flow.from_items([0])], [flow.from_items([1, 2, 3])], body)
    await (await flow.start()).wait()
    assert happened.index("begin 2") < happened.index("later 1")
