"""A flow that cannot run fails with an error at the wrong line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import pytest
from flow.small_flows import CLICKS, Fed, Pass, in_body, stream

from streamiter import Flow, IterationBodyResult, Json, Operator, OutputTag, Stream, connect, iterate_unbounded_streams
from streamiter.errors import GraphError
from streamiter.operators import Output
from streamiter.operators.source import Source


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


async def fetch(*arguments: Any) -> Any: ...


async def pages(record: Any) -> Any:
    yield record


class Client:
    async def __call__(self, record: Any) -> Any: ...


def unbounded() -> Stream:
    return Flow("f").from_source(Fed, name="clicks")


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "flow without a name": (lambda: Flow(""), "Flow: expected a name, given ''; it keys checkpoints and transactions"),
    "flow parallelism": (
        lambda: Flow("f", parallelism=0),
        "step 'f': expected a parallelism of at least 1, given 0; use a whole number",
    ),
    "source without a topic": (
        lambda: Flow("f").source("kafka://x/y"),  # type: ignore[arg-type]
        "flow.source: expected a topic, given 'kafka://x/y'; write flow.source(topic(\"scheme://…\"))",
    ),
    "source policy": (
        lambda: Flow("f").source(CLICKS, on_error="ignore"),  # type: ignore[arg-type]
        'step \'clicks\': expected on_error "fail", "skip" or "dead_letter", given \'ignore\'; choose one of these',
    ),
    "source dead letters without a topic": (
        lambda: Flow("f").source(CLICKS, on_error="dead_letter"),
        "step 'clicks': on_error=\"dead_letter\" expected a topic for the dead letters, given none; "
        'add dead_letter=topic("scheme://…")',
    ),
    "source parallelism": (
        lambda: Flow("f").source(CLICKS, parallelism=0),
        "step 'clicks': expected a parallelism of at least 1, given 0; use a whole number",
    ),
    "source that starts nowhere": (
        lambda: Flow("f").source(CLICKS, start="begin"),  # type: ignore[arg-type]
        'step \'clicks\': expected start "earliest", "latest", "committed", an offset for each partition ({0: 1200}) '
        "or an aware datetime, given 'begin'; choose one of these",
    ),
    "source that starts at one offset for all": (
        lambda: Flow("f").source(CLICKS, start=1200),  # type: ignore[arg-type]
        'step \'clicks\': expected start "earliest", "latest", "committed", an offset for each partition ({0: 1200}) '
        "or an aware datetime, given 1200; choose one of these",
    ),
    "source that starts before its first offset": (
        lambda: Flow("f").source(CLICKS, start={0: -1}),
        'step \'clicks\': expected start "earliest", "latest", "committed", an offset for each partition ({0: 1200}) '
        "or an aware datetime, given {0: -1}; choose one of these",
    ),
    "source that starts at a time somewhere on earth": (
        lambda: Flow("f").source(CLICKS, start=datetime(2013, 1, 1)),
        "step 'clicks': expected start to be an aware datetime, given 2013-01-01 00:00:00 without a time zone; "
        "say which one: start.replace(tzinfo=UTC)",
    ),
    "source that stops where it starts": (
        lambda: Flow("f").source(CLICKS, stop="earliest"),  # type: ignore[arg-type]
        "step 'clicks': expected stop None (read on for ever), \"latest\" or an offset for each partition "
        "({0: 1200}), given 'earliest'; choose one of these",
    ),
    "source that stops after three records": (
        lambda: Flow("f").source(CLICKS, stop=3),  # type: ignore[arg-type]
        "step 'clicks': expected stop None (read on for ever), \"latest\" or an offset for each partition "
        "({0: 1200}), given 3; choose one of these",
    ),
    "source that stops at a flag": (
        lambda: Flow("f").source(CLICKS, stop={0: True}),
        "step 'clicks': expected stop None (read on for ever), \"latest\" or an offset for each partition "
        "({0: 1200}), given {0: True}; choose one of these",
    ),
    "a decoder's class": (
        lambda: Flow("f").source(CLICKS, decode=Json),  # type: ignore[arg-type]
        "step 'clicks': expected decode= to be a decoder such as Json(), given the class Json; write Json()",
    ),
    "a decoder by name": (
        lambda: Flow("f").source(CLICKS, decode=b"json"),  # type: ignore[arg-type]
        "step 'clicks': expected decode= to be a decoder such as Json(), given b'json'; give an object with a "
        "method decode(batch)",
    ),
    "a decoder that is a function": (
        lambda: Flow("f").source(CLICKS, decode=len),  # type: ignore[arg-type]
        "step 'clicks': expected decode= to be a decoder such as Json(), given <built-in function len>; give an "
        "object with a method decode(batch)",
    ),
    "a dict as items": (
        lambda: Flow("f").from_items({"ann": 1}),
        "from_items: expected records, given a mapping: {'ann': 1}; write list(….items()) for pairs, Columns(…) for "
        "named arrays, or […] for one record",
    ),
    "a number as name": (
        lambda: stream().map(str, name=7),  # type: ignore[arg-type]
        'step: expected name= to be a text, given 7; write name="…", or leave it out',
    ),
    "an empty name": (
        lambda: Flow("f").from_items([1], name=""),
        "step: expected name= to be a text, given ''; write name=\"…\", or leave it out",
    ),
    "one item": (
        lambda: Flow("f").from_items(5),  # type: ignore[arg-type]
        "from_items: expected a list, an array whose first axis is the record, Columns or another iterable of "
        "records, given 5; for one record write [record]",
    ),
    "an array without axes": (
        lambda: Flow("f").from_items(np.array(5)),
        "from_items: expected a list, an array whose first axis is the record, Columns or another iterable of "
        "records, given array(5); for one record write [record]",
    ),
    "a text as items": (
        lambda: Flow("f").from_items("abc"),
        "from_items: expected a list, an array whose first axis is the record, Columns or another iterable of "
        "records, given 'abc'; for one record write [record]",
    ),
    "source instance": (
        lambda: Flow("f").from_source(Fed()),  # type: ignore[arg-type]
        "step 'source': expected a class or a callable without arguments that makes a new Source, given an "
        "instance of Fed, which all subtasks would share; write Fed or lambda: Fed(…)",
    ),
    "source class": (
        lambda: Flow("f").from_source(Pass),  # type: ignore[arg-type]
        "step 'Pass': expected a class derived from streamiter.operators.Source, given Pass; write class "
        "Pass(Source), or a function that makes one",
    ),
    "operator instance": (
        lambda: stream().process(Pass(), name="step"),  # type: ignore[arg-type]
        "step 'step': expected a class or a callable without arguments that makes a new Operator, given an "
        "instance of Pass, which all subtasks would share; write Pass or lambda: Pass(…)",
    ),
    "operator that is none": (
        lambda: stream().process(3),  # type: ignore[arg-type]
        "step 'process': expected a class or a callable without arguments that makes a new Operator, given 3; "
        "write a class derived from streamiter.Operator",
    ),
    "operator class": (
        lambda: stream().process(Fed),  # type: ignore[arg-type]
        "step 'Fed': expected a class derived from streamiter.Operator, given Fed; write class Fed(Operator), or "
        "a function that makes one",
    ),
    "operator without a method": (
        lambda: stream().process(Empty),
        "step 'Empty': expected Empty to define process(record, out) or process_batch(batch, out), given neither; "
        "define one of them",
    ),
    "operator without a method for an input": (
        lambda: connect(model=stream()).process(Pass),
        "step 'Pass': expected Pass to define process_model(record, out) or process_model_batch(batch, out), given "
        "neither; define one of them",
    ),
    "a keyed step by batch": (
        lambda: stream().key_by(int).process(ByBatch),
        "step 'ByBatch': expected ByBatch to define process(record, out), since a keyed step works record by "
        "record, given a method for whole batches; define process, or leave out key_by",
    ),
    "a coroutine in a thread": (
        lambda: stream().process(AsyncInThread),
        "step 'AsyncInThread': expected AsyncInThread.process to be a plain method, since it runs in a thread, "
        "given a coroutine function; write def, or leave out runs_in_thread",
    ),
    "wanted inputs as a coroutine": (
        lambda: stream().process(AsyncWanted),
        "step 'AsyncWanted': expected AsyncWanted.wanted_inputs to be a plain method, since it is asked after each "
        "record, given a coroutine function; write def",
    ),
    "map without a function": (
        lambda: stream().map(3),  # type: ignore[arg-type]
        "map: expected a function, given 3; write a function or a lambda",
    ),
    "flat_map with an asynchronous generator": (
        lambda: stream().flat_map(pages),
        "flat_map: expected a plain function, given the asynchronous generator function pages; await it in an "
        "Operator with async def process(self, record, out) and .process(…), or in .map_async(f)",
    ),
    "map with a part of a coroutine function": (
        lambda: stream().map(partial(fetch, 1)),
        "map: expected a plain function, given the coroutine function partial; await it in an Operator with "
        "async def process(self, record, out) and .process(…), or in .map_async(f)",
    ),
    "map with an object that is called with await": (
        lambda: stream().map(Client()),
        "map: expected a plain function, given the coroutine function Client; await it in an Operator with "
        "async def process(self, record, out) and .process(…), or in .map_async(f)",
    ),
    "process with a coroutine function": (
        lambda: stream().process(fetch),  # type: ignore[arg-type]
        "step 'fetch': expected a class or a callable without arguments that makes a new Operator, given a "
        "coroutine function; write async def in a class derived from streamiter.Operator",
    ),
    "sort by the number of a field": (
        lambda: stream().sort(0),  # type: ignore[arg-type]
        "sort: expected a field's name or a function, given 0; write a function or a lambda",
    ),
    "join on three keys": (
        lambda: stream().join(stream(), on=("a", "b", "c")),  # type: ignore[arg-type]
        "join: expected a field's name, a function or a pair of these, given ('a', 'b', 'c'); write on=\"id\", or "
        'on=("user_id", "id") for left and right',
    ),
    "join on a number": (
        lambda: stream().join(stream(), on=("a", 1)),
        "join: expected a field's name or a function, given 1; write a function or a lambda",
    ),
    "parallelism of a step": (
        lambda: stream().map(str, parallelism=-1),
        "step 'map': expected a parallelism of at least 1, given -1; use a whole number",
    ),
    "parallelism that is no number": (
        lambda: stream().map(str, parallelism=True),
        "step 'map': expected a parallelism of at least 1, given True; use a whole number",
    ),
    "policy": (
        lambda: stream().map(str, on_error="log"),  # type: ignore[arg-type]
        'step \'map\': expected on_error "fail", "skip" or "dead_letter", given \'log\'; choose one of these',
    ),
    "dead letters without a topic": (
        lambda: stream().map(str, on_error="dead_letter", name="parse"),
        "step 'parse': on_error=\"dead_letter\" expected a topic for the dead letters, given none; "
        'add dead_letter=topic("scheme://…")',
    ),
    "dead letters to what is no topic": (
        lambda: stream().map(str, dead_letter="memory://bad"),  # type: ignore[arg-type]
        "step 'map': expected dead_letter to be a topic, given 'memory://bad'; write dead_letter=topic(\"scheme://…\")",
    ),
    "both skipped and dead letters": (
        lambda: stream().map(str, on_error="skip", dead_letter=CLICKS),
        "step 'map': expected on_error=\"skip\" or a dead_letter topic, given both; leave one of them out",
    ),
    "batch of none": (
        lambda: stream().batch(0),
        "step 'batch': expected a number of records of at least 1, given 0; use a whole number",
    ),
    "batch of yes": (
        lambda: stream().batch(True),
        "step 'batch': expected a number of records of at least 1, given True; use a whole number",
    ),
    "batch that is due before it began": (
        lambda: stream().batch(10, timeout_s=-1),
        "step 'batch': expected timeout_s to be a number of seconds above 0, given -1; leave it out to wait for ever",
    ),
    "batch that is due at once": (
        lambda: stream().batch(10, 0),
        "step 'batch': expected timeout_s to be a number of seconds above 0, given 0; leave it out to wait for ever",
    ),
    "batch that is due at no time": (
        lambda: stream().batch(10, float("nan")),
        "step 'batch': expected timeout_s to be a number of seconds above 0, given nan; leave it out to wait for ever",
    ),
    "state that is forgotten at once": (
        lambda: stream().key_by(int).process(Pass, time_to_live_s=0),
        "step 'Pass': expected time_to_live_s to be a number of seconds above 0, given 0; leave it out to keep "
        "states for ever",
    ),
    "state that is forgotten after a text": (
        lambda: stream().key_by(int).process(Pass, time_to_live_s="1h"),  # type: ignore[arg-type]
        "step 'Pass': expected time_to_live_s to be a number of seconds above 0, given '1h'; leave it out to keep "
        "states for ever",
    ),
    "side output by name": (
        lambda: stream().side_output("late"),  # type: ignore[arg-type]
        "side_output: expected an OutputTag, given 'late'; write OutputTag(\"late\")",
    ),
    "union with a list": (
        lambda: stream().union([1]),  # type: ignore[arg-type]
        "union: expected streams, given [1]; write a.union(b, c)",
    ),
    "union of two flows": (
        lambda: stream().union(Flow("g").from_items([1], name="others")),
        "union: expected streams of one flow, given 'items' of flow 'f' and 'others' of flow 'g'; make both with "
        "methods of one flow",
    ),
    "join with a list": (
        lambda: stream().join([1], on="id"),  # type: ignore[arg-type]
        "join: expected a stream, given [1]; write left.join(right, on=…)",
    ),
    "join of an endless stream": (
        lambda: (lambda s: s.flow.from_items([1]).join(s, on="id"))(unbounded()),
        "join: expected a bounded stream, given 'clicks', which never ends; read the topic with stop=\"latest\", or "
        "use key_by(…).reduce(…) for running results",
    ),
    "sort of an endless stream": (
        lambda: unbounded().sort(),
        "sort: expected a bounded stream, given 'clicks', which never ends; read the topic with stop=\"latest\", or "
        "use key_by(…).reduce(…) for running results",
    ),
    "reduce of an endless stream": (
        lambda: unbounded().map(str).reduce_all(max),
        "reduce_all: expected a bounded stream, given 'map', which never ends; read the topic with stop=\"latest\", "
        "or use key_by(…).reduce(…) for running results",
    ),
    "sink without a topic": (
        lambda: stream().sink("memory://out"),  # type: ignore[arg-type]
        "sink: expected a topic, given 'memory://out'; write .sink(topic(\"scheme://…\"))",
    ),
    "sink delivery": (
        lambda: stream().sink(CLICKS, delivery="best_effort"),  # type: ignore[arg-type]
        "sink: expected delivery \"at_least_once\", given 'best_effort'; write that, or leave delivery out",
    ),
    "an encoder's class": (
        lambda: stream().sink(CLICKS, encode=Json),  # type: ignore[arg-type]
        "step 'sink clicks': expected encode= to be an encoder such as Json(), given the class Json; write Json()",
    ),
    "an encoder by name": (
        lambda: stream().sink(CLICKS, encode="json", name="out"),  # type: ignore[arg-type]
        "step 'out': expected encode= to be an encoder such as Json(), given 'json'; give an object with a method "
        "encode(batch)",
    ),
    "sink key that is a field": (
        lambda: stream().sink(CLICKS, key="user"),  # type: ignore[arg-type]
        "sink key: expected a function, given 'user'; write a function or a lambda",
    ),
    "sink policy": (
        lambda: stream().sink(CLICKS, on_error="dead_letter"),
        "step 'sink clicks': on_error=\"dead_letter\" expected a topic for the dead letters, given none; "
        'add dead_letter=topic("scheme://…")',
    ),
    "a model without a name": (
        lambda: stream().publish_model(CLICKS, model=""),
        "publish_model: expected model= to be the name of the model, given ''; it is the key of the updates, under "
        "which readers ask for them",
    ),
    "a model's unknown format": (
        lambda: stream().publish_model(CLICKS, model="ctr", format="pickle"),  # type: ignore[arg-type]
        'publish_model: expected format "auto", "json" or "safetensors", given \'pickle\'; choose one of these',
    ),
    "an input called batch": (
        lambda: connect(batch=stream()),
        "connect: expected a name of an input that does not end in batch, given 'batch': process_batch would be a "
        "method for whole batches; choose another, such as batches",
    ),
    "an input called input": (
        lambda: connect(input=stream()),
        "connect: expected a name of an input of its own, given 'input', which the only input of other steps has; "
        "choose another, such as data",
    ),
    "an input called like the batches of another": (
        lambda: connect(model_batch=stream()),
        "connect: expected a name of an input that does not end in batch, given 'model_batch': process_model_batch "
        "would be a method for whole batches; choose another, such as model_batches",
    ),
    "an input whose name is no name": (
        lambda: connect(**{"my-model": stream()}),
        "connect: expected names of inputs that can be part of a method's name, given 'my-model'; use letters, "
        "digits and underscores",
    ),
    "connect nothing": (
        lambda: connect(),
        "connect: expected at least one stream, given none; write connect(name=stream)",
    ),
    "connect what is no stream": (
        lambda: connect(model=stream(), data=[1]),  # type: ignore[arg-type]
        "connect: expected streams, given [1] for 'data'; write connect(data=stream)",
    ),
    "connect two flows": (
        lambda: connect(a=stream(), b=Flow("g").from_items([1])),
        "connect: expected streams of one flow, given 'items' of flow 'f' and 'items' of flow 'g'; make both with "
        "methods of one flow",
    ),
    "reduce after key_by_batch": (
        lambda: stream().key_by_batch(np.array).reduce(max),
        "reduce: after key_by_batch expected a numpy ufunc of two arguments and one result such as np.add, given "
        "<built-in function max>; use key_by(f) for other functions",
    ),
    "process after key_by_batch": (
        lambda: stream().key_by_batch(np.array).process(Pass),
        "process: expected a stream keyed record by record, given key_by_batch; use key_by(f)",
    ),
    "stateful_map after key_by_batch": (
        lambda: stream().key_by_batch(np.array).stateful_map(lambda s, r: (s, r), 0),
        "stateful_map: expected a stream keyed record by record, given key_by_batch; use key_by(f)",
    ),
    "a flow without a source": (
        lambda: Flow("f").run(),
        "flow 'f': expected at least one source, given none; begin with flow.source(…) or flow.from_items(…)",
    ),
}


NOT_AWAITED: list[tuple[str, Callable[[], Any]]] = [
    ("map", lambda: stream().map(fetch)),
    ("filter", lambda: stream().filter(fetch)),
    ("map_batch", lambda: stream().map_batch(fetch)),
    ("filter_batch", lambda: stream().filter_batch(fetch)),
    ("key_by", lambda: stream().key_by(fetch)),
    ("key_by_batch", lambda: stream().key_by_batch(fetch)),
    ("partition_by", lambda: stream().partition_by(fetch)),  # type: ignore[arg-type]
    ("reduce", lambda: stream().key_by(int).reduce(fetch)),
    ("stateful_map", lambda: stream().key_by(int).stateful_map(fetch, 0)),  # type: ignore[arg-type]
    ("reduce_all", lambda: stream().reduce_all(fetch)),
    ("sort", lambda: stream().sort(fetch)),
    ("sink key", lambda: stream().sink(CLICKS, key=fetch)),  # type: ignore[arg-type]
]
CASES |= {
    f"{name} with a coroutine function": (
        build,
        f"{name}: expected a plain function, given the coroutine function fetch; await it in an Operator with "
        "async def process(self, record, out) and .process(…), or in .map_async(f)",
    )
    for name, build in NOT_AWAITED
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_has_the_expected_and_the_given_value_and_a_correction(name: str) -> None:
    """A message that new users read had lost the part that says what to do."""
    build, message = CASES[name]
    with pytest.raises(GraphError) as caught:
        build()
    assert str(caught.value) == f"{message} (at test_graph_errors.py:{build.__code__.co_firstlineno})"
    assert "; " in message, "what to do"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda flow, _: flow.from_items([1]),
            "step 'items': expected no sources inside an iteration body, given one; make it outside and pass its "
            "stream as a data stream",
        ),
        (
            lambda _, variable: variable.sink(CLICKS),
            "step 'clicks': expected no sink inside an iteration body, given one; return the stream in "
            "output_streams and put the sink behind the iteration",
        ),
        (
            lambda _, variable: variable.collect(),
            "step 'collect': expected no collect inside an iteration body, given one; return the stream in "
            "output_streams and put the sink behind the iteration",
        ),
    ],
)
def test_sources_and_sinks_stay_outside_iteration_bodies(step: Callable[[Flow, Stream], Any], message: str) -> None:
    """A source in a body was read once, or never, and no error named it."""
    with pytest.raises(GraphError) as caught:
        in_body(step)
    assert str(caught.value) == f"{message} (at test_graph_errors.py:{step.__code__.co_firstlineno})"


def test_streams_of_a_body_are_not_used_outside_and_others_not_inside() -> None:
    """Records crossed the border of an iteration without their epochs."""
    flow = Flow("f")
    outside = flow.from_items([1], name="outside")
    escaped: list[Stream] = []

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        escaped.append(variables[0].map(str, name="inner"))
        return IterationBodyResult(variables, escaped)

    iterate_unbounded_streams([flow.from_items([0])], [], body)
    with pytest.raises(GraphError) as caught:
        escaped[0].map(str)
    assert caught.value.args == (
        "step 'map': expected a stream from outside the iteration, given 'inner' of its body; return it in "
        "output_streams and use the streams that the iteration returns",
    )
    with pytest.raises(GraphError) as caught:
        in_body(lambda _, __: None) or iterate_unbounded_streams(
            [outside], [], lambda variables, _: IterationBodyResult([outside.map(str)], variables)
        )
    assert caught.value.args == (
        "step 'map': expected streams that come in through the body's arguments, given 'outside' from outside; "
        "pass it as a data stream",
    )


async def test_run_in_a_running_loop_says_what_to_write() -> None:
    """A user of a notebook got the message of asyncio, which does not say what to write."""
    flow = Flow("f")
    flow.from_items([1])
    with pytest.raises(GraphError) as caught:
        flow.run()
    assert caught.value.args == (
        "flow 'f': run() expected no running event loop, given one; write: job = await flow.start(); await job.wait()",
    )


def test_the_repr_of_a_flow_and_a_stream_is_readable() -> None:
    """A flow or a stream in a debugger showed only its class and its address."""
    flow = Flow("f", parallelism=2)
    a, b = flow.from_items([1], name="a"), flow.from_items([1], name="b", parallelism=3)
    assert repr(flow) == "Flow('f', 2 steps)"
    assert repr(a.union(b)) == "Stream('a ∪ b', parallelism 3)"
    assert (a.is_bounded, flow.from_source(Fed).is_bounded) == (True, False)
    assert a.side_output(OutputTag("x")).name == "a"
    assert issubclass(Fed, Source)


def test_a_model_has_one_publisher() -> None:
    """Two trainings under one name published the same versions; readers took the first one and dropped the second."""
    flow = Flow("f")
    start = flow.from_items([np.zeros(2)])
    start.publish_model(CLICKS, model="ctr")
    start.publish_model(CLICKS, model="other")
    with pytest.raises(
        GraphError, match=r"expected one publisher of the model 'ctr' .* given a second one; the first is at .*\.py:"
    ):
        start.publish_model(CLICKS, model="ctr")
