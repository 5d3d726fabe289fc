"""The supervisor of a run in several processes: it starts the processes of each attempt, and waits for their ends.

An error of a step ends the run. The *loss* of a process (its end, the end of a connection, silence) ends the attempt:
all its processes are ended, and with checkpoints the next attempt starts from the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import msgspec

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.graph.statistics import JobState, JobStatistics
from streamiter.engine.job.job import StopMode
from streamiter.engine.job.running import OnInterrupt, TooSlow, WhileRunning, stopping_on_signals, without_figures
from streamiter.engine.plan.placement import Placement
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.host import (
    DEFAULT_LIMITS,
    SUPERVISOR,
    Host,
    HostedProcess,
    LossLimits,
    PlainOptions,
    ProcessSettings,
)
from streamiter.engine.processes.link import Address, LinkError, ProcessLink, address_of, listen
from streamiter.engine.processes.process import identity_of
from streamiter.errors import GraphError, ProcessLost, StreamiterError, user_line
from streamiter.models.update import ModelSnapshot
from streamiter.operators.source import Collect, begin_collecting
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_errors import error_from_plain
from streamiter.values.times import in_seconds

_log = logging.getLogger("streamiter.processes")

# A start takes half a second, and much longer on a busy machine, or while a cluster copies files.
_START_S: Final = 60.0

# After an order to end, steps are closed; then the process is killed.
_END_S: Final = 5.0

# The host says how a process has ended a little later than its connections end.
_REASON_S: Final = 1.0

# A machine that does not say in this time whether a process works is most likely gone. Ray starts a process for the
# answer, which takes a second, and several on a busy machine.
_ANSWER_S: Final = 10.0

_LOOK_S: Final = 0.5
"""The interval between two looks for silent processes."""


class Loss(NamedTuple):
    """What has ended an attempt."""

    process: int
    """The number of the process."""
    reason: str
    """What is known of its end."""


CollectedPart = tuple[str, int, bytes]
"""What a subtask of ``stream.collect()`` has collected: the name of the step, the subtask, and its records encoded."""


async def run_supervised(
    flow: RunnableFlow,
    reference: str,
    host: Host,
    options: Mapping[str, Any],
    first: OnInterrupt,
    while_running: WhileRunning[Attempt] = without_figures,
    limits: LossLimits = DEFAULT_LIMITS,
) -> JobStatistics:
    """Run a flow in the processes of a host, with a supervisor in this event loop."""
    check = partial(Placement.check, flow=flow.name, steps=flow.steps)
    supervisor = Supervisor(flow.name, reference, host, PlainOptions.of(flow.name, options), check, limits=limits)
    with stopping_on_signals(supervisor.stop_on_signal, first=first, third=supervisor.kill):
        statistics = await supervisor.run(while_running)
    put_collected(flow, supervisor.collected)
    return statistics


def put_collected(flow: RunnableFlow, collected: Sequence[CollectedPart]) -> None:
    """Put the records of subtasks into the results of ``stream.collect()`` in this process."""
    flow.plain_data.register(ModelSnapshot)
    steps = {step.name: step for step in flow.steps}
    for name, subtask, items in collected:
        operator = steps[name].factory()
        assert isinstance(operator, Collect)
        begin_collecting(operator.into, subtask, steps[name].parallelism)[:] = flow.plain_data.decode(items)


@final
class Supervisor:
    """Runs a flow in the processes of a host. It has no objects of the flow, so it can be in any process."""

    def __init__(
        self,
        flow: str,
        reference: str,
        host: Host,
        options: PlainOptions,
        check: Callable[[Placement], None],
        clock: Clock | None = None,
        run: str | None = None,
        limits: LossLimits = DEFAULT_LIMITS,
    ) -> None:
        """``flow`` is its name; ``check`` raises an error for the placement of another flow; ``run`` is a new id."""
        self._flow = flow
        self._host = host
        self._check = check
        self._clock: Clock = SystemClock() if clock is None else clock
        self._settings = ProcessSettings(
            number=0,
            processes=0,
            run=run or uuid.uuid4().hex,
            attempt=0,
            secret=secrets.token_bytes(32),
            supervisor="",
            listen="",
            flow=reference,
            options=options,
            limits=limits,
        )
        self._stops: list[StopMode] = []
        self._attempt: Attempt | None = None
        self._lost_at_s: list[float] = []

    async def run(self, while_running: WhileRunning[Attempt] = without_figures) -> JobStatistics:
        """Run the flow to its end. Raises the error of the first process that fails, or ProcessLost.

        As in one process, the run resumes after a transaction that was open for too long.
        """
        too_slow = TooSlow()
        while True:
            self._settings = msgspec.structs.replace(self._settings, processes=await self._host.room())
            attempt = self._attempt = Attempt(
                self._flow, self._host, self._settings, self._stops, self._check, self._clock
            )
            try:
                async with while_running(attempt, self._stops):
                    loss = await attempt.run()
                if loss is None:
                    return attempt.statistics()
                self._check_restarts(loss, attempt)
            except StreamiterError as error:
                if self._stops or not too_slow.may_resume(error, attempt.statistics().checkpoints):
                    raise
            self._start_again(attempt)

    def _start_again(self, attempt: Attempt) -> None:
        options = self._settings.options
        if attempt.has_run:  # Its claim has cleared what the run was told not to restore.
            options = msgspec.structs.replace(options, restore="last")
            if options.checkpoints is None or options.checkpoints["store"] is None:
                # The positions where these sources begin are committed.
                options = msgspec.structs.replace(options, changed_steps=())
        self._settings = msgspec.structs.replace(self._settings, attempt=self._settings.attempt + 1, options=options)

    @property
    def collected(self) -> list[CollectedPart]:
        """The records that the last attempt has collected."""
        return [] if self._attempt is None else self._attempt.collected

    async def stop_on_signal(self, mode: StopMode) -> None:
        """Stop the job: process 0 stops all, as a signal stops its job; ``abort`` ends each process."""
        self._stops.append(mode)
        if self._attempt is not None:
            self._attempt.stop(mode)

    def kill(self) -> None:
        """End all processes at once."""
        if self._attempt is not None:
            self._attempt.kill()

    def _check_restarts(self, loss: Loss, attempt: Attempt) -> None:
        """Raise ProcessLost unless the run starts again after this loss."""
        what = f"flow {self._flow!r}: process {loss.process} of {self._settings.processes} was lost: {loss.reason}"
        limits, now_s = self._settings.limits, self._clock.monotonic_s()
        within_s = in_seconds(limits.losses_within_s)
        self._lost_at_s = [at_s for at_s in self._lost_at_s if now_s - at_s < within_s] + [now_s]
        if self._settings.options.checkpoints is None and not attempt.commits:
            raise ProcessLost(
                f"{what}; the results of this run are incomplete, so run the flow again. With checkpoints= it would "
                "resume by itself"
            )
        if self._stops:
            raise ProcessLost(f"{what}, while the run was being stopped; the next run resumes from the last checkpoint")
        if len(self._lost_at_s) > limits.losses_max:
            raise ProcessLost(
                f"{what}; expected at most losses_max={limits.losses_max} losses in {within_s / 60:g} "
                "minutes, given one more; find the cause, then run the flow again: it resumes from the last checkpoint"
            )
        _log.warning("%s; starting all processes again from the last checkpoint", what)


@final
class Attempt:
    """The processes of one attempt, and the talk with each (:mod:`~streamiter.engine.processes.process`)."""

    def __init__(
        self,
        flow: str,
        host: Host,
        settings: ProcessSettings,
        stops: list[StopMode],
        check: Callable[[Placement], None],
        clock: Clock,
    ) -> None:
        self._flow = flow
        self._check = check
        self._clock = clock
        self._host = host
        self._settings = settings
        self._stops = stops
        """The stops that were asked for, also of earlier attempts."""
        self._started_at_s = self._clock.monotonic_s()
        self._hosted: dict[int, HostedProcess] = {}
        self._accepted: set[ProcessLink] = set()
        """The links that have not ended: two of each process that has begun, and those in the handshake."""
        self._links: dict[int, ProcessLink] = {}
        """The link of each process that has begun."""
        self._ends: dict[int, asyncio.Task[str]] = {}
        """Each waits for the end of a process."""
        self._silent_at_s: dict[int, float] = {}
        """When a process is looked at, unless there is a sign of life before."""
        self._heard_at_s: dict[int, float] = {}
        """When each process gave its last sign of life."""
        self._told_busy: dict[int, str] = {}
        """What holds Python's lock in each silent process that exists, as the log says already."""
        self._notes: dict[int, tuple[int, int]] = {}
        """The id of each process on its machine, and where it notes the step that runs; only Linux has both."""
        self._placement: bytes | None = None
        self.collected: list[CollectedPart] = []
        self._addresses: dict[int, Address] = {}
        self._statistics: JobStatistics | None = None
        """The last that process 0 has told."""
        self._finished: set[int] = set()
        """The processes whose followers have ended well, and which have told what they have collected."""
        self._error: BaseException | None = None
        self.loss: Loss | None = None
        """The first loss."""
        self.has_run = False
        """Whether the job has restored its state."""
        self.commits = False
        """Whether that job takes checkpoints, or commits positions."""
        self._farewell: str | None = None
        """The last message to each process, also to one that begins later."""
        self._is_over = asyncio.Event()
        """Set when all followers are done, or one has failed, or a process is lost."""

    # -- start and end ---------------------------------------------------------------------------------

    async def run(self) -> Loss | None:
        """Run the processes until all followers are done; return the first loss. Raises a process's first error."""
        server = await listen(self._host.address(f"s{self._settings.attempt}"), self._new_link)
        looking = asyncio.create_task(self._look_for_silence(), name="silence of processes")
        try:
            await self._start(address_of(server))
            await self._is_over.wait()
            if self.loss is not None:
                self.loss = await self._explained(self.loss)
            await self._end()
        finally:
            looking.cancel()
            self.kill()
            await asyncio.gather(*self._ends.values(), return_exceptions=True)
            server.close()
            for link in list(self._accepted):  # An actor may live on for a moment.
                link.abort("the attempt is over")
        if self._error is not None:
            raise self._error from self._error.__cause__
        return self.loss

    async def _start(self, address: Address) -> None:
        for number in range(self._settings.processes):
            given = self._host.address(f"{number}-{self._settings.attempt}")
            settings = msgspec.structs.replace(self._settings, number=number, supervisor=address, listen=given)
            process = self._hosted[number] = await self._host.start(settings)
            self._silent_at_s[number] = self._clock.monotonic_s() + _START_S
            self._ends[number] = asyncio.create_task(process.ended(), name=f"end of process {number}")
            self._ends[number].add_done_callback(partial(self._has_ended, number))

    def _has_ended(self, number: int, end: asyncio.Task[str]) -> None:
        if not end.cancelled():
            error = end.exception()
            self._lose(number, end.result() if error is None else f"{type(error).__name__}: {error}")

    async def _end(self) -> None:
        """Let all processes end; they are killed if they do not."""
        self._farewell = "end" if len(self._finished) == self._settings.processes else "abort"
        for link in self._links.values():
            link.send_message([self._farewell])
        await asyncio.wait(self._ends.values(), timeout=_END_S)

    def statistics(self) -> JobStatistics:
        """Return the statistics of the job, at most a second old while it runs."""
        if self._statistics is None:
            state: JobState = "aborted" if self._is_over.is_set() else "running"
            return JobStatistics(self._flow, state, self._clock.monotonic_s() - self._started_at_s, (), ())
        if self._is_over.is_set() and self._statistics.state == "running":  # It was killed.
            return replace(self._statistics, state="aborted")
        return self._statistics

    # -- losses ----------------------------------------------------------------------------------------

    async def _explained(self, loss: Loss) -> Loss:
        """Return a loss with the reason that the host gives, if the process has ended; else kill the process."""
        end = self._ends[loss.process]
        await asyncio.wait([end], timeout=_REASON_S)
        if end.done() and end.exception() is None:
            return Loss(loss.process, end.result())
        self._hosted[loss.process].kill()
        return loss

    def _lose(self, number: int, reason: str) -> None:
        if not self._is_over.is_set():
            if "abort" not in self._stops:
                self.loss = Loss(number, reason)
            self._is_over.set()

    async def _look_for_silence(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_S)
            now_s = self._clock.monotonic_s()
            silent = [number for number, silent_at_s in self._silent_at_s.items() if now_s > silent_at_s]
            await asyncio.gather(*map(self._judge, silent))

    async def _judge(self, number: int) -> None:
        """Lose a silent process, unless its machine says that it can run, and it may hold Python's lock for so long."""
        silent_at_s, limits = self._silent_at_s[number], self._settings.limits
        if number not in self._links:
            self._lose(number, f"it has given no sign of life for {_START_S:g} s")
            return
        place, look = self._notes.get(number), None
        if place is not None:
            with contextlib.suppress(TimeoutError):
                look = await asyncio.wait_for(self._hosted[number].look(*place), _ANSWER_S)
        if self._silent_at_s[number] != silent_at_s:  # It has given a sign meanwhile.
            return
        now_s = self._clock.monotonic_s()
        silent_s = now_s - self._heard_at_s[number]
        reason = f"it has given no sign of life for {in_seconds(limits.silence_s):g} s"
        step = f" while step {look.step!r} ran" if look is not None and look.step else ""
        if look is None or look.is_stopped:
            stopped = "" if look is None else ": a signal has stopped it"
            remedy = "; give silence_s= if a step may hold Python's lock for longer" if place is None else ""
            self._lose(number, f"{reason}{step}{stopped}{remedy}")
        elif limits.lock_s is not None and silent_s > in_seconds(limits.lock_s):
            reason = f"a function has held Python's lock for {silent_s:.3g} s{step}"
            self._lose(number, f"{reason}; give lock_s= above {in_seconds(limits.lock_s):g}, or leave it out")
        else:
            rest_s = in_seconds(limits.silence_s)
            if limits.lock_s is not None:  # Else a lock_s a little above silence_s would act after twice that time.
                rest_s = min(rest_s, in_seconds(limits.lock_s) - silent_s)
            self._silent_at_s[number] = now_s + rest_s
            holds = f"step {look.step!r}" if look.step else "a function"
            if self._told_busy.get(number) != holds:
                self._told_busy[number] = holds
                told = "flow %r: process %d: %s, but it exists: %s holds Python's lock"
                _log.warning(told, self._flow, number, reason, holds)

    # -- the conversation ------------------------------------------------------------------------------

    def stop(self, mode: StopMode) -> None:
        """Stop the job."""
        if mode == "abort":
            asyncio.get_running_loop().call_later(_END_S, self.kill)
        for number, link in self._links.items():
            self._tell_stop(number, link, mode)

    def kill(self) -> None:
        """End all processes at once."""
        self._is_over.set()
        for process in self._hosted.values():
            process.kill()

    def _tell_stop(self, number: int, link: ProcessLink, mode: StopMode) -> None:
        if number == 0 or mode == "abort":
            link.send_message(["stop", mode])

    def _new_link(self) -> ProcessLink:
        identity = identity_of(self._settings, SUPERVISOR)
        link = ProcessLink(identity, self, FrameEncoding(PlainData()), self._clock)
        self._accepted.add(link)
        return link

    def opened(self, link: ProcessLink) -> None:
        """Refuse a link of a process that was not started."""
        if link.peer not in range(self._settings.processes):
            link.abort(f"expected one of {self._settings.processes} processes, given process {link.peer}")

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """Lose the process, unless the run is over, or a stranger has connected."""
        self._accepted.discard(link)
        if error is not None and link in self._links.values():
            assert link.peer is not None
            self._lose(link.peer, str(error))

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """Handle a message of a process."""
        number = link.peer
        assert number is not None
        match message:
            case ["alive"]:
                self._hear(number)
                link.send_message(["alive"])
            case ["began", note]:
                self._links[number] = link
                if note is not None:
                    self._notes[number] = (note[0], note[1])
                self._hear(number)
                for mode in self._stops:
                    self._tell_stop(number, link, mode)
                self._tell_placement(number)
                if self._farewell is not None:
                    link.send_message([self._farewell])
            case ["runs", bool(commits)]:
                self.has_run, self.commits = True, commits
            case ["statistics", bytes(statistics)]:
                self._told(statistics)
            case ["placed", bytes(placement)]:
                self._placed(placement)
            case ["listens", address]:
                self._addresses[number] = address
                if len(self._addresses) == self._settings.processes:
                    addresses = [self._addresses[each] for each in sorted(self._addresses)]
                    for each in self._links.values():
                        each.send_message(["connect", addresses])
            case ["lost", int(other), str(reason)]:
                self._lose(other, reason)
            case ["collected", str(step), int(subtask), bytes(items)]:
                self.collected.append((step, subtask, items))
            case ["finished", statistics]:
                self._told(statistics)
                self._finished.add(number)
                if len(self._finished) == self._settings.processes:
                    self._is_over.set()
            case ["failed", error, statistics]:
                self._told(statistics)
                self._fail(error_from_plain(error))

    def _hear(self, number: int) -> None:
        self._told_busy.pop(number, None)
        self._heard_at_s[number] = now_s = self._clock.monotonic_s()
        self._silent_at_s[number] = now_s + in_seconds(self._settings.limits.silence_s)

    def _told(self, statistics: bytes | None) -> None:
        if statistics is not None:
            self._statistics = msgspec.msgpack.decode(statistics, type=JobStatistics)

    def _placed(self, placement: bytes) -> None:
        """Check that the processes run the flow of this program, and give all the placement of process 0."""
        try:
            self._check(msgspec.msgpack.decode(placement, type=Placement))
        except StreamiterError as error:
            self._fail(error)
            return
        self._placement = placement
        for number in self._links:
            self._tell_placement(number)

    def _tell_placement(self, number: int) -> None:
        if number and self._placement is not None:
            self._links[number].send_message(["place", self._placement])

    def _fail(self, error: BaseException) -> None:
        if self.loss is None and self._error is None:
            if isinstance(error, GraphError) and not error.where:
                error.where = user_line()
            self._error = error
            self._is_over.set()
