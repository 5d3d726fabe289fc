"""Jobs in a process with too few files or too little memory: ``scarce.py KIND FOLDER``; prints one outcome a line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from support.waiting import PATIENCE_S

from streamiter import (
    Checkpoints,
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    RocksState,
    iterate_unbounded_streams,
    topic,
)
from streamiter.engine.graph.statistics import JobState
from streamiter.engine.job.job import Job
from streamiter.errors import StreamiterError

# More than an interpreter with all imports has open.
_FILES = 128
_HUGE_BYTES = 1 << 34
_HELD_BYTES = 64 << 20


class Outcome(msgspec.Struct):
    """How a job has ended."""

    spare: int
    """The number of files that it could open besides."""
    state: JobState | None
    """None for a job that has not started."""
    error: str
    causes: list[str]
    """The class names of the error and of its causes."""


def _state(flow: Flow, folder: Path) -> None:
    counted = flow.from_items([*range(500)], name="numbers").key_by(lambda n: n % 50)
    counted.stateful_map(lambda count, n: (count + 1, n), 0, name="count").collect(name="counted")


def _sinks(flow: Flow, folder: Path) -> None:
    numbers = flow.from_items([*range(500)], name="numbers")
    numbers.sink(topic(f"file://{folder}/numbers.jsonl"), name="lines")
    for name in ("a", "b"):
        numbers.sink(topic(f"sqlite:///{folder}/{name}.db?topic=numbers"), name=name)


def _spill(flow: Flow, folder: Path) -> None:
    def body(variables: Any, data: Any) -> IterationBodyResult:
        pairs = variables[0].union(data[0])
        again = pairs.flat_map(lambda pair: [(pair[0] + 1, "x" * 500)] * 2 if pair[0] < 9 else [], name="again")
        return IterationBodyResult([again], [again.filter(lambda pair: False)])

    config = IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=4096, directory=folder))
    first, more = flow.from_items([(0, "")], name="first"), flow.from_items([(0, "")] * 50, name="more")
    [out] = iterate_unbounded_streams([first], [more], body, config=config)
    out.collect(name="out")


async def _outcome(
    flow: Flow, kept: Checkpoints | None, spare: int, work: Callable[[Job], Any] | None = None
) -> Outcome:
    job = None
    try:
        job = await asyncio.wait_for(flow.start(checkpoints=kept), PATIENCE_S)
        if work is not None:
            await asyncio.wait_for(work(job), PATIENCE_S)
        await asyncio.wait_for(job.wait(), PATIENCE_S)
        error: BaseException | None = None
    except Exception as failure:
        error = failure
    causes, text = [], str(error)
    while error is not None:
        causes.append(type(error).__name__)
        error = error.__cause__
    return Outcome(spare, None if job is None else job.statistics().state, text, causes)


async def files(folder: Path) -> list[Outcome]:
    """Run each flow with no file to spare, then with one, and so on, until it finishes; first without a limit."""
    outcomes = []
    for add_steps in (_state, _sinks, _spill):
        for spare in (_FILES, *range(_FILES)):
            place = folder / f"{add_steps.__name__} {spare}"
            place.mkdir()
            flow = Flow("scarce", state=RocksState(place / "state", memory_bytes=16 << 20))
            add_steps(flow, place)
            if add_steps is _sinks:
                for name in ("a", "b"):
                    await topic(f"sqlite:///{place}/{name}.db?topic=numbers").create()
            held = _hold(spare)
            try:
                kept = Checkpoints(place / "kept", interval_s=0.05) if add_steps is _state else None
                outcomes.append(await _outcome(flow, kept, spare))
            finally:
                for handle in held:
                    os.close(handle)
            if spare < _FILES and outcomes[-1].state == "finished":
                break
    return outcomes


def _hold(spare: int) -> list[int]:
    """Open files until only ``spare`` more may be opened."""
    held = []
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            break
    for _ in range(min(spare, len(held))):
        os.close(held.pop())
    return held


async def memory(folder: Path) -> list[Outcome]:
    """Let the memory end in a call of a step, in a state, and in a checkpoint."""
    in_call, in_state, in_checkpoint = (Flow("scarce") for _ in range(3))
    huge = in_call.from_items([1], name="numbers").map(lambda n: len(bytearray(n * _HUGE_BYTES)), name="hungry")
    huge.collect(name="seen")
    keyed = in_state.from_items([*range(10_000)], name="numbers").key_by(lambda n: n)
    keyed.stateful_map(lambda _, n: (bytearray(1 << 20), n), b"", name="hungry").collect(name="seen")
    waits = in_checkpoint.source(topic(f"sqlite:///{folder}/none.db?topic=none"), name="none")
    held = in_checkpoint.from_items([1], name="numbers").union(waits).key_by(lambda n: n)
    held.stateful_map(lambda _, n: (bytes(_HELD_BYTES), n), b"", name="hungry").collect(name="seen")
    await topic(f"sqlite:///{folder}/none.db?topic=none").create()

    async def take(job: Job) -> None:
        while not job.statistics().step("seen").records_in:
            await asyncio.sleep(0.005)
        _limit_memory(_HELD_BYTES // 2)
        with contextlib.suppress(StreamiterError):  # The job has the same error.
            await job.checkpoint()

    outcomes = []
    for number, (flow, work) in enumerate([(in_call, None), (in_state, None), (in_checkpoint, take)]):
        _limit_memory(256 << 20)
        outcomes.append(await _outcome(flow, Checkpoints(folder / str(number), interval_s=3600), 0, work))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return outcomes


def _limit_memory(more_bytes: int) -> None:
    """Let this process have only this many more bytes of memory."""
    now_kib = int(Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (1024 * now_kib + more_bytes, resource.RLIM_INFINITY))


def main() -> None:
    kind, folder = sys.argv[1:]
    if kind == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    outcomes = asyncio.run((files if kind == "files" else memory)(Path(folder)))
    sys.stdout.buffer.write(msgspec.json.encode(outcomes))


if __name__ == "__main__":
    main()
