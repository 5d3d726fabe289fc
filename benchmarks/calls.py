"""Call a service for each record, compared with the same calls behind an ``asyncio.Semaphore``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow

__all__ = ["calls"]

CONCURRENCY = 100
_CALL_S = 0.01

Ask = Callable[[int], Awaitable[int]]
Work = Callable[[Ask, int, Stopwatch], list[int]]


def calls(session: Session) -> Iterator[Figure]:
    """Calls of 10 ms, 100 at a time: 200 of them take 20 ms at best. And calls that answer at once."""
    by_hand, flow = "asyncio.Semaphore", "map_async"
    for what, ask, count, target in (
        ("200 calls of 10 ms", _slow, 200, Target("figure", at_least=2_000)),
        ("calls of 10 ms", _slow, session.size(20_000, 1_000), Target("ratio", at_least=0.8)),
        ("calls that answer at once", _fast, session.size(200_000, 5_000), Target("ratio", at_least=1.0)),
    ):
        contenders = {
            f"{by_hand}, {what}": _measured(_by_hand, ask, count),
            f"{flow}, {what}": _measured(_flow, ask, count),
        }
        series = alternate(contenders, repeat=session.repeat)
        yield series.figure(f"{by_hand}, {what}", "calls/s")
        yield series.figure(f"{flow}, {what}", "calls/s", compared_with=f"{by_hand}, {what}", target=target)


async def _slow(number: int) -> int:
    await asyncio.sleep(_CALL_S)
    return number + 1


async def _fast(number: int) -> int:
    return number + 1


def _measured(work: Work, ask: Ask, count: int) -> Contender:
    def run() -> Trial:
        watch = Stopwatch()
        results = work(ask, count, watch)
        return Trial(watch.rates(count, "calls"), results)

    return run


def _by_hand(ask: Ask, count: int, watch: Stopwatch) -> list[int]:
    async def limited(number: int, semaphore: asyncio.Semaphore) -> int:
        async with semaphore:
            return await ask(number)

    async def main() -> list[int]:
        semaphore = asyncio.Semaphore(CONCURRENCY)
        return await asyncio.gather(*(limited(number, semaphore) for number in range(count)))

    import uvloop

    with watch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _flow(ask: Ask, count: int, watch: Stopwatch) -> list[int]:
    flow = Flow("calls")
    answers = flow.from_items(range(count)).map_async(ask, CONCURRENCY).collect()
    with watch:
        run_to_end(flow)
    return list(answers.items)
