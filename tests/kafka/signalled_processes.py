"""A flow in two processes, of which the second alone has records to write to a topic whose brokers are gone."""

import os
import sys
from typing import Any

from streamiter import Checkpoints, Flow, LocalProcesses, topic
from streamiter.engine.job import job
from streamiter.operators import Context, Source, SourceBatch
from streamiter.topics import source_and_sink
from streamiter_kafka import cluster

if "WAITS_S" in os.environ:  # All processes import this module.
    job._UNANSWERED_S = float(os.environ["WAITS_S"])  # type: ignore[misc]
    cluster._CLOSING_S = source_and_sink._CLOSE_UNFLUSHED_S = float(os.environ["WAITS_S"])  # type: ignore[misc]


class Numbers(Source):
    """Reads a number every tenth of a second, for ever."""

    bounded = False

    def open(self, context: Context, positions: Any) -> None:
        self.clock = context.clock
        self.number = 0

    async def read(self) -> SourceBatch:
        await self.clock.sleep(0.1)
        self.number += 1
        return SourceBatch([self.number], {"number": self.number})


def made() -> Flow:
    flow = Flow(os.environ["FLOW"], parallelism=2)
    numbers = flow.from_source(Numbers, name="numbers", parallelism=1)
    sums = topic(os.environ["TOPIC"], give_up_after_s=600, request_timeout_s=0.5)
    delivery: Any = os.environ["DELIVERY"] or None
    numbers.partition_by(lambda number: 1).map(lambda number: [number], name="second").sink(
        sums, name="out", delivery=delivery
    )
    return flow


flow = made() if "FLOW" in os.environ else None

if __name__ == "__main__":
    assert flow is not None
    sys.stdout.write(f"{flow.run(on=LocalProcesses(2), checkpoints=Checkpoints(sys.argv[1], interval_s=0.5)).state}\n")
