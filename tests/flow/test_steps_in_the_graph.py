"""Each step of a graph has a name, its options, and the line of the user that added it; structs are plain data."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from flow.small_flows import CLICKS, Pass, stream
from topics.topic_case import write

from streamiter import Checkpoints, Flow, IterationConfig, Operator, Stream, connect
from streamiter.errors import GraphError
from streamiter.flow.flow import ConnectedStreams
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Output
from streamiter.topics import MemoryBroker, OutgoingBatch, Typed, WithMetadata


class Left(Operator):
    def process_left(self, record: Any, out: Output) -> None: ...


def test_the_error_about_a_taken_name_has_the_line_of_the_other_step() -> None:
    """Two steps with one name shared their state, which is restored by the name."""
    flow = Flow("f")
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    source = flow.from_items([1], name="prices")
    with pytest.raises(GraphError) as caught:
        source.map(str, name="prices")
    assert str(caught.value) == (
        f"step 'prices': expected a name of its own, given one that test_steps_in_the_graph.py:{line} already uses; "
        f"choose another (at test_steps_in_the_graph.py:{line + 2})"
    )


def in_a_helper() -> None:
    stream().map(3)  # type: ignore[arg-type]


def test_the_place_is_the_innermost_line_of_the_user() -> None:
    """A traceback through the engine hid the one line that the user can change."""
    with pytest.raises(GraphError) as caught:
        in_a_helper()
    assert caught.value.where == f"test_steps_in_the_graph.py:{in_a_helper.__code__.co_firstlineno + 1}"
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(GraphError) as caught:
        IterationConfig(max_epochs_ahead=-1)
    assert str(caught.value).endswith(f"None asynchronous (at test_steps_in_the_graph.py:{line})")


def test_the_place_stays_when_an_error_is_copied() -> None:
    """An error was copied between processes, and named the line of the copying, or both lines."""
    with pytest.raises(GraphError) as caught:
        in_a_helper()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.where) == (str(caught.value), caught.value.where)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 3, "step 'in': expected its factory to give a Source, given int; derive it from "),
        (lambda: 1 / 0, "step 'in': expected its factory to work without arguments, given ZeroDivisionError: "),
    ],
)
def test_an_error_at_the_start_names_the_line_that_added_the_step(factory: Any, message: str) -> None:
    """The error named the line that runs the flow, but the mistake was in the line of the step."""
    flow = Flow("f")
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    flow.from_source(factory, name="in")
    with pytest.raises(GraphError) as caught:
        flow.run()
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith(f" (at test_steps_in_the_graph.py:{line})")


def test_a_step_knows_the_user_s_own_line() -> None:
    """A step that a function of the engine had added, such as ``connect``, did not have the user's line."""
    flow = Flow("f")
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    items = flow.from_items([1])
    items.map(str)
    connect(left=items).process(Left)
    items.collect()
    assert [step.where for step in flow.steps] == [f"test_steps_in_the_graph.py:{line + n}" for n in range(4)]


# -- names and options ----------------------------------------------------------------------------------------

# Steps that call a function of the user for each record (or batch), or take records that may be bad.
MAY_REFUSE = [
    (Stream, "map"),
    (Stream, "filter"),
    (Stream, "flat_map"),
    (Stream, "map_batch"),
    (Stream, "filter_batch"),
    (Stream, "process"),
    (Stream, "reduce_all"),
    (Stream, "sort"),
    (Stream, "join"),
    (Stream, "sink"),
    (KeyedStream, "reduce"),
    (KeyedStream, "stateful_map"),
    (KeyedStream, "process"),
    (ConnectedStreams, "process"),
    (Flow, "source"),
]
NEVER_REFUSES = [(Stream, "batch"), (Stream, "publish_model"), (Stream, "collect")]
IN_ONE_SUBTASK = {"reduce_all", "sort", "join", "publish_model"}


@pytest.mark.parametrize(("kind", "method"), MAY_REFUSE + NEVER_REFUSES)
def test_steps_of_a_kind_take_the_same_options(kind: type, method: str) -> None:
    """An option worked at some steps, and was a TypeError at others."""
    function = getattr(kind, method)
    options = set(inspect.signature(function).parameters)
    if "options" in options:
        [shared] = get_args(get_type_hints(function)["options"])
        options |= set(shared.__annotations__)
    assert "name" in options
    assert ("parallelism" in options) == (method not in IN_ONE_SUBTASK)
    may_refuse = (kind, method) in MAY_REFUSE
    assert ("on_error" in options, "dead_letter" in options) == (may_refuse, may_refuse)


def mistyped_options() -> dict[str, Callable[[Stream], object]]:
    """Return calls with an option that the step does not have."""
    return {
        "map": lambda items: items.map(str, nmae="text"),
        "process": lambda items: items.process(Pass, nmae="plain"),
        "sort": lambda items: items.sort(nmae="sorted"),
        "sink": lambda items: items.sink(CLICKS, nmae="written"),
        "reduce": lambda items: items.key_by(str).reduce(max, nmae="largest"),
        "source": lambda items: items.flow.source(CLICKS, nmae="clicks"),
    }


@pytest.mark.parametrize("method", mistyped_options())
def test_an_option_that_a_step_does_not_have_is_a_type_error(method: str) -> None:
    """The error about a mistyped option did not list the options, or the step stayed in the flow."""
    flow = Flow("f")
    items = flow.from_items([1])
    with pytest.raises(
        TypeError, match=rf"^{method}\(\) got an unexpected keyword argument 'nmae'; its options are .*name="
    ):
        mistyped_options()[method](items)
    assert len(flow.steps) == 1


def test_an_option_that_a_run_does_not_have_is_a_type_error() -> None:
    """A misspelt option of ``run`` was found by a type checker only at the start of the job."""
    flow = Flow("f")
    flow.from_items([1]).collect()
    with pytest.raises(
        TypeError, match=r"^start\(\) got an unexpected .* 'checkpoint'; its options are .*checkpoints="
    ):
        flow.run(checkpoint=None)  # type: ignore[call-arg]


def test_a_step_with_one_subtask_has_no_parallelism() -> None:
    """Several subtasks of ``sort``, which keeps all records in memory, gave several sorted parts."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'parallelism'"):
        Flow("f").from_items([1]).sort(parallelism=2)  # type: ignore[call-arg]


def test_default_names_are_numbered() -> None:
    """Two maps without names were an error."""
    flow = Flow("f")
    mapped = flow.from_items([1]).map(str).map(int)
    mapped.map(str, name="map-4").map(int)
    assert [step.name for step in flow.steps] == ["items", "map", "map-2", "map-4", "map-3"]


class Item(msgspec.Struct):
    """Part of an order."""

    name: str


class Order(msgspec.Struct, tag=True):
    """An event with parts."""

    items: list[Item]


class Cancellation(msgspec.Struct, tag=True):
    """An event of another kind."""

    number: int = 0


class Last(Operator):
    """Keeps the last record."""

    def __init__(self) -> None:
        self.last: object = None

    def process(self, record: object, out: Output) -> None:
        self.last = record

    def snapshot(self) -> object:
        return self.last

    def restore(self, state: object) -> None:
        self.last = state


async def test_events_of_a_typed_source_can_be_state(tmp_path: Path) -> None:
    """Mini-batches of events waited at a barrier, and the job failed, because each class had to be registered by
    hand.
    """
    orders = MemoryBroker().topic("orders")
    await orders.create()
    await write(orders, OutgoingBatch([b'{"type": "Order", "items": [{"name": "tea"}]}']))
    for decoder in (Typed(Order | Cancellation), WithMetadata(Typed(Order | Cancellation))):
        flow = Flow("orders")
        flow.source(orders, decode=decoder, stop="latest").process(Last, name="last")
        folder = tmp_path / type(decoder).__name__
        job = await flow.start(checkpoints=Checkpoints(folder, interval_s=100.0))
        assert (await job.wait()).checkpoints is not None
        assert flow.plain_data.decode(flow.plain_data.encode(Cancellation(7))) == Cancellation(7)


class Elsewhere:
    """A class that contains a class of the same name."""

    class Item(msgspec.Struct):
        """A class that has only its name in common with the other one."""

        price: float


def test_two_classes_of_one_name_are_no_error_of_a_flow_that_stores_neither() -> None:
    """Two modules had a class Event each, and the flow that read both could not be built."""
    flow = Flow("two")
    broker = MemoryBroker()
    flow.source(broker.topic("a"), decode=Typed(Item))
    flow.source(broker.topic("b"), decode=Typed(Elsewhere.Item))
    assert flow.plain_data.decode(flow.plain_data.encode(Item("tea"))) == Item("tea")
