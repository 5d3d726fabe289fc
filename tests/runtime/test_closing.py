"""Whatever closes several things closes each of them, and the first failure stays the error that is raised."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import streamiter
from streamiter.engine.checkpointing.checkpoint_follower import CheckpointFollower, LagReports
from streamiter.engine.checkpointing.committed import SourcePositions
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.inbox.alignment import FeedbackLog
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.job.checkpointer import Checkpointer
from streamiter.engine.states.rocks_state import RocksJobStates
from streamiter.engine.storage.snapshot_file import StoredSnapshot
from streamiter.topics.connecting import closed_on_failure
from streamiter.values.helpers.closing import close_all, close_each, closed_after

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
            if name not in _CANNOT_FAIL and not name.startswith(("streamiter/cli", "streamiter/testing")):
                found += [f"{name}:{line}" for line in _careless(ast.parse(path.read_text()))]
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
