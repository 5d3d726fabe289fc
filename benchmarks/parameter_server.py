"""Call a parameter server in this process, compared with the same work on a bare numpy array."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks import parameter_server_by_hand as by_hand
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.parameter_server_by_hand import Keys, Numbers, Work
from benchmarks.session import Session
from streamiter.parameter_server import ASP, SSP, Client, Consistency, ParameterServer, psf
from streamiter.parameter_server.optimizers import Adam

__all__ = ["agree", "digest", "parameter_server", "parameter_server_calls", "parameter_server_optimizer"]

CALLS: Final = "calls/s"
AT_LEAST: Final = 0.5
"""The calls may be half as fast as numpy."""
AT_LEAST_CALLS: Final = 50_000
"""The number of calls in a second, of 100 keys each."""
MATRIX: Final = "w"
KEYS_IN_ALL: Final = 200_000
"""The number of different keys in successive calls; their values take 13 MB of cache lines, more than a core has."""
CLOCKS_AHEAD: Final = 1

Use = Callable[[Client, Stopwatch], Awaitable[Numbers]]


def parameter_server(session: Session) -> Iterator[Figure]:
    """A whole row of 10 M float32, and 10,000 of its keys in random order, are added and read, as in numpy.

    For the whole row, numpy does ``row += values`` and ``row.copy()``; for keys it does ``row[keys] += values`` (no
    key comes twice) and ``row[keys]``. As in a program, each call takes an array or returns a new one. Two shards are
    two arrays, between which keys must be divided; one line shows the cost of this division in numpy alone.
    """
    columns = session.size(10_000_000, 100_000)
    start, row_values = _numbers(columns, seed=1), _numbers(columns, seed=2)
    yield from _compared_with_numpy(
        session,
        "whole row",
        session.size(40, 4),
        numpy=lambda count: {"add": by_hand.adds_row(start, count, row_values), "get": by_hand.gets_row(start, count)},
        served=lambda shards, count: {
            "add": _served(shards, start, _adds(count, [None], row_values)),
            "get": _served(shards, start, _gets(count, [None])),
        },
    )
    keys = _key_sets(columns, session.size(10_000, 1_000))
    values = _numbers(len(keys[0]), seed=2)
    yield from _compared_with_numpy(
        session,
        f"{len(keys[0]):,} keys",
        session.size(2_000, 40),
        numpy=lambda count: {
            "add": by_hand.adds_keys(start, count, keys, values),
            "get": by_hand.gets_keys(start, count, keys),
        },
        served=lambda shards, count: {
            "add": _served(shards, start, _adds(count, keys, values)),
            "get": _served(shards, start, _gets(count, keys)),
        },
        two_arrays={
            "add": lambda count: by_hand.adds_keys_to_two(start, count, keys, values),
            "get": lambda count: by_hand.gets_keys_of_two(start, count, keys),
        },
    )


def parameter_server_calls(session: Session) -> Iterator[Figure]:
    """Calls for 100 keys of a row of 10 M float32 follow each other, and none of them waits.

    With SSP the caller is one clock ahead of another worker, which the staleness allows.
    """
    count = session.size(50_000, 500)
    start = _numbers(session.size(10_000_000, 100_000), seed=1)
    keys = _key_sets(len(start), 100)
    values = _numbers(100, seed=2)
    ways: dict[str, tuple[int, Consistency]] = {
        "1 shard, ASP": (1, ASP()),
        "1 shard, SSP": (1, SSP(staleness=CLOCKS_AHEAD + 1)),
        "2 shards, SSP": (2, SSP(staleness=CLOCKS_AHEAD + 1)),
    }
    uses = {"add": _adds(count, keys, values), "get": _gets(count, keys)}
    numpy = {"add": by_hand.adds_keys(start, count, keys, values), "get": by_hand.gets_keys(start, count, keys)}
    for call, use in uses.items():
        series = alternate(
            {f"numpy, {call}": _measured(count, numpy[call])}
            | {
                f"{call}, {way}": _measured(count, _served(shards, start, use, consistency))
                for way, (shards, consistency) in ways.items()
            },
            repeat=session.repeat,
            agree=agree,
        )
        yield series.figure(f"numpy, {call}", CALLS)
        for way, (shards, _) in ways.items():
            target = Target("figure", at_least=AT_LEAST_CALLS) if shards == 1 else None
            yield series.figure(f"{call}, {way}", CALLS, compared_with=f"numpy, {call}", target=target)


def parameter_server_optimizer(session: Session) -> Iterator[Figure]:
    """Adam updates 10 M float32 on the server (``psf.Optimize``), compared with Adam on whole arrays in numpy.

    An update adds one gradient and makes the step with it.
    """
    count = session.size(5, 2)
    columns = session.size(10_000_000, 100_000)
    weights, gradient = _numbers(columns, seed=1), _numbers(columns, seed=2)
    series = alternate(
        {
            "numpy, whole arrays": _measured(count, by_hand.adam(weights, gradient, count), "updates"),
            "psf.Optimize": _measured(count, _served_adam(weights, gradient, count), "updates"),
        },
        repeat=session.repeat,
        agree=agree,
    )
    yield series.figure("numpy, whole arrays", "updates/s")
    yield series.figure("psf.Optimize", "updates/s", compared_with="numpy, whole arrays")


# -- measuring -----------------------------------------------------------------------------------------------


def _compared_with_numpy(
    session: Session,
    label: str,
    count: int,
    *,
    numpy: Callable[[int], Mapping[str, Work]],
    served: Callable[[int, int], Mapping[str, Work]],
    two_arrays: Mapping[str, Callable[[int], Work]] | None = None,
) -> Iterator[Figure]:
    for call, bare in numpy(count).items():
        contenders = {f"numpy, {label}, {call}": bare}
        of_two = f"numpy, {label}, {call}, two arrays"
        if two_arrays is not None:
            contenders[of_two] = two_arrays[call](count)
        for shards in (1, 2):
            contenders[f"{label}, {call}, {shards} shard{'s' * (shards > 1)}"] = served(shards, count)[call]
        series = alternate(
            {name: _measured(count, work) for name, work in contenders.items()}, repeat=session.repeat, agree=agree
        )
        bare_name, *others = contenders
        yield series.figure(bare_name, CALLS)
        for name in others:
            target = Target("ratio", at_least=AT_LEAST) if name != of_two else None
            yield series.figure(name, CALLS, compared_with=bare_name, target=target)
        if two_arrays is not None:
            yield series.figure(others[-1], CALLS, compared_with=of_two)


def _measured(count: int, work: Work, noun: str = "calls") -> Contender:
    def run() -> Trial:
        watch = Stopwatch()
        result = work(watch)
        return Trial(watch.rates(count, noun), digest(result))

    return run


def digest(numbers: Numbers) -> npt.NDArray[np.float64]:
    """Return some of many numbers and the sum of all, which differ between different results."""
    return np.append(numbers[::997].astype(np.float64), numbers.sum(dtype=np.float64))


def agree(first: Any, other: Any) -> bool:
    """Return whether two digests are those of the same float32 numbers, summed in any order."""
    return bool(np.allclose(first, other, rtol=1e-4, atol=1e-3))


def _numbers(count: int, seed: int) -> Numbers:
    return np.random.default_rng(seed).random(count, np.float32)


def _key_sets(columns: int, count: int) -> list[Keys]:
    random = np.random.default_rng(3)
    return [random.choice(columns, count, replace=False) for _ in range(KEYS_IN_ALL // count)]


# -- on a server ---------------------------------------------------------------------------------------------


def _served(shards: int, start: Numbers, use: Use, consistency: Consistency | None = None) -> Work:
    async def run(watch: Stopwatch) -> Numbers:
        async with ParameterServer(shards) as server:
            await server.create_matrix(
                MATRIX, rows=1, columns=len(start), dtype="float32", consistency=consistency or ASP(), init=start
            )
            client = server.client(worker=0)
            server.client(worker=1)
            for _ in range(CLOCKS_AHEAD):
                await client.clock(MATRIX)
            return await use(client, watch)

    return lambda watch: _run(run(watch))


def _adds(count: int, keys: list[Any], values: Numbers) -> Use:
    async def use(client: Client, watch: Stopwatch) -> Numbers:
        with watch:
            for number in range(count):
                await client.add(MATRIX, row=0, columns=keys[number % len(keys)], values=values)
        return await client.get(MATRIX, row=0)

    return use


def _gets(count: int, keys: list[Any]) -> Use:
    async def use(client: Client, watch: Stopwatch) -> Numbers:
        with watch:
            for number in range(count):
                values = await client.get(MATRIX, row=0, columns=keys[number % len(keys)])
        return values

    return use


def _served_adam(weights: Numbers, gradient: Numbers, count: int) -> Work:
    optimize = psf.Optimize(MATRIX, Adam())

    async def run(watch: Stopwatch) -> Numbers:
        async with ParameterServer() as server:
            rows = optimize.rows_needed(optimize.optimizer)
            await server.create_matrix(MATRIX, rows=rows, columns=len(weights), dtype="float32")
            client = server.client(worker=0)
            await client.update(psf.FullFill(MATRIX, 0.0))  # allocates the memory before the time is measured
            await client.add(MATRIX, row=0, values=weights)
            with watch:
                for _ in range(count):
                    await client.add(MATRIX, row=optimize.gradient_row(), values=gradient)
                    await client.update(optimize)
            return await client.get(MATRIX, row=0)

    return lambda watch: _run(run(watch))


def _run(work: Any) -> Numbers:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result: Numbers = runner.run(work)
        return result
