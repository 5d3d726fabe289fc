"""One process of a run: it is started by a host, and does what the supervisor says.

The conversation goes over a link; each message is a list that begins with its kind:

=====================================  =====================================================================
from the process                       from the supervisor
=====================================  =====================================================================
``began``, with the place of its note  ``place``, the placement: to all but process 0
``placed``, the placement: process 0   ``connect``, the addresses of all processes
``listens``, its address               ``stop``, a mode: stop the job
``runs``, whether it commits:          ``end``: all are done, so close the links and end
process 0                              ``abort``: end at once
``statistics``, once a second:
process 0
``lost``, a process, the reason
``collected``, a step, subtask, bytes
``finished``, the statistics of
process 0, or None
``failed``, an error, the statistics
of process 0, or None
=====================================  =====================================================================

The job, in process 0, has the statistics and the first error of all followers. Another process tells only an error
that it meets before its follower starts.

A second link, in a thread of its own, carries ``alive`` in both directions (:class:`Pulse`); the process adds
the seconds that it has used a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal, final

import msgspec

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.graph.statistics import REPORT_EVERY_S
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job, StopMode, leave_other_processes
from streamiter.engine.job.running import follower_of, job_of
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.engine.plan.placement import Placement
from streamiter.engine.plan.plan import first_process
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.host import ProcessSettings, pulse_s
from streamiter.engine.processes.link import LinkError, LinkIdentity, ProcessLink, connect_link
from streamiter.engine.processes.loading import load_flow
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.engine.processes.silence import ProcessNote
from streamiter.errors import GraphError, PlainDataError, user_line
from streamiter.operators.source import Collect, collected_parts
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.helpers.importing import IS_LOADING
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_errors import error_to_plain
from streamiter.values.times import in_seconds

_log = logging.getLogger("streamiter.processes")

_LOST_SUPERVISOR: Final = 3
"""The exit code of a process that has lost its supervisor."""


def identity_of(settings: ProcessSettings, number: int, fingerprint: str = "supervisor") -> LinkIdentity:
    """Return the identity of a process, or of the supervisor, at their links."""
    silence_s = in_seconds(settings.limits.silence_s)
    return LinkIdentity(number, settings.run, settings.attempt, fingerprint, settings.secret, silence_s)


async def run_process(settings: ProcessSettings, load: Callable[[], RunnableFlow] | None = None) -> None:
    """Do the part of one process in an attempt of a run, in an event loop of its own; return when all is over.

    ``load`` returns the flow; by default it is loaded from its reference. Signs of life are sent by a thread, because
    user code may hold the event loop of the job; the process ends if it loses its supervisor.
    """
    note = ProcessNote()
    if note.place is None and settings.number == settings.attempt == 0:
        _log.warning(
            "this system does not tell whether a silent process exists, as Linux does: a step that holds Python's lock "
            "for more than silence_s=%g s is taken for a lost process",
            in_seconds(settings.limits.silence_s),
        )
    is_over = threading.Event()
    threading.Thread(target=_give_signs, args=(settings, is_over), name="signs of life", daemon=True).start()
    await run_part(settings, load or partial(load_referenced, settings.flow), settings.job_options(), note)
    is_over.set()


def _give_signs(settings: ProcessSettings, is_over: threading.Event) -> None:
    try:
        asyncio.run(Pulse(settings, SystemClock()).beat())
    except Exception:  # A process without signs of life would never be taken for lost.
        traceback.print_exc()
    if is_over.is_set():
        return
    sys.stderr.write(
        f"streamiter: process {settings.number} ends, because the program that started it is gone or silent\n"
    )
    os._exit(_LOST_SUPERVISOR)


async def run_part(
    settings: ProcessSettings, load: Callable[[], RunnableFlow], options: JobOptions, note: ProcessNote | None = None
) -> None:
    """Do the part of a process without signs of life; ``options`` are the options of its job."""
    await _Process(settings, load, options, note).run()


@final
class _Process:
    """Runs the job of one process, while it does what the supervisor says: it owns the link to the supervisor."""

    def __init__(
        self, settings: ProcessSettings, load: Callable[[], RunnableFlow], options: JobOptions, note: ProcessNote | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._load = load
        self._options = options
        self._note = note
        identity = identity_of(settings, settings.number)
        self._link = ProcessLink(identity, self, FrameEncoding(PlainData()), options.clock)
        self._is_open = asyncio.Event()
        self._placement: asyncio.Future[bytes] = loop.create_future()
        self._addresses: asyncio.Future[Any] = loop.create_future()
        self._job: asyncio.Future[Job | JobFollower] = loop.create_future()
        """The job in process 0, a follower in the others, when it runs."""
        self._farewell: asyncio.Future[Literal["end", "abort"]] = loop.create_future()
        """How the supervisor ends the attempt; ``abort`` if it is lost."""
        self._mesh: ProcessMesh | None = None
        self._stopping: list[asyncio.Task[None]] = []

    # -- the supervisor --------------------------------------------------------------------------------

    def opened(self, link: ProcessLink) -> None:
        """Begin the conversation."""
        place = None if self._note is None else self._note.place
        self._tell("began", None if place is None else list(place))
        self._is_open.set()

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        """Do what the supervisor says."""
        match message:
            case ["place", placement]:
                self._placement.set_result(placement)
            case ["connect", addresses]:
                self._addresses.set_result(addresses)
            case ["stop", mode] if (mode != "abort" or self._job.done()) and not self._farewell.done():
                self._stopping.append(asyncio.create_task(self._stop(mode), name=f"stop {mode}"))
            case ["end"]:
                self._leave("end")
            case _:
                self._leave("abort")

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        """Abort the job: the supervisor is lost."""
        self._leave("abort")

    def _leave(self, farewell: Literal["end", "abort"]) -> None:
        if not self._farewell.done():
            self._farewell.set_result(farewell)

    def _tell(self, kind: str, *contents: PlainValue) -> None:
        self._link.send_message([kind, *contents])

    # -- the job ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the job until the supervisor ends the attempt. Raises ``OSError`` if there is no supervisor."""
        await connect_link(self._settings.supervisor, self._link)
        work = asyncio.create_task(self._work(), name=f"process {self._settings.number}")
        if await self._farewell == "end":
            await work
            if self._mesh is not None:
                await self._mesh.close()
        else:
            await self._abort(work)
        self._link.close()

    async def _stop(self, mode: StopMode) -> None:
        job = await asyncio.shield(self._job)
        with contextlib.suppress(Exception):  # job.wait() raises it, too.
            if isinstance(job, Job):
                await job.stop_on_signal(mode)
            else:
                job.abort()
                await job.wait()

    async def _abort(self, work: asyncio.Task[None]) -> None:
        for stopping in self._stopping:
            stopping.cancel()
        if self._job.done():
            if isinstance(job := self._job.result(), Job):
                leave_other_processes(job)
            await self._stop("abort")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        if self._mesh is not None:
            self._mesh.abort()

    async def _work(self) -> None:
        job = statistics = None
        try:
            await self._is_open.wait()
            flow = self._load()
            job, own = await self._make_job(flow)
            await self._run_job(job, own, flow.plain_data)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if job is not None:
                if self._settings.number:  # The job was told, and fails with this error.
                    return
                statistics = msgspec.msgpack.encode(job.statistics())
            if isinstance(error, GraphError) and _file(error.where) == _file(user_line()):
                error.where = ""  # The line of the program of this process is none of the user's.
            self._tell("failed", error_to_plain(error), statistics)

    async def _make_job(self, flow: RunnableFlow) -> tuple[Job | JobFollower, OwnProcess]:
        settings = self._settings
        encoding = self._link.encoding = FrameEncoding(flow.plain_data)
        own = await self._own_process(flow)
        mesh = self._mesh = ProcessMesh(
            identity_of(settings, settings.number, own.placement.fingerprint),
            settings.processes,
            encoding,
            self._options.clock,
            on_loss=lambda number, reason: self._tell("lost", number, reason),
        )
        self._tell("listens", await mesh.listen(settings.listen))
        others = await mesh.connect(await self._addresses)
        own = OwnProcess(own.placement, settings.number, others, own.operators, mesh, self._note)
        make = follower_of if settings.number else job_of
        return make(flow, self._options, own), own

    async def _run_job(self, job: Job | JobFollower, own: OwnProcess, plain_data: PlainData) -> None:
        assert self._mesh is not None
        self._mesh.deliver()
        await job.start()
        self._job.set_result(job)
        if self._settings.number:
            statistics = await job.wait()
        else:
            self._tell("runs", job.statistics().checkpoints is not None)
            telling = asyncio.create_task(self._tell_statistics(job), name="tell statistics")
            async with closed_after(telling.cancel):
                statistics = await job.wait()
        if statistics.state != "aborted":
            self._tell_collected(own, plain_data)
        self._tell("finished", None if self._settings.number else msgspec.msgpack.encode(statistics))

    async def _tell_statistics(self, job: Job | JobFollower) -> None:
        while True:
            await self._options.clock.sleep(REPORT_EVERY_S)
            self._tell("statistics", msgspec.msgpack.encode(job.statistics()))

    async def _own_process(self, flow: RunnableFlow) -> OwnProcess:
        """Return this process, with the placement that process 0 has decided."""
        settings = self._settings
        if settings.number:
            placement = msgspec.msgpack.decode(await self._placement, type=Placement)
            placement.check(flow.name, flow.steps)
            return OwnProcess(placement, settings.number)
        own = first_process(flow.name, flow.steps, settings.processes)
        self._tell("placed", msgspec.msgpack.encode(own.placement))
        return own

    def _tell_collected(self, own: OwnProcess, plain_data: PlainData) -> None:
        for step, operator in own.operators.items():
            parts = collected_parts(operator.into) if isinstance(operator, Collect) else {}
            try:
                for subtask, items in parts.items():
                    self._tell("collected", step.name, subtask, plain_data.encode(items))
            except PlainDataError as error:
                raise PlainDataError(
                    f"step {step.name!r}: the records of stream.collect() go to the program that has started the "
                    f"processes: {error}; collect less, or write to a topic"
                ) from error


def load_referenced(reference: str) -> RunnableFlow:
    """Return the flow; a run that its program would start is refused meanwhile."""
    token = IS_LOADING.set(True)
    try:
        return load_flow(reference, RunnableFlow)
    finally:
        IS_LOADING.reset(token)


def _file(line: str) -> str:
    return line.rpartition(":")[0]


@final
class ProcessLines(logging.Formatter):
    r"""Formats log records as text, with the number of the process before each line.

    >>> record = logging.makeLogRecord({"msg": "one\ntwo"})
    >>> print(ProcessLines(2).format(record))
    process 2: one
    process 2: two
    """

    def __init__(self, process: int, lines: logging.Formatter | None = None) -> None:
        """``lines`` formats the records, such as the formatter of ``logging.basicConfig``."""
        super().__init__()
        self._process = process
        self._lines = logging.Formatter() if lines is None else lines

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"process {self._process}: {line}" for line in self._lines.format(record).splitlines())

    @classmethod
    def put_on(cls, process: int) -> None:
        """Put the number before the lines of all handlers of the root that write plain text.

        Each is told only once. A formatter of another class may write JSON, which a prefix would break.
        """
        for handler in logging.getLogger().handlers:
            if type(handler.formatter) in (type(None), logging.Formatter):
                handler.setFormatter(cls(process, handler.formatter))


@final
class Pulse:
    """The signs of life that a process sends to the supervisor, which answers each.

    Without an answer for the limit of silence, or when the connection has ended, the process must end: its supervisor
    is dead, or has started other processes. Time in which this thread could not run does not count.
    """

    def __init__(self, settings: ProcessSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._unanswered = 0
        """How many signs were sent since the last answer."""
        self._link: ProcessLink | None = None
        self._ended = asyncio.Event()

    async def beat(self) -> None:
        """Send signs of life; return when the supervisor is lost, or if there is none."""
        identity = identity_of(self._settings, self._settings.number)
        link = ProcessLink(identity, self, FrameEncoding(PlainData()), self._clock)
        try:
            await connect_link(self._settings.supervisor, link)
        except OSError:
            return
        limits = self._settings.limits
        while self._unanswered * pulse_s(limits) < in_seconds(limits.silence_s) and not self._ended.is_set():
            if self._link is not None:
                link.send_message(["alive"])
            self._unanswered += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), pulse_s(limits))

    def opened(self, link: ProcessLink) -> None:
        self._link = link

    def received(self, link: ProcessLink, message: PlainValue) -> None:
        self._unanswered = 0

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        self._ended.set()
