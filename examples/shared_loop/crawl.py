"""A crawl that several processes share: each page is visited once, by the process that owns it.

Links are fed back through a topic, by key. So a page always arrives at the same process, which knows whether it has
visited the page. Run each command in its own terminal::

    streamiter topics create 'sqlite:///crawl.db?topic=links' --partitions 2
    streamiter topics create 'sqlite:///crawl.db?topic=visited'
    python examples/shared_loop/crawl.py 0 2 monday sqlite:///crawl.db
    python examples/shared_loop/crawl.py 1 2 monday sqlite:///crawl.db
    streamiter topics tail 'sqlite:///crawl.db?topic=visited' --follow

A process is told its number, how many there are, what they call this run (a new name for each run) and where the
topics are. It waits for further links until Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Any

from streamiter import (
    Flow,
    IterationBodyResult,
    Json,
    Operator,
    Stream,
    feedback_through,
    iterate_unbounded_streams,
    topic,
)

FIRST_PAGE = 0
PAGES = 200


def links(page: int) -> list[int]:
    """Return the links of a generated page: to two later pages and one earlier page; none leads to the first page."""
    return [link for link in (2 * page + 1, 2 * page + 2, page // 3 + 1) if link < PAGES]


class Visit(Operator):
    """Emits the pages that it has not seen before."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def process(self, page: int, out: Any) -> None:
        if page not in self.seen:
            self.seen.add(page)
            out.emit(page)


def crawl(place: str, worker: int) -> Flow:
    """Return the flow of one process. One process reads the first page; no link leads to it."""
    flow = Flow("crawl")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        visited = variables[0].process(Visit)
        found = visited.flat_map(links).key_by(lambda page: page)
        told = visited.map(lambda page: {"page": page, "worker": worker})
        return IterationBodyResult([feedback_through(found, topic(f"{place}?topic=links"))], [told])

    [told] = iterate_unbounded_streams([flow.from_items([FIRST_PAGE])], [], body)
    told.sink(topic(f"{place}?topic=visited"), encode=Json())
    return flow


if __name__ == "__main__":
    index, count, run_id, place = sys.argv[1:]
    crawl(place, int(index)).run(worker=(int(index), int(count)), run_id=run_id)
