"""A worker of a loop in which tokens hop from head to head by their key, and each hop is written to a topic.

Run by `test_shared_loops.py` as a separate process:
``shared_loop_worker.py <index> <count> <run id> <url of the loop> <url of the hops> <tokens> <hops>``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from streamiter import Flow, IterationBodyResult, Json, Stream, feedback_through, iterate_unbounded_streams, topic
from streamiter.checkpoints.keys import key_groups
from streamiter.operators.source import Source, SourceBatch
from streamiter.topics import Topic

HEADS = 2
"""The number of heads in each worker."""


class Silence(Source):
    """An input that never has a record and never ends."""

    bounded = False

    def open(self, context: Any, positions: Any) -> None:
        pass

    async def read(self) -> SourceBatch | None:
        await asyncio.get_running_loop().create_future()
        return None


def owner(token: int, hop: int, workers: int) -> int:
    """Return the worker whose head receives the token at this hop, by its key."""
    head = int(key_groups([f"{token}-{hop}"])[0]) * HEADS * workers // 128
    return head // HEADS


def hopping(
    name: str,
    loop: Topic,
    hops: Topic,
    tokens: int,
    count: int,
    worker: int,
    note: Callable[[tuple[int, int]], object] = lambda at: None,
) -> Flow:
    """Return a flow that shares tokens out over the workers; each token hops ``count`` times."""
    flow = Flow(name)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        def noted(at: tuple[int, int]) -> tuple[int, int]:
            note(at)
            return at

        token = variables[0].map(noted)
        written = token.map(lambda at: {"token": at[0], "hop": at[1], "worker": worker})
        onward = token.filter(lambda at: at[1] < count).map(lambda at: (at[0], at[1] + 1))
        back = onward.key_by(lambda at: f"{at[0]}-{at[1]}")
        return IterationBodyResult([feedback_through(back, loop)], [written])

    initial = flow.from_items([(token, 0) for token in range(tokens)], parallelism=HEADS)
    [written] = iterate_unbounded_streams([initial], [flow.from_source(Silence)], body)
    written.sink(hops, encode=Json())
    return flow


if __name__ == "__main__":
    index, count, run_id, loop_url, hops_url, tokens, hops = sys.argv[1:]
    flow = hopping("hops", topic(loop_url), topic(hops_url), int(tokens), int(hops), int(index))
    flow.run(worker=(int(index), int(count)), run_id=run_id)
