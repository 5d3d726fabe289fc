"""A step that fails: one clear error, no running task, every step closed once."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest
from runtime.probe import AwaitedProbe, Life, Probe, ProbeSource, ThreadProbe, Valve, failure_of, tasks_left, turns

from streamiter import Flow, Operator, connect
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.states.backends import MemoryStates
from streamiter.engine.tasks.failures import Failures, RecordFailure
from streamiter.errors import CheckpointError, InternalError, JobFailed
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
        assert place != "open" or life.count("before process") == 0

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


class TestWrongOperators:
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

    async def test_a_failure_whose_text_fails_is_no_abort(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The text of an error failed, and the run returned as if all was well."""
        monkeypatch.setattr("streamiter.engine.tasks.failures._place", lambda failure: failure.no_such_thing)
        flow = Flow("f")
        flow.from_items([1]).map(lambda one: 1 // 0)
        job = await flow.start()
        with pytest.raises(InternalError, match="no_such_thing"):
            await job.wait()
        assert job.statistics().state == "failed"


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
