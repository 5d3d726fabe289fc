"""Tests run this program in its own process: a training that only Ctrl-C ends.

The first argument is ``script``, or ``event loop`` for a call from a coroutine, as in notebooks; the second is ``fit``,
or ``hang`` for a training whose second round waits for ever.
"""

import asyncio
import sys

import numpy as np

from streamiter import Flow, IterationBodyResult, Operator, iterate_bounded_streams_until_termination
from streamiter.learn import LogisticRegression
from streamiter.learn.estimators import run_offline


def fit() -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(200, 3))
    targets = (features[:, 0] > 0).astype(float)
    model = LogisticRegression(3)
    fit = model.fit(features, targets, rounds=1_000_000_000, learning_rate=0.01, parallelism=2)
    learned = fit.losses[-1] < fit.losses[0] and model.weights[0] > 0
    print(fit.ended_by, fit.steps == model.version, learned, flush=True)


class Hang(Operator):
    """Pass the first record on, and keep the second for ever."""

    def __init__(self):
        self.seen = 0

    async def process(self, record, out):
        self.seen += 1
        if self.seen > 1:
            await asyncio.Event().wait()
        out.emit(record)

    def close(self):
        print("closed", flush=True)


def hang() -> None:
    flow = Flow("hanging")

    def body(variables, data):
        slow = variables[0].process(Hang)
        return IterationBodyResult([slow], [slow])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    run_offline(flow, title="hanging")


async def in_event_loop(work) -> None:
    work()


if __name__ == "__main__":
    where, what = sys.argv[1:]
    work = {"fit": fit, "hang": hang}[what]
    try:
        if where == "script":
            work()
        else:
            asyncio.run(in_event_loop(work))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
