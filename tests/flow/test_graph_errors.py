"""Errors of flows that follow from several calls, and arguments that are taken; ``refusals.txt`` has others."""

import operator
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
from flow.small_flows import CLICKS, Fed, in_body, stream

import streamiter
from streamiter import (
    Checkpoints,
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    hopping,
    iterate_unbounded_streams,
    session,
    topic,
    tumbling,
)
from streamiter.errors import ConfigurationError, GraphError
from streamiter.operators.source import Source
from streamiter.service.settings.file import read_settings


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


def two(first: Any, second: Any) -> Any: ...


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


def test_a_stream_has_no_attribute_of_other_libraries() -> None:
    """An array was asked for ``__array__``, and a method that was meant is no attribute."""
    assert not hasattr(stream(), "__array__")


def test_what_is_collected_is_refused_before_a_run() -> None:
    """A notebook printed an empty list, because its flow had not run."""
    flow = Flow("before")
    items = flow.from_items([]).collect()
    with pytest.raises(GraphError, match=r"collect: expected \.items after the flow has started.* call flow.run"):
        _ = items.items
    flow.run()
    assert items.items == []


def test_a_field_is_a_key_and_a_step_has_its_name_in_aggregate() -> None:
    """``event_time("at")`` took a field where ``key_by`` took none, and ``name=`` became an aggregate."""
    flow = Flow("windows")
    timed = flow.from_items([{"user": "ann", "at": 1.0, "name": "x"}]).event_time("at", unit="s")
    windows = timed.key_by("user").window(tumbling(60))
    counts, names = windows.aggregate("count", name="per minute").collect(), windows.aggregate(name="last").collect()
    assert flow.run().step("per minute").records_in == 1
    assert [each.value for each in counts.items] == [1]
    assert [each.value for each in names.items] == [{"name": {"user": "ann", "at": 1.0, "name": "x"}}]
    with pytest.raises(GraphError, match="expected one name"):
        timed.key_by("user").window(tumbling(60), name="a").aggregate("count", name="b")
    with pytest.raises(GraphError, match="key_by: expected a field's name or a function, given 3"):
        timed.key_by(3)


def test_durations_are_taken_where_seconds_are() -> None:
    """``timedelta(minutes=1)`` was refused by each option in seconds."""
    minute = timedelta(minutes=1)
    assert (tumbling(minute), hopping(minute, timedelta(seconds=30))) == (tumbling(60), hopping(60, 30))
    assert session(minute) == session(60)
    assert Checkpoints(interval_s=timedelta(seconds=2)).interval_s == 2.0
    assert topic("kafka://h/t", give_up_after_s=minute) is not None

    async def same(record: dict[str, object]) -> dict[str, object]:
        return record

    flow = Flow("durations")
    items = flow.from_items([{"user": "ann", "at": 1.0}])
    timed = items.event_time(
        "at", unit="s", out_of_orderness_s=minute, idle_after_s=minute, max_ahead_s=timedelta(days=1)
    )
    keyed = timed.key_by("user")
    results = [
        keyed.window(tumbling(minute), allowed_lateness_s=minute, early_every_s=minute).aggregate("count").collect(),
        keyed.interval_join(keyed, lower_s=-minute, upper_s=minute).collect(),
        items.map_async(same, timeout_s=minute, backoff_s=timedelta(milliseconds=1)).collect(),
        items.batch(2, minute).collect(),
    ]
    flow.run(stall_after_s=minute)
    assert [len(result.items) for result in results] == [1, 1, 1, 1]
    with pytest.raises(GraphError, match="expected timeout_s to be a number of seconds above 0"):
        items.batch(2, -minute)


def test_the_package_has_a_version() -> None:
    """Reports of errors asked for a version, which only the installer knew."""
    assert streamiter.__version__.count(".") == 2


def test_a_path_with_a_null_character_is_no_file_of_settings() -> None:
    """``open`` raised its own "embedded null byte"."""
    with pytest.raises(ConfigurationError, match=r"expected a file of settings .* null character"):
        read_settings("a='\0'")
