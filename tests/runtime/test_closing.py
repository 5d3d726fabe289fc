"""Whatever closes several things closes each of them; and the clock that advances only on a test's request."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamiter
from streamiter.engine.checkpointing.checkpoint_follower import CheckpointFollower, LagReports
from streamiter.engine.checkpointing.committed import SourcePositions
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.alignment import FeedbackLog
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.job.checkpointer import Checkpointer
from streamiter.engine.states.rocks_state import RocksJobStates
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.errors import ConfigurationError
from streamiter.testing import VirtualClock
from streamiter.topics.connecting import closed_on_failure
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_all, close_each, closed_after, undone_on_failure

ROOT = Path(streamiter.__file__).parents[1]


class Part:
    """Fails to close, and counts how often it was closed."""

    def __init__(self, name: str, *, is_awaited: bool = False) -> None:
        self.name = name
        self.closed = 0
        self._is_awaited = is_awaited

    def close(self) -> Any:
        """Fail, now or when it is awaited."""
        self.closed += 1
        if self._is_awaited:
            return self._fail()
        raise OSError(f"{self.name} is lost")

    release = close

    async def _fail(self) -> None:
        await asyncio.sleep(0)
        raise OSError(f"{self.name} is lost")


def closed_by(kind: type[Any], **parts: Any) -> Any:
    """Return an object whose close() needs nothing but these parts."""
    made = object.__new__(kind)
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


def cases() -> Iterator[tuple[type[Any], list[Part], Any]]:
    first, second = Part("first"), Part("second")
    later = Part("second", is_awaited=True)
    first_of_all = Part("first", is_awaited=True)
    inbox = closed_by(Inbox)
    inbox.feedback, inbox.ports = first, [second]
    yield Inbox, [first, second], inbox
    first, second = Part("first"), Part("second")
    channels = {0: SimpleNamespace(close_log=first.close)}
    yield FeedbackLog, [first, second], closed_by(FeedbackLog, channels=channels, logged={0: (second, ())})
    first, second = Part("first"), Part("second")
    channel = closed_by(FeedbackChannel, log=first)
    channel.queue, channel.return_path = second, None
    yield FeedbackChannel, [first, second], channel
    first, second = Part("first"), Part("second")
    added = [closed_by(StoredSnapshot, reader=second, added=[])]
    yield StoredSnapshot, [first, second], closed_by(StoredSnapshot, reader=first, added=added)
    first, second = Part("first"), Part("second")
    yield RocksJobStates, [first, second], closed_by(RocksJobStates, databases=[first], home=second)
    yield SourcePositions, [first_of_all, later], closed_by(SourcePositions, others={"a": first_of_all, "b": later})
    first, second, later = Part("first"), Part("second"), Part("third", is_awaited=True)
    follower = closed_by(CheckpointFollower, queues=first, store=later, taking=set(), lag=LagReports("f", []))
    follower.snapshot = second
    yield CheckpointFollower, [first, second, later], follower
    first, later = Part("first", is_awaited=True), Part("second", is_awaited=True)
    yield Checkpointer, [first, later], closed_by(Checkpointer, transaction=first, positions=None, store=later)


@pytest.mark.parametrize(("kind", "parts", "made"), [*cases()], ids=lambda value: getattr(value, "__name__", ""))
async def test_each_part_is_closed_and_the_first_error_is_raised(kind: type[Any], parts: list[Part], made: Any) -> None:
    """The first error stopped the closing, and the later ones were left open; or the last error hid the first."""
    with pytest.raises(OSError, match=r"^first is lost") as told:
        await close_all([made.close])
    assert [part.closed for part in parts] == [1] * len(parts)
    assert "second is lost" in "".join(told.value.__notes__)


async def test_a_failure_is_not_hidden_by_the_closing_after_it() -> None:
    """A full disk was reported as a file that could not be closed."""
    parts = Part("first"), Part("second", is_awaited=True)
    with pytest.raises(ValueError, match=r"^the disk is full") as told:
        async with closed_after(parts[0].close, parts[1].close):
            raise ValueError("the disk is full")
    assert told.value.__notes__ == ["then, while closing: first is lost", "then, while closing: second is lost"]
    with pytest.raises(ValueError, match=r"^no such topic") as told:
        async with closed_on_failure(parts[1]):
            raise ValueError("no such topic")
    assert told.value.__notes__ == ["then, while closing: second is lost"]
    with pytest.raises(ValueError, match="no such checkpoint") as told, undone_on_failure(Part("file").close):
        raise ValueError("no such checkpoint")
    assert told.value.__notes__ == ["then, while closing: file is lost"]


async def test_a_cancellation_while_something_closes_leaves_nothing_open() -> None:
    """A job was aborted while it closed, and files stayed open until the process ended."""
    closed = Part("last")

    async def hang() -> None:
        await asyncio.Event().wait()

    closing = asyncio.create_task(close_each([hang, closed.close]))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed.closed == 1


_CLOSES = {"close", "aclose", "_close", "_close_files", "release", "drop"}

# Their closing cannot fail: sockets and links, memory, handles that were read only, or errors that are suppressed.
_CANNOT_FAIL = {
    "streamiter/engine/job/follower.py",  # It collects what each task returns.
    "streamiter/engine/processes/mesh.py",
    "streamiter/engine/processes/shared_memory.py",
    "streamiter/engine/processes/silence.py",
    "streamiter/engine/processes/supervisor.py",
    "connectors/streamiter_files/table_format.py",
}


def test_no_close_stops_at_the_first_error() -> None:
    """Each class that owned two things closed them in its own way, and most of these ways stopped at an error."""
    found = []
    for folder in ("streamiter", "connectors"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            text = path.read_text()
            if name in _CANNOT_FAIL or name.startswith(("streamiter/cli", "streamiter/testing")):
                continue
            if any(f"{call}(" in text for call in _CLOSES):  # To parse the other two thirds would take a second.
                found += [f"{name}:{line}" for line in _careless(ast.parse(text))]
    assert not found, "use streamiter.values.helpers.closing, or say above why it cannot fail"


def _careless(tree: ast.AST) -> Iterator[int]:
    """Give the lines where several things are closed one after the other, or one is awaited after a failure."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in _CLOSES:
            calls = [call for call in ast.walk(node) if _closes_a_part(call)]
            loops = (loop for loop in ast.walk(node) if isinstance(loop, (ast.For, ast.While)))
            if any(_closes_a_part(call) for loop in loops for call in ast.walk(loop)) or _in_a_row(node, len(calls)):
                yield node.lineno
        elif isinstance(node, ast.Try):
            raising = [handler for handler in node.handlers if any(isinstance(x, ast.Raise) for x in ast.walk(handler))]
            for block in (*(handler.body for handler in raising), node.finalbody):
                awaited = [x.value for statement in block for x in ast.walk(statement) if isinstance(x, ast.Await)]
                if any(map(_closes_a_part, awaited)):
                    yield block[0].lineno


def _closes_a_part(node: ast.AST) -> bool:
    """Return whether it is a call such as ``self._store.close()``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CLOSES


def _in_a_row(function: ast.FunctionDef | ast.AsyncFunctionDef, calls: int) -> bool:
    branches = [x for x in ast.walk(function) if isinstance(x, (ast.Return, ast.With, ast.AsyncWith))]
    return calls > 1 and not branches


async def test_the_clock_does_not_advance_by_itself() -> None:
    """A test that depended on the machine's speed failed on the slowest machine."""
    clock: Clock = VirtualClock(start_ms=1000)
    await asyncio.sleep(0.001)
    assert (clock.now_ms(), clock.monotonic_s()) == (1000, 0.0)


async def test_both_times_move_together() -> None:
    """Time stamps and durations of one run disagreed."""
    clock = VirtualClock(start_ms=1000)
    await clock.advance(1.5)
    await clock.advance(0.25)
    assert (clock.now_ms(), clock.monotonic_s()) == (2750, 1.75)


@given(delays=st.lists(st.integers(0, 20), max_size=12), steps=st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_due_timers_fire_in_order_each_at_its_own_time(delays: list[int], steps: list[int]) -> None:
    """The times of timers depended on how the test cut the time into steps."""
    asyncio.run(_fires_in_order(delays, steps))


async def _fires_in_order(delays: list[int], steps: list[int]) -> None:
    clock, fired = VirtualClock(), list[tuple[float, int]]()
    for number, delay in enumerate(delays):
        clock.call_later(delay / 4, lambda number=number: fired.append((clock.monotonic_s(), number)))  # type: ignore[misc]
    for step in steps:
        await clock.advance(step / 4)
    expected = sorted((delay / 4, number) for number, delay in enumerate(delays) if delay <= sum(steps))
    assert fired == expected
    assert clock.timers == len(delays) - len(expected)


async def test_a_timer_set_by_another_fires_in_the_same_span() -> None:
    """A flush every second came only once in three seconds."""
    clock, fired = VirtualClock(), list[float]()

    def again() -> None:
        fired.append(clock.monotonic_s())
        clock.call_later(1.0, again)

    clock.call_later(1.0, again)
    await clock.advance(3.5)
    assert fired == [1.0, 2.0, 3.0]


async def test_tasks_run_between_two_timers() -> None:
    """The second timer fired before the task that the first timer had woken."""
    clock, heard = VirtualClock(), list[str]()

    async def sleeper() -> None:
        await clock.sleep(1)
        heard.append(f"awake at {clock.monotonic_s()}")
        await clock.sleep(0.5)
        heard.append(f"again at {clock.monotonic_s()}")

    task = asyncio.create_task(sleeper())
    clock.call_later(2, lambda: heard.append("timer at 2"))
    await clock.advance(0)
    await clock.advance(2)
    assert heard == ["awake at 1.0", "again at 1.5", "timer at 2"]
    await task


async def test_cancelled_timers_do_not_fire() -> None:
    """A timer that another timer of the same moment had cancelled still fired."""
    clock, fired = VirtualClock(), list[str]()
    first = clock.call_later(1, lambda: fired.append("first"))
    clock.call_later(2, lambda: third.cancel())
    third = clock.call_later(2, lambda: fired.append("third"))
    first.cancel()
    await clock.advance(5)
    first.cancel()
    assert fired == []
    assert clock.timers == 0


async def test_a_cancelled_sleep_leaves_no_timer() -> None:
    """A timer woke a task that had ended."""
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep(5))
    await clock.advance(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.timers == 0
    await clock.advance(10)


async def test_the_error_of_a_callback_is_raised_by_advance() -> None:
    """The error of a callback was only in a log, and the test passed."""
    clock = VirtualClock()

    def fail() -> None:
        raise ValueError("no")

    clock.call_later(1, fail)
    with pytest.raises(ValueError, match="no"):
        await clock.advance(2)
    assert clock.monotonic_s() == 1.0


async def test_time_does_not_go_back() -> None:
    """A negative step, a mistake in a test, moved the clock back."""
    with pytest.raises(ConfigurationError, match="expected seconds of at least 0, given -1"):
        await VirtualClock().advance(-1)
