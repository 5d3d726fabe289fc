"""Labels that come a fixed number of rows later, on real streams in the order of time.

``python -m benchmarks.learning_late_real [NAME ...]`` prints this section of the page alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from benchmarks.learning_late import ours
from benchmarks.learning_late_streams import LateStream
from benchmarks.learning_peers import Floats, River, by_row, loss, losses, without_flow
from benchmarks.learning_streams import IN_TIME, LearningStream, MissingStream
from benchmarks.measuring import Stopwatch
from benchmarks.report import markdown_table

__all__ = ["TITLE", "follow_real", "late_by", "real_section"]

_DELAYS: Final = (60, 300, 1_000)

# With a longer delay, most labels of a short stream come when there is not much left to predict.
_PART_OF_ROWS_MAX: Final = 0.25

_ROWS: Final = 20_000

# It takes as long as all others together, three times over.
_DELAY_OF_FOREST: Final = 300

_MEAN: Final = "mean so far"
_RIVER: Final = "river"
_FOREST: Final = "river, forest"
_ONE: Final = "one expert"
_OURS: Final = "streamiter"
_AT_ONCE: Final = "label at once"
_LEARNERS: Final = (_MEAN, _RIVER, _FOREST, _ONE, _OURS, _AT_ONCE)


def late_by(rows: LearningStream, delay: int) -> LateStream:
    """Return the stream with a question a second, and each label right after so many more questions."""
    asked = np.arange(len(rows)) * 1_000
    late = LateStream(rows, asked, asked + 1_000 * delay + 500, 1_000 * (delay + 1), rows.name)
    return replace(late, rows=replace(rows, events=late.events()[0]))


def mean_so_far(stream: LateStream) -> Floats:
    """Predict the mean of the labels that have come; a share counts one True and one False more."""
    come = np.searchsorted(stream.answered_ms, stream.asked_ms)
    labels = stream.rows.labels
    sums = np.concatenate([[0.0], np.cumsum(labels)])[come]
    is_share = stream.rows.task == "binary"
    return (sums + is_share) / np.maximum(come + 2 * is_share, 1)


def follow_real(rows: LearningStream, delay: int, *, has_forest: bool) -> dict[str, Floats]:
    """Return what each learner predicts of the rows."""
    stream = late_by(rows, delay)
    found = {_MEAN: mean_so_far(stream)}
    if find_spec("river") is not None:
        found[_RIVER] = by_row(stream.rows, River(stream.rows)).predictions
        if has_forest:
            found[_FOREST] = by_row(stream.rows, River(stream.rows, _forest(rows))).predictions
    found[_ONE] = without_flow(stream.rows, shapes=False, rates=(0.1,))
    found[_OURS] = ours(stream, None).predictions
    found[_AT_ONCE] = without_flow(rows)
    return found


def _forest(rows: LearningStream) -> Any:
    from river.forest import ARFClassifier, ARFRegressor

    return ARFRegressor(seed=1) if rows.task == "number" else ARFClassifier(seed=1)


def _losses(rows: LearningStream, delay: int, *, has_forest: bool) -> dict[str, float]:
    """Return the loss of each learner over the rows that are asked after the first label has come."""
    found = follow_real(rows, delay, has_forest=has_forest)
    return {name: loss(rows, losses(rows, predictions)[delay + 1 :]) for name, predictions in found.items()}


# ---- the section of the page

TITLE: Final = "## Labels some rows later, on real streams\n"

_ABOUT: Final = """\
Most streams above are drawn row by row, so the rows of a delay tell as much as all others. Neighbouring rows of real
streams are alike: an hour with many late flights ends before its labels come, and a learner that follows these labels
predicts one hour with another. Here each label comes right after a fixed number of further questions, and all questions
are answered; streamiter learns with `train_online(labels=…)`, in event time. About 920 flights leave New York a day;
half of them land after 122 others have left, and a tenth after 268. 60 rows of the weather at its three airports are 20
hours, and 300 are four days. A delay above a quarter of the stream is left out, since there is not much left to
predict.

The loss is of the predictions as they were asked, the mean log loss or the RMSE, of all questions after the first label
has come; all learners of one line have the same questions.

- *{mean}*: the mean of the labels that have come; a share counts one True and one False more. A learner should be no
  worse than this.
- *{river}*: its linear model behind `StandardScaler` and `OneHotEncoder`, where a question waits for its label. On
  *wind* it diverges also with labels at once.
- *{forest}*: its adaptive random forest of ten trees behind the same encoders, with `seed=1`. It is slow, so it has one
  delay of each stream.
- *{one}*: the linear model of streamiter with a single rate, `AdaptiveLinearModel(shapes=False, rates=(0.1,))`.
- *{at_once}*: streamiter with each label right after its question, as nobody can have it here.

*flights* are the first of their month and those after them: is it more than 15 minutes late at the arrival? *minutes*:
how many? *rain* and *wind* are the hours of 2013 at the three airports, in one stream: does it rain, and how many miles
an hour has the wind? The others are of river: days of *SP500* and *TrumpApproval*, hours of *WaterFlow*, and *Elec2*
and *Bikes*, which river downloads.
"""


def real_section(names: Sequence[str], rows: int, say: Callable[[str], None], *, with_forest: bool = True) -> str:
    """Follow the streams; return the section of the page in Markdown."""
    table: list[list[str]] = []
    missing: list[str] = []
    worse: dict[str, list[str]] = {_MEAN: [], _ONE: []}
    for name in names:
        try:
            stream = IN_TIME[name]().head(rows)
        except MissingStream as absent:
            missing.append(f"{name} (`{absent}`)")
            continue
        delays = [delay for delay in _DELAYS if delay <= _PART_OF_ROWS_MAX * len(stream)]
        for delay in delays:
            has_forest = with_forest and delay == max(other for other in delays if other <= _DELAY_OF_FOREST)
            with Stopwatch() as watch:
                found = _losses(stream, delay, has_forest=has_forest)
            say(f"{name}, labels {delay:,} rows later: {watch.cpu_seconds:.1f} s of CPU time")
            table.append([name, f"{len(stream):,}", _TASKS[stream.task], f"{delay:,}", *_shown(found)])
            for other, lines in worse.items():
                table[-1].append(f"{found[_OURS] / found[other] - 1.0:+.1%}")
                lines += [f"{name}, {delay:,}"] if found[_OURS] > found[other] else []
    header = ["stream", "rows", "task", "rows later", *_LEARNERS, *(f"against {other}" for other in worse)]
    names_of = {"mean": _MEAN, "river": _RIVER, "forest": _FOREST, "one": _ONE, "at_once": _AT_ONCE}
    parts = [TITLE, _ABOUT.format_map(names_of), markdown_table([header, *table])]
    for other, lines in worse.items():
        said = f"streamiter is worse than *{other}* on {len(lines)} of {len(table)} lines"
        parts.append(f"{said}: {'; '.join(lines)}.\n" if lines else f"{said}.\n")
    parts += [f"Left out: {'; '.join(missing)}.\n"] if missing else []
    return "\n".join(parts)


_TASKS: Final = {"binary": "yes or no", "number": "number"}


def _shown(found: dict[str, float]) -> list[str]:
    """Return the loss of each learner; the lowest one of those that can be had is bold."""
    best = min(value for name, value in found.items() if name != _AT_ONCE)
    shown = {name: f"{found[name]:.4g}" if name in found else "–" for name in _LEARNERS}
    return [f"**{text}**" if found.get(name) == best else text for name, text in shown.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print this section of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_late_real", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(IN_TIME)}")
    parser.add_argument("--rows", type=int, default=_ROWS, help="how many rows of each stream, from the first one on")
    parser.add_argument("--no-forest", action="store_true", help="leave out the forest of river, the slowest learner")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in IN_TIME]:
        parser.error(f"expected the name of a stream, given {unknown[0]!r}; the names are {', '.join(IN_TIME)}")
    say = partial(print, file=sys.stderr, flush=True)
    print(real_section(options.names or list(IN_TIME), options.rows, say, with_forest=not options.no_forest))


if __name__ == "__main__":
    main()
