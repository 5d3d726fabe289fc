"""The supervisor of a run in several processes: it starts the processes of each attempt, and waits for their ends.

An error of a step ends the run. The *loss* of a process (its end, the end of a connection, silence) ends the attempt:
all its processes are ended, and with checkpoints the next attempt starts from the last one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple, final

import msgspec

from streamiter.clock import SystemClock
from streamiter.deferred import PlainValue
from streamiter.errors import StreamiterError
from streamiter.flow.flow import Flow
from streamiter.models.update import ModelSnapshot
from streamiter.processes.frames import FrameEncoding
from streamiter.processes.host import SILENCE_S, SUPERVISOR, Host, HostedProcess, PlainOptions, ProcessSettings
from streamiter.processes.link import Address, LinkError, ProcessLink, address_of, listen
from streamiter.processes.outcomes import Failure, merged, put_collected
from streamiter.processes.process import identity_of
from streamiter.runtime.job import StopMode
from streamiter.runtime.placement import Placement
from streamiter.runtime.running import OnInterrupt, stopping_on_signals
from streamiter.runtime.statistics import JobStatistics

_log = logging.getLogger("streamiter.processes")

# A start takes half a second, and much longer on a busy machine, or while a cluster copies files.
_START_S: Final = 60.0

# After an order to end, steps are closed; then the process is killed.
_END_S: Final = 5.0

# The host says how a process has ended a little later than its connections end.
_REASON_S: Final = 1.0

_LOOK_S: Final = 0.5
"""The interval between two looks for silent processes."""

# A loss that comes back has a cause that a restart does not remove. A machine that restarts takes a few minutes.
_RESTARTS_MAX: Final = 3
_RESTARTS_WITHIN_S: Final = 600.0


class ProcessLost(StreamiterError):
    """A process of the run has died, or was silent for too long."""


class _Loss(NamedTuple):
    process: int
    reason: str


@final
class Supervisor:
    """Runs a flow in the processes of a host."""

    def __init__(self, flow: Flow, reference: str, host: Host, processes: int, options: Mapping[str, Any]) -> None:
        flow.register(ModelSnapshot)  # It may be among the collected records.
        self._flow = flow
        self._host = host
        self._options = PlainOptions.of(flow.name, options)
        self._settings = ProcessSettings(
            number=0,
            processes=processes,
            run=uuid.uuid4().hex,
            attempt=0,
            secret=secrets.token_bytes(32),
            supervisor="",
            listen="",
            flow=reference,
            options=self._options,
        )
        self._stops: list[StopMode] = []
        self._attempt: _Attempt | None = None
        self._lost_at_s: list[float] = []

    async def run(self, first: OnInterrupt = "suspend") -> JobStatistics:
        """Run the flow to its end. Raises the error of the first process that fails, or ProcessLost."""
        with stopping_on_signals(self, first=first):
            while True:
                self._attempt = _Attempt(self._flow, self._host, self._settings, self._stops)
                loss = await self._attempt.run()
                if loss is None:
                    return self._attempt.statistics()
                self._check_restarts(loss)
                if self._attempt.has_run:  # Its claim has cleared what the run was told not to restore.
                    self._options = msgspec.structs.replace(self._options, restore="last")
                attempt = self._settings.attempt + 1
                self._settings = msgspec.structs.replace(self._settings, attempt=attempt, options=self._options)

    async def stop(self, mode: StopMode) -> None:
        """Stop the job: process 0 stops all; ``abort`` ends each process."""
        self._stops.append(mode)
        if self._attempt is not None:
            self._attempt.stop(mode)

    def _check_restarts(self, loss: _Loss) -> None:
        """Raise ProcessLost unless the run starts again after this loss."""
        what = f"flow {self._flow.name!r}: process {loss.process} of {self._settings.processes} was lost: {loss.reason}"
        now_s = time.monotonic()
        self._lost_at_s = [at_s for at_s in self._lost_at_s if now_s - at_s < _RESTARTS_WITHIN_S] + [now_s]
        if self._options.checkpoints is None:
            raise ProcessLost(
                f"{what}; the results of this run are incomplete, so run the flow again. With checkpoints= it would "
                "resume by itself"
            )
        if self._stops:
            raise ProcessLost(f"{what}, while the run was being stopped; the next run resumes from the last checkpoint")
        if self._options.changed_steps and self._attempt is not None and self._attempt.has_run:
            # The last checkpoint may be of this run, and then has the state of these steps.
            raise ProcessLost(
                f"{what}; a run with changed_steps= does not restart by itself; run the flow again, without "
                "changed_steps= if this run has taken a checkpoint"
            )
        if len(self._lost_at_s) > _RESTARTS_MAX:
            raise ProcessLost(
                f"{what}; expected at most {_RESTARTS_MAX} losses in {_RESTARTS_WITHIN_S / 60:g} minutes, given one "
                "more; find the cause, then run the flow again: it resumes from the last checkpoint"
            )
        _log.warning("%s; starting all processes again from the last checkpoint", what)


@final
class _Attempt:
    """The processes of one attempt, and the conversation with each (see :mod:`~streamiter.processes.process`)."""

    def __init__(self, flow: Flow, host: Host, settings: ProcessSettings, stops: list[StopMode]) -> None:
        self._flow = flow
        self._host = host
        self._settings = settings
        self._stops = stops
        """The stops that were asked for, also of earlier attempts."""
        self._started_at_s = time.monotonic()
        self._hosted: dict[int, HostedProcess] = {}
        self._links: dict[int, ProcessLink] = {}
        """The link of each process that has begun."""
        self._ends: dict[int, asyncio.Task[str]] = {}
        """Each waits for the end of a process."""
        self._silent_at_s: dict[int, float] = {}
        """When a process is lost, unless there is a sign of life before."""
        self._placement: bytes | None = None
        self._addresses: dict[int, Address] = {}
        self._statistics: dict[int, JobStatistics] = {}
        self._failures: dict[int, StreamiterError] = {}
        self._loss: _Loss | None = None
        self.has_run = False
        """Whether the job of process 0 has restored its state."""
        self._farewell: str | None = None
        """The last message to each process, also to one that begins later."""
        self._is_over = asyncio.Event()
        """Set when all jobs are done, or one has failed, or a process is lost."""

    # -- start and end ---------------------------------------------------------------------------------

    async def run(self) -> _Loss | None:
        """Run the processes until all jobs are done; return the first loss. Raises the first error of a process."""
        server = await listen(self._host.address(f"s{self._settings.attempt}"), self._new_link)
        looking = asyncio.create_task(self._look_for_silence(), name="silence of processes")
        try:
            await self._start(address_of(server))
            await self._is_over.wait()
            if self._loss is not None:
                self._loss = await self._explained(self._loss)
            await self._end()
        finally:
            looking.cancel()
            for process in self._hosted.values():
                process.kill()
            await asyncio.gather(*self._ends.values(), return_exceptions=True)
            server.close()
        if self._failures:
            raise self._error()
        return self._loss

    async def _start(self, address: Address) -> None:
        for number in range(self._settings.processes):
            given = self._host.address(f"{number}-{self._settings.attempt}")
            settings = msgspec.structs.replace(self._settings, number=number, supervisor=address, listen=given)
            process = self._hosted[number] = await self._host.start(settings)
            self._silent_at_s[number] = time.monotonic() + _START_S
            self._ends[number] = asyncio.create_task(process.ended(), name=f"end of process {number}")
            self._ends[number].add_done_callback(partial(self._has_ended, number))

    def _has_ended(self, number: int, end: asyncio.Task[str]) -> None:
        if not end.cancelled():
            error = end.exception()
            self._lose(number, end.result() if error is None else f"{type(error).__name__}: {error}")

    async def _end(self) -> None:
        """Let all processes end; they are killed if they do not."""
        went_well = len(self._statistics) == self._settings.processes and not self._failures
        self._farewell = "end" if went_well else "abort"
        for link in self._links.values():
            link.send_message([self._farewell])
        await asyncio.wait(self._ends.values(), timeout=_END_S)

    def statistics(self) -> JobStatistics:
        """Return the statistics of all processes."""
        if not self._statistics:  # Aborted before all jobs ran.
            return JobStatistics(self._flow.name, "aborted", time.monotonic() - self._started_at_s, (), ())
        return merged(self._flow.steps, self._statistics)

    def _error(self) -> StreamiterError:
        error, *others = self._failures.values()
        for other in others:
            if str(other) != str(error):
                error.add_note(f"also: {other}")
        return error

    # -- losses ----------------------------------------------------------------------------------------

    async def _explained(self, loss: _Loss) -> _Loss:
        """Return a loss with the reason that the host gives, if the process has ended; else kill the process."""
        end = self._ends[loss.process]
        await asyncio.wait([end], timeout=_REASON_S)
        if end.done() and end.exception() is None:
            return _Loss(loss.process, end.result())
        self._hosted[loss.process].kill()
        return loss

    def _lose(self, number: int, reason: str) -> None:
        if not self._is_over.is_set():
            if "abort" not in self._stops:
                self._loss = _Loss(number, reason)
            self._is_over.set()

    async def _look_for_silence(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            for number, silent_at_s in self._silent_at_s.items():
                if now_s > silent_at_s:
                    seconds = SILENCE_S if number in self._links else _START_S
                    self._lose(number, f"it has given no sign of life for {seconds:g} s")

    # -- the conversation ------------------------------------------------------------------------------

    def stop(self, mode: StopMode) -> None:
        """Stop the job."""
        if mode == "abort":
            asyncio.get_running_loop().call_later(_END_S, self._is_over.set)
        for number, link in self._links.items():
            self._tell_stop(number, link, mode)

    def _tell_stop(self, number: int, link: ProcessLink, mode: StopMode) -> None:
        if number == 0 or mode == "abort":
            link.send_message(["stop", mode])

    def _new_link(self) -> ProcessLink:
        encoding = FrameEncoding(self._flow.plain_data)
        return ProcessLink(identity_of(self._settings, SUPERVISOR), self, encoding, SystemClock())

    def opened(self, link: ProcessLink) -> None:
        """Refuse a link of a process that was not started."""
        if link.peer not in range(self._settings.processes):
            link.abort(f"expected one of {self._settings.processes} processes, given process {link.peer}")

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """Lose the process, unless the run is over, or a stranger has connected."""
        if error is not None and link in self._links.values():
            assert link.peer is not None
            self._lose(link.peer, str(error))

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """Handle a message of a process."""
        number = link.peer
        assert number is not None
        match message:
            case ["alive"]:
                self._silent_at_s[number] = time.monotonic() + SILENCE_S
                link.send_message(["alive"])
            case ["began"]:
                self._links[number] = link
                self._silent_at_s[number] = time.monotonic() + SILENCE_S
                for mode in self._stops:
                    self._tell_stop(number, link, mode)
                self._tell_placement(number)
                if self._farewell is not None:
                    link.send_message([self._farewell])
            case ["runs"]:
                self.has_run = True
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
            case ["collected", str(step), int(subtask), items]:
                put_collected(self._flow.steps, step, subtask, items)
            case ["finished", bytes(statistics)]:
                self._statistics[number] = msgspec.msgpack.decode(statistics, type=JobStatistics)
                if len(self._statistics) == self._settings.processes:
                    self._is_over.set()
            case ["failed", bytes(failure)]:
                self._fail(number, msgspec.msgpack.decode(failure, type=Failure))

    def _placed(self, placement: bytes) -> None:
        """Check that the processes run the flow of this program, and give all the placement of process 0."""
        try:
            msgspec.msgpack.decode(placement, type=Placement).check(self._flow.name, self._flow.steps)
        except StreamiterError as error:
            self._fail(0, Failure.of(error))
            return
        self._placement = placement
        for number in self._links:
            self._tell_placement(number)

    def _tell_placement(self, number: int) -> None:
        if number and self._placement is not None:
            self._links[number].send_message(["place", self._placement])

    def _fail(self, number: int, failure: Failure) -> None:
        if self._loss is None:
            place = f"process {number} of {self._settings.processes}"
            self._failures.setdefault(number, failure.error(place))
            self._is_over.set()
