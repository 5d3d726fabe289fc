"""A user's program passes ``mypy --strict``, and the results of iterations have types."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from support.processes import LIMIT_S

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
reveal_type(trained)  # list[Stream]
[last, by_round, counts] = trained
reveal_type(last)  # Stream
collected = last.collect()
named = iterate_bounded_streams_until_termination([initial], [replayed(rows)], train_by_name)
reveal_type(named)  # dict[str, Stream]
by_any_name = iterate_bounded_streams_until_termination([initial], [], any_names)
reveal_type(by_any_name)  # dict[str, Stream]
named["params"].filter(lambda p: p["loss"] > 0, name="positive", parallelism=2, on_error="skip").collect()
endless = iterate_unbounded_streams([initial], [rows], through_a_topic)
reveal_type(endless)  # list[Stream]
endless_by_name = iterate_unbounded_streams([initial], [rows], train_by_name)
reveal_type(endless_by_name)  # dict[str, Stream]
short = iterate_unbounded_streams([initial], [], lambda v, d: IterationBodyResult(v, v))
reveal_type(short)  # list[Stream]
short_by_name = iterate_unbounded_streams([initial], [], lambda v, d: IterationBodyResult(v, {"x": v[0]}))
reveal_type(short_by_name)  # dict[str, Stream]
result = IterationBodyResult[dict[str, Stream]]([last], {"last": last})
reveal_type(result.output_streams)  # dict[str, Stream]
KMeans(clusters=2).fit(topic("memory:points"), extract=coordinates)
"""

MISTAKES = """
from streamiter import Flow, IterationBodyResult, Stream, feedback_through, iterate_unbounded_streams, replayed, topic


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
rows.flow.source(topic("memory:rows"), on_error="ignore")  # arg-type
"""

PROGRAMS = {"program.py": PROGRAM, "mistakes.py": MISTAKES}

# What mypy knows of streamiter is kept from run to run: to find out all of it takes 5 s of processor time.
CACHE = Path(__file__).parents[1] / ".mypy_cache" / "programs"

MESSAGE = re.compile(r"^([a-z]+\.py):(\d+): (?:error: .*\[([\w-]+)\]|note: Revealed type is \"(.*)\")$")

Messages = list[tuple[int, str]]
"""The number of a line, and the type that mypy reveals there or the kind of mistake that it reports."""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Messages]:
    """Run mypy, and return its messages for each program."""
    folder = tmp_path_factory.mktemp("programs")
    for name, program in PROGRAMS.items():
        (folder / name).write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={CACHE}", *PROGRAMS],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.stderr == ""
    print(done.stdout)
    messages: dict[str, Messages] = {name: [] for name in PROGRAMS}
    for line in done.stdout.splitlines()[:-1]:
        if matched := MESSAGE.match(line):
            name, number, mistake, revealed = matched.groups()
            messages[name].append((int(number), mistake or revealed.replace("streamiter.flow.stream.", "")))
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
