"""Names that users write by mistake or from other systems, and arguments that they expect to be taken."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

import streamiter
from streamiter import Checkpoints, Flow, hopping, session, topic, tumbling
from streamiter.errors import ConfigurationError, GraphError
from streamiter.service.settings_file import read_settings


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("flatmap", "flat_map"),
        ("group_by", "key_by"),
        ("keyBy", "key_by"),
        ("foreach", "map"),
        ("apply", "map"),
        ("where", "filter"),
        ("collet", "collect"),
    ],
)
def test_an_unknown_method_names_the_one_that_was_meant(written: str, meant: str) -> None:
    """A user of another system read "no attribute 'group_by'", and searched the pages for the word."""
    stream = Flow("names").from_items([1])
    with pytest.raises(AttributeError, match=f"no attribute '{written}'; did you mean '{meant}'"):
        getattr(stream, written)
    assert not hasattr(stream, "__array__")


def _run_with_a_wrong_step() -> object:
    flow = Flow("names")
    flow.from_items([1]).map(lambda x: x, name="double").collect()
    return flow.run().step("doubel")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Flow("a").from_item([1]), AttributeError, "'Flow' object has no attribute 'from_item'; did you mean"),
        (lambda: streamiter.tumblin, AttributeError, "did you mean 'tumbling'"),
        (lambda: Flow("a").from_items([1]).map(abs, paralelism=2), TypeError, "did you mean 'parallelism'"),
        (lambda: Flow("a").from_items([1]).event_time("at", idle_after=2), TypeError, "did you mean 'idle_after_s'"),
        (lambda: topic("memry://t"), ConfigurationError, "did you mean 'memory'"),
        (lambda: topic("kafka://h/t", lingers=1), ConfigurationError, "did you mean 'linger_s'"),
        (_run_with_a_wrong_step, KeyError, "no step 'doubel'; there are .*; did you mean 'double'"),
    ],
)
def test_errors_about_names_say_what_was_meant(call: Callable[[], object], error: type[Exception], text: str) -> None:
    """An option of a method's own was not even among those that the error listed."""
    with pytest.raises(error, match=text):
        call()


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
