"""The changes of steps on the page about upgrades: the flow before and after each, and what becomes of its state."""

from __future__ import annotations

from typing import Any

import numpy as np
from upgrades.changed_flows import (
    FIRST,
    REST,
    Build,
    Change,
    DoubledSums,
    Last,
    RenamedSums,
    Sums,
    Totals,
    before_each,
    joined,
    later_pairs,
    looped,
    once,
    processed,
    reduced,
    timed,
    unchanged,
    values,
    windows,
)

from streamiter import Json, OutputTag, calendar, epochs_every, fold, hopping, quantile, session, tumbling
from streamiter import sliding as sliding_windows

LATE = OutputTag("late")
N_AND_S = {"n": "count", "s": ("sum", "v")}
COUNT_AND_SUM = windows(None, **N_AND_S)
WINDOW, JOIN, TABLE, TABLE_NOW = "`window`", "`interval_join`", "`join_table`", '`join_table`, `time="processing"`'
BETWEEN = {"lower_s": -10, "upper_s": 10}


def windowed(change: str, before: Build, after: Build, becomes: Any, says: str = "", **more: Any) -> Change:
    return Change((WINDOW, change), before, after, becomes, says, **more)


OF_STEPS: list[Change] = [
    windowed("the order of aggregates", COUNT_AND_SUM, windows(None, s=("sum", "v"), n="count"), "keep"),
    windowed(
        "an aggregate is added",
        windows(None, n="count"),
        COUNT_AND_SUM,
        "keep",
        results=values,
        expected=[{"n": 3, "s": None}, {"n": 1, "s": 8}, {"n": 1, "s": 16}],
    ),
    windowed(
        "an aggregate is added",
        windows(session(30), s=("sum", "v")),
        windows(session(30), c=("collect", "v"), s=("sum", "v")),
        "keep",
        results=values,
        expected=[{"c": None, "s": 15}, {"c": [16], "s": 16}],
    ),
    windowed(
        "an aggregate is added",
        windows(sliding_windows(9), m=("max", "v")),
        windows(sliding_windows(9), m=("max", "v"), n="count"),
        "keep",
        results=values,
        expected=[{"m": 1}, {"m": 2, "n": None}, {"m": 4, "n": None}, {"m": 8, "n": None}, {"m": 16, "n": 1}],
    ),
    windowed("an aggregate is removed or renamed", COUNT_AND_SUM, windows(None, n="count"), "refuse", "'s' .* is gone"),
    windowed(
        "an aggregate is removed or renamed",
        windows(None, n="count"),
        windows(None, m="count"),
        "refuse",
        r"'n' \(count\) is gone",
    ),
    windowed(
        "what an aggregate computes", windows(None, x="count"), windows(None, x=("sum", "v")), "refuse", "'x' was"
    ),
    windowed(
        "what an aggregate computes",
        windows(None, ("sum", "v")),
        windows(None, ("sum", "w")),
        "refuse",
        "'value' was sum of field 'v', now sum of field 'w'",
    ),
    windowed("`q` of a `quantile`", windows(None, (quantile(0.1), "v")), windows(None, (quantile(0.9), "v")), "keep"),
    windowed(
        "functions of your own, such as those of `fold`",
        windows(None, (fold(0, lambda total, v: total + v), lambda record: record["v"])),
        windows(None, (fold(0, lambda total, v: v + total), lambda record: record["v"])),
        "keep",
    ),
    windowed("the kind of the window", windows(), windows(session(10)), "refuse", "windows was tumbling, now session"),
    *(
        windowed("its length, step, offset, gap, unit or zone", windows(before), windows(after), "refuse", says)
        for before, after, says in [
            (tumbling(10), tumbling(20), "size_ms was 10000, now 20000"),
            (tumbling(10), tumbling(10, 3), "offset_ms was 0, now 3000"),
            (hopping(10, 5), hopping(10, 2), "step_ms was 5000, now 2000"),
            (sliding_windows(10), sliding_windows(20), "size_ms was 10000, now 20000"),
            (session(10), session(20), "gap_ms was 10000, now 20000"),
            (calendar("day", "UTC"), calendar("week", "UTC"), "unit was day, now week"),
            (calendar("day", "UTC"), calendar("day", "Europe/Berlin"), "time_zone was UTC, now Europe/Berlin"),
        ]
    ),
    windowed("the same windows in other words", windows(tumbling(10)), windows(hopping(10, 10, offset_s=20)), "keep"),
    windowed("`allowed_lateness_s`, shorter", windows(options={"allowed_lateness_s": 60}), windows(), "drop"),
    windowed(
        "`allowed_lateness_s`, longer",
        windows(),
        windows(options={"allowed_lateness_s": 60}),
        "refuse",
        "allowed_lateness_ms was 0, now 60000",
    ),
    windowed("`early_every_s`, `late`", windows(), windows(options={"early_every_s": 3600, "late": LATE}), "keep"),
    windowed("`early_every_s`, `late`", windows(options={"early_every_s": 3600, "late": LATE}), windows(), "keep"),
    windowed("`results`", windows(), windows(options={"results": "retracting"}), "refuse", "results was accumulating"),
    windowed("`time`", windows(), windows(options={"time": "processing"}), "refuse", "time was event, now processing"),
    windowed(
        "the order of aggregates",
        windows(tumbling(1e6), options={"time": "processing"}, **N_AND_S),
        windows(tumbling(1e6), options={"time": "processing"}, s=("sum", "v"), n="count"),
        "keep",
        results=values,
    ),
    Change(
        ("`as_of_window`", "`size_s`, shorter"),
        before_each(30),
        before_each(3),
        "drop",
        results=lambda results: [value["n"] for _, value in results],
        expected=[0, 1, 1, 0, 0],
    ),
    Change(("`as_of_window`", "`size_s`, longer"), before_each(3), before_each(30), "refuse", "size_ms was 3000"),
    Change(
        ("`as_of_window`", "an aggregate is added"),
        before_each(7, n="count"),
        before_each(7, s=("sum", "v"), n="count"),
        "keep",
        results=lambda results: [value for _, value in results],
        expected=[{"n": 0}, {"n": 1}, {"s": None, "n": 2}, {"s": 4, "n": 1}, {"s": 0, "n": 0}],
    ),
    Change(
        ("`as_of_window`", "other aggregates"),
        before_each(5, x="count"),
        before_each(5, x=("max", "v")),
        "refuse",
        "'x' was count, now max",
    ),
    Change(
        (JOIN, "bounds that are nearer"),
        joined("interval_join", **BETWEEN, how="left"),
        joined("interval_join", lower_s=-2, upper_s=2, how="left"),
        "drop",
        results=later_pairs,
    ),
    Change(
        (JOIN, "bounds that are further"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", lower_s=-10, upper_s=20),
        "refuse",
        "upper_ms was 10000, now 20000",
    ),
    Change(
        (JOIN, "bounds that are further"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", lower_s=-20, upper_s=None),
        "refuse",
        "lower_ms was -10000, now -20000, upper_ms",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, how="left"),
        "refuse",
        "how was inner, now left",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, one_to_one=True),
        "refuse",
        "one_to_one was False, now True",
    ),
    Change(
        (JOIN, "`how`, `one_to_one`, `time`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, time="processing"),
        "refuse",
        "time was event, now processing",
    ),
    Change(
        (JOIN, "`kept_max`, `late`"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, kept_max=100, late=LATE),
        "keep",
        results=later_pairs,
    ),
    Change(
        ("joins by event time", "`allowed_lateness_s`, shorter"),
        joined("interval_join", **BETWEEN, allowed_lateness_s=60),
        joined("interval_join", **BETWEEN),
        "drop",
        results=later_pairs,
    ),
    Change(
        ("joins by event time", "`allowed_lateness_s`, longer"),
        joined("interval_join", **BETWEEN),
        joined("interval_join", **BETWEEN, allowed_lateness_s=60),
        "refuse",
        "allowed_lateness_ms was 0",
    ),
    Change(
        ("`window_join`", "the window, `time`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(20)),
        "refuse",
        "size_ms was 10000, now 20000",
    ),
    Change(
        ("`window_join`", "the window, `time`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(10), time="processing"),
        "refuse",
        "time was event",
    ),
    Change(
        ("`window_join`", "`how`"),
        joined("window_join", tumbling(10)),
        joined("window_join", tumbling(10), how="full"),
        "keep",
        results=later_pairs,
    ),
    Change(
        (TABLE, "`how`, `strict`"),
        joined("join_table", value="v", how="inner"),
        joined("join_table", value="v", strict=True),
        "keep",
        results=lambda pairs: [value for _, value in pairs],
        expected=[1, 1, 2, 4, None],
    ),
    Change(
        (TABLE, "`value`, `time`"),
        joined("join_table", value="v"),
        joined("join_table", value="w"),
        "refuse",
        "value was field 'v', now field 'w'",
    ),
    Change(
        (TABLE, "`value`, `time`"),
        joined("join_table", value="v"),
        joined("join_table", value="v", time="processing"),
        "refuse",
        "time was event, now processing",
    ),
    Change(
        (TABLE_NOW, "`value`"),
        joined("join_table", value="v", time="processing", wait_for_table=False),
        joined("join_table", time="processing", wait_for_table=False),
        "refuse",
        "value was field 'v'",
    ),
    Change(
        (TABLE_NOW, "`how`, `wait_for_table`"),
        joined("join_table", value="v", time="processing", wait_for_table=False),
        joined("join_table", value="v", time="processing", how="inner"),
        "keep",
        results=len,
        expected=5,
    ),
    Change(("`deduplicate`", "`within_s`, shorter"), once(), once(within_s=4), "drop"),
    Change(
        ("`deduplicate`", "`within_s`, longer"), once(within_s=4), once(), "refuse", "within_ms was 4000, now 60000"
    ),
    Change(("`deduplicate`", "`by`, `time`"), once(), once("v"), "refuse", "by was field 'id', now field 'v'"),
    Change(("`deduplicate`", "`by`, `time`"), once(), once(time="processing"), "refuse", "time was event"),
    Change(("`reduce`", "a function of Python or numpy"), reduced(max), reduced(min), "refuse", "f was max, now min"),
    Change(("`reduce`", "a function of Python or numpy"), reduced(np.add), reduced(np.maximum), "refuse", "numpy.add"),
    Change(("`reduce`", "a function of your own"), reduced(lambda a, b: a + b), reduced(lambda a, b: b + a), "keep"),
    Change(
        ("`stateful_map`", "its function, `initial`"),
        lambda inputs: (
            inputs.plain().key_by(lambda one: one["k"]).stateful_map(lambda n, one: (n + 1, n), 0, name="step")
        ),
        lambda inputs: (
            inputs.plain().key_by(lambda one: one["k"]).stateful_map(lambda n, one: (n + 1, n), 100, name="step")
        ),
        "keep",
        expected=[0, 1, 2, 3, 100],
    ),
    Change(
        ("`process`", "the class of the operator"),
        processed(Sums),
        processed(Totals),
        "refuse",
        "it was Sums, now Totals",
    ),
    Change(("`process`", "the class, with the old `definition()`"), processed(Sums), processed(RenamedSums), "keep"),
    Change(
        ("`process`", "what its `definition()` returns"),
        processed(RenamedSums),
        processed(DoubledSums),
        "refuse",
        "factor is new",
    ),
    Change(("`process`", "`time_to_live_s`"), processed(Sums, time_to_live_s=60), processed(Sums), "keep"),
    Change(("`process`", "`time_to_live_s`"), processed(Sums), processed(Sums, time_to_live_s=60), "keep"),
    Change(
        ("`key_by`, `key_by_batch`", "a function of Python"),
        lambda inputs: inputs.plain().map(str).key_by(str.lower).reduce(max, name="step"),
        lambda inputs: inputs.plain().map(str).key_by(str.strip).reduce(max, name="step"),
        "refuse",
        "key was str.lower, now str.strip",
    ),
    Change(
        ("`key_by`, `key_by_batch`", "a function of Python"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(abs).process(Last, name="step"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(str).process(Last, name="step"),
        "refuse",
        "keys: 'input' was abs, now str",
    ),
    Change(
        ("`event_time`", "the field or function, `unit`, `time_zone`"),
        timed(),
        timed("v"),
        "refuse",
        "of was field 't', now field 'v'",
    ),
    Change(
        ("`event_time`", "the field or function, `unit`, `time_zone`"),
        timed(),
        timed(unit="ms"),
        "refuse",
        "unit was s, now ms",
    ),
    Change(
        ("`event_time`", "`out_of_orderness_s` and all others"),
        timed(),
        timed(out_of_orderness_s=30, idle_after_s=1, max_ahead_s=None),
        "keep",
    ),
    Change(
        ("`batch`", "`n`, `timeout_s`"),
        lambda inputs: inputs.plain().batch(100, name="step"),
        lambda inputs: inputs.plain().batch(4, 3600, name="step"),
        "keep",
    ),
    Change(
        ("`sort`, `join`", "the key, `reverse`"),
        lambda inputs: inputs.bounded().sort("v", name="step"),
        lambda inputs: inputs.bounded().sort("w", reverse=True, name="step"),
        "keep",
    ),
    Change(
        ("`sort`, `join`", "the key, `reverse`"),
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="k", name="step"),
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="v", name="step"),
        "keep",
    ),
    Change(
        ("`reduce_all`", "a function of Python or numpy"),
        lambda inputs: inputs.bounded().map(lambda one: one["v"]).reduce_all(max, name="step"),
        lambda inputs: inputs.bounded().map(lambda one: one["v"]).reduce_all(min, name="step"),
        "refuse",
        "f was max, now min",
    ),
    Change(
        ("any", "another kind of step"),
        reduced(max),
        lambda inputs: (
            inputs.plain()
            .map(lambda one: one["v"])
            .key_by(lambda v: v % 2)
            .stateful_map(lambda n, v: (n, v), 0, name="step")
        ),
        "refuse",
        "it was reduce, now stateful_map",
    ),
    Change(
        ("any", "its name, or whether it is there"),
        reduced(max),
        lambda inputs: inputs.plain().map(lambda one: one["v"]),
        "refuse",
        "no step 'step', whose state it has",
    ),
    Change(
        ("any", "its name, or whether it is there"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]),
        reduced(max),
        "refuse",
        "a new step 'step', without state in it",
    ),
    Change(
        ("any", "its name, or whether it is there"),
        lambda inputs: inputs.plain().map(lambda one: one["v"]),
        looped(Sums),
        "refuse",
        "new steps 'variable', .*, 'step', without state in it: .* loses nothing",
        also=("loop: data 0", "loop: variable 0", "variable"),
    ),
    Change(
        ("any", "`parallelism`"),
        COUNT_AND_SUM,
        windows(None, s=("sum", "v"), n="count", options={"parallelism": 2}),
        "keep",
    ),
    Change(
        ("any, in a loop", "what is refused outside of a loop"),
        looped(Sums),
        looped(Totals),
        "refuse",
        "it was Sums, now Totals",
        has_remedy=False,
    ),
    Change(
        ("a source", "`decode`, `start`, `stop`, `on_error`"),
        lambda inputs: inputs.plain(),
        lambda inputs: inputs.plain(decode=Json(), start="latest", on_error="skip"),
        "keep",
        expected=[*FIRST, *REST],
    ),
    Change(
        ("a source", "its topic"),
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step"),
        "refuse",
        "the topic was created again, with other records",
    ),
    Change(
        ("a source", 'its topic, with `on_lost="skip"`'),
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step", on_lost="skip"),
        "drop",
        results=len,
        expected=7,
    ),
    Change(
        ("a source", "a topic, items, or a source of your own"),
        lambda inputs: inputs.plain(name="step"),
        lambda inputs: inputs.flow.from_items([*FIRST, *REST], name="step"),
        "refuse",
        "it was TopicSource, now ItemsSource",
    ),
    Change(
        ("`map_async`", "its function and options"),
        lambda inputs: inputs.plain().map_async(unchanged, name="step"),
        lambda inputs: inputs.plain().map_async(unchanged, 2, ordered=False, retries=3, name="step"),
        "keep",
    ),
    Change(
        ("`epochs_every`", "`records`, `seconds`"),
        lambda inputs: epochs_every(inputs.plain(), records=3, name="step"),
        lambda inputs: epochs_every(inputs.plain(), records=1, name="step"),
        "keep",
    ),
    Change(
        ("`from_items`", "the items"),
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["a", "b"], name="items")),
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["c", "d", "e"], name="items")),
        "keep",
        expected=["a", "b", *FIRST, *REST],
    ),
    Change(
        ("steps without state", "any"),
        lambda inputs: inputs.plain().map(str),
        lambda inputs: inputs.plain().filter(lambda one: one["v"] > 4),
        "keep",
        results=len,
        expected=4,
    ),
    Change(
        ("`key_by`, `key_by_batch`", "a function of your own"),
        reduced(max),
        lambda inputs: inputs.plain().map(lambda one: one["v"]).key_by(lambda v: v & 1).reduce(max, name="step"),
        "keep",
    ),
]
