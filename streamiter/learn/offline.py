"""Offline training of linear models: ``train_offline``, round after round on bounded data.

It is a bounded iteration of workers, which hold the examples, and an owner of the parameters. In each round every
worker computes the gradient of its share of a mini-batch. *Synchronous* training makes one step a round, with the
gradients of all workers; *asynchronous* training makes a step for each gradient as it arrives, and answers the worker
that sent it. Workers keep their examples in memory (:class:`KeptExamples`), or read them again in every round
(:class:`ReplayedExamples`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from streamiter.errors import GraphError
from streamiter.flow.flow import all_or_nothing, check_stream, connect, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.helpers import terminate_after
from streamiter.iteration.marked_streams import replayed
from streamiter.learn.linear import LinearModel
from streamiter.learn.rows import (
    CheckedExamples,
    Extract,
    RowsRecord,
    as_examples,
    blaming_rows,
    of_good_rows,
)
from streamiter.learn.training import (
    LOSSES,
    MODELS,
    EpochSteps,
    GradientSum,
    GradientWorker,
    MakeModel,
    ParameterOwner,
    StepRule,
    WorkerReport,
    check_makes_model,
)
from streamiter.numbers import is_number, whole_number
from streamiter.operators.operator import Context
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.records import Batch
from streamiter.topics.topic import Topic

OfflineExtract = Extract | Callable[[Any], CheckedExamples]
"""Returns the examples of a batch of records. Examples that are checked already are not checked again."""


@dataclass(frozen=True)
class OfflineTraining:
    """The streams that :func:`train_offline` returns."""

    models: Stream
    """A ``ModelSnapshot``: the last one, and with ``publish_every=n`` each n-th before it."""
    losses: Stream
    """For each step the mean loss before it."""


@all_or_nothing
def train_offline(
    examples: Stream,
    model: Callable[[], LinearModel],
    *,
    extract: OfflineExtract,
    rounds: int,
    mini_batch: int | None = None,
    tolerance: float | None = None,
    mode: Literal["synchronous", "asynchronous"] = "synchronous",
    replay: bool = False,
    publish_every: int | None = None,
    workers: int | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    config: IterationConfig | None = None,
    name: str | None = None,
) -> OfflineTraining:
    """Train a linear model on a bounded stream, in ``rounds`` rounds.

    ``model()`` makes the model; the owner and each worker call it, and must get equal models. Any optimizer can be
    used, the usual one is ``GradientDescent``. ``extract(batch)`` returns the :class:`Examples` of a batch of records.

    In each round all workers together take the next ``mini_batch`` rows. Each worker takes its share of them from the
    rows it has: the next ones, fewer at the end, then again from the first one. None takes all rows. Training ends
    after ``rounds`` rounds, or after the first round in which the mean loss, before its step, is ``tolerance`` or less.

    ``mode="synchronous"``: one step a round, with the mean of the gradients of all rows. The result does not depend on
    timing. Except for the last digits it does not depend on the number of workers either, if each round takes all rows,
    or if the number of workers divides the mini-batch, the mini-batch divides the number of rows, and the rows are
    dealt out in turn (``workers=`` does so).
    ``mode="asynchronous"``: a step for each worker's share as soon as it arrives. The worker continues with the new
    parameters while others still compute theirs.

    Workers keep their examples in memory. With ``replay`` the examples are read again in every round, from memory
    and beyond a limit from disk (``IterationConfig(replay_memory_bytes=…)``): synchronous only.

    A version is published after every ``publish_every`` steps and at the end. Rows that are no examples follow
    ``on_error`` or go to ``dead_letter``. ``name`` is put in front of the names of the steps.

    Raises GraphError for options that cannot be used. A job without examples fails.
    """
    check_stream("train_offline", examples, "examples", bounded=True)
    check_makes_model("train_offline", model)
    check_function(
        extract, "train_offline(extract=)", ["batch"], expected="a function that makes Examples of a batch"
    )
    rounds = _count("rounds", rounds)
    workers = examples.parallelism if workers is None else _count("workers", workers)
    every = sys.maxsize if publish_every is None else _count("publish_every", publish_every)
    if mini_batch is not None:
        mini_batch = _checked_mini_batch(mini_batch, workers)
    _check_tolerance(tolerance)
    _check_mode(mode, replay)
    synchronous = mode == "synchronous"
    flow = examples.flow
    label = step_names(flow, name)
    options = OfflineWorkerOptions(model, extract, mini_batch, rounds, synchronous, replay)

    def make_worker() -> OfflineWorker:
        return OfflineWorker(options)

    def make_owner() -> ParameterOwner:
        rule = EpochSteps(requires_examples=True) if synchronous else ReplySteps(workers, tolerance)
        return ParameterOwner(model, rule, every)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [answers] = variables
        to_workers = answers.broadcast() if synchronous else answers.partition_by(_worker_of)
        gradients = connect(model=to_workers, examples=data[0]).process(
            make_worker, name=label("train"), parallelism=workers, on_error=on_error, dead_letter=dead_letter
        )
        # A single worker and the owner run in one task.
        owner = gradients.process(make_owner, name=label("parameters"), parallelism=1)
        losses = owner.side_output(LOSSES)
        criteria = None
        if synchronous:
            criteria = terminate_after(losses, rounds=rounds, tolerance=tolerance, name=label("rounds"))
        return IterationBodyResult([owner], [owner.side_output(MODELS), losses], criteria)

    starts = [None] if synchronous else [{"worker": worker, "parameters": None} for worker in range(workers)]
    start = flow.from_items(starts, name=label("start"), parallelism=1)
    given = replayed(examples) if replay else examples
    if config is None:
        config = (
            IterationConfig(name=name) if synchronous else IterationConfig(max_epochs_ahead=None, name=name)
        )
    models, losses = iterate_bounded_streams_until_termination([start], [given], body, config)
    return OfflineTraining(models, losses)


def _worker_of(answer: dict[str, Any]) -> int:
    worker: int = answer["worker"]
    return worker


def _count(option: str, count: object) -> int:
    return whole_number(f"train_offline({option}=)", count, 1, error=GraphError)


def _checked_mini_batch(mini_batch: object, workers: int) -> int:
    rows = _count("mini_batch", mini_batch)
    if rows < workers:
        raise GraphError(
            f"train_offline(mini_batch=): expected at least a row for each of {workers} workers, given {rows}; "
            "make it larger, or take fewer workers"
        )
    return rows


def _check_tolerance(tolerance: object) -> None:
    if tolerance is not None and not (is_number(tolerance) and not math.isnan(tolerance)):
        raise GraphError(
            f"train_offline(tolerance=): expected a number, given {tolerance!r}; leave it out for none"
        )


def _check_mode(mode: object, replay: bool) -> None:
    if mode not in ("synchronous", "asynchronous"):
        raise GraphError(
            f'train_offline: expected mode "synchronous" or "asynchronous", given {mode!r}; choose one of them'
        )
    if replay and mode == "asynchronous":
        raise GraphError(
            "train_offline(replay=): expected the mode synchronous, given asynchronous, whose workers go through their "
            "examples each at its own pace; leave replay out, or take the mode synchronous"
        )


# ---- when the owner makes a step


class ReplySteps(StepRule):
    """A step for each gradient as it arrives; the answer goes to the worker that sent the gradient.

    The loss of a step is the mean over the last mini-batch of each worker. When it is as small as the tolerance, no
    worker gets an answer any more, and the iteration ends.
    """

    needs_epochs = False

    def __init__(self, workers: int, tolerance: float | None) -> None:
        self._workers = workers
        self._tolerance = tolerance
        self._last: dict[int, tuple[float, float] | None] = {}
        """The sums of losses and weights of each worker's last mini-batch; None for a worker without examples."""

    def add(self, report: WorkerReport, epoch: int) -> GradientSum | None:
        sums = GradientSum.from_record(report)
        if sums.gradient is None:
            self._last[report["worker"]] = None
            return None
        self._last[report["worker"]] = (sums.loss, sums.gradient.weight)
        return sums

    def mean_loss(self, step: GradientSum) -> float | None:
        last = [sums for sums in self._last.values() if sums is not None]
        weight = sum(weight for _, weight in last)
        return sum(loss for loss, _ in last) / weight if weight else None

    def answer(self, worker: int | None, parameters: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        return None if self._is_good_enough() else {"worker": worker, "parameters": parameters()}

    def _is_good_enough(self) -> bool:
        if self._tolerance is None or len(self._last) < self._workers:
            return False
        mean_loss = self.mean_loss(GradientSum())
        return mean_loss is not None and mean_loss <= self._tolerance

    def lacks_examples(self) -> bool:
        return not any(self._last.values())

    def snapshot(self) -> dict[str, Any]:
        return {"last": list(self._last.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._last = dict(state["last"])


# ---- workers


class OfflineWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    make_model: MakeModel
    extract: OfflineExtract
    mini_batch: int | None
    """Rows that all workers together take in a round; None: all rows."""
    rounds: int
    synchronous: bool
    replay: bool


class OfflineWorker(GradientWorker):
    """Reports the gradient of its share of each round's mini-batch; also if it has no rows.

    Synchronous, it reports at the end of each epoch. Asynchronous, it reads all examples first; then it reports when
    an answer of the owner arrives, once for each round.
    """

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options.make_model, in_epochs=options.synchronous)
        self.epochs_in_order = (
            options.replay
        )  # Kept examples arrive in epoch 0 only, so no record comes early.
        self._options = options
        self._reports = 0

    def open(self, context: Context) -> None:
        super().open(context)
        share = None
        if self._options.mini_batch is not None:
            each, more = divmod(self._options.mini_batch, context.parallelism)
            share = each + (context.subtask_index < more)
        self._examples = ReplayedExamples(share) if self._options.replay else KeptExamples(share)

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Read replayed examples after the parameters of their round; asynchronous, read all examples first."""
        if self._options.replay:
            return super().wanted_inputs()
        return None if self._in_epochs or self._examples_ended else ("examples",)

    def process_model(self, answer: Any, out: Output) -> None:
        """Continue with the parameters of an answer; asynchronous, report the next mini-batch at once."""
        if self._in_epochs:
            self.follow(answer)
            return
        self.follow(answer["parameters"])
        if self._reports < self._options.rounds:
            self._reports += 1
            self.report(self._examples.take_round(self._model), out)

    def process_examples_batch(self, batch: Batch, out: Output) -> None:
        """Add the examples of a batch. In later rounds replayed rows that are no examples are not refused again."""
        refused = out if self._epoch == 0 else Output(policy="skip")
        examples = of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), batch, refused)
        if examples is not None:
            self._examples.add(examples, self._model)

    def _checked(self, batch: Batch) -> CheckedExamples:
        examples = self._options.extract(batch)
        if isinstance(examples, CheckedExamples):
            return examples
        return self._model.checked_examples(as_examples("train_offline(extract=)", examples))

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        super().on_epoch_watermark_incremented(epoch_watermark, context, out)
        if self._in_epochs:
            self.report(self._examples.take_round(self._model), out)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"examples": self._examples.state(), "reports": self._reports}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._examples.restore(state["examples"])
        self._reports = state["reports"]


class KeptExamples:
    """Examples that arrive once and stay in memory."""

    def __init__(self, mini_batch: int | None) -> None:
        self._mini_batches = MiniBatches(mini_batch)
        self._blocks = ExampleBlocks()

    def add(self, examples: CheckedExamples, model: LinearModel) -> None:
        """Append examples; they must not change afterwards."""
        self._blocks.add(examples)

    def take_round(self, model: LinearModel) -> GradientSum:
        """Return the sums of this round's mini-batch, and move to the next mini-batch."""
        sums = GradientSum()
        for part in self._blocks.between(*self._mini_batches.bounds()):
            sums.add(*model.gradient_and_loss(part))
        self._mini_batches.advance(len(self._blocks))
        return sums

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"rows": self._blocks.to_records(), "next": self._mini_batches.start}

    def restore(self, state: dict[str, Any]) -> None:
        """Take on a state that :meth:`state` gave."""
        self._blocks = ExampleBlocks.from_records(state["rows"])
        self._mini_batches.start = state["next"]


class ReplayedExamples:
    """Examples that arrive again in every round, after the round's parameters; none is kept."""

    def __init__(self, mini_batch: int | None) -> None:
        self._mini_batches = MiniBatches(mini_batch)
        self._seen = 0
        """Rows that have arrived in this round."""
        self._sums = GradientSum()

    def add(self, examples: CheckedExamples, model: LinearModel) -> None:
        """Add the gradient of the rows that belong to this round's mini-batch."""
        first, behind_last = (max(row - self._seen, 0) for row in self._mini_batches.bounds())
        self._seen += len(examples)
        if len(part := examples[first:behind_last]):
            self._sums.add(*model.gradient_and_loss(part))

    def take_round(self, model: LinearModel) -> GradientSum:
        """Return the sums of this round's mini-batch, and move to the next mini-batch."""
        sums = self._sums
        self._mini_batches.advance(self._seen)
        self._sums, self._seen = GradientSum(), 0
        return sums

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"sums": self._sums.to_record(), "seen": self._seen, "next": self._mini_batches.start}

    def restore(self, state: dict[str, Any]) -> None:
        """Take on a state that :meth:`state` gave."""
        self._sums, self._seen = GradientSum.from_record(state["sums"]), state["seen"]
        self._mini_batches.start = state["next"]


# So many rows that the cost of a numpy call does not count, and that BLAS uses all cores. While rows are copied into a
# block, no more than this many are in memory twice.
_BLOCK_ROWS: Final = 65_536


class ExampleBlocks:
    """Examples in the order in which they were added, in blocks.

    Small pieces are joined to blocks of equal length, so that sums over blocks are the same to the last bit however the
    examples were cut. A piece that is longer than a block stays as it is.

    >>> import numpy as np
    >>> blocks = ExampleBlocks()
    >>> for start in (0.0, 2.0, 4.0):
    ...     blocks.add(CheckedExamples(np.ones((2, 1)), np.array([start, start + 1])))
    >>> mini_batches = MiniBatches(4)
    >>> for _ in range(3):
    ...     print([part.targets.tolist() for part in blocks.between(*mini_batches.bounds())])
    ...     mini_batches.advance(len(blocks))
    [[0.0, 1.0, 2.0, 3.0]]
    [[4.0, 5.0]]
    [[0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(self) -> None:
        self._blocks: list[CheckedExamples] = []
        self._rows_in_blocks = 0
        self._parts: list[CheckedExamples] = []
        """Pieces that do not fill a block yet."""
        self._rows_in_parts = 0

    def __len__(self) -> int:
        return self._rows_in_blocks + self._rows_in_parts

    def add(self, examples: CheckedExamples) -> None:
        """Append examples; they must not change afterwards."""
        if not self._parts and len(examples) >= _BLOCK_ROWS:
            self._add_block(examples)
            return
        while len(examples):
            part = examples[: _BLOCK_ROWS - self._rows_in_parts]
            examples = examples[len(part) :]
            self._parts.append(part)
            self._rows_in_parts += len(part)
            if self._rows_in_parts == _BLOCK_ROWS:
                parts, self._parts, self._rows_in_parts = self._parts, [], 0
                self._add_block(CheckedExamples.concatenate(parts))

    def _add_block(self, block: CheckedExamples) -> None:
        self._blocks.append(block)
        self._rows_in_blocks += len(block)

    def between(self, start: int, stop: int) -> Iterator[CheckedExamples]:
        """Give the rows from ``start`` to before ``stop``, or to the last row, block by block, without copies."""
        if len(self._parts) > 1:
            self._parts = [CheckedExamples.concatenate(self._parts)]
        first = 0
        for block in (*self._blocks, *self._parts):
            if start < first + len(block) and stop > first:
                whole = start <= first and stop >= first + len(block)
                yield block if whole else block[max(start - first, 0) : stop - first]
            first += len(block)

    def to_records(self) -> list[RowsRecord]:
        """Return all examples as plain data."""
        return [part.to_record() for part in (*self._blocks, *self._parts)]

    @classmethod
    def from_records(cls, records: list[RowsRecord]) -> ExampleBlocks:
        """Return the examples that :meth:`to_records` gave."""
        blocks = cls()
        for record in records:
            blocks.add(CheckedExamples.from_record(record))
        return blocks


class MiniBatches:
    """The bounds of one mini-batch after the other: ``length`` rows each, fewer at the end, then from the first row.

    Without a length each mini-batch has all rows.
    """

    def __init__(self, length: int | None) -> None:
        self._length = sys.maxsize if length is None else length
        self.start = 0
        """The first row of the mini-batch."""

    def bounds(self) -> tuple[int, int]:
        """Return the first row, and the row behind the last one."""
        return self.start, self.start + self._length

    def advance(self, rows: int) -> None:
        """Move to the next mini-batch; ``rows`` is the number of all rows."""
        self.start += self._length
        if self.start >= rows:
            self.start = 0
