"""Flows and steps that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/flow/test_refusals.py`` writes the texts as they are now.
"""

import asyncio
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flow import small_flows
from flow.small_flows import Fed, Pass, in_body
from support.refusals import refusals_test, sections, write

import streamiter.iteration
import streamiter.learn
from streamiter import Flow, IterationBodyResult, IterationListener, Operator, Stream, iterate_unbounded_streams
from streamiter.errors import GraphError
from streamiter.operators import Output
from streamiter.operators.source import Source

FILE = Path(__file__).with_name("refusals.txt")


class ByBatch(Operator):
    def process_batch(self, batch: Any, out: Output) -> None:
        out.emit_batch(batch)


class Empty(Operator):
    pass


class AsyncInThread(Operator):
    runs_in_thread = True

    async def process(self, record: Any, out: Output) -> None: ...


class AsyncWanted(Pass):
    async def wanted_inputs(self) -> tuple[str, ...]:
        return ("input",)


class Wants(Pass):
    wanted_inputs = ("input",)


class Scaled(Pass):
    def __init__(self, factor: int) -> None: ...


class Opens(Source):
    def open(self, context: Any) -> None: ...  # type: ignore[override]


class Client:
    async def __call__(self, record: Any) -> Any: ...


async def fetch(*arguments: Any) -> Any: ...


async def pages(record: Any) -> Any:
    yield record


def two(first: Any, second: Any) -> Any: ...


def none() -> Any: ...


def unbounded() -> Stream:
    return Flow("f").from_source(Fed, name="clicks")


def started(stream: Stream) -> None:
    """Run the flow of a step whose class only its factory knows."""
    stream.flow.run()


def trainer(method: str, written: Any) -> None:
    """Add an operator with this method to a body; its class is refused at once, and its factory at the start."""
    listens = method.startswith("on_") and method != "on_timer"
    made = type("Trainer", (Pass, IterationListener) if listens else (Pass,), {method: written})

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        variables[0].process(lambda: made(), name="train")
        return IterationBodyResult(variables, [])

    flow = Flow("f")
    iterate_unbounded_streams([flow.from_items([1])], [], body)
    with pytest.raises(GraphError) as at_start:
        flow.run()
    with pytest.raises(GraphError) as at_once:
        in_body(lambda flow, variable: variable.process(made, name="train"))
    assert at_start.value.args[0].partition(", given")[0] == at_once.value.args[0].partition(", given")[0]
    at_once.value.where = "the user's line"
    raise at_once.value


MODULES = (streamiter, streamiter.iteration, streamiter.learn)
NAMES = {name: getattr(module, name) for module in MODULES for name in module.__all__}
NAMES |= {"np": np, "datetime": datetime, "partial": partial, **vars(small_flows), **globals()}


async def called(code: str) -> object:
    """Evaluate a call as a line of ``call.py``, which is the line of the error."""
    return await asyncio.to_thread(eval, compile(code, "call.py", "eval"), dict(NAMES))


CALLS = dict.fromkeys(sections(FILE), called)

test_a_wrong_step_is_refused_with_its_text_at_the_line_of_the_user = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
