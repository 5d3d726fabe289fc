"""Flows of the tests, and a program that runs them: ``python flows_on_hosts.py NAME PROCESSES``."""

import asyncio
import ctypes
import logging
import os
import sys
import time
from pathlib import Path

from streamiter import Flow, LocalProcesses, Operator, OutputTag, topic
from streamiter.learn import train_online
from streamiter.operators import Context, Output, Source, SourceBatch

NIGHTLY = "TESTS_NIGHTLY"
"""The variable with the file of the topics of :func:`nightly`."""

TOLD = "TESTS_TOLD"
"""The variable with the folder in which a file lets a step go on that keeps Python's lock."""


def nightly() -> Flow:
    """Return a flow that adds up the numbers that are there, and ends."""
    numbers, sums = (topic(f"sqlite:///{os.environ[NIGHTLY]}?topic={name}") for name in ("numbers", "sums"))
    flow = Flow("nightly", parallelism=2)
    keyed = flow.source(numbers, stop="latest", name="numbers").key_by(lambda number: number % 2)
    keyed.reduce(lambda total, number: total + number, name="sum").sink(sums, name="sums")
    return flow


class Endless(Source):
    bounded = False

    def open(self, context: object, positions: object) -> None:
        self.number = 0

    def read(self) -> SourceBatch:
        self.number += 1
        time.sleep(0.001)
        return SourceBatch([self.number], {"number": self.number})


class Says:
    """Prints the number of its process once, when it gets its first record."""

    def __init__(self) -> None:
        self.has_said = False

    def __call__(self, record: int) -> int:
        if not self.has_said:
            self.has_said = True
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
        return record


squares = Flow("squares", parallelism=3)
collected = (
    squares.from_items(range(200))
    .rebalance()
    .map(lambda n: n * n)
    .key_by(lambda n: n % 5)
    .map(str, name="texts")
    .collect()
)

failing = Flow("failing", parallelism=2)
failing.from_items(range(100)).rebalance().map(lambda n: 1 // (n - 57), name="divide").collect()

unlike = Flow("unlike", parallelism=2)
unlike.from_items(range(4)).rebalance().map(str, name=f"texts of {os.getpid()}").collect()

endless = Flow("endless", parallelism=2)
endless.from_source(Endless, parallelism=1).rebalance().map(Says()).filter(lambda n: n < 0).collect()


class Forever(Operator):
    async def process(self, record: int, out: Output) -> None:
        await asyncio.Event().wait()


waiting = Flow("waiting", parallelism=2)
waiting.from_source(Endless, parallelism=1).rebalance().map(Says()).process(Forever).collect()


class Large(Source):
    """Numbers with 50 KB each, as fast as they are read."""

    bounded = True

    def open(self, context: object, positions: dict[str, int] | None) -> None:
        self.number = (positions or {}).get("number", 0)

    def read(self) -> SourceBatch | None:
        if self.number == LARGE_RECORDS:
            return None
        numbers = range(self.number, self.number + 4)
        self.number += 4
        return SourceBatch([b"%050000d" % number for number in numbers], {"number": self.number})


LARGE_RECORDS = 1200
GROWTH = OutputTag("growth")


class Growth(Operator):
    """Tells in the end by how many MB its process has grown since the first record."""

    at_first = 0

    def process(self, record: bytes, out: Output) -> None:
        self.at_first = self.at_first or _peak_mb()
        out.emit(record)

    def finish(self, out: Output) -> None:
        out.emit(_peak_mb() - self.at_first, tag=GROWTH)


def _peak_mb() -> float:
    # Not getrusage(), whose peak begins with that of the program that has started this one.
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) / 1024


class SlowSum(Operator):
    """Adds numbers; the half in process 1 takes 2 ms for each."""

    def open(self, context: Context) -> None:
        self.total, self.delay_s = 0, 0.002 * context.subtask_index

    def process(self, record: bytes, out: Output) -> None:
        time.sleep(self.delay_s)
        self.total += int(record[-4:])

    def finish(self, out: Output) -> None:
        out.emit(self.total)

    def snapshot(self) -> int:
        return self.total

    def restore(self, state: int) -> None:
        self.total = state


overloaded = Flow("overloaded", parallelism=2)
measured = overloaded.from_source(Large, name="large", parallelism=1).process(Growth, name="growth", parallelism=1)
growth = measured.side_output(GROWTH).collect(name="grown")
halves = measured.partition_by(lambda record: int(record[-4:]) % 2)
sums = halves.process(SlowSum, name="sum").collect(name="sums")


def hold_lock(record: int) -> int:
    """Work without a turn for another thread, as a sort of a long list does, until the log tells it."""
    if record == 3:
        _keep_lock("hold", pause_us=0)
    return record


def wait_in_c(record: int) -> int:
    """Wait until the log tells it, as a function in C that keeps Python's lock and uses no processor."""
    if record == 4:
        _keep_lock("wait", pause_us=100_000)
    return record


def _keep_lock(step: str, *, pause_us: int) -> None:
    """Keep Python's lock until the test has made the file of the step: only calls in C that keep the lock are made."""
    told, c = os.fsencode(Path(os.environ[TOLD]) / step), ctypes.PyDLL(None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    while c.access(told, os.F_OK):
        c.usleep(pause_us)
    sys.setswitchinterval(before)


async def hang(record: int) -> int:
    """Wait for ever, as a function in C that has kept Python's lock."""
    await asyncio.sleep(0)
    if record == 3:
        ctypes.PyDLL(None).pause()
    return record


def leave(record: int) -> int:
    if record == 3:
        sys.exit(7)
    return record


async def leave_later(record: int) -> int:
    await asyncio.sleep(0)
    return leave(record)


def debug(record: int) -> int:
    logging.getLogger("debugged").warning("record %d\nof 8", record)
    if record == 3:
        breakpoint()
    return record


def debugged() -> Flow:
    """Return a flow that configures the log, as programs do at their top level."""
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", force=True)
    flow = Flow("debugged", parallelism=2)
    flow.from_items(range(8)).rebalance().map(debug, name="debug").collect()
    return flow


around = Flow("around", parallelism=2)
labelled = around.from_items([{"x": n % 7, "y": n % 7 > 3} for n in range(200)]).rebalance().map(dict, name="before")
training = train_online(labelled, label="y", workers=1)
validated = training.validation.rebalance().map(dict, name="after").collect()
busy = Flow("busy", parallelism=2)
held = busy.from_items(range(8)).rebalance().map(hold_lock, name="hold").map(wait_in_c, name="wait").collect()
hanging = Flow("hanging", parallelism=2)
hanging.from_items(range(8)).rebalance().map(abs).map_async(hang, name="hang").map(abs).collect()
leaving = Flow("leaving", parallelism=2)
leaving.from_items(range(8)).rebalance().map(abs).map(leave, name="leave").map(abs).collect()
leaving_later = Flow("leaving later", parallelism=2)
leaving_later.from_items(range(8)).rebalance().map_async(leave_later, name="leave", on_error="skip").collect()


def made() -> Flow:
    flow = Flow("made", parallelism=2)
    flow.from_items(range(4)).rebalance().map(str).collect()
    return flow


if sys.argv[1:] == ["without a guard"]:
    squares.run(on=LocalProcesses(2))

if __name__ == "__main__":
    name, count, silence_s = sys.argv[1:]
    on = LocalProcesses(int(count), silence_s=float(silence_s))
    sys.stdout.write(f"{globals()[name].run(on=on).state}\n")
