"""Labels that come a fixed number of rows later, on real streams in the order of time.

``python -m benchmarks.learning_late_real [NAME ...]`` prints this part of the page alone.
"""

from __future__ import annotations

import argparse
import sys
import time
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
from benchmarks.report import markdown_table

__all__ = ["follow_real", "late_by", "real_part"]

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
    found[_AT_ONCE] = ours(late_by(rows, 0), None).predictions
    return found


def _forest(rows: LearningStream) -> Any:
    from river.forest import ARFClassifier, ARFRegressor

    return ARFRegressor(seed=1) if rows.task == "number" else ARFClassifier(seed=1)


def _losses(rows: LearningStream, delay: int, *, has_forest: bool) -> dict[str, float]:
    """Return the loss of each learner over the rows that are asked after the first label has come."""
    found = follow_real(rows, delay, has_forest=has_forest)
    return {name: loss(rows, losses(rows, predictions)[delay + 1 :]) for name, predictions in found.items()}


# ---- the part of the page

_TITLE: Final = "### Real streams, labels some rows later\n"

_ABOUT: Final = """\
TODO
"""


def real_part(
    names: Sequence[str], rows: int, say: Callable[[str], None], *, with_forest: bool = True
) -> str:
    """Follow the streams; return this part of the page in Markdown."""
    table: list[list[str]] = []
    missing: list[str] = []
    worse: list[str] = []
    for name in names:
        try:
            stream = IN_TIME[name]().head(rows)
        except MissingStream as absent:
            missing.append(f"{name} ({absent})")
            continue
        delays = [delay for delay in _DELAYS if delay <= _PART_OF_ROWS_MAX * len(stream)]
        for delay in delays:
            started_s = time.process_time()
            has_forest = with_forest and delay == max(other for other in delays if other <= _DELAY_OF_FOREST)
            found = _losses(stream, delay, has_forest=has_forest)
            say(f"{name}, labels {delay} rows later: {time.process_time() - started_s:.1f} CPU-s")
            table.append([name, f"{len(stream):,}", _TASKS[stream.task], f"{delay:,}", *_shown(found)])
            table[-1].append(f"{found[_OURS] / found[_MEAN] - 1.0:+.1%}")
            worse += [f"{name}, {delay}"] if found[_OURS] > found[_MEAN] else []
    header = ["stream", "rows", "task", "rows later", *_LEARNERS, f"{_OURS} against {_MEAN}"]
    parts = [_TITLE, _ABOUT, markdown_table([header, *table])]
    parts += [f"streamiter is worse than *{_MEAN}* on {len(worse)} of {len(table)}: {'; '.join(worse) or 'none'}.\n"]
    parts += [f"Left out: {'; '.join(missing)}.\n"] if missing else []
    return "\n".join(parts)


_TASKS: Final = {"binary": "yes or no", "number": "number"}


def _shown(found: dict[str, float]) -> list[str]:
    """Return the loss of each learner; the lowest one of those that can be had is bold."""
    best = min(value for name, value in found.items() if name != _AT_ONCE)
    shown = {name: f"{found[name]:.4g}" if name in found else "–" for name in _LEARNERS}
    return [f"**{text}**" if found.get(name) == best else text for name, text in shown.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print this part of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_late_real", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(IN_TIME)}")
    parser.add_argument("--rows", type=int, default=_ROWS, help="the first so many rows of each stream")
    parser.add_argument("--no-forest", action="store_true", help="leave out the forest of river, the slowest learner")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in IN_TIME]:
        parser.error(f"expected the name of a stream, given {unknown[0]!r}; the names are {', '.join(IN_TIME)}")
    say = partial(print, file=sys.stderr, flush=True)
    print(real_part(options.names or list(IN_TIME), options.rows, say, with_forest=not options.no_forest))


if __name__ == "__main__":
    main()
