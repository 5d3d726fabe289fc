"""Stopping a job: suspend, drain, abort; and waiting for it."""

import asyncio
import itertools
from typing import Any, Literal

import pytest
from flow.small_flows import Fed
from runtime.probe import AwaitedProbe, Life, Probe, ProbeSource, Valve, tasks_left, turns
from support.waiting import PATIENCE_S

from streamiter import Flow, Operator, connect
from streamiter.engine.job.job import Job
from streamiter.engine.job.running import job_of
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.errors import ConfigurationError, JobFailed
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Source, SourceBatch
from streamiter.topics.memory import MemoryBroker

Mode = Literal["suspend", "drain", "abort"]
MODES = pytest.mark.parametrize("mode", ["suspend", "drain", "abort"])
GRACEFUL = pytest.mark.parametrize("mode", ["suspend", "drain"])
STATES = {"suspend": "suspended", "drain": "finished", "abort": "aborted"}


def endless(life: Life | None = None) -> Flow:
    """Return a flow of endless numbers, with a chained step, a separate task and a last step."""
    life = life or Life()
    flow = Flow("f", parallelism=2)
    flow.from_source(lambda: ProbeSource(life), name="in").process(lambda: Probe(life, "chained")).rebalance().process(
        lambda: AwaitedProbe(life, "awaited")
    ).process(lambda: Probe(life, "last"), parallelism=1)
    return flow


@MODES
async def test_a_stopped_job_has_ended_in_its_state_and_left_nothing_behind(mode: Mode) -> None:
    """A service that had stopped could not start again in the same process."""
    life = Life()
    job = await endless(life).start()
    await turns()
    statistics = await job.stop(mode)
    assert statistics.state == STATES[mode]
    assert statistics == await job.wait()
    assert all(task.ended for task in statistics.tasks) or mode == "abort"
    assert tasks_left() == []
    assert life.opened_but_not_closed_once() == []
    assert life.count("last finish") == (1 if mode == "drain" else 0)


@MODES
async def test_stopping_again_gives_the_same_statistics(mode: Mode) -> None:
    """A deployment tool sent the stop twice, and the second stop failed."""
    job = await endless().start()
    await turns()
    first = await job.stop(mode)
    for again in ("suspend", "drain", "abort"):
        assert await job.stop(again) == first  # type: ignore[arg-type]


@MODES
async def test_two_stops_at_once_both_return(mode: Mode) -> None:
    """An HTTP handler and a signal handler stopped the job at once, and one of them never returned."""
    life = Life()
    job = await endless(life).start()
    await turns()
    first, second = await asyncio.gather(job.stop(mode), job.stop(mode))
    assert first == second
    assert first.state == STATES[mode]
    assert life.opened_but_not_closed_once() == []


@pytest.mark.parametrize("modes", list(itertools.product(["suspend", "drain"], repeat=2)), ids="-".join)
@pytest.mark.parametrize("waits_between", [False, True])
async def test_two_stops_while_a_source_waits_for_records_end_the_job(
    modes: tuple[Mode, Mode], waits_between: bool
) -> None:
    """On a quiet topic the second stop was taken for an unexpected abort, and the job never ended."""
    fed = Fed()
    flow = Flow("f")
    got = flow.from_source(lambda: fed).collect()
    job = await flow.start()
    fed.give(1)
    await turns()
    first = asyncio.create_task(job.stop(modes[0]))
    if waits_between:
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        statistics = await job.stop(modes[1])
        assert await first == statistics
    assert statistics.state in {STATES[mode] for mode in modes}
    assert got.items == [1]
    assert tasks_left() == []
    assert fed.closed == 1


@pytest.mark.parametrize("modes", [("suspend", "drain"), ("drain", "suspend")], ids="-".join)
async def test_of_two_stops_all_sources_obey_the_same(modes: tuple[Mode, Mode]) -> None:
    """One source suspended and the other one ended, and the next run never read from the second again."""
    opened, quick, held = asyncio.Event(), Fed(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: quick, name="quick").collect(name="one")
    flow.from_source(lambda: held, name="held").process(lambda: Valve(opened)).collect(name="two")
    job = await flow.start(channel_limits=ChannelLimits(records=1))
    for number in range(10):
        quick.give(number)
        held.give(number)
    await turns(200)
    stopping = []
    for mode in modes:
        stopping.append(asyncio.create_task(job.stop(mode)))
        await turns()  # The quick source has ended, and the other one waits for room.
    assert not any(stop.done() for stop in stopping)
    opened.set()
    async with asyncio.timeout(PATIENCE_S):
        first, second = await asyncio.gather(*stopping)
    assert first == second
    assert {task.suspended for task in job._tasks if task.feeder is not None} == {modes[0] == "suspend"}
    assert first.state == STATES[modes[0]]


@MODES
async def test_a_stop_right_after_the_start_takes_effect(mode: Mode) -> None:
    """The stop came before the first turn of any task, and the source started to read after it, forever."""
    life = Life()
    job = await endless(life).start()
    statistics = await job.stop(mode)
    assert statistics.state == STATES[mode]
    assert tasks_left() == []
    assert life.opened_but_not_closed_once() == []


@GRACEFUL
async def test_all_read_records_are_handled(mode: Mode) -> None:
    """Records that were read but not handled were lost, because the source cannot read them again."""
    given: list[int] = []

    class Once(Source):
        """Behaves like a socket: it cannot return a record a second time."""

        bounded = False

        async def read(self) -> SourceBatch:
            await asyncio.sleep(0)
            given.append(len(given))
            return SourceBatch([given[-1]], {})

    opened = asyncio.Event()
    flow = Flow("f")
    got = flow.from_source(Once).process(lambda: Valve(opened)).collect()
    job = await flow.start(channel_limits=ChannelLimits(records=4))
    await turns(200)
    assert len(given) >= 9
    stopping = asyncio.create_task(job.stop(mode))
    await turns()
    assert not stopping.done()
    opened.set()
    await stopping
    assert got.items == given


@GRACEFUL
@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_stop_while_blocked_by_backpressure_waits_for_the_slow_step(mode: Mode, limit: int) -> None:
    """A sink was stuck for some time, and the stop lost records, or did not continue with the sink."""
    opened, fed = asyncio.Event(), Fed()
    flow = Flow("f")
    got = flow.from_source(lambda: fed).map(lambda x: x).process(lambda: Valve(opened)).collect()
    job = await flow.start(channel_limits=ChannelLimits(records=limit))
    for number in range(20):
        fed.give(number)
    await turns(200)
    stopping = asyncio.create_task(job.stop(mode))
    await turns()
    assert not stopping.done()
    opened.set()
    assert (await stopping).state == STATES[mode]
    assert got.items == list(range(fed.brought))


async def test_an_abort_before_the_first_turn_of_a_job_closes_its_steps() -> None:
    """Another process told of its end in the turn in which a job began, and the job ended with CancelledError."""
    life, jobs, loop = Life(), list[Job](), asyncio.get_running_loop()

    def begin(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
        if "JobFollower._run" in repr(code):
            loop.call_soon(jobs[0]._abort)  # as a message of process 0 does
        return asyncio.Task(code, loop=loop, **options)

    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life), name="in").process(lambda: Probe(life, "step"), name="step")
    jobs.append(job_of(flow, JobOptions()))
    loop.set_task_factory(begin)
    try:
        await jobs[0].start()
        statistics = await jobs[0].wait()
    finally:
        loop.set_task_factory(None)
    assert statistics.state == "aborted"
    assert tasks_left() == life.opened_but_not_closed_once() == []


async def test_abort_ends_a_job_whose_step_hangs() -> None:
    """A server did not answer, and neither the job nor a suspend that waited for it could be ended."""
    life = Life()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).process(lambda: Valve(asyncio.Event()))
    job = await flow.start(channel_limits=ChannelLimits(records=3))
    await turns()
    suspending = asyncio.create_task(job.stop("suspend"))
    await turns()
    statistics = await job.stop("abort")
    assert statistics.state == "aborted"
    assert await suspending == statistics
    assert tasks_left() == []
    assert life.opened_but_not_closed_once() == []


async def test_suspend_flushes_sinks_and_its_positions_match_the_written_records() -> None:
    """The job that resumed from the positions lost or repeated a record."""
    broker = MemoryBroker()
    out = broker.topic("out")
    await out.create()
    fed = Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").sink(out)
    job = await flow.start()
    for number in range(10):
        fed.give(number)
    await turns(5)
    await job.stop("suspend")
    written = (await out.describe()).offsets[0][1]
    [source] = [task for task in job._tasks if task.feeder is not None]
    assert source.positions == {"brought": written}
    assert written == fed.brought


async def test_suspend_takes_effect_at_steps_with_unwanted_or_waiting_data() -> None:
    """A barrier behind data of an operator that waits for its model kept the job from stopping."""

    class Waits(Operator):
        def open(self, context: Context) -> None:
            self.handled = 0

        def wanted_inputs(self) -> tuple[str, ...]:
            return ("model",)

        def process_model(self, record: Any, out: Output) -> None: ...

        def process_data(self, record: Any, out: Output) -> None:
            raise AssertionError("not wanted")

    flow = Flow("f")
    model, data = Fed(), Fed()
    connect(model=flow.from_source(lambda: model), data=flow.from_source(lambda: data, name="data")).process(Waits)
    job = await flow.start()
    data.give(1, 2, 3)
    await turns()
    assert (await job.stop("suspend")).state == "suspended"


async def test_suspend_after_all_inputs_have_ended_is_the_end() -> None:
    """Bounded inputs ended a moment before the signal, and the job was ``suspended`` although every step had ended."""
    opened, life = asyncio.Event(), Life()
    flow = Flow("f")
    got = flow.from_items([1, 2, 3]).process(lambda: Valve(opened)).process(lambda: Probe(life, "last")).collect()
    job = await flow.start()
    await turns()
    stopping = asyncio.create_task(job.stop("suspend"))
    await turns()
    opened.set()
    statistics = await stopping
    assert statistics.state == "finished"
    assert (got.items, life.count("last finish")) == ([1, 2, 3], 1)


async def test_suspend_with_another_input_that_has_ended() -> None:
    """One of two inputs had ended, the other was suspended, and the job, which can resume, was not ``suspended``."""
    life, fed = Life(), Fed()
    flow = Flow("f")
    ended = flow.from_items([1, 2])
    ended.union(flow.from_source(lambda: fed)).process(lambda: Probe(life, "both"))
    job = await flow.start()
    fed.give(3)
    await turns()
    assert (await job.stop("suspend")).state == "suspended"
    assert life.count("both process") == 3
    assert life.count("both finish") == 0


async def test_drain_emits_mini_batches_and_calls_finish() -> None:
    """A drained job, whose inputs end, kept the rest of its mini-batch."""
    fed = Fed()
    flow = Flow("f")
    got = flow.from_source(lambda: fed).batch(10).collect()
    job = await flow.start()
    fed.give(1, 2, 3)
    await turns()
    assert got.items == []
    assert (await job.stop("drain")).state == "finished"
    assert got.items == [[1, 2, 3]]


async def test_no_timer_or_record_arrives_after_the_end() -> None:
    """A timer fired while the job closed, and reached an operator that had finished."""
    heard: list[str] = []

    class Late(Operator):
        def open(self, context: Context) -> None:
            self.context = context

        def process(self, record: Any, out: Output) -> None:
            self.context.set_timer(0.0, "late")

        def on_timer(self, payload: Any, out: Output) -> None:
            heard.append(payload)

        def finish(self, out: Output) -> None:
            heard.append("finish")
            self.context.set_timer(0.0, "too late")

        async def close(self) -> None:
            await turns()
            heard.append("close")

    flow = Flow("f")
    flow.from_items([1]).process(Late)
    job = await flow.start()
    await job.wait()
    await asyncio.sleep(0)
    assert [what for what in heard if what != "late"] == ["finish", "close"]
    assert heard.index("finish") >= heard.count("late")


async def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    """A typing error stopped the job in another way."""
    job = await endless().start()
    with pytest.raises(ConfigurationError, match='expected "suspend", "drain" or "abort", given \'kill\''):
        await job.stop("kill")  # type: ignore[arg-type]
    assert job.statistics().state == "running"
    await job.stop("abort")


async def test_a_failure_while_it_suspends_is_raised_by_the_stop() -> None:
    """A sink could not flush, and the stop returned without an error."""
    life = Life()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).process(lambda: Probe(life, "sink", "snapshot"), name="sink")
    job = await flow.start()
    await turns()
    with pytest.raises(JobFailed, match="sink cannot snapshot"):
        await job.stop("suspend")
    assert job.statistics().state == "failed"
    assert tasks_left() == []


class TestWait:
    async def test_cancelling_a_wait_leaves_the_job_running(self) -> None:
        """A closed web request that had waited for the result stopped the service."""
        fed = Fed()
        flow = Flow("f")
        got = flow.from_source(lambda: fed).collect()
        job = await flow.start()
        waiting = asyncio.create_task(job.wait())
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        fed.give(1)
        await turns()
        assert (job.statistics().state, got.items) == ("running", [1])
        fed.end()
        assert (await job.wait()).state == "finished"

    async def test_cancelling_a_stop_leaves_the_job_stopping(self) -> None:
        """A caller's time limit cancelled the stop, and tasks were left over."""
        opened, fed = asyncio.Event(), Fed()
        flow = Flow("f")
        flow.from_source(lambda: fed).process(lambda: Valve(opened))
        job = await flow.start()
        fed.give(1)
        await turns()
        stopping = asyncio.create_task(job.stop("suspend"))
        await turns()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        opened.set()
        assert (await job.wait()).state == "suspended"
        assert tasks_left() == []

    async def test_waiting_for_an_aborted_job_returns_its_statistics(self) -> None:
        """A caller that waited received a CancelledError instead of the statistics."""
        job = await endless().start()
        waiting = asyncio.create_task(job.wait())
        await turns()
        await job.stop("abort")
        assert (await waiting).state == "aborted"

    async def test_an_event_loop_that_shuts_down_closes_the_steps(self) -> None:
        """``asyncio.run`` cancels all tasks at its end, also the job's supervisor, and the steps stayed open."""
        life = Life()
        job = await endless(life).start()
        await turns()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[operator]
            task.cancel()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[operator]
        assert job.statistics().state == "aborted"
        assert life.opened_but_not_closed_once() == []


class TestSnapshotOfAJob:
    async def test_a_snapshot_of_an_ended_job_is_refused(self) -> None:
        """A snapshot of a job that had ended waited forever, or returned state that cannot be resumed."""
        flow = Flow("f")
        flow.from_items([1])
        job = await flow.start()
        await job.wait()
        with pytest.raises(ConfigurationError, match="expected a running job, given one that has ended"):
            await job.snapshot()

    async def test_several_snapshots_at_once_are_taken_one_after_the_other(self) -> None:
        """Two barriers of different checkpoints were not distinguished."""
        job = await endless().start()
        await turns()
        snapshots = await asyncio.gather(*(job.snapshot() for _ in range(3)))
        counts = [sum(task["positions"].get("next", 0) for task in snapshot.values()) for snapshot in snapshots]
        assert counts == sorted(counts)
        await job.stop("abort")

    async def test_a_cancelled_snapshot_does_not_disturb_the_next(self) -> None:
        """Barriers of a cancelled snapshot, still in transit at the start of the next one, disturbed it."""
        opened, fed = asyncio.Event(), Fed()
        flow = Flow("f", parallelism=2)
        stream = flow.from_source(lambda: fed, parallelism=1)
        valve = Valve(opened)
        stream.process(lambda: valve, parallelism=1).union(stream).process(lambda: Probe(Life(), "both"), parallelism=1)
        job = await flow.start()
        fed.give(1)
        await turns()
        first = asyncio.create_task(job.snapshot())
        await turns()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(job.snapshot())
        await turns()
        opened.set()
        assert set(await second) == {task.name for task in job.statistics().tasks}
        await job.stop("drain")
        assert tasks_left() == []


async def test_many_short_jobs_leave_nothing_behind() -> None:
    """A notebook that ran a flow several times collected tasks."""
    for _, mode in zip(range(12), itertools.cycle(["suspend", "drain", "abort"]), strict=False):
        job = await endless().start()
        await turns(3)
        await job.stop(mode)  # type: ignore[arg-type]
    assert tasks_left() == []


async def test_ended_steps_are_closed_while_others_continue() -> None:
    """The reader of a bounded topic stayed connected for weeks, as long as the endless input continued."""
    life = Life()

    class Few(ProbeSource):
        def read(self) -> SourceBatch | None:
            self._life.note("few read")
            return SourceBatch([1], {"done": 1}) if life.count("few read") == 1 else None

        def close(self) -> None:
            life.note("few close")

    flow = Flow("f")
    bounded = flow.from_source(lambda: Few(life)).process(lambda: Probe(life, "first"))
    bounded.process(lambda: AwaitedProbe(life, "second"))
    flow.from_source(lambda: ProbeSource(Life())).map(lambda x: x)
    job = await flow.start()
    await turns(200)
    ends = [what for what in life.noted if what.split()[1] in ("finish", "close")]
    assert ends == ["first finish", "first close", "few close", "second finish", "second close"]
    assert job.statistics().state == "running"
    await job.stop("suspend")
    assert life.count("first close") == life.count("few close") == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_an_abort_during_the_closing_keeps_the_result_of_the_job(fails: bool) -> None:
    """The error was lost, the caller received only a CancelledError, and the state stayed "running"."""
    closing, closed = asyncio.Event(), list[str]()

    class Slow(Operator):
        def process(self, record: int, out: Output) -> None:
            if fails:
                raise ZeroDivisionError

        async def close(self) -> None:
            closing.set()
            await asyncio.Event().wait()

    class Other(Operator):
        def process(self, record: int, out: Output) -> None:
            out.emit(record)

        def close(self) -> None:
            closed.append("other")

    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(Life())).process(Slow, name="slow")
    flow.from_source(lambda: ProbeSource(Life())).process(Other)
    job = await flow.start()
    await turns(20)
    stopping = asyncio.create_task(job.stop("suspend"))
    await closing.wait()
    if fails:
        with pytest.raises(JobFailed, match=r"slow.*ZeroDivisionError"):
            await job.stop("abort")
    else:
        assert (await job.stop("abort")).state == "aborted"
    await asyncio.gather(stopping, return_exceptions=True)
    assert job.statistics().state == ("failed" if fails else "aborted")
    assert closed == ["other"]
    assert tasks_left() == []
