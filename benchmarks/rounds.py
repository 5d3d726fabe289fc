"""Measure the cost of a round, in bounded iterations with almost no work in a round."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.feedback import token_in_futures
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow, IterationBodyResult, Stream, iterate_bounded_streams_until_termination
from streamiter.iteration import terminate_after

__all__ = ["bounded_rounds"]

ROUNDS = "rounds/s"

# Flink ML 2.3 on two cores makes 1,900 to 2,500 rounds a second in the first 1,000 rounds, 3,800 to 7,000 later,
# and 1,500 to 2,000 with a criteria stream.


def bounded_rounds(session: Session) -> Iterator[Figure]:
    """A bounded iteration has one small record a round for each subtask (Flink ML: 3,800 to 7,000 rounds/s).

    The measure is a hop of a token between asyncio tasks, with bare futures: the share says how much dearer a round is.
    """
    rounds = session.size(20_000, 500)
    kinds = {
        "parallelism 1": (1, False, False, 0.06),
        "parallelism 2": (2, False, False, 0.035),
        "parallelism 1, criteria stream": (1, True, False, 0.035),
        "parallelism 2, criteria stream": (2, True, False, None),
        # Each step has several channels, so that its inbox puts records into order.
        "parallelism 2, repartitioned": (2, False, True, None),
    }
    futures = "a hop between asyncio tasks, bare futures"
    series = alternate(
        {futures: lambda: _hops(2 * rounds)}
        | {
            name: _measured(rounds, parallelism=parallelism, with_criteria=with_criteria, repartitioned=repartitioned)
            for name, (parallelism, with_criteria, repartitioned, _) in kinds.items()
        },
        repeat=session.repeat,
        agree=lambda hops, last: isinstance(hops, int) and bool(last == [hops // 2 + 1]),
    )
    yield series.figure(futures, ROUNDS)
    for name, (_, _, _, at_least) in kinds.items():
        target = None if at_least is None else Target("ratio", at_least=at_least)
        yield series.figure(name, ROUNDS, compared_with=futures, target=target)


def _hops(hops: int) -> Trial:
    return token_in_futures(hops, "rounds")


def _measured(rounds: int, *, parallelism: int, with_criteria: bool, repartitioned: bool) -> Contender:
    def run() -> Trial:
        flow = Flow("rounds", parallelism=parallelism)

        def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
            variable = variables[0].rebalance() if repartitioned else variables[0]
            raised = variable.map(lambda number: number + 1)
            last = raised.filter(lambda number: number > rounds)
            if with_criteria:
                return IterationBodyResult([raised], [last], terminate_after(raised, rounds=rounds))
            return IterationBodyResult([raised.filter(lambda number: number <= rounds)], [last])

        numbers = flow.from_items([0] * parallelism)
        [last] = iterate_bounded_streams_until_termination([numbers], [], body)
        collected = last.collect()
        watch = Stopwatch()
        with watch:
            run_to_end(flow)
        # The set is the same for all contenders, for any number of subtasks.
        return Trial(watch.rates(rounds, "rounds"), sorted(set(collected.items)))

    return run
