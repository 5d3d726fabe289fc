"""A flow in real processes of this machine: results, errors, losses and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from processes import flows_on_hosts
from runtime import checkpointed_sums
from support.fork_server import FORKS_PROCESSES, Forked
from support.processes import AsyncForked, process
from support.waiting import PATIENCE_S, until
from topics.topic_case import write

from streamiter import Checkpoints, Flow, LocalProcesses, Ray, topic
from streamiter.cli.run import run_flow
from streamiter.engine.job.running import run_in_own_loop, without_figures
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.processes.host import LossLimits, PlainOptions, ProcessSettings
from streamiter.engine.processes.link import Address
from streamiter.engine.processes.silence import ProcessLook
from streamiter.engine.processes.supervisor import Attempt, Supervisor, run_supervised
from streamiter.errors import ConfigurationError, GraphError, JobFailed, ProcessLost
from streamiter.flow.flow import Processes
from streamiter.testing import VirtualClock
from streamiter.topics import OutgoingBatch, Topic

PROGRAM = Path(flows_on_hosts.__file__)
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

NOTHING_IS_KEPT = "a signal has stopped it.* no positions are kept, .*: the next run begins where its sources start"


async def _started(*command: str, **options: Any) -> AsyncForked:
    return await AsyncForked.start(Forked(command, **options))


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a flow be forks, where their start is not the subject: half a second each."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _started)


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")


@pytest.mark.parametrize("processes", [1, 3])
def test_the_results_are_those_of_one_process(processes: int) -> None:
    """A flow in several processes printed nothing: its collected records stayed in another process."""
    statistics = flows_on_hosts.squares.run(
        on=LocalProcesses(processes), channel_limits=ChannelLimits(records=16), stall_after_s=30
    )
    assert sorted(flows_on_hosts.collected.items) == sorted(str(number * number) for number in range(200))
    assert (statistics.state, statistics.step("texts").records_in) == ("finished", 200)
    tasks = [task.name for task in statistics.tasks]
    assert tasks[:3] == ["items[0]", "items[1]", "items[2]"]
    assert len(tasks) == len(set(tasks))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_a_slow_process_slows_down_the_others_instead_of_filling_their_memory(tmp_path: Path) -> None:
    """One machine was slower than the others; their memory held all that it had not read, until they were killed."""
    limits = ChannelLimits(records=16, size_bytes=1_000_000)
    statistics = flows_on_hosts.overloaded.run(
        on=LocalProcesses(2), channel_limits=limits, checkpoints=Checkpoints(tmp_path, interval_s=0.1)
    )
    numbers, waited_s = range(flows_on_hosts.LARGE_RECORDS), flows_on_hosts.LARGE_RECORDS / 2 * 0.002
    assert sorted(flows_on_hosts.sums.items) == [sum(numbers[::2]), sum(numbers[1::2])]
    assert statistics.checkpoints is not None
    assert statistics.checkpoints.taken > 2
    tasks = {task.name: task for task in statistics.tasks}
    source, slow = tasks["large[0]"], tasks["sum[1]"]
    assert (source.process, slow.process) == (0, 1)
    assert source.blocked_s > waited_s / 2
    assert slow.blocked_s == 0
    assert slow.busy_s > waited_s / 2  # A busy machine takes longer.
    [channel] = [each for each in source.outputs if each.name.endswith("sum[1]")]
    assert channel.total_bytes > 30 * limits.size_bytes
    assert channel.peak_records <= limits.records * 8
    assert channel.peak_bytes <= limits.size_bytes
    [grown_mb] = flows_on_hosts.growth.items
    assert grown_mb < 10


@pytest.mark.usefixtures("forks")
def test_a_finished_flow_reads_on_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process knew what the others would read, so a nightly flow read nothing from its second night on."""
    monkeypatch.setenv(flows_on_hosts.NIGHTLY, str(tmp_path / "topics.db"))
    numbers, sums = (topic(f"sqlite:///{tmp_path}/topics.db?topic={name}") for name in ("numbers", "sums"))
    asyncio.run(numbers.create(partitions=2))
    asyncio.run(sums.create())
    for values in (range(4), range(4, 8)):
        asyncio.run(write_numbers(numbers, values))
        on = LocalProcesses(2, flow=f"{PROGRAM}:nightly")
        flows_on_hosts.nightly().run(on=on, checkpoints=Checkpoints(tmp_path / "kept"))
    assert sorted(asyncio.run(checkpointed_sums.written(sums))) == sorted(checkpointed_sums.expected(8))


async def write_numbers(numbers: Topic, values: range) -> None:
    await write(numbers, OutgoingBatch([b"%d" % value for value in values], keys=[b"%d" % (n % 2) for n in values]))


@pytest.mark.usefixtures("forks")
def test_a_learner_of_one_subtask_is_in_the_first_process_and_the_steps_around_it_in_all() -> None:
    """A learner with one owner was thought to need one process, and features were made on one core."""
    statistics = flows_on_hosts.around.run(on=LocalProcesses(2))
    processes = {task.name: task.process for task in statistics.tasks}
    expected = {"before[0]": 0, "before[1]": 1, "learn[0]": 0, "after[0]": 0, "after[1]": 1}
    assert {name: processes[name] for name in expected} == expected
    assert flows_on_hosts.validated.items[-1]["count"] == 200


@pytest.mark.usefixtures("forks")
def test_an_error_of_a_step_is_raised_as_in_one_process() -> None:
    """The user saw that a process was lost, but neither the step, nor the record, nor the line of the function."""
    with pytest.raises(JobFailed, match=r"on record 57, in process [01]: ZeroDivisionError") as raised:
        flows_on_hosts.failing.run(on=LocalProcesses(2))
    assert raised.value.step == "divide"
    assert raised.value.__cause__ is not None
    assert 'name="divide"' in raised.value.__cause__.__notes__[0]  # the line of the user


class LetsGoOn(logging.Handler):
    """Makes the file of each step that a message names, so that the step goes on; of both if no message comes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.guard = threading.Timer(PATIENCE_S, self.let_go_on, [("hold", "wait")])

    def emit(self, record: logging.LogRecord) -> None:
        self.let_go_on(re.findall(r"step '(\w+)' holds", record.getMessage()))

    def let_go_on(self, steps: Iterable[str]) -> None:
        for step in steps:
            (self.folder / step).touch()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a silent process works")
@pytest.mark.usefixtures("forks")
def test_a_step_that_holds_the_lock_of_python_runs_as_in_one_process(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sort of a long list took 6 s, or a function in C waited for a device, and the process was taken for lost, at
    each restart again.
    """
    monkeypatch.setenv(flows_on_hosts.TOLD, str(tmp_path))
    lets_go_on = LetsGoOn(tmp_path)
    monkeypatch.setattr(logging.getLogger("streamiter.processes"), "handlers", [lets_go_on])
    lets_go_on.guard.start()
    try:
        flows_on_hosts.busy.run(on=LocalProcesses(2, silence_s=1))
    finally:
        lets_go_on.guard.cancel()
    assert sorted(flows_on_hosts.held.items) == list(range(8))
    for step in ("hold", "wait"):
        told = f"has given no sign of life for 1 s, but it exists: step '{step}' holds Python's lock"
        assert caplog.text.count(told) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whether a silent process works")
@pytest.mark.usefixtures("forks")
def test_the_silence_of_a_step_that_hangs_names_the_step() -> None:
    """The error said that a process was silent, and the user had to guess which of twelve steps hung."""
    expected = r"has held Python's lock for \d[.\d]* s while step 'hang' ran; give lock_s= above 1.5, or leave it out"
    with pytest.raises(ProcessLost, match=expected):
        flows_on_hosts.hanging.run(on=LocalProcesses(2, silence_s=1, lock_s=timedelta(seconds=1.5)))


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("leaving", [flows_on_hosts.leaving, flows_on_hosts.leaving_later], ids=["map", "map_async"])
def test_a_step_that_exits_names_step_and_line(leaving: Flow) -> None:
    """A library called ``sys.exit``, and the process was lost with exit code 7, at each restart again."""
    with pytest.raises(
        JobFailed, match=r"step 'leave' \(.*given sys.exit\(7\) in flows_on_hosts.py:\d+, which"
    ) as raised:
        leaving.run(on=LocalProcesses(2))
    assert raised.value.step == "leave"


def test_a_breakpoint_says_how_to_debug_and_lines_of_the_log_keep_the_number_of_their_process() -> None:
    """``breakpoint()`` ended with BdbQuit, and after ``logging.basicConfig`` no line named its process."""
    command = [sys.executable, "-m", "streamiter", "run", f"{PROGRAM}:debugged", "--processes", "2"]
    with process(command, is_forked=True, env=os.environ | FORKS_PROCESSES, **PIPES) as started:
        _, errors = started.communicate()
    assert "step 'debug'" in errors
    assert "run the flow in one process to debug it: flow.run() without on=" in errors
    assert re.search(r"^process [01]: WARNING debugged record 3\nprocess [01]: of 8$", errors, re.MULTILINE)


@pytest.mark.usefixtures("forks")
def test_processes_with_different_flows_name_the_first_different_step() -> None:
    """A name of a step was made of the time, so each process had another flow, and records had no reader."""
    with pytest.raises(GraphError, match=r"expected step 'texts of \d+' as in process 0, given step 'texts of \d+'"):
        flows_on_hosts.unlike.run(on=LocalProcesses(2))


@pytest.mark.usefixtures("forks")
def test_a_flow_that_no_other_process_can_import_is_refused() -> None:
    """A flow that was made in a function had no name; the error must say how to write it."""
    with pytest.raises(ConfigurationError, match=r"name at the top level of a module.*flow=.*:make_flow"):
        flows_on_hosts.made().run(on=LocalProcesses(2))
    flow = flows_on_hosts.made()
    assert flow.run(on=LocalProcesses(2, flow="processes.flows_on_hosts:made")).step("map").records_in == 4


async def test_options_that_are_not_plain_data_are_refused() -> None:
    """A callback was silently called in no process, or in all."""
    flow = flows_on_hosts.made()
    reference = LocalProcesses(2, flow="processes.flows_on_hosts:made")
    with pytest.raises(ConfigurationError, match="given on_rejected=; leave it out"):
        await reference._run_flow(flow, {"on_rejected": print}, "suspend", without_figures)
    with pytest.raises(ConfigurationError, match=r"asyncio.to_thread\(flow.run, on=…\)"):
        await flow.start(on=reference)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on", "url", "expected"),
    [
        (LocalProcesses(2), "memory://clicks", "processes share .* of kafka://, or of sqlite://"),
        (Ray(2), "memory://clicks", "processes share .* of kafka://, or of sqlite://"),
        (Ray(2, address="auto"), "sqlite:///clicks.db?topic=clicks", "machines share .* use a topic of kafka:// "),
    ],
)
@pytest.mark.parametrize("reads", [True, False])
def test_topics_that_the_processes_do_not_share_are_refused(
    on: Processes, url: str, expected: str, reads: bool
) -> None:
    """Each process wrote to a topic of its own, and the user's topic stayed empty."""
    flow = Flow("f", parallelism=2)
    if reads:
        flow.source(topic(url), name="ends").collect()
    else:
        flow.from_items([1]).sink(topic(url), name="ends")
    with pytest.raises(GraphError, match=rf"step 'ends': expected a topic that all {expected}.*{Path(__file__).name}"):
        run_in_own_loop(run_flow(flow, "suspend", {}, on))  # as the command does


def test_a_program_without_a_guard_starts_no_further_processes() -> None:
    """Each process ran the program, which started processes, and so on until the machine stood still."""
    with process(
        [sys.executable, PROGRAM, "without a guard"], is_forked=True, env=os.environ | FORKS_PROCESSES, **PIPES
    ) as started:
        _, errors = started.communicate()
    assert started.returncode == 1
    assert 'put it behind: if __name__ == "__main__":' in errors


def test_the_command_runs_a_flow_in_several_processes() -> None:
    """The command and the program must not differ in what they can run."""
    command = [sys.executable, "-m", "streamiter", "run", f"{PROGRAM}:made", "--processes", "2"]
    command += ["--silence-s", "30", "--lock-s", "60", "--losses-max", "0", "--losses-within-s", "60"]
    with process(command, is_forked=True, env=os.environ | FORKS_PROCESSES, **PIPES) as started:
        out, errors = started.communicate()
    assert (started.returncode, out) == (0, "")
    assert re.fullmatch(r"made: finished, [\d.]+ s, 4 records read\n", errors)


@pytest.mark.parametrize("host", [LocalProcesses, Ray])
def test_limits_of_losses_are_checked(host: type[LocalProcesses | Ray]) -> None:
    """A limit of 0 s made a loss of each process, and a text failed in the supervisor."""
    assert host(2, silence_s=30, losses_max=0).losses_within_s == 600
    wrong = {"silence_s": 0, "lock_s": 0, "losses_max": -1, "losses_within_s": "1 h"}
    for option, value in wrong.items():
        with pytest.raises(ConfigurationError, match=f"{host.__name__}: {option}: expected a .*given {value!r}"):
            host(2, **{option: value})  # type: ignore[arg-type]


@contextmanager
def endless(flow: str = "endless", silence_s: float = 5) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run an endless flow in two processes, all of them forks; give the program, and the two, which have records."""
    command, environment = [sys.executable, PROGRAM, flow, "2", f"{silence_s}"], os.environ | FORKS_PROCESSES
    with process(command, is_forked=True, env=environment, **PIPES) as started:
        yield started, [int(started.stdout.readline()) for _ in range(2)]


async def all_end(numbers: list[int]) -> None:
    def is_running(number: int) -> bool:
        asked = ["ps", "-o", "stat=", "-p", str(number)]
        state = subprocess.run(asked, capture_output=True, check=False, text=True, timeout=PATIENCE_S)
        return bool(state.stdout.strip()) and not state.stdout.startswith("Z")

    await until(lambda: not any(map(is_running, numbers)))


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "it was killed by signal 9"), (signal.SIGSTOP, "it has given no sign of life for 2 s")],
)
async def test_a_lost_process_ends_the_run_with_an_error(number: signal.Signals, reason: str) -> None:
    """The system killed a process for its memory, and the others waited for its records for ever."""
    with endless(silence_s=2 if number == signal.SIGSTOP else 5) as (started, numbers):
        os.kill(numbers[1], number)
        _, errors = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 1
    last = errors.splitlines()[-1]
    assert "flow 'endless': process " in last
    assert f"of 2 was lost: {reason}" in last
    assert "With checkpoints= it would resume by itself" in last
    await all_end(numbers)


async def test_processes_end_when_their_program_is_killed() -> None:
    """A program was killed, its processes ran on, and wrote next to those of the next start."""
    with endless() as (started, numbers):
        started.kill()
        await all_end(numbers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_suspends_the_flow_in_all_processes(number: signal.Signals) -> None:
    """Ctrl-C killed the processes, while the program waited for them."""
    with endless() as (started, numbers):
        started.send_signal(number)
        out, errors = started.communicate(timeout=PATIENCE_S)
    assert (out, started.returncode) == ("suspended\n", 0)
    assert re.fullmatch(rf"flow 'endless': {NOTHING_IS_KEPT}\n", errors)
    await all_end(numbers)


async def test_a_second_signal_aborts_the_flow_in_all_processes() -> None:
    """A call of a server did not return, and the flow could only be killed."""
    with endless("waiting") as (started, numbers):
        started.send_signal(signal.SIGINT)
        started.send_signal(signal.SIGTERM)
        out, errors = started.communicate(timeout=PATIENCE_S)
    assert (out, errors, started.returncode) == ("aborted\n", "", 0)
    await all_end(numbers)


class DyingProcesses:
    """A host whose processes end at their start; it has room for nine attempts, and waits for room before each."""

    def __init__(self, folder: Path, clock: VirtualClock | None = None, every_s: float = 0.0) -> None:
        self.folder = folder
        self.clock = clock
        self.every_s = every_s
        self.attempts: list[int] = []

    async def room(self) -> int:
        if len(self.attempts) == 2 * 9:
            raise ConfigurationError("no room")
        if self.clock is not None:
            await self.clock.advance(self.every_s)
        return 2

    def address(self, name: str) -> Address:
        return str(self.folder / name)

    async def start(self, settings: ProcessSettings) -> DyingProcesses:
        self.attempts.append(settings.attempt)
        return self

    def kill(self) -> None:
        pass

    async def look(self, process: int, note: int) -> ProcessLook | None:
        return None

    async def ended(self) -> str:
        await asyncio.sleep(0)
        return "it has ended with exit code 7"


async def test_with_checkpoints_a_run_starts_again_three_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that the system killed at each start was started for ever, and nobody was told."""
    flow = Flow("f", parallelism=2)
    flow.from_items([1]).collect()
    host = DyingProcesses(tmp_path)
    options = {"checkpoints": Checkpoints(tmp_path)}
    with pytest.raises(
        ProcessLost, match="exit code 7; expected at most losses_max=3 losses in 10 minutes, given one more"
    ):
        await run_supervised(flow, "m:f", host, options, "suspend")
    assert host.attempts == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(caplog.messages) == 3


async def test_three_losses_are_counted_within_ten_minutes(tmp_path: Path) -> None:
    """A flow that ran for months ended at its fourth loss."""
    clock = VirtualClock()
    for every_s, attempts, expected in ((199.0, 4, ProcessLost), (201.0, 9, ConfigurationError)):
        host = DyingProcesses(tmp_path, clock, every_s)
        options = PlainOptions.of("f", {"checkpoints": Checkpoints(tmp_path)})
        supervisor = Supervisor("f", "m:f", host, options, lambda placement: None, clock)
        with pytest.raises(expected):
            await supervisor.run()
        assert max(host.attempts) == attempts - 1


class BusyProcesses(DyingProcesses):
    """Processes that connect, and then hold Python's lock for ever."""

    async def look(self, process: int, note: int) -> ProcessLook:
        return ProcessLook(is_stopped=False, step="hang")


async def test_a_limit_of_the_lock_is_looked_at_when_it_is_over(tmp_path: Path) -> None:
    """A limit of 31 s was looked at every 30 s, so a step that hung was noticed after a minute."""
    clock = VirtualClock()
    host, limits = BusyProcesses(tmp_path), LossLimits(silence_s=30.0, lock_s=31.0)
    supervisor = Supervisor("f", "m:f", host, PlainOptions(), lambda placement: None, clock, limits=limits)
    attempt = Attempt("f", host, supervisor._settings, [], lambda placement: None, clock)
    attempt._hosted[0], attempt._links[0] = host, attempt._new_link()
    attempt._notes[0] = (1, 1)
    attempt._hear(0)
    looking = asyncio.create_task(attempt._look_for_silence())
    while attempt.loss is None and clock.monotonic_s() < 90:
        await clock.advance(0.5)
    looking.cancel()
    assert attempt.loss is not None
    assert "a function has held Python's lock for 31.5 s while step 'hang' ran" in attempt.loss.reason


class ConnectedProcesses(DyingProcesses):
    """Processes that have connected when they end, but have not said who they are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.connections: list[asyncio.StreamReader] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, settings: ProcessSettings) -> DyingProcesses:
        reader, writer = await asyncio.open_unix_connection(settings.supervisor)
        self.connections.append(reader)
        self._writers.append(writer)
        await reader.readexactly(10)  # The supervisor has accepted the connection.
        return await super().start(settings)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


async def test_no_connection_outlives_a_run(tmp_path: Path) -> None:
    """A process ended in the middle of the handshake; its connection stayed, and was an unclosed resource at the end
    of the program.
    """
    flow = Flow("f", parallelism=2)
    flow.from_items([1]).collect()
    host = ConnectedProcesses(tmp_path)
    with pytest.raises(ProcessLost, match="exit code 7"):
        await run_supervised(flow, "m:f", host, {}, "suspend")
    async with asyncio.timeout(PATIENCE_S):
        for connection in host.connections:
            await connection.read()  # until its end
    host.close()
