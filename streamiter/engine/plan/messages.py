"""Messages between the processes of a run, and the points that all of them reach before any continues.

Processes send each other messages of plain data: reports of loops, barriers and their answers, statistics. What carries
them is a :class:`Messages`: links between processes, or an event loop that plays several. :class:`Exchange` brings
messages also to the own process; :class:`Meeting` and :class:`SharedObjects` use them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast, final

from streamiter.errors import InternalError
from streamiter.operators.operator import JobScope
from streamiter.values.deferred import PlainValue

T = TypeVar("T")

Handler = Callable[..., None]
"""Takes the number of the sender, then the contents of a message."""


class Messages(Protocol):
    """Carries messages between the processes of a run, in the thread of the event loop.

    Messages from one process to another arrive in order, behind all batches and control records sent before them.
    Those of two senders have no order. When a process is lost, the run ends, so no answer needs a time limit.
    """

    def send(self, process: int, kind: str, *contents: PlainValue) -> Callable[[], None]:
        """Send a message to another process. Raises ``PlainDataError`` for other data.

        Return a function that must be called before an array in the message changes that may not have left.
        """

    def handle(self, kind: str, handler: Handler) -> None:
        """Give the messages of this kind to ``handler``.

        All handlers are set while the job is made, before any process sends. A message without a handler is an error.
        """


@final
class Exchange:
    """The messages between the followers of a job and its coordinator, which is in process 0.

    What a process sends to itself is a call at once: so a job of one process needs no :class:`Messages`.

    >>> alone = Exchange(None, own=0, processes=1)
    >>> alone.handle("stop", print)
    >>> alone.tell("stop", "drain")
    0 drain
    """

    def __init__(self, messages: Messages | None, own: int, processes: int) -> None:
        """``own`` is the number of this process; ``messages`` may be None if it is the only one."""
        self.own = own
        self.processes = processes
        self._messages = messages
        self._handlers: dict[str, Handler] = {}

    def handle(self, kind: str, handler: Handler) -> None:
        """Give the messages of this kind to ``handler``, also the messages of this process to itself."""
        self._handlers[kind] = handler
        if self._messages is not None:
            self._messages.handle(kind, handler)

    def send(self, process: int, kind: str, *contents: PlainValue) -> None:
        """Send a message to a process."""
        if process == self.own:
            self._handlers[kind](process, *contents)
        else:
            assert self._messages is not None
            self._messages.send(process, kind, *contents)

    def tell(self, kind: str, *contents: PlainValue) -> None:
        """Send a message to all processes; to this one last, since it may answer within the call."""
        for process in reversed(range(self.processes)):
            self.send(process, kind, *contents)


@final
class ProcessAnswers:
    """What all processes answer to one question of the coordinator.

    >>> answers = ProcessAnswers(2)
    >>> answers.give(1, "from the other"), answers.missing()
    (None, [0])
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._given: dict[int, PlainValue] = {}
        self.are_given = asyncio.Event()
        """Set when all processes have answered."""

    def give(self, process: int, answer: PlainValue) -> None:
        """Note the answer of a process."""
        self._given[process] = answer
        if not self.missing():
            self.are_given.set()

    def missing(self) -> list[int]:
        """Return the processes that have not answered."""
        return [process for process in range(self._processes) if process not in self._given]

    def by_process(self) -> list[PlainValue]:
        """Return the answers, by number of the process."""
        return [self._given[process] for process in sorted(self._given)]


_REACHED: Final = "reached"
_GO_ON: Final = "go on"


@final
class Meeting:
    """Lets the followers of all processes wait for each other, and for the coordinator, at named points."""

    def __init__(self, exchange: Exchange) -> None:
        """The messages of a run have one meeting in each process."""
        self.process = exchange.own
        self._exchange = exchange
        self._arrived: dict[str, ProcessAnswers] = {}
        """For each point: what each process has found, in process 0."""
        self._told: dict[str, list[PlainValue]] = {}
        """For each point that is passed: what was told there."""
        self._passed: dict[str, asyncio.Event] = {}
        exchange.handle(_REACHED, self._has_reached)
        exchange.handle(_GO_ON, self._go_on)

    async def reach(self, point: str, found: PlainValue = None) -> list[PlainValue]:
        """Wait until all followers have reached this point; return what each has found, by number of the process."""
        self._exchange.send(0, _REACHED, point, found)
        return await self.until(point)

    def open(self, point: str, *told: PlainValue) -> None:
        """Let all followers pass this point; only the coordinator calls it, for points that no follower reaches."""
        self._exchange.tell(_GO_ON, point, list(told))

    async def until(self, point: str) -> list[PlainValue]:
        """Wait until the followers pass this point; return what they are told."""
        await self._event(point).wait()
        return self._told[point]

    def _has_reached(self, process: int, point: str, found: PlainValue) -> None:
        arrived = self._arrived.setdefault(point, ProcessAnswers(self._exchange.processes))
        arrived.give(process, found)
        if arrived.are_given.is_set():
            self.open(point, *arrived.by_process())

    def _go_on(self, process: int, point: str, told: list[PlainValue]) -> None:
        self._told[point] = told
        self._event(point).set()

    def _event(self, point: str) -> asyncio.Event:
        return self._passed.setdefault(point, asyncio.Event())


_REPORT: Final = "report"
_ANSWER: Final = "answer"
_JOIN: Final = "join"


@final
class SharedObjects:
    """Lets tasks of all processes report to objects in process 0, such as the coordinator of a loop.

    A task reports by a call ``shared.method(member, *contents)``, and ``shared.join(member, answers)`` connects it
    first: the object answers by a call ``answers.method(*contents)``. Between two processes such a call is a message.
    """

    def __init__(self, messages: Messages, own: int) -> None:
        """``own`` is the number of this process. The messages of a run have one such object in each process."""
        self.is_first = own == 0
        self._messages = messages
        self._shared: dict[str, Any] = {}
        """The objects of process 0, by subject."""
        self._early: dict[str, list[tuple[PlainValue, ...]]] = {}
        """Reports to objects that no task of process 0 has asked for yet."""
        self._remote: dict[str, _RemoteReports] = {}
        """By subject, in the other processes."""
        messages.handle(_REPORT, self._report)
        messages.handle(_ANSWER, self._answer)

    def serve(self, subject: str, shared: object) -> None:
        """Give the reports about a subject to this object; for process 0."""
        self._shared[subject] = shared
        for report in self._early.pop(subject, []):
            self._report(*report)

    def remote(self, subject: str) -> object:
        """Return an object whose calls are reports about a subject; for the other processes."""
        return self._remote.setdefault(subject, _RemoteReports(partial(self._messages.send, 0, _REPORT, subject)))

    def _report(self, process: int, subject: str, method: str, member: int, *contents: PlainValue) -> None:
        shared = self._shared.get(subject)
        if shared is None:
            self._early.setdefault(subject, []).append((process, subject, method, member, *contents))
        elif method == _JOIN:
            shared.join(member, _Remote(partial(self._messages.send, process, _ANSWER, subject, member)))
        elif method.startswith("_"):
            raise InternalError(f"{subject}: expected a report, given {method!r} from process {process}")
        else:
            getattr(shared, method)(member, *contents)

    def _answer(self, process: int, subject: str, member: int, method: str, *contents: PlainValue) -> None:
        getattr(self._remote[subject].members[member], method)(*contents)


class _Remote:
    """Stands for an object of another process: each call of one of its methods is sent there."""

    def __init__(self, send: Callable[..., object]) -> None:
        self._send = send

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*contents: PlainValue) -> None:
            # A named tuple travels as a tuple.
            self._send(method, *(tuple(each) if isinstance(each, tuple) else each for each in contents))

        return call


@final
class _RemoteReports(_Remote):
    """Stands for an object of process 0, for the members in this process."""

    def __init__(self, send: Callable[..., object]) -> None:
        super().__init__(send)
        self.members: dict[int, object] = {}
        """The members that take the answers."""

    def join(self, member: int, answers: object) -> None:
        self.members[member] = answers
        self._send(_JOIN, member)


def shared_object(scope: JobScope, subject: str, create: Callable[[], T]) -> T:
    """Return the object in process 0 that tasks report to about a subject; in another process, what stands for it."""
    objects: SharedObjects | None = scope.get(SharedObjects, lambda: None)
    if objects is None:
        return create()
    if not objects.is_first:
        return cast("T", objects.remote(subject))
    shared = create()
    objects.serve(subject, shared)
    return shared
