"""Compare how well and how fast learners learn, each with its defaults: ``python -m benchmarks.learning [NAME ...]``.

It writes a table to ``docs/learning-results.md`` and the loss over time of each stream to ``docs/pictures/learning``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.learning_late import late_section
from benchmarks.learning_late_real import real_section
from benchmarks.learning_late_streams import LATE_STREAMS
from benchmarks.learning_peers import (
    AMF,
    FOREST,
    LINEAR,
    OURS,
    TREE,
    VALUES_OF_A_FOREST,
    VALUES_OF_AMF,
    Learner,
    installed_learners,
    loss,
    losses,
)
from benchmarks.learning_streams import FURTHER, IN_TIME, MAIN, SCALES, STREAMS, LearningStream, MissingStream, Task
from benchmarks.report import environment, markdown_table
from benchmarks.session import PROJECT, Session
from streamiter import Columns
from streamiter.flow.drawing.charts import Line, Panel, chart

__all__ = ["Compared", "as_page", "compare", "main", "with_section"]

_DEFAULTS: Final = ("river", "VW")
_TREES: Final = (TREE, FOREST, AMF)
PICTURES: Final = Path("pictures") / "learning"
_PAGE: Final = "learning-results.md"
_PICTURES_TITLE: Final = "## Loss over time\n"

_POINTS: Final = 50

_TASKS: Final = {"binary": "yes or no", "classes": "classes", "number": "number"}


@dataclass(frozen=True)
class Compared:
    """The results of all learners on one stream."""

    stream: str
    task: str
    rows: int
    columns: int
    losses: Mapping[str, float]
    """For each learner that took the stream the mean log loss or the root of the mean squared error."""
    rates: Mapping[str, float]
    """For each learner rows a second of CPU time."""
    lines: Sequence[Line]
    """For each linear learner the loss of all rows so far, over time."""
    accuracies: Mapping[str, float]
    """For each learner in a flow the part of the rows whose label was predicted; none for numbers."""

    def is_better_than(self, others: Sequence[str]) -> bool:
        """Whether the loss of streamiter is below that of each of these learners."""
        return all(self.losses[OURS] < self.losses[other] for other in others if other in self.losses)

    @property
    def picture(self) -> str:
        """The name of the file of the picture."""
        return re.sub(r"[^a-z0-9]+", "-", self.stream.lower()).strip("-") + ".svg"

    def drawn(self) -> str:
        """Return the picture: the loss of each learner over time."""
        # The better lines are in the lower half, below the legend; the others may leave the picture.
        lines = sorted(self.lines, key=lambda line: line.ys[-1])[:3]
        ys = [y for line in lines for y in line.ys[len(line.ys) // 10 :]]
        cut_above = min(ys) + 1.9 * (float(np.quantile(ys, 0.9)) - min(ys))
        name = "RMSE" if self.task == "number" else "log loss"
        return chart([Panel(self.stream, "rows so far", self.lines, name, cut_above=cut_above, has_whole_xs=True)])


def compare(stream: LearningStream, learners: Mapping[str, Learner]) -> Compared:
    """Let each learner learn the stream."""
    found: dict[str, float] = {}
    rates: dict[str, float] = {}
    lines: list[Line] = []
    accuracies: dict[str, float] = {}
    for name, learner in learners.items():
        if (learned := learner(stream)) is None:
            continue
        of_rows = losses(stream, learned.predictions)
        found[name], rates[name] = loss(stream, of_rows), len(stream) / learned.cpu_seconds
        if learned.accuracy is not None:
            accuracies[name] = learned.accuracy
        if name not in _TREES:
            points = min(_POINTS, len(of_rows))
            ends = [len(of_rows) * point // points for point in range(1, points + 1)]
            lines.append(Line(name, ends, [loss(stream, of_rows[:end]) for end in ends]))
        _say(f"  {name}: {found[name]:.4g}, {rates[name]:,.0f} rows/CPU-s")
    return Compared(stream.name, stream.task, len(stream), stream.columns, found, rates, lines, accuracies)


# ---- the page

_INTRODUCTION: Final = """\
# Learning quality and speed

`make bench-learning` makes this page, in about {minutes} minutes on 2 cores. Each learner has its defaults and reads
each stream once: it predicts a row, then learns from it. The loss is over the predictions for all rows, from the first
one on: the mean log loss for yes or no and for classes (probabilities are clipped at 1e-15), the root of the mean
squared error (RMSE) for numbers. Lower is better.

- *streamiter*: `train_online` with label and features, and no other argument, where its own guess of the task is right.
  *linear* is the same with `shapes=False`, without the members that have tables.
  A first label of 0 or 1 is taken for yes or no, so SolarFlare, which counts flares, needs `task="regression"`. The
  loss that the flow reports is checked against the same model without a flow.
- *river*: `StandardScaler` for numbers and `OneHotEncoder` for texts, then `LogisticRegression`, `SoftmaxRegression`
  or `LinearRegression`.
- *VW*: Vowpal Wabbit in its Python package, with the logistic or the squared loss: the default, `--coin` and `--ftrl`.
  For classes it has `--oaa` with the number of classes, and `--probabilities`.

streamiter finds classes as they come. A class that has not come yet is scored with the probability of the open class.
Vowpal Wabbit is told the number of classes before the first row. In river a class that has not come yet has no
probability, and is scored as if all classes were equally probable.

Categories of RandomTree and census are numbers, and all learners get them as texts such as `c3`: streamiter reads a
text such as `3` as a number unless `kinds=` says otherwise, the peers as a category, so the same rows would be
different data.

Rows are in memory: `Columns` for streamiter, a dict for each row for river, and a line of text for each row for Vowpal
Wabbit. Where labels come later, Vowpal Wabbit reads the text twice. On streams of a few thousand rows most of the time
of streamiter is the start of the flow. Speeds are rows a second of CPU time (rows/CPU-s), from one run; losses are the
same in each run.

The constants of the linear model were settled on real streams and generators of this page ([decision
019](decisions/019-the-default-learner.md)), so losses on these are no proof for other data. AirlinePassengers,
WaterFlow and flights with labels at arrival had no part in that choice. Most constants of tables are first guesses; a
few were chosen after seeing results ([decision 058](decisions/058-a-learner-that-sees-shapes.md)).
"""


def as_page(results: Sequence[Compared], missing: Mapping[str, str], minutes: float) -> str:
    """Return the page in Markdown."""
    by_name = {result.stream: result for result in results}
    versions = ", ".join(f"{name} {value}" for name, value in environment(_PACKAGES).items())
    parts = [_INTRODUCTION.format(minutes=max(1, round(minutes))), f"Measured with {versions}.\n"]
    for title, names in _GROUPS.items():
        if group := [by_name[name] for name in names if name in by_name]:
            parts += [f"## {title}\n", _totals(group), _table(group)]
    if any(TREE in result.losses for result in results):
        parts += [_about_trees(results), _table_of_trees(results)]
    if missing:
        parts.append("Left out: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items()) + ".\n")
    parts += [
        _PICTURES_TITLE,
        "The loss of all rows so far. The lines of learners that are far worse may leave the picture.\n",
    ]
    parts += [f"![{result.stream}]({PICTURES}/{result.picture})\n" for result in results]
    return "\n".join(parts)


_ABOUT_TREES: Final = """\
## Online trees

The trees of river as ready-made learners of a flow: `train_online(stream, ForeignModel.of_river(…), label=…)` trains,
validates, publishes and serves them like its own model ([how](other-learners.md#a-model-of-another-library)). *tree*
is the Hoeffding adaptive tree, *forest* the adaptive random forest of ten trees, with their defaults and `seed=1`.
Trees for numbers have `StandardScaler` and `OneHotEncoder` before them, because they have linear models in their
leaves. Where labels come later, there are no trees: a `ForeignModel` takes rows with their labels only. The forest is
slow, so it reads only streams of at most {values:,} values (rows times columns). *AMF* is river's aggregated Mondrian
forest of ten trees with `seed=1`, row by row without a flow, behind `StandardScaler` and `OneHotEncoder`. Its memory
grows with each row, so it reads streams of at most {values_of_amf:,} values.

The tree or the forest has a smaller loss than streamiter on {wins} of {streams} streams, and AMF on {wins_of_amf} of
{streams_of_amf}.

Labels that depend on ranges of columns, or on combinations of them, are what trees are for, and what the tables of the
default learner are for. To find out which is better, train both on the same stream in one flow, as
[the example](../examples/other_libraries/river_trees.py) does, and compare their validation.

Compare the accuracy, too. A leaf gives the probability 0 to a class that it has not seen, and a single row of that
class then costs a log loss of 34.5. So a tree may be right as often as another model, and have a loss several times as
large: its choice of a class is good, and its probabilities are not.
"""


_PACKAGES: Final = ("streamiter", "numba", "numpy", "river", "vowpalwabbit")
_GROUPS: Final = {"Streams": MAIN, "Further streams": FURTHER, "Changes of scale": SCALES}


def _linear(group: Sequence[Compared]) -> list[str]:
    return [name for name in group[0].losses if name not in _TREES]


def _peers(learners: Sequence[str]) -> list[str]:
    return [name for name in learners if name not in (OURS, LINEAR)]


def _totals(group: Sequence[Compared]) -> str:
    peers = _peers(_linear(group))
    if not peers:
        return "river and Vowpal Wabbit are not installed.\n"
    defaults = sum(result.is_better_than(_DEFAULTS) for result in group)
    every = sum(result.is_better_than(peers) for result in group)
    linear = sum(result.is_better_than([LINEAR]) for result in group)
    return (
        f"streamiter is better than both defaults on {defaults} of {len(group)} streams, better than all {len(peers)} "
        f"on {every}, and better than its linear model alone on {linear}.\n"
    )


def _table(group: Sequence[Compared]) -> str:
    learners = _linear(group)
    speeds = [name for name in learners if not name.startswith("VW -")]
    header = ["stream", "rows", "columns", "task", *learners, "better than both defaults", "than all"]
    header += [f"rows/CPU-s {name}" for name in speeds]
    return markdown_table([header, *(_row(result, learners, speeds) for result in group)])


def _row(result: Compared, learners: Sequence[str], speeds: Sequence[str]) -> list[str]:
    peers = _peers(learners)
    return [
        result.stream,
        f"{result.rows:,}",
        str(result.columns),
        _TASKS[result.task],
        *_with_best(result.losses, learners, min),
        "yes" if result.is_better_than(_DEFAULTS) else "no",
        "yes" if result.is_better_than(peers) else "no",
        *(f"{result.rates[name]:,.0f}" for name in speeds),
    ]


def _with_best(
    found: Mapping[str, float], learners: Sequence[str], best_of: Callable[..., float], form: str = ".4g"
) -> list[str]:
    """Return the figure of each learner, the best one in bold; a dash for learners without one."""
    best = best_of((found[name] for name in learners if name in found), default=None)
    figures = ((format(found[name], form), found[name] == best) if name in found else ("–", False) for name in learners)
    return [f"**{figure}**" if is_best else figure for figure, is_best in figures]


def _about_trees(results: Sequence[Compared]) -> str:
    streams = [result for result in results if TREE in result.losses]

    def wins(*learners: str) -> int:
        return sum(not result.is_better_than(learners) for result in streams)

    return _ABOUT_TREES.format(
        values=VALUES_OF_A_FOREST,
        values_of_amf=VALUES_OF_AMF,
        wins=wins(TREE, FOREST),
        streams=len(streams),
        wins_of_amf=wins(AMF),
        streams_of_amf=sum(AMF in result.losses for result in streams),
    )


def _table_of_trees(results: Sequence[Compared]) -> str:
    learners = [OURS, *_TREES]
    in_flows = [name for name in learners if name != AMF]  # A flow reports the accuracy.
    header = ["stream", "task", *(f"loss {name}" for name in learners), *(f"accuracy {name}" for name in in_flows)]
    header += [f"rows/CPU-s {name}" for name in learners]
    rows = [
        [
            result.stream,
            _TASKS[result.task],
            *_with_best(result.losses, learners, min),
            *_with_best(result.accuracies, in_flows, max, ".3f"),
            *(f"{result.rates[name]:,.0f}" if name in result.rates else "–" for name in learners),
        ]
        for result in results
        if TREE in result.losses
    ]
    return markdown_table([header, *rows])


# ---- the command


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the learners on the named streams, or on all of them."""
    options = _parsed(arguments)
    if options.only is not None:
        _SECTIONS[options.only](options)
        return
    learners = installed_learners()
    results: list[Compared] = []
    missing: dict[str, str] = {}
    _warm_up(learners)
    started_s = time.monotonic()
    for name in options.names or STREAMS:
        try:
            stream = STREAMS[name]()
        except MissingStream as absent:
            missing[name] = str(absent)
            _say(f"{name}: left out, {absent}")
            continue
        _say(f"{name}, {len(stream):,} rows")
        results.append(compare(stream.head(_QUICK_ROWS) if options.quick else stream, learners))
        # The page is written after each stream, so that an interrupted run leaves its results.
        _write(options.output, results, as_page(results, missing, (time.monotonic() - started_s) / 60))
    if not options.names:
        for write_section in _SECTIONS.values():
            write_section(options)
        page = options.output / _PAGE
        minutes = max(1, round((time.monotonic() - started_s) / 60))
        page.write_text(re.sub(r"(?<=in about )\d+(?= minutes)", str(minutes), page.read_text(), count=1))


def _write_late(options: argparse.Namespace) -> None:
    """Measure the section of labels that come later."""
    with Session() as session:
        names, rows = options.names or list(LATE_STREAMS), _QUICK_QUESTIONS if options.quick else _ALL
        _write_section(options, late_section(names, rows, None if options.quick else session, _say))


def _write_real(options: argparse.Namespace) -> None:
    """Measure the section of labels that come some rows later, on real streams."""
    names, rows = options.names or list(IN_TIME), _QUICK_ROWS if options.quick else _ALL
    _write_section(options, real_section(names, rows, _say))


_SECTIONS: Final[Mapping[str, Callable[[argparse.Namespace], None]]] = {"late": _write_late, "real": _write_real}


def _write_section(options: argparse.Namespace, section: str) -> None:
    """Put the section in its place on the page; the rest stays."""
    page = options.output / _PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(with_section(page.read_text() if page.exists() else _PICTURES_TITLE, section))


def with_section(page: str, section: str) -> str:
    """Return the page with this section, in place of the one with its title, or else before the pictures."""
    before, title, rest = page.partition(section.partition("\n")[0] + "\n")
    if not title:
        before, title, rest = page.partition(_PICTURES_TITLE)
        return f"{before}{section}\n{title}{rest}"
    return before + section + rest[rest.index("\n## ") :]


def _warm_up(learners: Mapping[str, Learner]) -> None:
    """Import the learners and compile their code, which would count as learning."""
    drawn = np.random.default_rng(seed=1).normal(size=(100, 2))
    features = Columns({"x": drawn[:, 0]})
    labels: dict[Task, Any] = {
        "binary": drawn[:, 1] > 0,
        "classes": np.where(drawn[:, 1] > 0, "above", "below"),
        "number": drawn[:, 1],
    }
    for task, of_task in labels.items():
        for learner in learners.values():
            learner(LearningStream("warm-up", task, features, of_task))


def _write(directory: Path, results: Sequence[Compared], page: str) -> None:
    (directory / PICTURES).mkdir(parents=True, exist_ok=True)
    (directory / _PAGE).write_text(page)
    for result in results:
        (directory / PICTURES / result.picture).write_text(result.drawn())


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description="Compare learners with their defaults on streams."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(STREAMS)}")
    only = "measure only the section of labels that come later, or of those some rows later on real streams"
    parser.add_argument("--only", choices=_SECTIONS, help=only)
    quick = f"use the first {_QUICK_ROWS:,} rows, or {_QUICK_QUESTIONS:,} questions, of each stream"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=PROJECT / "docs", metavar="DIR")
    options = parser.parse_args(arguments)
    known = {None: STREAMS, "late": LATE_STREAMS, "real": IN_TIME}[options.only]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"expected the name of a stream, given {unknown[0]!r}; the names are {', '.join(known)}")
    return options


_QUICK_ROWS: Final = 500
_QUICK_QUESTIONS: Final = 20_000
_ALL: Final = 10**9


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
