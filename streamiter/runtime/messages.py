"""Messages between the processes of a run, and the points that all of them reach before any goes on.

In each process a job sends messages of plain data to the jobs of the other processes: reports of loops, barriers and
their answers, statistics. What carries them is a :class:`Messages`: links between processes, or an event loop in which
several jobs run. :class:`Meeting` and :class:`SharedObjects` use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast, final

from streamiter.deferred import PlainValue
from streamiter.errors import InternalError
from streamiter.operators.operator import JobScope

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


_REACHED: Final = "reached"
_GO_ON: Final = "go on"


@final
class Meeting:
    """Lets all processes of a run wait for each other at named points."""

    def __init__(self, messages: Messages, own: int, processes: int) -> None:
        """``own`` is the number of this process. The messages of a run have one meeting in each process."""
        self._messages = messages
        self._own = own
        self._processes = processes
        self._arrived: dict[str, set[int]] = {}
        self._open: dict[str, asyncio.Event] = {}
        messages.handle(_REACHED, self._has_reached)
        messages.handle(_GO_ON, self._go_on)

    async def reach(self, point: str) -> None:
        """Wait until all processes have reached this point."""
        if self._own:
            self._messages.send(0, _REACHED, point)
        else:
            self._has_reached(0, point)
        await self._opened(point).wait()

    def _has_reached(self, process: int, point: str) -> None:
        arrived = self._arrived.setdefault(point, set())
        arrived.add(process)
        if len(arrived) == self._processes:
            for other in range(1, self._processes):
                self._messages.send(other, _GO_ON, point)
            self._go_on(0, point)

    def _go_on(self, process: int, point: str) -> None:
        self._opened(point).set()

    def _opened(self, point: str) -> asyncio.Event:
        return self._open.setdefault(point, asyncio.Event())


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
