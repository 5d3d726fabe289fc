"""Iterations that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/iteration/test_refusals.py`` writes the texts as they are now.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from iteration.iteration_support import Endless, ended
from support.refusals import refusals_test, sections, write

import streamiter
from streamiter import Flow, IterationBodyResult, IterationConfig, IterationListener, Operator, Stream
from streamiter.engine.graph.feedback import FeedbackLimits
from streamiter.errors import StreamiterError
from streamiter.iteration import all_reduce, last_round, map_with, terminate_after
from streamiter.topics import MemoryBroker

FILE = Path(__file__).with_name("refusals.txt")


def untouched(variables: list[Stream], data: list[Stream]) -> Any:
    return IterationBodyResult(variables, variables)


async def later(*streams: list[Stream]) -> Any: ...


def generates(variables: list[Stream], data: list[Stream]) -> Any:
    yield IterationBodyResult(variables, [])


def same(stream: Stream, name: str, **options: Any) -> Stream:
    return stream.map(lambda x: x, name=name, **options)


class Both(Operator):
    """Passes records on."""

    def process(self, record: Any, out: Any) -> None:
        out.emit(record)

    process_left = process_right = process


class InOrder(Both):
    epochs_in_order = True


class Listening(Both, IterationListener):
    """Is called at the end of each epoch."""


class AtTimes(Listening):
    """Says with each instance whether it needs epochs."""

    def __init__(self, needs_epochs: bool) -> None:
        self.needs_epochs = needs_epochs


def set_aside(variables: list[Stream], data: list[Stream]) -> Any:
    both = streamiter.connect(left=variables[0], right=data[0]).process(lambda: InOrder(), name="in order")
    return IterationBodyResult([both.filter(lambda x: False)], [])


def past(streams: list[Stream], sub_body: Any) -> list[Stream]:
    """Add a part that uses a stream past its argument."""
    outside = same(streams[0], "outside")
    return streamiter.for_each_round(streams, lambda given: sub_body(given, outside))


def leaked_from_a_round(streams: list[Stream]) -> Stream:
    leaks = list[Stream]()
    streamiter.for_each_round(streams, lambda given: leaks.append(same(given[0], "inner")) or given)  # type: ignore[func-returns-value]
    return leaks[0]


def fails_in_round_2(how: str) -> Any:
    """Return a factory that makes no new operator in the third round."""
    made: list[Operator] = []

    def make() -> Any:
        if len(made) < 2:
            made.append(Both())
            return made[-1]
        if how == "raises":
            raise ValueError("no more")
        return made[-1] if how == "the same" else 5

    return make


NAMES: dict[str, Any] = {name: getattr(streamiter, name) for name in streamiter.__all__}
NAMES |= {each.__name__: each for each in (untouched, later, generates, same, Both, InOrder, Listening, AtTimes)}
NAMES |= {each.__name__: each for each in (set_aside, past, leaked_from_a_round, fails_in_round_2, Endless)}
NAMES |= {"Result": IterationBodyResult, "FeedbackLimits": FeedbackLimits, "terminate_after": terminate_after}
NAMES |= {"all_reduce": all_reduce, "last_round": last_round, "map_with": map_with}


async def of_a_flow(code: str) -> object:
    """Evaluate a call with streams of a flow, whose iterations it may build and run."""
    flow = Flow("loop")

    def bounded(body: Any = untouched, initial: Any = None, data: Any = (), **config: Any) -> Any:
        given = [flow.from_items([0], name="start")] if initial is None else initial
        return streamiter.iterate_bounded_streams_until_termination(given, data, body, IterationConfig(**config))

    def unbounded(body: Any = untouched, initial: Any = None, data: Any = (), **config: Any) -> Any:
        given = [flow.from_items([0], name="start")] if initial is None else initial
        return streamiter.iterate_unbounded_streams(given, data, body, IterationConfig(**config))

    def leaked() -> Stream:
        leaks: list[Stream] = []
        unbounded(lambda v, d: leaks.append(same(v[0], "inner")) or untouched(v, d))  # type: ignore[func-returns-value]
        return leaks[0]

    def each(sub_body: Any) -> object:
        return bounded(lambda v, d: streamiter.for_each_round(v, sub_body))

    def in_rounds(make: Any) -> object:
        def body(variables: list[Stream], data: list[Stream]) -> Any:
            return IterationBodyResult(
                streamiter.for_each_round(variables, lambda given: [given[0].process(make, name="step")]), []
            )

        return bounded(body)

    async def run(built: object) -> None:
        await ended(await flow.start())

    clicks = flow.from_source(Endless(), name="clicks")
    names = {
        "flow": flow,
        "rows": flow.from_items([1], name="rows"),
        "pairs": flow.from_items([1, 2], name="pairs", parallelism=2),
        "clicks": clicks,
        "stamps": streamiter.epochs_every(flow.from_items([1]), records=1, name="stamps"),
        "elsewhere": Flow("other").from_items([], name="elsewhere"),
        "topic": MemoryBroker().topic("loop"),
        "file": streamiter.topic("file:/tmp/a.jsonl"),
    }
    for function in (bounded, unbounded, leaked, each, in_rounds, run):
        names[function.__name__] = function
    try:
        result = eval(code, {**NAMES, **names})
        return await result if inspect.isawaitable(result) else result
    except StreamiterError as error:
        # The lines of this file change with each edit.
        text = re.sub(r"(test_refusals\.py):\d+", r"\1", str(error))
        raise type(type(error).__name__, (Exception,), {})(text) from error


CALLS = dict.fromkeys(sections(FILE), of_a_flow)

test_wrong_iterations_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
