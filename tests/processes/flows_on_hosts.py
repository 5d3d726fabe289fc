"""Flows of the tests, and a program that runs them: ``python flows_on_hosts.py NAME PROCESSES``."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from streamiter import Flow, LocalProcesses, Operator
from streamiter.operators import Output, Source, SourceBatch


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


def made() -> Flow:
    flow = Flow("made", parallelism=2)
    flow.from_items(range(4)).rebalance().map(str).collect()
    return flow


if sys.argv[1:] == ["without a guard"]:
    squares.run(on=LocalProcesses(2))

if __name__ == "__main__":
    sys.stdout.write(f"{globals()[sys.argv[1]].run(on=LocalProcesses(int(sys.argv[2]))).state}\n")
