"""A flow that runs until a signal stops it; tests run it as a process.

Argument: the behaviour of the last step, ``pass`` or ``hang``.
"""

import asyncio
import sys

from streamiter import Flow, Operator
from streamiter.operators.source import Source, SourceBatch


class Numbers(Source):
    """Emits one number after the other, without end."""

    bounded = False

    def open(self, context, positions):
        self.next = 0

    async def read(self):
        await asyncio.sleep(0.001)
        self.next += 1
        return SourceBatch([self.next], {"next": self.next})


class First(Operator):
    """Reports when the job has begun to stop."""

    def process_batch(self, batch, out):
        out.emit_batch(batch)

    def snapshot(self):
        print("suspending", flush=True)


class Last(Operator):
    """Reports that it has started, and how it ends."""

    def __init__(self):
        self.handled = 0

    async def process(self, record, out):
        if self.handled == 0:
            print("running", flush=True)
        self.handled += 1
        if sys.argv[1] == "hang":
            await asyncio.Event().wait()

    def snapshot(self):
        print("suspended here", flush=True)

    def finish(self, out):
        print("finish", flush=True)

    def close(self):
        print("close", flush=True)


if __name__ == "__main__":
    flow = Flow("signals")
    flow.from_source(Numbers).process(First).process(Last)
    statistics = flow.run()
    print(statistics.state, flush=True)
