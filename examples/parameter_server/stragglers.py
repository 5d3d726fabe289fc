"""The cost of a worker that is five times slower than three others, under BSP, SSP and ASP.

The same logistic regression is trained on a parameter server three times. Time is virtual: this program sets the time
of a mini-batch, so a run takes seconds, and prints the same numbers on every machine. With made-up data::

    python examples/parameter_server/stragglers.py

Or with two files of examples in libsvm format, one for training and one for evaluation::

    python examples/parameter_server/stragglers.py file:train.libsvm file:test.libsvm

It prints a table and draws ``stragglers.png`` (``--picture`` names another file, also ``.svg``). With ``--hiccups`` all
workers are slow at times, instead of one worker always: this is the case for bounded staleness. With ``--k-means`` the
workers find clusters in the same rows. ``--seconds`` is the length of each training, in virtual seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tasks import Clustering, LogisticRegression, Task, examples_in, made_up_examples

from streamiter import Flow, Stream
from streamiter.flow.drawing.charts import COLOURS, TEXT, Line, Panel, Plot, chart, text, ticks
from streamiter.flow.drawing.formats import png_of_svg
from streamiter.learn import ParameterServerWorker
from streamiter.models import model_updates
from streamiter.parameter_server import ASP, BSP, SSP, Consistency, ParameterServer
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, Topic

WORKERS = 4
SLOW_WORKER = 3
MINI_BATCH = 200
MINI_BATCH_S = 0.01
"""The time of a mini-batch, in virtual seconds."""
TIMES_SLOWER = 5
PUBLISH_EVERY = 5
LOOKED_AT_S = (0.5, 1.0, 2.0, 5.0, 10.0)
SHOWN = 0.93
"""The share of a line's losses that the picture does not cut off."""

HOW: dict[str, Consistency] = {"BSP": BSP(), "SSP(3)": SSP(staleness=3), "ASP": ASP()}


class Worker(ParameterServerWorker):
    """Sleeps for each mini-batch, and stops at the end of the training time."""

    seconds = 10.0

    async def process(self, mini_batch: Any, out: Any) -> None:
        if self.context.clock.monotonic_s() < self.seconds:
            await super().process(mini_batch, out)

    async def compute(self, mini_batch: Any, pulled: Any) -> Any:
        await self.context.clock.sleep(MINI_BATCH_S * (TIMES_SLOWER if self.is_slow() else 1))
        return await super().compute(mini_batch, pulled)

    def is_slow(self) -> bool:
        return self.context.subtask_index == SLOW_WORKER


class Stumbling(Worker):
    """A worker that is slow for one in ten mini-batches, at random."""

    async def open(self, context: Any) -> None:
        await super().open(context)
        self.generator = np.random.default_rng(context.subtask_index)

    def is_slow(self) -> bool:
        return bool(self.generator.random() < 0.1)


SCENES = {
    Worker: f"worker {SLOW_WORKER} is {TIMES_SLOWER} times slower",
    Stumbling: f"each is {TIMES_SLOWER} times slower for one in ten mini-batches",
}


@dataclass
class Result:
    """The result of one training."""

    epochs_per_s: float
    waited_s: Sequence[float]
    """By worker."""
    times_s: Sequence[float]
    losses: Sequence[float]
    """The loss of the version at each of these times, on the held-out rows."""
    judged: Sequence[float]
    """The task's measures of the last version."""


# -- training ------------------------------------------------------------------------------------------------


def training(flow: Flow, task: Task, how: str, worker: type[Worker], updates: Topic) -> Stream:
    """Publish versions to a topic; return the stream of the workers' reports."""
    trained = task.training(
        flow,
        ParameterServer(shards=2),
        consistency=HOW[how],
        batch=MINI_BATCH,
        epochs=more_than_all_epochs(len(task.train.targets), worker.seconds),
        workers=WORKERS,
        publish_every=PUBLISH_EVERY,
        worker=worker,
    )
    trained.models.publish_model(updates, model=how)
    return trained.losses


def more_than_all_epochs(rows: int, seconds: float) -> int:
    """Return more epochs than a worker finishes in this time."""
    return 1 + math.ceil(seconds / MINI_BATCH_S * MINI_BATCH * WORKERS / rows)


async def run(task: Task, how: str, worker: type[Worker], updates: Topic) -> Result:
    """Run one training in virtual time; return its result."""
    flow, clock = Flow(f"stragglers {how}"), VirtualClock()
    told = training(flow, task, how, worker, updates).collect()
    began_ms = clock.now_ms()
    job = await flow.start(clock=clock)
    ended = asyncio.ensure_future(job.wait())
    while not ended.done():
        await clock.advance(worker.seconds / 100)
    await ended
    times_s, losses = [], []
    async for update in model_updates(updates, how, follow=False):
        times_s.append(min((update.created_at_ms - began_ms) / 1000, worker.seconds))
        losses.append(task.loss(update.parameters))
    waited_s = np.bincount([each["worker"] for each in told.items], [each["waited_s"] for each in told.items])
    return Result(
        epochs_per_s=sum(each["records"] for each in told.items) / len(task.train.targets) / worker.seconds,
        waited_s=waited_s.tolist(),
        times_s=times_s,
        losses=losses,
        judged=task.judge(update.parameters),
    )


# -- output -------------------------------------------------------------------------------------------------


def table(task: Task, results: dict[str, Result], scene: str, seconds: float) -> str:
    """Return a table with a line for each training."""
    looked_at_s = [at for at in LOOKED_AT_S if at <= seconds]
    lines = [
        f"{WORKERS} workers, {scene}; {seconds:g} virtual seconds",
        "",
        f"{'':8}{'epochs/s':>9}"
        + "".join(f"{name:>10}" for name in task.judged_by)
        + f"  {'waited (s), by worker':<24}"
        + "".join(f"{f'loss {at:g} s':>12}" for at in looked_at_s),
    ]
    for how, result in results.items():
        waits = " ".join(f"{waited:.1f}" for waited in result.waited_s)
        losses = "".join(f"{np.interp(at, result.times_s, result.losses):>12.4f}" for at in looked_at_s)
        judged = "".join(f"{figure:>10.4f}" for figure in result.judged)
        lines.append(f"{how:8}{result.epochs_per_s:>9.3f}{judged}  {waits:<24}{losses}")
    return "\n".join(lines)


# The share of a bar's place that stays empty, on each side of the bar.
MARGIN = 0.22
# The number above a bar has room below the highest line of the grid, or is little above it.
ROOM_ABOVE = 1.08


@dataclass(frozen=True)
class BarPanel:
    """A bar for each name (at least one), with its number above it. No number is below 0.

    The bars have the colours of the lines of the other panel, in order.
    """

    title: str
    heights: Mapping[str, float]

    def parts(self, left: float) -> Iterator[str]:
        """Return the parts of the drawing, which starts at ``left``."""
        y_ticks = ticks([0.0, ROOM_ABOVE * max(self.heights.values()) or 1.0])
        plot = Plot(left, (0.0, float(len(self.heights))), (y_ticks[0], y_ticks[-1]))
        yield from plot.frame(self.title, y_ticks)
        for number, (name, height) in enumerate(self.heights.items()):
            x, right, top = plot.x(number + MARGIN), plot.x(number + 1 - MARGIN), plot.y(height)
            yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{right - x:.1f}" height="{plot.bottom - top:.1f}" '
            yield f'fill="{COLOURS[number % len(COLOURS)]}" rx="2"/>'
            yield text((x + right) / 2, top - 7, f"{height:.2f}", TEXT)
            yield text((x + right) / 2, plot.bottom + 18, name, TEXT)


def draw(task: Task, results: dict[str, Result], to: Path) -> None:
    """Draw the losses and the speed; PNG needs ``pip install 'streamiter[draw]'``."""
    losses = Panel(
        "Loss on rows held out",
        "virtual seconds",
        [Line(how, each.times_s, each.losses) for how, each in results.items()],
        y_name=task.loss_name,
        cut_above=max(float(np.quantile(each.losses, SHOWN)) for each in results.values()),
    )
    speed = BarPanel("Epochs per virtual second", {how: each.epochs_per_s for how, each in results.items()})
    drawing = chart([losses, speed])
    to.write_bytes(drawing.encode() if to.suffix == ".svg" else png_of_svg(drawing))


async def main(task: Task, worker: type[Worker], to: Path) -> None:
    updates = MemoryBroker().topic("model-updates")
    await updates.create()
    results = {how: await run(task, how, worker, updates) for how in HOW}
    print(table(task, results, SCENES[worker], worker.seconds))
    draw(task, results, to)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="two topics: examples to learn from, examples to judge by")
    parser.add_argument("--hiccups", action="store_true", help="all are slow now and then, instead of one always")
    parser.add_argument("--k-means", action="store_true", help="clusters, instead of a logistic regression")
    parser.add_argument("--picture", type=Path, default=Path("stragglers.png"))
    parser.add_argument(
        "--seconds", type=float, default=Worker.seconds, help="the length of each training, in virtual seconds"
    )
    given = parser.parse_args()
    if len(given.files) not in (0, 2):
        parser.error(f"expected two topics or none, given {len(given.files)}")
    made = examples_in(given.files) if given.files else [made_up_examples(20_000, 1), made_up_examples(10_000, 2)]
    Worker.seconds = given.seconds
    task = (Clustering if given.k_means else LogisticRegression)(*made)
    asyncio.run(main(task, Stumbling if given.hiccups else Worker, given.picture))
