"""A function, a factory or a method that cannot be called with the engine's arguments is refused at its line."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
from flow.small_flows import CLICKS, Pass, in_body, stream

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationListener,
    Operator,
    Stream,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.errors import GraphError
from streamiter.iteration import all_reduce, map_with
from streamiter.learn import train_offline, train_online
from streamiter.operators.source import Source


def two(first: Any, second: Any) -> Any: ...


def none() -> Any: ...


WRONG_SIGNATURES: list[tuple[Callable[[Any], Any], str, str, str]] = [
    (lambda f: stream().map(f), "map", "record", "two"),
    (lambda f: stream().filter(f), "filter", "record", "two"),
    (lambda f: stream().flat_map(f), "flat_map", "record", "two"),
    (lambda f: stream().map_batch(f), "map_batch", "batch", "two"),
    (lambda f: stream().filter_batch(f), "filter_batch", "batch", "two"),
    (lambda f: stream().key_by(f), "key_by", "record", "two"),
    (lambda f: stream().key_by_batch(f), "key_by_batch", "batch", "two"),
    (lambda f: stream().partition_by(f), "partition_by", "record", "two"),
    (lambda f: stream().sort(f), "sort", "record", "two"),
    (lambda f: stream().join(stream(), on=("id", f)), "join", "record", "two"),
    (lambda f: stream().sink(CLICKS, key=f), "sink key", "record", "two"),
    (lambda f: epochs_every(stream(), marks=f), "epochs_every(marks)", "record", "two"),
    (lambda f: stream().reduce_all(f), "reduce_all", "result, record", "none"),
    (lambda f: stream().key_by(str).reduce(f), "reduce", "result, record", "none"),
    (lambda f: stream().key_by(str).stateful_map(f, 0), "stateful_map", "state, record", "none"),
    (lambda f: stream().key_by(str).stateful_map(two, f), "stateful_map(initial=)", "", "two"),
    (lambda f: train_online(stream(), f, mode="synchronous", extract=str), "train_online(model)", "", "two"),
    (
        lambda f: train_online(stream(), none, mode="synchronous", extract=f),
        "train_online(extract=)",
        "mini_batch",
        "two",
    ),
    (lambda f: train_offline(stream(), none, extract=f, rounds=1), "train_offline(extract=)", "batch", "two"),
    (lambda f: in_body(lambda _, x: all_reduce(x, f)), "all_reduce", "result, record", "none"),
    (lambda f: in_body(lambda _, x: map_with(x, x, f)), "map_with", "value, batch", "none"),
]


@pytest.mark.parametrize(
    ("build", "method", "takes", "given"), WRONG_SIGNATURES, ids=[case[1] for case in WRONG_SIGNATURES]
)
def test_a_function_that_takes_other_arguments_is_refused_where_it_is_given(
    build: Callable[[Any], Any], method: str, takes: str, given: str
) -> None:
    """The job started and failed with its first record, which is minutes later in a cluster."""
    shown = {
        "two": "two(first, second): missing a required argument: 'first'"
        if not takes
        else "two(first, second): missing a required argument: 'second'",
        "none": "none(): too many positional arguments",
    }[given]
    with pytest.raises(GraphError) as caught:
        build({"two": two, "none": none}[given])
    around = f"lambda {takes}: …" if takes else "lambda: …"
    assert caught.value.args[0] == (
        f"{method}: expected a function that is called as f({takes}), given {shown}; write def f({takes}), or "
        f"{around} around it"
    )
    assert caught.value.where.startswith("test_wrong_signatures.py:")


def test_the_error_of_a_wrong_signature_names_the_step_that_the_user_named() -> None:
    """In a flow with ten maps, the error said only "map"."""
    with pytest.raises(GraphError, match=r"^step 'double', map: expected a function that is called as f\(record\)"):
        stream().map(two, name="double")


class Callable_(Operator):
    """An object that can be called."""

    def method(self, record: Any) -> Any: ...

    @classmethod
    def of_class(cls, record: Any) -> Any: ...

    @staticmethod
    def static(record: Any) -> Any: ...

    def __call__(self, record: Any, *others: Any, key: int = 0) -> Any: ...


@wraps(two)
def passes_a_second(record: Any) -> Any:
    return two(record, None)


@pytest.mark.parametrize(
    "f",
    [
        str,
        int,
        len,
        max,
        print,
        str.upper,
        np.sqrt,
        np.asarray,
        operator.itemgetter(0),
        partial(two, 1),
        partial(two, second=1),
        Callable_().method,
        Callable_.of_class,
        Callable_.static,
        Callable_(),
        np.vectorize(two),
        passes_a_second,
    ],
)
def test_every_callable_that_takes_a_record_is_accepted(f: Any) -> None:
    """A C function without known arguments was refused, or a decorated function by the arguments of the inner one."""
    stream().map(f)
    stream().key_by(f).reduce(max)
    stream().map_batch(f)


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (partial(Pass, 1), None),
        (lambda factor: Pass(), "<lambda>(factor): missing a required argument: 'factor'; write lambda: f(…)"),
        (two, "two(first, second): missing a required argument: 'first'; write lambda: two(…)"),
    ],
)
def test_a_factory_that_needs_arguments_is_refused_where_it_is_given(factory: Any, reason: str | None) -> None:
    """A factory with arguments failed when the job started, far from the line that gave it."""

    class Scaled(Pass):
        def __init__(self, factor: int) -> None: ...

    expected = reason or "Scaled(factor): missing a required argument: 'factor'; write lambda: Scaled(…)"
    given = Scaled if reason is None else factory
    with pytest.raises(GraphError) as caught:
        stream().process(given, name="scale")
    assert caught.value.args[0] == (
        "step 'scale': expected a class or a callable without arguments that makes a new Operator, given " + expected
    )
    with pytest.raises(GraphError, match="that makes a new Source, given two"):
        Flow("f").from_source(two)


WRONG_METHODS: list[tuple[str, Any, str, str]] = [
    ("process", lambda self, record: None, "record, out", "too many positional arguments"),
    ("process", lambda self, record, out, more: None, "record, out", "missing a required argument: 'more'"),
    ("open", lambda self: None, "context", "too many positional arguments"),
    ("finish", lambda self: None, "out", "too many positional arguments"),
    ("close", lambda self, out: None, "", "missing a required argument: 'out'"),
    ("snapshot", lambda self, out: None, "", "missing a required argument: 'out'"),
    ("restore", lambda self: None, "state", "too many positional arguments"),
    ("wanted_inputs", lambda self, name: None, "", "missing a required argument: 'name'"),
    ("input_ended", lambda self, out: None, "name, out", "too many positional arguments"),
    ("on_timer", lambda self, out: None, "payload, out", "too many positional arguments"),
    ("redistribute", lambda self, states: None, "states, parallelism", "too many positional arguments"),
    (
        "on_epoch_watermark_incremented",
        lambda self, epoch, out: None,
        "epoch_watermark, context, out",
        "too many positional arguments",
    ),
    ("on_iteration_terminated", lambda self, out: None, "context, out", "too many positional arguments"),
]


@pytest.mark.parametrize(("method", "written", "takes", "reason"), WRONG_METHODS)
def test_a_method_of_an_operator_that_takes_other_arguments_is_refused(
    method: str, written: Any, takes: str, reason: str
) -> None:
    """A callback with other arguments failed the job in the first epoch, and ``restore`` failed after the first
    crash.
    """
    listens = method.startswith("on_") and method != "on_timer"
    made = type("Trainer", (Pass, IterationListener) if listens else (Pass,), {method: written})
    message = f"expected Trainer.{method} to be called as {method}({takes}), given <lambda>("

    def add(flow: Flow, stream: Stream, factory: Any) -> None:
        stream.process(factory, name="train")

    with pytest.raises(GraphError) as caught:
        in_body(lambda flow, variable: add(flow, variable, made))
    text = caught.value.args[0]
    assert text.startswith(f"step 'train': {message}")
    assert f": {reason}; write def {method}(self" in text
    flow = Flow("f")
    items = flow.from_items([1])
    iterate_unbounded_streams(
        [items], [], lambda variables, _: add(flow, variables[0], lambda: made()) or IterationBodyResult(variables, [])
    )
    with pytest.raises(GraphError) as caught:
        flow.run()
    assert caught.value.args[0].startswith(f"step 'train': {message}")


def test_a_method_of_a_source_that_takes_other_arguments_is_refused() -> None:
    """A source without the argument for its positions failed when it was opened."""

    class Opens(Source):
        def open(self, context: Any) -> None: ...  # type: ignore[override]

    message = "step 'in': expected Opens.open to be called as open(context, positions), given open("
    flow = Flow("f")
    with pytest.raises(GraphError, match=re.escape(message)):
        flow.from_source(Opens, name="in")
    flow.from_source(lambda: Opens(), name="in")
    with pytest.raises(GraphError, match=re.escape(message)):
        flow.run()


def test_wanted_inputs_is_a_method() -> None:
    """A tuple in the place of the method ``wanted_inputs`` was called with the first record."""

    class Wants(Pass):
        wanted_inputs = ("input",)

    with pytest.raises(GraphError, match=r"expected Wants.wanted_inputs to be a method, given \('input',\); write def"):
        stream().process(Wants)
