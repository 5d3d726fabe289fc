"""A step that fails: one clear error, no running task, every step closed once."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest
from runtime.probe import AwaitedProbe, Life, Probe, ProbeSource, ThreadProbe, Valve, tasks_left, turns

from streamiter import Flow, Operator, connect
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.states.backends import MemoryStates
from streamiter.engine.tasks.failures import Failures, RecordFailure
from streamiter.errors import CheckpointError, ConfigurationError, InternalError, JobFailed, RejectRecords
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Source, SourceBatch
from streamiter.values.plain_data import PlainData

KINDS = pytest.mark.parametrize("kind", [Probe, AwaitedProbe, ThreadProbe])


def flow_of(life: Life, kind: type[Probe], fails_in: str, *, bounded: bool = True) -> Flow:
    """Return a flow source → before → middle (which fails) → after; source and last step also with parallelism 2."""
    flow = Flow("f", parallelism=2)
    source = flow.from_items(list(range(40)), name="in") if bounded else endless(flow, life)
    source.process(lambda: Probe(life, "before"), name="before").rebalance().process(
        lambda: kind(life, "middle", fails_in), name="middle"
    ).process(lambda: Probe(life, "after"), name="after", parallelism=1)
    return flow


class StatesThatFailToClose(MemoryStates):
    def _of_job(self, flow: str, plain_data: PlainData) -> StatesThatFailToClose:
        return self

    def close(self) -> None:
        raise OSError("the states do not close")


@pytest.mark.parametrize("fails_in", ["process", "nothing"])
async def test_states_that_fail_to_close_hide_nothing(fails_in: str) -> None:
    """On a full disk the state failed to close, too: its error hid that of the step, and the job ran for ever."""
    flow = Flow("f", state=StatesThatFailToClose(PlainData()))
    flow.from_items([1], name="in").map(lambda one: 1 // (0 if fails_in == "process" else one), name="divide").collect()
    job = await flow.start()
    with pytest.raises(Exception, match="ZeroDivisionError" if fails_in == "process" else "do not close") as caught:
        await job.wait()
    assert job.statistics().state == "failed"
    if fails_in == "process":
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "the states do not close" in "".join(caught.value.__notes__)


def endless(flow: Flow, life: Life, **options: Any) -> Any:
    return flow.from_source(lambda: ProbeSource(life, **options), name="in")


async def failure_of(flow: Flow, **options: Any) -> JobFailed:
    """Return the error of a job that fails, after the checks for all such errors."""
    threads = threading.active_count()
    jobs: list[Job] = []

    async def run() -> None:
        jobs.append(await flow.start(**options))
        await jobs[0].wait()

    with pytest.raises(JobFailed) as caught:
        await run()
    await turns(3)
    assert tasks_left() == []
    # The event loop keeps a thread for ``to_thread``; no other thread stays.
    assert threading.active_count() <= threads + 1
    for job in jobs:
        assert job.statistics().state == "failed"
        with pytest.raises(JobFailed) as again:
            await job.stop("drain")
        assert str(again.value) == str(caught.value)
    return caught.value


class TestOneClearError:
    @KINDS
    @pytest.mark.parametrize("bounded", [True, False])
    async def test_in_the_middle_it_names_step_line_and_record(self, kind: type[Probe], bounded: bool) -> None:
        """The log did not name the record and the line for one of the ways in which a step runs."""
        life = Life()
        error = await failure_of(flow_of(life, kind, "process", bounded=bounded))
        assert error.step == "middle"
        assert isinstance(error.__cause__, ValueError)
        line = str(error).partition("(test_job_failures.py:")[2].partition(")")[0]
        record = str(error).partition("on record ")[2].partition(":")[0]
        assert str(error) == (
            f"flow 'f', step 'middle' (test_job_failures.py:{line}) on record {record}: "
            "ValueError: middle cannot process"
        )
        assert int(line) > 0
        assert int(record) in (0, 1)
        assert life.opened_but_not_closed_once() == []
        assert life.count("middle finish") == 0

    @KINDS
    @pytest.mark.parametrize("place", ["open", "finish", "close", "snapshot"])
    async def test_in_any_other_method_it_names_the_step(self, kind: type[Probe], place: str) -> None:
        """A sink whose close had failed, and so had lost its last records, ended as finished."""
        life = Life()
        flow = flow_of(life, kind, place, bounded=place != "snapshot")
        if place == "snapshot":
            job = await flow.start()
            with pytest.raises(JobFailed, match="middle cannot snapshot"):
                await job.snapshot()
            with pytest.raises(JobFailed) as caught:
                await job.wait()
            error = caught.value
        else:
            error = await failure_of(flow)
        assert error.step == "middle"
        assert f"ValueError: middle cannot {place}" in str(error)
        assert isinstance(error.__cause__, ValueError)
        assert life.opened_but_not_closed_once() == []

    @pytest.mark.parametrize("place", ["open", "read", "close"])
    async def test_in_a_source_it_names_the_source(self, place: str) -> None:
        """The error of a lost or refused connection did not name the source."""
        life = Life()
        flow = Flow("f")
        endless(flow, life, fails_in=place).process(lambda: Probe(life, "after"), name="after")
        if place == "close":
            job = await flow.start()
            await turns()
            with pytest.raises(JobFailed) as caught:
                await job.stop("drain")
            error = caught.value
        else:
            error = await failure_of(flow)
        assert error.step == "in"
        assert f"ValueError: source cannot {place}" in str(error)
        assert life.opened_but_not_closed_once() == []

    async def test_a_failed_open_closes_all_opened_steps_and_reads_nothing(self) -> None:
        """One topic was missing, and the open connections to the other topics were not closed."""
        life = Life()
        await failure_of(flow_of(life, Probe, "open", bounded=False))
        assert life.opened_but_not_closed_once() == []
        assert life.count("source read") == 0

    async def test_a_second_failure_while_closing_is_reported_with_the_first(self) -> None:
        """A second failure, which may explain lost records, was not reported with the first."""
        life = Life()
        flow = Flow("f")
        flow.from_items([1]).process(lambda: Probe(life, "a", "process"), name="a").process(
            lambda: Probe(life, "b", "close"), name="b"
        )
        error = await failure_of(flow)
        assert error.step == "a"
        [note] = error.__notes__
        assert note.startswith("then, while closing: flow 'f', step 'b'")
        assert life.opened_but_not_closed_once() == []

    async def test_a_long_record_is_shown_shortened(self) -> None:
        """A record of a megabyte was written into the log."""
        flow = Flow("f")
        flow.from_items(["x" * 100_000]).map(int)
        error = await failure_of(flow)
        assert "… (100002 characters)" in str(error)
        assert len(str(error)) < 1000

    async def test_the_record_of_a_chained_step_is_its_own(self) -> None:
        """The error named the record before the map instead of the one that the next step failed on."""
        flow = Flow("f")
        flow.from_items([1, 2]).map(lambda x: 10 * x).map(lambda x: 1 / (x - 20), name="second")
        assert "step 'second'" in str(error := await failure_of(flow))
        assert "on record 20: ZeroDivisionError" in str(error)

    async def test_a_source_s_batch_is_named_by_its_next_offset(self) -> None:
        """The error of a batch, whose bad record and offset are unknown, did not name its place in the source."""

        class Fails(Operator):
            def process_batch(self, batch: Any, out: Output) -> None:
                raise ValueError("no")

        flow = Flow("f")
        flow.from_items([1, 2, 3]).process(Fails)
        assert "in the batch after which its source continues at {'items done': 3}: " in str(await failure_of(flow))


class TestKeysAndPartitions:
    @pytest.mark.parametrize("parallelism", [1, 3])
    async def test_a_record_without_a_key_fails_at_the_keyed_step(self, parallelism: int) -> None:
        """A missing key was reported as an internal error, or named the step before."""
        flow = Flow("f", parallelism=parallelism)
        flow.from_items([{"user": 1}, {"name": 2}]).key_by(lambda r: r["user"]).process(
            lambda: Probe(Life(), "count"), name="count"
        )
        error = await failure_of(flow)
        assert error.step == "count"
        assert "on record {'name': 2}: KeyError: 'user'" in str(error)

    @pytest.mark.parametrize("parallelism", [1, 3])
    async def test_the_error_of_an_invalid_key_names_the_reason(self, parallelism: int) -> None:
        """A float was accepted as a key, and its state was never found again."""
        flow = Flow("f", parallelism=parallelism)
        flow.from_items([1, 0.5]).key_by(lambda r: r).reduce(max, name="top")
        error = await failure_of(flow)
        assert error.step == "top"
        assert "on record 0.5" in str(error)
        assert "expected an int, str, bytes or a tuple of such, given float" in str(error)

    async def test_a_partition_function_that_fails_names_the_step_behind_it(self) -> None:
        """The error of a partition function, which belongs to no step, named no step."""
        flow = Flow("f", parallelism=2)
        flow.from_items([1, 2]).partition_by(lambda r: r / 0).map(str, name="target")
        error = await failure_of(flow)
        assert (error.step, isinstance(error.__cause__, ZeroDivisionError)) == ("target", True)


class TestWrongOperators:
    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (("modle",), "expected names of inputs (model), given 'modle'"),
            ("model", "expected a tuple or list of names, given 'model'; return ('model',)"),
            (3, "expected a tuple or list of names, given 3; return None for all inputs"),
        ],
    )
    async def test_the_error_of_unknown_wanted_inputs_names_the_step(self, wanted: Any, message: str) -> None:
        """After a typing error all inputs were read, in any order; and a text was taken for a collection of letters."""

        class Choosy(Operator):
            def wanted_inputs(self) -> Any:
                return wanted

            def process_model(self, record: Any, out: Output) -> None: ...

        flow = Flow("f")
        connect(model=flow.from_items([1])).process(Choosy, name="train")
        error = await failure_of(flow)
        assert error.step == "train"
        assert f"wanted_inputs(): {message}" in str(error)

    async def test_wrong_wanted_inputs_are_reported_before_any_record_is_read(self) -> None:
        """The model came once a day, and so did the error; until then records were read and handled."""
        reads: list[str] = []

        class Counted(Source):
            def read(self) -> None:
                reads.append("read")

        class Choosy(Operator):
            def open(self, context: Any) -> None:
                self.wanted = ("modle",)

            def wanted_inputs(self) -> Any:
                return self.wanted

            def process_model(self, record: Any, out: Output) -> None: ...

        flow = Flow("f")
        connect(model=flow.from_source(Counted)).process(lambda: Choosy(), name="train")
        with pytest.raises(JobFailed, match=r"'train' .*expected names of inputs \(model\), given 'modle'; return"):
            await flow.start()
        assert reads == []

    async def test_a_hidden_coroutine_function_is_refused(self) -> None:
        """A decorated method hides that it is a coroutine function, and its records were silently lost."""

        class Hidden(Operator):
            def process(self, record: Any, out: Output) -> Any:
                async def later() -> None:
                    out.emit(record)

                return later()

        flow = Flow("f")
        flow.from_items([1]).process(Hidden)
        assert "given something to await" in str(await failure_of(flow))

    @pytest.mark.parametrize("written", ["return", "yield", "async return", "async yield"])
    @pytest.mark.parametrize("keyed", [False, True])
    async def test_records_that_a_method_returns_are_not_lost(self, written: str, *, keyed: bool) -> None:
        """A user of Flink wrote yield, one of Faust return: the flow ran, and emitted nothing."""

        class Written(Operator):
            process: Any

        class Returns(Written):
            def process(self, record: Any, out: Output) -> Any:
                return record

        class Yields(Written):
            def process(self, record: Any, out: Output) -> Any:
                yield record

        class ReturnsLater(Written):
            async def process(self, record: Any, out: Output) -> Any:
                return record

        class YieldsLater(Written):
            async def process(self, record: Any, out: Output) -> Any:
                yield record

        made = {"return": Returns, "yield": Yields, "async return": ReturnsLater, "async yield": YieldsLater}
        items = Flow("f").from_items([7])
        (items.key_by(lambda record: record) if keyed else items).process(made[written], name="step")
        given = "a generator, of a method with yield" if "yield" in written else "7"
        error = str(await failure_of(items.flow))
        assert f"records to return None, given {given}; write out.emit(record)" in error

    @pytest.mark.parametrize("method", ["finish", "on_event_timer"])
    async def test_records_of_a_timer_and_of_the_end_are_not_lost(self, method: str) -> None:
        """Methods for records refused a yield, and timers, where users of Flink write it most, emitted nothing."""

        class Later(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            def process(self, record: int, out: Output) -> None:
                self.context.set_event_timer(record)

            def on_event_timer(self, payload: Any, out: Output) -> Any:
                return [] if method == "on_event_timer" else None

            def finish(self, out: Output) -> Any:
                yield 7

        if method != "finish":
            del Later.finish
        flow = Flow("f")
        flow.from_items([7]).event_time(lambda record: record, unit="ms").key_by(lambda record: record).process(Later)
        given = "a generator, of a method with yield" if method == "finish" else "[]"
        assert f"records to return None, given {given}; write out.emit(record)" in str(await failure_of(flow))

    async def test_an_error_shows_a_record_whose_values_cannot_be_asked(self) -> None:
        """A scalar of another library, which has no item(), hid the error of the step behind one of its own."""

        class Scalar:
            shape = ()

        flow = Flow("f")
        flow.from_items([{"km": Scalar()}]).map(lambda record: record["miles"])
        assert "KeyError: 'miles'" in str(await failure_of(flow))

    async def test_a_failure_whose_text_fails_is_no_abort(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The text of an error failed, and the run returned as if all was well."""
        monkeypatch.setattr("streamiter.engine.tasks.failures._place", lambda failure: failure.no_such_thing)
        flow = Flow("f")
        flow.from_items([1]).map(lambda one: 1 // 0)
        job = await flow.start()
        with pytest.raises(InternalError, match="no_such_thing"):
            await job.wait()
        assert job.statistics().state == "failed"

    @pytest.mark.parametrize("count", [1, 2])
    async def test_a_coroutine_is_no_record(self, count: int) -> None:
        """A lambda around a call of a client gave coroutines, which later steps took for records."""
        flow = Flow("f")
        flow.from_items([0.0] * count).map(lambda seconds: asyncio.sleep(seconds)).collect()
        assert "given one that returns a coroutine; write .map_async(f)" in str(await failure_of(flow))

    async def test_a_source_must_give_source_batches(self) -> None:
        """A source without positions was accepted, and could not be restored."""

        class Lists(Source):
            def read(self) -> Any:
                return [1, 2]

        flow = Flow("f")
        flow.from_source(Lists, name="in")
        error = await failure_of(flow)
        assert "Lists.read: expected a SourceBatch, or None at the end, given [1, 2]" in str(error)

    async def test_rejected_indices_must_be_of_the_batch(self) -> None:
        """Index 5 in a batch of two, a sign of another error, was ignored."""

        def check(batch: Any) -> Any:
            raise RejectRecords([5], "too large")

        flow = Flow("f")
        flow.from_items([1, 2]).map_batch(check, name="check", on_error="skip")
        error = await failure_of(flow)
        assert "expected indices of a batch of 2, given (5,); the reason was: too large" in str(error)
        assert isinstance(error.__cause__, ConfigurationError)

    async def test_a_rejected_record_without_a_policy_fails_with_the_reason(self) -> None:
        """A rejected record without a policy failed without its reason, for batches or for single records."""

        class Strict(Operator):
            def process(self, record: Any, out: Output) -> None:
                raise RejectRecords([0], "too old")

        def strict(batch: Any) -> Any:
            raise RejectRecords([1], "too old")

        for build, record in (
            (lambda s: s.process(Strict, name="step"), 7),
            (lambda s: s.map_batch(strict, name="step"), 8),
        ):
            flow = Flow("f")
            build(flow.from_items([7, 8]))
            error = await failure_of(flow)
            assert f"on record {record}: too old" in str(error)
            assert isinstance(error.__cause__, RejectRecords)


class TestCancellationByOthers:
    """Asyncio silently drops a task with a CancelledError that no caller has requested, and the job stalled."""

    async def test_in_a_step(self) -> None:
        """An HTTP client that was closed cancelled the calls that waited for it, and the job stalled."""

        class Cancelled(Operator):
            async def process(self, record: Any, out: Output) -> None:
                raise asyncio.CancelledError

        flow = Flow("f")
        flow.from_items([1]).process(Cancelled, name="ask")
        error = await failure_of(flow)
        assert error.step == "ask"
        assert "was cancelled, although the job was not stopped" in str(error)

    async def test_in_a_source(self) -> None:
        """A source was cancelled while it read, and the job stalled."""

        class Cancelled(Source):
            async def read(self) -> SourceBatch:
                raise asyncio.CancelledError

        flow = Flow("f")
        flow.from_source(Cancelled, name="in")
        assert (await failure_of(flow)).step == "in"

    async def test_while_opening(self) -> None:
        """The job continued with a step that was not open."""

        class Cancelled(Operator):
            async def open(self, context: Context) -> None:
                raise asyncio.CancelledError

            def process(self, record: Any, out: Output) -> None: ...

        flow = Flow("f")
        flow.from_items([1]).process(Cancelled, name="ask")
        assert (await failure_of(flow)).step == "ask"


async def test_a_failure_ends_a_job_that_is_blocked_and_waiting_elsewhere() -> None:
    """One step waited for room, another for a server without an answer, and both stayed when a third one failed."""
    closed = asyncio.Event()
    life = Life()
    flow = Flow("f")
    numbers = endless(flow, life)
    numbers.process(lambda: Valve(closed), name="stuck")
    numbers.process(lambda: AwaitedProbe(life, "other", ""), name="other").map(lambda x: 1 // (x - 2), name="bad")
    error = await failure_of(flow, channel_limits=ChannelLimits(records=3))
    # The valve never opens, so the source is blocked after some records; "bad" has received them already.
    assert error.step == "bad"


async def test_a_failure_does_not_interrupt_a_step_that_closes() -> None:
    """A bounded topic's reader was closing when the model failed, and its connections stayed open."""
    life = Life()
    is_closing = asyncio.Event()

    class SlowToClose(Source):
        def read(self) -> SourceBatch | None:
            return None

        async def close(self) -> None:
            is_closing.set()
            await turns(5)
            life.note("closed")

    class FailsMeanwhile(Source):
        async def read(self) -> SourceBatch | None:
            await is_closing.wait()
            raise ValueError("cannot go on")

    flow = Flow("f")
    flow.from_source(SlowToClose, name="bounded").map(lambda x: x)
    flow.from_source(FailsMeanwhile, name="failing").map(lambda x: x)
    assert "cannot go on" in str(await failure_of(flow))
    assert life.noted == ["closed"]


async def test_a_bug_in_the_engine_is_an_internal_error() -> None:
    """An error that no user can cause named a step of the user."""
    flow = Flow("f")
    flow.from_items([1])
    job = await flow.start()
    job._tasks[0].inbox.poll = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(InternalError, match="ZeroDivisionError: division by zero; please report this"):
        await job.wait()
    assert tasks_left() == []


async def test_a_cancelled_start_closes_all_opened_steps() -> None:
    """A service that was shut down while it connected left its steps open."""
    life = Life()

    class Hangs(Probe):
        async def open(self, context: Context) -> None:  # type: ignore[override]
            self._at("open")
            await asyncio.Event().wait()

    flow = Flow("f")
    flow.from_items([1]).process(lambda: Hangs(life, "hangs")).rebalance().process(lambda: AwaitedProbe(life, "other"))
    starting = asyncio.create_task(flow.start())
    await turns()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert life.count("hangs open") == 1
    assert life.opened_but_not_closed_once() == []
    assert tasks_left() == []


async def test_a_failed_job_without_a_waiting_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The engine suppressed the error that asyncio logs when a failed job is deleted."""
    flow = Flow("f")
    flow.from_items([1]).map(lambda x: x / 0)
    job = await flow.start()
    await turns()
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        del job
        gc.collect()
    assert "JobFailed" in caplog.text


def test_a_step_that_exits_the_program_closes_the_others() -> None:
    """``sys.exit`` in a function of a user left files and connections of all other steps open."""
    life = Life()

    class Exits(Operator):
        def process(self, record: int, out: Output) -> None:
            raise SystemExit(3)

    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).process(Exits)
    flow.from_source(lambda: ProbeSource(Life())).process(lambda: AwaitedProbe(life, "other"))
    with pytest.raises(SystemExit):
        flow.run()
    assert life.count("other close") == 1
    assert life.opened_but_not_closed_once() == []


@pytest.mark.parametrize("said", ["flow 'f': no disk", "flow 'f', checkpoint 3: no disk"])
@pytest.mark.parametrize("process", [None, 1])
def test_the_error_of_a_job_names_the_flow_once(said: str, process: int | None) -> None:
    """An error "flow 'f', step 'sum': flow 'f', checkpoint 3" was read as two flows, one inside of the other."""
    failures = Failures("f", {}, None, process)
    in_step = RecordFailure("sum")
    in_step.__cause__ = CheckpointError(said)
    for failure in (CheckpointError(said), in_step):
        error = failures.error_of(failure)
        assert str(error).count("flow 'f'") == 1
        assert str(error).endswith(": no disk")
        assert str(error.__cause__) == said
