"""The changes of steps on the page about upgrades: the flow before and after each, and what becomes of its state."""

from typing import Any

import numpy as np
from upgrades.changed_flows import (
    FIRST,
    REST,
    Build,
    Change,
    DoubledSums,
    Inputs,
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

from streamiter import (
    Json,
    KeyedStream,
    OutputTag,
    Stream,
    calendar,
    epochs_every,
    fold,
    hopping,
    quantile,
    session,
    tumbling,
)
from streamiter import sliding as sliding_windows

LATE = OutputTag("late")
N_AND_S = {"n": "count", "s": ("sum", "v")}
COUNT_AND_SUM = windows(None, **N_AND_S)
WINDOW, JOIN, TABLE, TABLE_NOW = "`window`", "`interval_join`", "`join_table`", '`join_table`, `time="processing"`'
COUNT, SUM_AND_COUNT = windows(None, n="count"), windows(None, s=("sum", "v"), n="count")
LATER_WINDOWS = windows(options={"allowed_lateness_s": 60})
EARLY_WINDOWS = windows(options={"early_every_s": 3600, "late": LATE})
NOW = {"time": "processing", "wait_for_table": False}
MODES, OF_TIME = "`how`, `one_to_one`, `time`", "the field or function, `unit`, `time_zone`"
NAME, OF_PYTHON = "its name, or whether it is there", "a function of Python or numpy"


def keep(step: str, change: str, before: Build, after: Build, **more: Any) -> Change:
    return Change((step, change), before, after, "keep", **more)


def drop(step: str, change: str, before: Build, after: Build, **more: Any) -> Change:
    return Change((step, change), before, after, "drop", **more)


def refuse(step: str, change: str, before: Build, after: Build, says: str, **more: Any) -> Change:
    return Change((step, change), before, after, "refuse", says, **more)


def near(**options: Any) -> Build:
    return joined("interval_join", **{"lower_s": -10, "upper_s": 10, **options})


def in_windows(window: Any, **options: Any) -> Build:
    return joined("window_join", window, **options)


def with_table(**options: Any) -> Build:
    return joined("join_table", **options)


def numbers(inputs: Inputs, *, bounded: bool = False) -> Stream:
    return (inputs.bounded() if bounded else inputs.plain()).map(lambda one: one["v"])


def by_key(inputs: Inputs) -> KeyedStream[Any, Any]:
    return inputs.plain().key_by(lambda one: one["k"])


def second_values(pairs: list[Any]) -> list[Any]:
    return [value for _, value in pairs]


OF_STEPS: list[Change] = [
    keep(WINDOW, "the order of aggregates", COUNT_AND_SUM, SUM_AND_COUNT),
    keep(
        WINDOW,
        "an aggregate is added",
        COUNT,
        COUNT_AND_SUM,
        results=values,
        expected=[{"n": 3, "s": None}, {"n": 1, "s": 8}, {"n": 1, "s": 16}],
    ),
    keep(
        WINDOW,
        "an aggregate is added",
        windows(session(30), s=("sum", "v")),
        windows(session(30), c=("collect", "v"), s=("sum", "v")),
        results=values,
        expected=[{"c": None, "s": 15}, {"c": [16], "s": 16}],
    ),
    keep(
        WINDOW,
        "an aggregate is added",
        windows(sliding_windows(9), m=("max", "v")),
        windows(sliding_windows(9), m=("max", "v"), n="count"),
        results=values,
        expected=[{"m": 1}, {"m": 2, "n": None}, {"m": 4, "n": None}, {"m": 8, "n": None}, {"m": 16, "n": 1}],
    ),
    refuse(WINDOW, "an aggregate is removed or renamed", COUNT_AND_SUM, COUNT, "'s' .* is gone"),
    refuse(WINDOW, "an aggregate is removed or renamed", COUNT, windows(None, m="count"), r"'n' \(count\) is gone"),
    refuse(WINDOW, "what an aggregate computes", windows(None, x="count"), windows(None, x=("sum", "v")), "'x' was"),
    refuse(
        WINDOW,
        "what an aggregate computes",
        windows(None, ("sum", "v")),
        windows(None, ("sum", "w")),
        "'value' was sum of field 'v', now sum of field 'w'",
    ),
    keep(WINDOW, "`q` of a `quantile`", windows(None, (quantile(0.1), "v")), windows(None, (quantile(0.9), "v"))),
    keep(
        WINDOW,
        "functions of your own, such as those of `fold`",
        windows(None, (fold(0, lambda total, v: total + v), lambda record: record["v"])),
        windows(None, (fold(0, lambda total, v: v + total), lambda record: record["v"])),
    ),
    refuse(WINDOW, "the kind of the window", windows(), windows(session(10)), "windows was tumbling, now session"),
    *(
        refuse(WINDOW, "its length, step, offset, gap, unit or zone", windows(before), windows(after), says)
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
    keep(WINDOW, "the same windows in other words", windows(tumbling(10)), windows(hopping(10, 10, offset_s=20))),
    drop(WINDOW, "`allowed_lateness_s`, shorter", LATER_WINDOWS, windows()),
    refuse(WINDOW, "`allowed_lateness_s`, longer", windows(), LATER_WINDOWS, "allowed_lateness_ms was 0, now 60000"),
    keep(WINDOW, "`early_every_s`, `late`", windows(), EARLY_WINDOWS),
    keep(WINDOW, "`early_every_s`, `late`", EARLY_WINDOWS, windows()),
    refuse(WINDOW, "`results`", windows(), windows(options={"results": "retracting"}), "results was accumulating"),
    refuse(WINDOW, "`time`", windows(), windows(options={"time": "processing"}), "time was event, now processing"),
    keep(
        WINDOW,
        "the order of aggregates",
        windows(tumbling(1e6), options={"time": "processing"}, **N_AND_S),
        windows(tumbling(1e6), options={"time": "processing"}, s=("sum", "v"), n="count"),
        results=values,
    ),
    drop(
        "`as_of_window`",
        "`size_s`, shorter",
        before_each(30),
        before_each(3),
        results=lambda pairs: [value["n"] for _, value in pairs],
        expected=[0, 1, 1, 0, 0],
    ),
    refuse("`as_of_window`", "`size_s`, longer", before_each(3), before_each(30), "size_ms was 3000"),
    keep(
        "`as_of_window`",
        "an aggregate is added",
        before_each(7, n="count"),
        before_each(7, s=("sum", "v"), n="count"),
        results=second_values,
        expected=[{"n": 0}, {"n": 1}, {"s": None, "n": 2}, {"s": 4, "n": 1}, {"s": 0, "n": 0}],
    ),
    refuse(
        "`as_of_window`",
        "other aggregates",
        before_each(5, x="count"),
        before_each(5, x=("max", "v")),
        "'x' was count, now max",
    ),
    drop(
        JOIN, "bounds that are nearer", near(how="left"), near(lower_s=-2, upper_s=2, how="left"), results=later_pairs
    ),
    refuse(JOIN, "bounds that are further", near(), near(lower_s=-10, upper_s=20), "upper_ms was 10000, now 20000"),
    refuse(
        JOIN,
        "bounds that are further",
        near(),
        near(lower_s=-20, upper_s=None),
        "lower_ms was -10000, now -20000, upper_ms",
    ),
    refuse(JOIN, MODES, near(), near(how="left"), "how was inner, now left"),
    refuse(JOIN, MODES, near(), near(one_to_one=True), "one_to_one was False, now True"),
    refuse(JOIN, MODES, near(), near(time="processing"), "time was event, now processing"),
    keep(JOIN, "`kept_max`, `late`", near(), near(kept_max=100, late=LATE), results=later_pairs),
    drop(
        "joins by event time", "`allowed_lateness_s`, shorter", near(allowed_lateness_s=60), near(), results=later_pairs
    ),
    refuse(
        "joins by event time",
        "`allowed_lateness_s`, longer",
        near(),
        near(allowed_lateness_s=60),
        "allowed_lateness_ms was 0",
    ),
    refuse(
        "`window_join`",
        "the window, `time`",
        in_windows(tumbling(10)),
        in_windows(tumbling(20)),
        "size_ms was 10000, now 20000",
    ),
    refuse(
        "`window_join`",
        "the window, `time`",
        in_windows(tumbling(10)),
        in_windows(tumbling(10), time="processing"),
        "time was event",
    ),
    keep("`window_join`", "`how`", in_windows(tumbling(10)), in_windows(tumbling(10), how="full"), results=later_pairs),
    keep(
        TABLE,
        "`how`, `strict`",
        with_table(value="v", how="inner"),
        with_table(value="v", strict=True),
        results=second_values,
        expected=[1, 1, 2, 4, None],
    ),
    refuse(
        TABLE, "`value`, `time`", with_table(value="v"), with_table(value="w"), "value was field 'v', now field 'w'"
    ),
    refuse(
        TABLE,
        "`value`, `time`",
        with_table(value="v"),
        with_table(value="v", time="processing"),
        "time was event, now processing",
    ),
    refuse(TABLE_NOW, "`value`", with_table(value="v", **NOW), with_table(**NOW), "value was field 'v'"),
    keep(
        TABLE_NOW,
        "`how`, `wait_for_table`",
        with_table(value="v", **NOW),
        with_table(value="v", time="processing", how="inner"),
        results=len,
        expected=5,
    ),
    drop("`deduplicate`", "`within_s`, shorter", once(), once(within_s=4)),
    refuse("`deduplicate`", "`within_s`, longer", once(within_s=4), once(), "within_ms was 4000, now 60000"),
    refuse("`deduplicate`", "`by`, `time`", once(), once("v"), "by was field 'id', now field 'v'"),
    refuse("`deduplicate`", "`by`, `time`", once(), once(time="processing"), "time was event"),
    refuse("`reduce`", OF_PYTHON, reduced(max), reduced(min), "f was max, now min"),
    refuse("`reduce`", OF_PYTHON, reduced(np.add), reduced(np.maximum), "numpy.add"),
    keep("`reduce`", "a function of your own", reduced(lambda a, b: a + b), reduced(lambda a, b: b + a)),
    keep(
        "`stateful_map`",
        "its function, `initial`",
        lambda inputs: by_key(inputs).stateful_map(lambda n, one: (n + 1, n), 0, name="step"),
        lambda inputs: by_key(inputs).stateful_map(lambda n, one: (n + 1, n), 100, name="step"),
        expected=[0, 1, 2, 3, 100],
    ),
    refuse("`process`", "the class of the operator", processed(Sums), processed(Totals), "it was Sums, now Totals"),
    keep("`process`", "the class, with the old `definition()`", processed(Sums), processed(RenamedSums)),
    refuse(
        "`process`", "what its `definition()` returns", processed(RenamedSums), processed(DoubledSums), "factor is new"
    ),
    keep("`process`", "`time_to_live_s`", processed(Sums, time_to_live_s=60), processed(Sums)),
    keep("`process`", "`time_to_live_s`", processed(Sums), processed(Sums, time_to_live_s=60)),
    refuse(
        "`key_by`, `key_by_batch`",
        "a function of Python",
        lambda inputs: inputs.plain().map(str).key_by(str.lower).reduce(max, name="step"),
        lambda inputs: inputs.plain().map(str).key_by(str.strip).reduce(max, name="step"),
        "key was str.lower, now str.strip",
    ),
    refuse(
        "`key_by`, `key_by_batch`",
        "a function of Python",
        lambda inputs: numbers(inputs).key_by(abs).process(Last, name="step"),
        lambda inputs: numbers(inputs).key_by(str).process(Last, name="step"),
        "keys: 'input' was abs, now str",
    ),
    refuse("`event_time`", OF_TIME, timed(), timed("v"), "of was field 't', now field 'v'"),
    refuse("`event_time`", OF_TIME, timed(), timed(unit="ms"), "unit was s, now ms"),
    keep(
        "`event_time`",
        "`out_of_orderness_s` and all others",
        timed(),
        timed(out_of_orderness_s=30, idle_after_s=1, max_ahead_s=None),
    ),
    keep(
        "`batch`",
        "`n`, `timeout_s`",
        lambda inputs: inputs.plain().batch(100, name="step"),
        lambda inputs: inputs.plain().batch(4, 3600, name="step"),
    ),
    keep(
        "`sort`, `join`",
        "the key, `reverse`",
        lambda inputs: inputs.bounded().sort("v", name="step"),
        lambda inputs: inputs.bounded().sort("w", reverse=True, name="step"),
    ),
    keep(
        "`sort`, `join`",
        "the key, `reverse`",
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="k", name="step"),
        lambda inputs: inputs.bounded().join(inputs.bounded("right"), on="v", name="step"),
    ),
    refuse(
        "`reduce_all`",
        OF_PYTHON,
        lambda inputs: numbers(inputs, bounded=True).reduce_all(max, name="step"),
        lambda inputs: numbers(inputs, bounded=True).reduce_all(min, name="step"),
        "f was max, now min",
    ),
    refuse(
        "any",
        "another kind of step",
        reduced(max),
        lambda inputs: (
            inputs.plain()
            .map(lambda one: one["v"])
            .key_by(lambda v: v % 2)
            .stateful_map(lambda n, v: (n, v), 0, name="step")
        ),
        "it was reduce, now stateful_map",
    ),
    refuse("any", NAME, reduced(max), lambda inputs: numbers(inputs), "no step 'step', whose state it has"),
    refuse("any", NAME, lambda inputs: numbers(inputs), reduced(max), "a new step 'step', without state in it"),
    refuse(
        "any",
        NAME,
        lambda inputs: numbers(inputs),
        looped(Sums),
        "new steps 'variable', .*, 'step', without state in it: .* loses nothing",
        also=("loop: data 0", "loop: variable 0", "variable"),
    ),
    keep("any", "`parallelism`", COUNT_AND_SUM, windows(None, s=("sum", "v"), n="count", options={"parallelism": 2})),
    refuse(
        "any, in a loop",
        "what is refused outside of a loop",
        looped(Sums),
        looped(Totals),
        "it was Sums, now Totals",
        has_remedy=False,
    ),
    keep(
        "a source",
        "`decode`, `start`, `stop`, `on_error`",
        lambda inputs: inputs.plain(),
        lambda inputs: inputs.plain(decode=Json(), start="latest", on_error="skip"),
        expected=[*FIRST, *REST],
    ),
    refuse(
        "a source",
        "its topic",
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step"),
        "the topic was created again, with other records",
    ),
    drop(
        "a source",
        'its topic, with `on_lost="skip"`',
        lambda inputs: inputs.plain("left", name="step"),
        lambda inputs: inputs.plain("right", name="step", on_lost="skip"),
        results=len,
        expected=7,
    ),
    refuse(
        "a source",
        "a topic, items, or a source of your own",
        lambda inputs: inputs.plain(name="step"),
        lambda inputs: inputs.flow.from_items([*FIRST, *REST], name="step"),
        "it was TopicSource, now ItemsSource",
    ),
    keep(
        "`map_async`",
        "its function and options",
        lambda inputs: inputs.plain().map_async(unchanged, name="step"),
        lambda inputs: inputs.plain().map_async(unchanged, 2, ordered=False, retries=3, name="step"),
    ),
    keep(
        "`epochs_every`",
        "`records`, `seconds`",
        lambda inputs: epochs_every(inputs.plain(), records=3, name="step"),
        lambda inputs: epochs_every(inputs.plain(), records=1, name="step"),
    ),
    keep(
        "`from_items`",
        "the items",
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["a", "b"], name="items")),
        lambda inputs: inputs.plain().union(inputs.flow.from_items(["c", "d", "e"], name="items")),
        expected=["a", "b", *FIRST, *REST],
    ),
    keep(
        "steps without state",
        "any",
        lambda inputs: inputs.plain().map(str),
        lambda inputs: inputs.plain().filter(lambda one: one["v"] > 4),
        results=len,
        expected=4,
    ),
    keep(
        "`key_by`, `key_by_batch`",
        "a function of your own",
        reduced(max),
        lambda inputs: numbers(inputs).key_by(lambda v: v & 1).reduce(max, name="step"),
    ),
]
