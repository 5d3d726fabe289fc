"""Run a learning job with checkpoints: ``python -m benchmarks.recovering KAFKA EVENTS UPDATES FOLDER COUNT``.

The job learns until it is killed. It prints the time after the first event, and the time after the commit of COUNT
events.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks import kafka
from benchmarks.events import FEATURES
from benchmarks.online_learning import learn_online, rows_of_columns
from streamiter import Checkpoints, Flow, topic
from streamiter.topics import JsonColumns

__all__ = ["main"]

# The time between two looks at the counters, short compared with the hundreds of milliseconds that are measured.
_LOOK_S = 0.002


async def learn(address: str, events: str, updates: str, folder: str, count: int) -> None:
    """Learn; print the seconds of the monotonic clock after the first event, and after a checkpoint behind the last."""
    flow = Flow(f"recovering {events}")
    columns = JsonColumns({"id": "int64", "x": ("float64", FEATURES), "y": "float64"})
    source = flow.source(topic(f"kafka://{address}/{events}"), decode=columns, name="events")
    learn_online(source, rows_of_columns).publish_model(topic(f"kafka://{address}/{updates}"), model="regression")
    job = await flow.start(checkpoints=Checkpoints(folder, interval_s=1.0))
    for step, records in (("train", 1), ("events", count)):
        while job.statistics().step(step).records_in < records:  # noqa: ASYNC110 (no event signals it)
            await asyncio.sleep(_LOOK_S)
        if step == "events":
            await job.checkpoint()
        print(time.monotonic(), flush=True)
    await job.wait()


def main() -> None:
    """Run the job with the arguments of the command line."""
    address, events, updates, folder, count = sys.argv[1:]
    kafka.run(learn(address, events, updates, folder, int(count)))


if __name__ == "__main__":
    main()
