"""A user's program passes ``mypy --strict``, and the results of iterations have types."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from streamiter import Flow, IterationBodyResult, Stream

PROGRAM = """
from collections.abc import Mapping
from typing import Any, TypedDict, reveal_type

import numpy as np
import numpy.typing as npt

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationConfig,
    IterationListener,
    Operator,
    Stream,
    feedback_through,
    for_each_round,
    iterate_bounded_streams_until_termination,
    iterate_unbounded_streams,
    replayed,
    topic,
)
from streamiter.iteration import FeedbackThrough, Replayed, all_reduce, last_round, map_with, terminate_after
from streamiter.learn import KMeans


class Params(TypedDict):
    weights: npt.NDArray[np.float64]
    loss: float


def gradient(p: Params, rows: Columns) -> list[tuple[npt.NDArray[np.float64], float]]:
    errors = rows["x"] @ p["weights"] - rows["y"]
    return [(errors @ rows["x"], float(errors @ errors))]


def coordinates(rows: Columns) -> npt.NDArray[np.float64]:
    return np.stack([rows["x"], rows["y"]], axis=1)


class Rounds(Operator, IterationListener):
    def process(self, record: Params, out: Any) -> None:
        self.last = record

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        out.emit((epoch_watermark, self.last["loss"]))


def train(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    [params], [rows] = variables, data
    totals = all_reduce(map_with(rows, params, gradient), lambda a, b: (a[0] + b[0], a[1] + b[1]))
    following = map_with(
        totals, params, lambda p, totals: [{"weights": p["weights"] - totals[0][:3][0], "loss": totals[0][1]}]
    )
    [counts] = for_each_round([rows], lambda streams: [streams[0].map(lambda row: 1).reduce_all(int.__add__)])
    losses = following.map(lambda p: p["loss"])
    return IterationBodyResult(
        feedback_variable_streams=[following],
        output_streams=[last_round(following), following.process(Rounds), counts],
        termination_criteria=terminate_after(losses, rounds=10, tolerance=0.1),
    )


def train_by_name(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[dict[str, Stream]]:
    return IterationBodyResult([variables[0]], {"params": last_round(variables[0])})


def any_names(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[Mapping[str, Stream]]:
    return IterationBodyResult([variables[0]], {"params": last_round(variables[0])})


def through_a_topic(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    back: list[Stream | FeedbackThrough] = [feedback_through(variables[0], topic("memory:loop")), data[0]]
    return IterationBodyResult(back, variables)


flow = Flow("regression")
initial = flow.from_items([Params(weights=np.zeros(3), loss=0.0)])
rows = flow.from_items(Columns({"x": np.ones((6, 3)), "y": np.ones(6)}))
config = IterationConfig(max_epochs_ahead=None)

inputs: list[Stream | Replayed] = [replayed(rows), rows]
trained = iterate_bounded_streams_until_termination([initial], inputs, train, config)
trained = iterate_bounded_streams_until_termination([initial], [replayed(rows), rows], train, config)
reveal_type(trained)  # list[Stream[Any]]
[last, by_round, counts] = trained
reveal_type(last)  # Stream[Any]
collected = last.collect()
named = iterate_bounded_streams_until_termination([initial], [replayed(rows)], train_by_name)
reveal_type(named)  # dict[str, Stream[Any]]
by_any_name = iterate_bounded_streams_until_termination([initial], [], any_names)
reveal_type(by_any_name)  # dict[str, Stream[Any]]
named["params"].filter(lambda p: p["loss"] > 0, name="positive", parallelism=2, on_error="skip").collect()
endless = iterate_unbounded_streams([initial], [rows], through_a_topic)
reveal_type(endless)  # list[Stream[Any]]
endless_by_name = iterate_unbounded_streams([initial], [rows], train_by_name)
reveal_type(endless_by_name)  # dict[str, Stream[Any]]
short = iterate_unbounded_streams([initial], [], lambda v, d: IterationBodyResult(v, v))
reveal_type(short)  # list[Stream[Any]]
short_by_name = iterate_unbounded_streams([initial], [], lambda v, d: IterationBodyResult(v, {"x": v[0]}))
reveal_type(short_by_name)  # dict[str, Stream[Any]]
result = IterationBodyResult[dict[str, Stream]]([last], {"last": last})
reveal_type(result.output_streams)  # dict[str, Stream[Any]]
KMeans(clusters=2).fit(topic("memory:points"), extract=coordinates)
"""

MISTAKES = """
from streamiter import (
    Flow,
    IterationBodyResult,
    Operator,
    Stream,
    feedback_through,
    iterate_unbounded_streams,
    replayed,
    topic,
    tumbling,
)
from streamiter.operators import Output


def names_that_nobody_was_told_of(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
    return IterationBodyResult(variables, {"out": variables[0]})  # arg-type


def streams_of_numbers(variables: list[Stream], data: list[Stream]) -> IterationBodyResult[list[int]]:  # type-var
    return IterationBodyResult(variables, [1])  # type-var


rows = Flow("flow").from_items([1])
replayed(rows).map(str)  # attr-defined
feedback_through(rows, topic("memory:loop")).map(str)  # attr-defined
iterate_unbounded_streams([rows], [replayed(rows)], lambda v, d: IterationBodyResult(v, d))  # list-item
rows.map(str, names="text")  # call-arg
rows.map(str, parallelism="two")  # arg-type
rows.sort(parallelism=2)  # call-arg
rows.flow.source(topic("memory:rows"), on_error="ignore")  # call-overload
rows.flow.run(checkpoint=None)  # call-arg
rows.flow.run(restore="first")  # arg-type
started = rows.flow.start(stall_after="5")  # call-arg
rows.map(lambda number: number.upper())  # attr-defined
rows.map(str).map(lambda text: text + 1)  # operator
rows.map_async(str)  # arg-type
rows.key_by(str).reduce(lambda a, b: a.bit_count(b))  # call-arg
keyed = rows.key_by(str)
keyed.interval_join(keyed, lower_s=0, upper_s=1, how="outer")  # call-overload
keyed.join_table(keyed, time="clock")  # call-overload
keyed.window_join(keyed, tumbling(1), how="left").map(lambda pair: pair[0] + pair[1])  # operator
texts: Stream[str] = rows  # assignment


class Returns(Operator):
    def process(self, record: int, out: Output) -> int:  # override
        return record


class Lacks(Operator):
    def process(self, record: int) -> None:  # override
        pass
"""

TYPES = """
import asyncio
from typing import Any, reveal_type

import msgspec
import numpy as np
import polars

from streamiter import Checkpoints, Columns, Flow, KeyedStream, Operator, Stream, topic, tumbling
from streamiter.operators import Collected, Output
from streamiter.topics import Text, Typed


class Click(msgspec.Struct, tag=True):
    user: str
    price: float


class View(msgspec.Struct, tag=True):
    page: str


async def look_up(click: Click) -> str:
    return click.user


class Prices(Operator):
    async def process(self, record: Click, out: Output) -> None:
        out.emit(record.price)

    def on_timer(self, payload: str, out: Output) -> None:
        out.emit(payload)


class Sums(Operator):
    def process_batch(self, batch: list[float], out: Output) -> None:
        out.emit(sum(batch))


def half(number: int) -> float | None:
    return number / 2 if number else None


def any_records(stream: Stream) -> Stream:
    return stream


def of_numbers(stream: Stream[float]) -> Collected[float]:
    return stream.collect()


flow = Flow("types")
words = flow.from_items(["a", "bc"])
reveal_type(words)  # Stream[str]
lengths = words.map(len)
reveal_type(lengths)  # Stream[int]
reveal_type(words.flat_map(str.split).filter(lambda word: word > "a"))  # Stream[str]
by_length = words.key_by(len)
reveal_type(by_length)  # KeyedStream[int, str]
reveal_type(by_length.reduce(max))  # Stream[str]
reveal_type(by_length.stateful_map(lambda n, word: (n + 1, (word, n)), 0))  # Stream[tuple[str, int]]
reveal_type(lengths.union(words))  # Stream[int | str]
reveal_type(lengths.union(lengths).rebalance().broadcast())  # Stream[int]
reveal_type(words.join(lengths, on=str).sort(lambda pair: pair[1]))  # Stream[tuple[str, int]]
reveal_type(lengths.reduce_all(lambda a, b: a + b))  # Stream[int]
numbers = lengths.key_by(abs)
reveal_type(by_length.interval_join(numbers, lower_s=0, upper_s=1))  # Stream[tuple[str, int]]
reveal_type(by_length.interval_join(numbers, lower_s=0, upper_s=1, how="left"))  # Stream[tuple[str, int | None]]
reveal_type(by_length.interval_join(numbers, lower_s=0, upper_s=1, how="right"))  # Stream[tuple[str | None, int]]
reveal_type(by_length.window_join(numbers, tumbling(1), allowed_lateness_s=2))  # Stream[tuple[str, int]]
reveal_type(by_length.window_join(numbers, tumbling(1), how="full"))  # Stream[tuple[str | None, int | None]]
reveal_type(by_length.join_table(numbers))  # Stream[tuple[str, int | None]]
reveal_type(by_length.join_table(numbers, how="inner", time="processing"))  # Stream[tuple[str, int]]
reveal_type(by_length.join_table(numbers, value=half))  # Stream[tuple[str, float | None]]
reveal_type(by_length.join_table(numbers, value=half, how="inner"))  # Stream[tuple[str, float]]
reveal_type(by_length.join_table(numbers, value="real"))  # Stream[tuple[str, Any]]
reveal_type(by_length.as_of_window(numbers, 60).aggregate("count"))  # Stream[tuple[str, Any]]
reveal_type(by_length.deduplicate(len, within_s=60))  # Stream[str]
collected = lengths.collect()
reveal_type(collected)  # Collected[int]
reveal_type(collected.items)  # list[int]
clicks = flow.source(topic("memory:clicks"), decode=Typed(Click), start="latest", on_error="skip")
reveal_type(clicks)  # Stream[Click]
reveal_type(flow.source(topic("memory:events"), decode=Typed(Click | View)))  # Stream[Any]
reveal_type(clicks.map_async(look_up, timeout_s=5))  # Stream[str]
reveal_type(clicks.process(Prices).process(Sums))  # Stream[Any]
reveal_type(clicks.map(lambda click: click.price).batch(3))  # Stream[Any]
reveal_type(flow.source(topic("memory:rows")))  # Stream[Any]
reveal_type(flow.source(topic("memory:lines"), decode=Text()))  # Stream[str]
reveal_type(flow.from_items(Columns({"x": np.ones(3)})))  # Stream[dict[str, Any]]
reveal_type(flow.from_items(polars.DataFrame({"x": [1]})))  # Stream[Any]
reveal_type(any_records(lengths))  # Stream[Any]
reveal_type(of_numbers(lengths))  # Collected[float]
keyed: KeyedStream = by_length
statistics = flow.run(checkpoints=Checkpoints("folder", interval_s=1), restore=None, on_interrupt="drain")


async def main() -> None:
    job = await flow.start(stall_after_s=5, changed_steps=["a"])
    await job.wait()


asyncio.run(main())
"""

PROGRAMS = {"of_types.py": TYPES, "program.py": PROGRAM, "mistakes.py": MISTAKES}

# What mypy knows of streamiter is kept from run to run: to find out all of it takes 5 s of processor time.
CACHE = Path(__file__).parents[1] / ".mypy_cache" / "programs"

# Of these libraries no public function has a type; to read their 1,500 files would take another 5 s.
SETTINGS = """
[mypy]
[mypy-ray.*,numba.*,cryptography.*,hypothesis.*,rich.*,markdown_it.*,confluent_kafka.*,fastavro.*,urllib3.*]
follow_imports = skip
follow_imports_for_stubs = True
"""

MESSAGE = re.compile(r"^([a-z_]+\.py):(\d+): (?:error: .*\[([\w-]+)\]|note: Revealed type is \"(.*)\")$")

Messages = list[tuple[int, str]]
"""The number of a line, and the type that mypy reveals there or the kind of mistake that it reports."""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Messages]:
    """Run mypy, and return its messages for each program."""
    folder = tmp_path_factory.mktemp("programs")
    for name, program in PROGRAMS.items():
        (folder / name).write_text(program)
    (folder / "settings.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=settings.ini", f"--cache-dir={CACHE}", *PROGRAMS],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stderr == ""
    print(done.stdout)
    messages: dict[str, Messages] = {name: [] for name in PROGRAMS}
    for line in done.stdout.splitlines()[:-1]:
        if matched := MESSAGE.match(line):
            name, number, mistake, revealed = matched.groups()
            messages[name].append(
                (int(number), mistake or re.sub(r"(streamiter\.\w+(\.\w+)?|builtins|of_types)\.", "", revealed))
            )
        else:
            assert re.match(r"^mistakes\.py:\d+: note: ", line), line
    return messages


@pytest.mark.parametrize("name", PROGRAMS)
def test_mypy_reports_the_comments_of_a_program(name: str, messages: dict[str, Messages]) -> None:
    """Functions of Columns were refused and outputs were Any, so users wrote casts, or found mistakes late."""
    lines = enumerate(PROGRAMS[name].splitlines(), start=1)
    assert messages[name] == [(number, line.partition("  # ")[2]) for number, line in lines if "  # " in line]


def test_a_result_with_a_type_parameter_is_frozen() -> None:
    """Python 3.11 raised a TypeError about super() when a result was made with its parameter."""
    rows = Flow("flow").from_items([1])
    result = IterationBodyResult[dict[str, Stream]]([rows], {"rows": rows})
    assert type(result) is IterationBodyResult
    assert result == IterationBodyResult([rows], {"rows": rows})
    assert not hasattr(result, "__dict__")
    with pytest.raises(FrozenInstanceError):
        result.output_streams = {}  # type: ignore[misc]
