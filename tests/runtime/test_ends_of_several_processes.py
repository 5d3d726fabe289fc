"""A job in several processes is like one job, seen from process 0: how it stops and fails, and its statistics."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from flow.small_flows import Fed
from processes.linked_jobs import JoinedJobs, joined_jobs
from runtime.probe import AwaitedProbe, Life, Probe, ProbeSource, Valve, tasks_left, turns
from runtime.test_statistics_as_json import checked
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow, Operator, OutputTag, connect
from streamiter.cli.figures import statistics_table
from streamiter.engine.graph.statistics import JobStatistics, ProcessStatistics
from streamiter.engine.job.running import causes_of
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.engine.storage.store import CommitPointer, MemoryStore
from streamiter.errors import (
    ConfigurationError,
    DecodeError,
    GraphError,
    JobFailed,
    OffsetOutOfRange,
    ProducerFenced,
    RejectRecords,
    StorageFull,
    StreamiterError,
    TransactionExpired,
)
from streamiter.operators import Context, Output
from streamiter.service.observing.metrics import MetricsNow, exposition
from streamiter.service.observing.observations import Observations
from streamiter.testing import VirtualClock
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_errors import RemoteError, error_from_plain, error_to_plain

PROCESSES = pytest.mark.parametrize("processes", [1, 2, 3])


TENS = OutputTag("tens")


class SplitTens(Operator):
    def process(self, record: int, out: Output) -> None:
        out.emit(record, tag=None if record % 10 else TENS)


class Both(Operator):
    def process_left(self, record: int, out: Output) -> None: ...

    def process_right(self, record: int, out: Output) -> None: ...


class FailingProbe(Probe):
    """Raises an error of streamiter."""

    reason = "the transaction was open for too long"

    def process(self, record: Any, out: Output) -> None:
        raise TransactionExpired(self.reason)


def probes(
    life: Life, process: int, *, fails: int | None = None, fails_in: str = "", kind: type[Probe] = Probe
) -> Flow:
    """Return endless source → before → middle → after, with 3 subtasks; the middle of process ``fails`` fails."""
    flow = Flow("f", parallelism=3)
    source = flow.from_source(lambda: ProbeSource(life), name="in")
    before = source.process(lambda: Probe(life, "before"), name="before")
    kind, fails_in = (kind, fails_in) if process == fails else (Probe, "")
    middle = before.rebalance().process(lambda: kind(life, "middle", fails_in), name="middle")
    middle.rebalance().process(lambda: Probe(life, "after"), name="after")
    return flow


async def run_to_end(joined: JoinedJobs) -> JobStatistics:
    """Run all jobs; return the statistics of process 0, or raise its error. No task may be left."""
    runs = [asyncio.ensure_future(run(job)) for job in joined.jobs]
    await asyncio.wait(runs)
    await turns(3)
    assert tasks_left() == []
    for other in runs[1:]:
        other.exception()
    return runs[0].result()


async def run(job: Any) -> JobStatistics:
    await job.start()
    statistics: JobStatistics = await job.wait()
    return statistics


class FullStore(MemoryStore):
    """Has no room for the claim of a run."""

    async def claim(self, flow: str, run: str, *, forget_committed: bool = False) -> CommitPointer | None:
        raise StorageFull("the store is full")


async def test_others_end_if_process_0_cannot_read_the_checkpoint() -> None:
    """The others waited forever for the states that process 0 would choose, and process 0 for their ends."""
    stores = [FullStore(), MemoryStore(), MemoryStore()]
    joined = joined_jobs(
        [probes(Life(), number) for number in range(3)],
        lambda number: JobOptions(checkpoints=Checkpoints(stores[number])),
    )
    with pytest.raises(StorageFull, match="the store is full"):
        await run_to_end(joined)


async def test_the_final_statistics_are_those_of_one_process() -> None:
    """The counts of process 0 were taken for those of the flow, and half of the records seemed lost."""

    def build() -> Flow:
        flow = Flow("f", parallelism=4)
        numbers = flow.from_items(range(400), name="in").map(lambda n: (n % 7, n), name="pairs")
        summed = numbers.key_by(lambda pair: pair[0]).reduce(lambda a, b: (a[0], a[1] + b[1]), name="sum")
        summed.rebalance().map(str, name="text").collect(name="all")
        return flow

    whole = await run_to_end(joined_jobs([build()]))
    assert whole.processes == ()
    for processes in (2, 3):
        joined = joined_jobs([build() for _ in range(processes)])
        several = checked(await run_to_end(joined))
        assert [task.name for task in several.tasks] == [task.name for task in whole.tasks]
        assert [task.process for task in several.tasks if task.name[:2] == "in"] == [n % processes for n in range(4)]
        for name in ("in", "pairs", "sum", "text", "all"):
            counts, expected = several.step(name), whole.step(name)
            assert (counts.records_in, counts.records_out) == (expected.records_in, expected.records_out), name
        for one, other in zip(several.tasks, whole.tasks, strict=True):
            channels = [[(c.name, c.total_records, c.records) for c in task.inputs] for task in (one, other)]
            assert channels[0] == channels[1]
        assert [(one.process, one.state, one.age_s) for one in several.processes] == [
            (process, "finished", 0.0) for process in range(processes)
        ]


@PROCESSES
@pytest.mark.parametrize("mode", ["drain", "abort"])
@pytest.mark.parametrize("waits", [0, 20])
async def test_a_stop_of_process_0_stops_all_processes(processes: int, mode: Any, waits: int) -> None:
    """Sources of other processes went on after the stop, so it never returned."""
    life = Life()
    joined = joined_jobs([probes(life, process) for process in range(processes)])
    await asyncio.gather(*(job.start() for job in joined.jobs))
    await turns(waits)
    statistics = await joined.jobs[0].stop(mode)
    state = "finished" if mode == "drain" else "aborted"
    assert statistics.state == state
    assert [one.state for one in statistics.processes] == ([state] * processes if processes > 1 else [])
    assert life.opened_but_not_closed_once() == []
    assert life.count("after finish") == (3 if mode == "drain" else 0)
    assert all(task.ended for task in statistics.tasks) == (mode == "drain")
    if mode == "drain":
        read = statistics.step("in").records_out
        assert read == life.count("after process") == statistics.step("after").records_in
    assert [(await job.wait()).state for job in joined.jobs] == [state] * processes
    await turns(3)
    assert tasks_left() == []


@PROCESSES
@pytest.mark.parametrize("place", ["open", "process", "close"])
async def test_a_failure_in_any_process_is_the_error_of_process_0(processes: int, place: str) -> None:
    """Process 0 waited for ever, or said that a process had ended without the step and the line."""
    for fails in range(processes):
        life = Life()
        flows = [probes(life, process, fails=fails, fails_in=place) for process in range(processes)]
        joined = joined_jobs(flows)
        if place == "close":
            await asyncio.gather(*(job.start() for job in joined.jobs))
            with pytest.raises(JobFailed) as caught:
                await joined.jobs[0].stop("drain")
            await asyncio.gather(*(job.wait() for job in joined.jobs), return_exceptions=True)
        else:
            with pytest.raises(JobFailed) as caught:
                await run_to_end(joined)
        error = caught.value
        line = next(step.where for step in flows[0].steps if step.name == "middle")
        where = f", in process {fails}" if processes > 1 else ""
        record = str(error).partition("on record ")[2].partition(",")[0].partition(":")[0]
        record = f" on record {record}" if record else ""
        assert str(error) == f"flow 'f', step 'middle' ({line}){record}{where}: ValueError: middle cannot {place}"
        assert bool(record) == (place == "process")
        assert error.step == "middle"
        if fails:
            assert type(error.__cause__) is RemoteError
            assert str(error.__cause__) == f"ValueError: middle cannot {place}"
            assert 'raise ValueError(f"{self._name} cannot {place}")' in error.__cause__.__notes__[0]
        else:
            assert type(error.__cause__) is ValueError
        assert joined.jobs[0].statistics().state == "failed"
        assert life.opened_but_not_closed_once() == []


@PROCESSES
async def test_the_classes_of_errors_that_callers_check_survive(processes: int) -> None:
    """A transaction that had expired in another process ended the flow, although it could be resumed."""
    joined = joined_jobs(
        [probes(Life(), process, fails=processes - 1, kind=FailingProbe) for process in range(processes)]
    )
    with pytest.raises(JobFailed, match="the transaction was open for too long") as caught:
        await run_to_end(joined)
    fenced = next(cause for cause in causes_of(caught.value) if isinstance(cause, ProducerFenced))
    assert type(fenced) is TransactionExpired


class TextlessProbe(Probe):
    """Raises an error whose text cannot be told."""

    def process(self, record: Any, out: Output) -> None:
        class Textless(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        raise Textless


@PROCESSES
async def test_an_error_whose_text_fails_ends_the_job_with_its_class(processes: int) -> None:
    """The job failed on the text of the error, and a process of several was silent until it was lost."""
    joined = joined_jobs(
        [probes(Life(), process, fails=processes - 1, kind=TextlessProbe) for process in range(processes)]
    )
    with pytest.raises(JobFailed, match=r"step 'middle'.*: Textless$"):
        await run_to_end(joined)


async def test_the_first_error_that_arrives_is_raised_and_the_others_are_its_notes() -> None:
    """The log named an error that followed from another one, which it did not name."""
    life = Life()
    flows = [probes(life, process, fails=process, fails_in="close") for process in range(3)]
    joined = joined_jobs(flows)
    await asyncio.gather(*(job.start() for job in joined.jobs))
    with pytest.raises(JobFailed) as caught:
        await joined.jobs[0].stop("drain")
    said = [str(caught.value), *caught.value.__notes__]
    assert sorted(text.partition("in process ")[2][0] for text in said) == ["0", "1", "2"]
    assert all("middle cannot close" in text for text in said)
    await asyncio.gather(*(job.wait() for job in joined.jobs), return_exceptions=True)


async def test_a_failure_ends_the_others_before_its_process_has_closed() -> None:
    """A step that had failed took minutes to close, and the other processes read on and wrote results meanwhile."""
    life, may_close = Life(), asyncio.Event()

    class ClosesLate(FailingProbe):
        async def close(self) -> None:  # type: ignore[override]
            await may_close.wait()

    joined = joined_jobs([probes(life, process, fails=1, kind=ClosesLate) for process in range(2)])
    ends = asyncio.gather(*map(run, joined.jobs), return_exceptions=True)
    await until(lambda: life.count("after close") == 2)
    assert [job.statistics().state for job in joined.jobs] == ["running", "running"]
    may_close.set()
    assert all(f", in process 1: {ClosesLate.reason}" in str(error) for error in await ends)


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_process_that_has_failed_closes_its_steps_to_the_end(failing: int) -> None:
    """The abort that answered a failure interrupted the closing of the step that had failed, and its file was lost."""
    closed = []

    class ClosesSlowly(Operator):
        def open(self, context: Context) -> None:
            self.number = context.subtask_index

        def process(self, record: int, out: Output) -> None:
            if self.number == failing:
                raise ValueError("refused")

        async def close(self) -> None:  # type: ignore[override]
            await turns(50 if self.number == failing else 0)
            closed.append(self.number)

    def made() -> Flow:
        flow = Flow("flow")
        flow.from_items(range(10)).rebalance().process(ClosesSlowly, parallelism=2)
        return flow

    joined = joined_jobs([made(), made()])
    ends = await asyncio.gather(*map(run, joined.jobs), return_exceptions=True)
    assert "refused" in str(ends[0])
    assert sorted(closed) == [0, 1]


async def test_a_start_that_is_cancelled_waits_for_no_other_process() -> None:
    """A process was lost while the steps were opened, and the others were killed after five seconds."""
    joined = joined_jobs([probes(Life(), process) for process in range(2)])
    starting = asyncio.create_task(joined.jobs[0].start())
    await turns(20)  # It waits for the steps of the other process, which is lost.
    assert not starting.done()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, PATIENCE_S)
    assert joined.jobs[0].statistics().state == "aborted"


async def test_a_process_that_is_aborted_ends_all() -> None:
    """A process was stopped by a signal, and the others waited for its records for ever."""
    life = Life()
    joined = joined_jobs([probes(life, process) for process in range(3)])
    await asyncio.gather(*(job.start() for job in joined.jobs))
    joined.jobs[1].abort()
    assert [(await job.wait()).state for job in joined.jobs] == ["aborted"] * 3
    assert life.opened_but_not_closed_once() == []


async def test_what_only_one_process_can_do_is_refused_by_name() -> None:
    """A snapshot had the state of one process; a callback was called in processes that nobody saw."""
    joined = joined_jobs([probes(Life(), process) for process in range(2)])
    await asyncio.gather(*(job.start() for job in joined.jobs))
    with pytest.raises(ConfigurationError, match="expected a job of a single process, given one of 2"):
        await joined.jobs[0].snapshot()
    await joined.jobs[0].stop("abort")
    await joined.jobs[1].wait()
    with pytest.raises(ConfigurationError, match="expected no on_rejected in 2 processes"):
        joined_jobs([probes(Life(), process) for process in range(2)], JobOptions(on_rejected=print))


async def test_running_statistics_say_how_old_the_numbers_of_a_process_are_and_where_it_stalls() -> None:
    """A process that hung looked busy; the watchdog failed at a channel whose reader is in another process."""
    clock, life, opened, feds = VirtualClock(), Life(), asyncio.Event(), [Fed() for _ in range(2)]

    def build(process: int) -> Flow:
        flow = Flow("f", parallelism=2)
        source = flow.from_source(lambda: feds[process], name="in")
        source.rebalance().process(lambda: Valve(opened) if process else AwaitedProbe(life, "write"), name="write")
        return flow

    joined = joined_jobs(
        [build(process) for process in range(2)],
        JobOptions(clock=clock, stall_after_s=60, channel_limits=ChannelLimits(records=1)),
    )
    first = joined.jobs[0]
    await asyncio.gather(*(job.start() for job in joined.jobs))
    assert [(task.name, task.process) for task in checked(first.statistics()).tasks] == [
        ("in[0]", 0),
        ("in[1]", 1),
        ("write[0]", 0),
        ("write[1]", 1),
    ]
    for number in range(10):
        feds[0].give(number)
    await clock.advance(0.5)
    statistics = first.statistics()
    assert [one.age_s for one in statistics.processes] == [0.0, 0.5]
    assert statistics.tasks[3].steps[0].counts.records_in == 0
    await clock.advance(0.75)
    statistics = first.statistics()
    assert [one.age_s for one in statistics.processes] == [0.0, 0.25]
    assert statistics.tasks[3].steps[0].counts.records_in == 1
    # Both ends of the channel have the same numbers.
    [departing], [arriving] = (
        [c for c in task.outputs + task.inputs if c.name == "in[0] → write[1]"]
        for task in (statistics.tasks[0], statistics.tasks[3])
    )
    assert departing == arriving
    await clock.advance(120)
    [stalled] = first.statistics().stalled
    assert (stalled.name, stalled.process, stalled.reason) == ("write[1]", 1, "write[1] is at work on a batch")
    opened.set()
    await clock.advance(60)
    assert first.statistics().stalled == ()
    stopped = await first.stop("drain")
    assert stopped.step("write").records_in == 10
    assert all(channel.records == 0 for task in stopped.tasks for channel in task.inputs + task.outputs)
    await joined.jobs[1].wait()


async def test_two_edges_between_the_same_steps_have_channels_of_their_own_in_the_statistics() -> None:
    """The channels of two edges have equal names, and the records of one were counted twice."""

    def build() -> Flow:
        flow = Flow("f", parallelism=2)
        split = flow.from_items(range(40), name="in").process(SplitTens, name="split")
        connect(left=split.rebalance(), right=split.side_output(TENS).rebalance()).process(Both, name="both")
        return flow

    statistics = await run_to_end(joined_jobs([build(), build()]))
    ends = [
        Counter(
            (channel.name, channel.total_records)
            for task in statistics.tasks
            for channel in getattr(task, end)
            if " → " in channel.name
        )
        for end in ("inputs", "outputs")
    ]
    assert ends[0] == ends[1]
    assert sum(records * count for (_, records), count in ends[0].items()) == 40


async def test_drawings_figures_and_metrics_show_the_process_of_each_task() -> None:
    """Nobody saw which process had the slow subtask, or that the figures of a process were old."""
    clock = VirtualClock()
    flows = [probes(Life(), process) for process in range(3)]
    joined = joined_jobs(flows, JobOptions(clock=clock))
    await asyncio.gather(*(job.start() for job in joined.jobs))
    await turns()
    running = joined.jobs[0].statistics()
    await joined.jobs[0].stop("abort")
    assert "in process 0–2" in flows[0].draw(running)
    silent = ProcessStatistics(2, "running", age_s=7.2)
    shown = statistics_table(replace(running, processes=(*running.processes[:2], silent)))
    assert "running, 0.0 s, process 2 silent for 7 s" in str(shown.title)
    assert [str(cell) for cell in shown.columns[-1].cells] == ["0–2"] * 4
    observations = Observations("late flights")
    observations.job = joined.jobs[0]
    text = exposition(MetricsNow(observations), "")[0].decode()
    assert 'streamiter_subtask_process{flow="f",step="middle",subtask="1"} 1.0' in text
    assert 'streamiter_process_age_seconds{process="2"} 0.0' in text


@pytest.mark.parametrize(
    "error",
    [
        GraphError("step 'a': no", where="job.py:3"),
        DecodeError({3: "no JSON"}),
        RejectRecords([1, 4], "negative price"),
        OffsetOutOfRange("no longer there"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_streamiter_is_the_same_in_another_process(error: StreamiterError) -> None:
    """An error whose class has arguments of its own failed on its way, or lost its fields."""
    error.add_note("while closing")
    plain = PlainData()
    received = error_from_plain(plain.decode(plain.encode(error_to_plain(error))))
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)


def test_a_users_class_derived_from_an_error_of_streamiter_is_not_made_in_another_process() -> None:
    """A class that only one process knows was built from its message alone."""

    class NoPrice(OffsetOutOfRange):
        pass

    received = error_from_plain(error_to_plain(NoPrice("of 3")))
    assert (type(received), str(received)) == (RemoteError, "NoPrice: of 3")
