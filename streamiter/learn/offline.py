"""Offline training of linear models: a bounded iteration of workers and an owner."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from streamiter.errors import GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream, connect
from streamiter.iteration.api import iterate_bounded_streams_until_termination
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.helpers import terminate_after
from streamiter.iteration.replay import replayed
from streamiter.learn.linear import (
    MODELS,
    EpochGradients,
    LinearModel,
    ParameterOwner,
    check_makes_model,
)
from streamiter.learn.linear_weights import Gradient
from streamiter.learn.rows import CheckedExamples, Extract, as_examples, blaming_rows, of_good_rows
from streamiter.numbers import is_number, whole_number
from streamiter.operators.operator import Context, IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch, OutputTag
from streamiter.topics.topic import Topic

__all__ = [
    "AsynchronousOfflineOwner",
    "AsynchronousWorker",
    "OfflineTraining",
    "ReplayingWorker",
    "SynchronousOfflineOwner",
    "train_offline",
]


# Large enough that a numpy call is not noticed beside its work, and that BLAS uses all cores; while rows are put
# together, no more than this many are in memory twice.
_BLOCK_ROWS: Final = 65_536


class ExampleBlocks:
    """Examples in the order they were added, in blocks.

    Small pieces become blocks of equal length, so that sums over them are the same to the last bit however the
    examples were cut; a piece that is longer stays as it is.

    Examples that are kept and gone through again and again, a mini-batch at a time.

    >>> import numpy as np
    >>> blocks = ExampleBlocks()
    >>> for start in (0.0, 2.0, 4.0):
    ...     blocks.add(CheckedExamples(np.ones((2, 1)), np.array([start, start + 1])))
    >>> turns = MiniBatches(4)
    >>> for _ in range(3):
    ...     print([part.targets.tolist() for part in blocks.between(*turns.now())])
    ...     turns.next(len(blocks))
    [[0.0, 1.0, 2.0, 3.0]]
    [[4.0, 5.0]]
    [[0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(self) -> None:
        self._blocks: list[CheckedExamples] = []
        self._rows_in_blocks = 0
        self._parts: list[CheckedExamples] = []
        """What does not fill a block yet."""
        self._rows_in_parts = 0

    def __len__(self) -> int:
        return self._rows_in_blocks + self._rows_in_parts

    def add(self, examples: CheckedExamples) -> None:
        """Put examples behind the others; they must not change afterwards."""
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
        """Rows ``start`` to ``stop`` (half-open; beyond the last is the last), block by block, without copies."""
        if len(self._parts) > 1:
            self._parts = [CheckedExamples.concatenate(self._parts)]
        first = 0
        for block in (*self._blocks, *self._parts):
            if start < first + len(block) and stop > first:
                whole = start <= first and stop >= first + len(block)
                yield block if whole else block[max(start - first, 0) : stop - first]
            first += len(block)

    def to_records(self) -> list[dict[str, Any]]:
        """All of it as plain data."""
        return [part.to_record() for part in (*self._blocks, *self._parts)]

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> ExampleBlocks:
        """What :meth:`to_records` gave."""
        blocks = cls()
        for record in records:
            blocks.add(CheckedExamples.from_record(record))
        return blocks


class MiniBatches:
    """Which rows come next: ``length`` of them, fewer at the end, and then from the beginning. None: all."""

    def __init__(self, length: int | None) -> None:
        self._length = sys.maxsize if length is None else length
        self.start = 0

    def now(self) -> tuple[int, int]:
        """The first row, and the one behind the last."""
        return self.start, self.start + self._length

    def next(self, rows: int) -> None:
        """Go on to the next of ``rows`` rows in all."""
        self.start += self._length
        if self.start >= rows:
            self.start = 0


OfflineExtract = Extract | Callable[[Any], CheckedExamples]
"""What has been checked already is not checked again."""


class OfflineWorkerOptions(NamedTuple):
    """What every worker of one training is given.

    Workers of offline training: from the parameters of each round to the gradient of its mini-batch.
    """

    make_model: Callable[[], LinearModel]
    extract: OfflineExtract
    mini_batch: int | None
    """Rows in a round of all workers together; None: all there are."""
    rounds: int


class _OfflineWorker(Operator):
    """Input ``examples``: records that ``extract`` makes examples of; input ``model``: parameters to go on with."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        self._options = options
        self._model = options.make_model()
        self._mini_batches = MiniBatches(None)

    def open(self, context: Context) -> None:
        self._context = context
        if self._options.mini_batch is not None:
            each, more = divmod(self._options.mini_batch, context.parallelism)
            self._mini_batches = MiniBatches(each + (context.subtask_index < more))

    def checked(self, batch: Batch, out: Output) -> CheckedExamples | None:
        """The examples that a batch of records holds, without those that are none."""
        return of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), batch, out)

    def _checked(self, batch: Batch) -> CheckedExamples:
        examples = self._options.extract(batch)
        if isinstance(examples, CheckedExamples):
            return examples
        return self._model.checked_examples(as_examples("train_offline(extract=)", examples))

    def follow(self, parameters: Any) -> None:
        """Go on with these; None: as the model was made."""
        if parameters is not None:
            self._model.follow(parameters)

    def report(self, gradients: _GradientSum, out: Output) -> None:
        """Tell the owner, also that there is nothing to tell."""
        gradient = None if gradients.gradient is None else gradients.gradient.to_record()
        out.emit({"worker": self._context.subtask_index, "gradient": gradient, "loss": gradients.loss})


class _KeepingWorker(_OfflineWorker):
    """Keeps its examples, which come once, in epoch 0."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._examples = ExampleBlocks()

    def process_examples_batch(self, batch: Batch, out: Output) -> None:
        """Keep them."""
        examples = self.checked(batch, out)
        if examples is not None:
            self._examples.add(examples)

    def report_next(self, out: Output) -> None:
        """The gradient of the next mini-batch."""
        gradients = _GradientSum()
        for part in self._examples.between(*self._mini_batches.now()):
            gradients.add(*self._model.gradient_and_loss(part))
        self._mini_batches.next(len(self._examples))
        self.report(gradients, out)

    def snapshot(self) -> dict[str, Any]:
        return {
            "parameters": self._model.parameters(),
            "examples": self._examples.to_records(),
            "next": self._mini_batches.start,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._examples = ExampleBlocks.from_records(state["examples"])
        self._mini_batches.start = state["next"]


class SynchronousWorker(_KeepingWorker, IterationListener):
    """One mini-batch in the callback of each epoch, with the parameters of that epoch."""

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these."""
        self.follow(parameters)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self.report_next(out)


class AsynchronousWorker(_KeepingWorker):
    """One mini-batch for each answer of the owner, as soon as it is there; ``rounds`` of them."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._reports = 0
        self._examples_ended = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """All examples first."""
        return None if self._examples_ended else ("examples",)

    def input_ended(self, name: str, out: Output) -> None:
        """The examples are all there."""
        self._examples_ended = self._examples_ended or name == "examples"

    def process_model(self, answer: dict[str, Any], out: Output) -> None:
        """Answer with a gradient."""
        self.follow(answer["parameters"])
        if self._reports < self._options.rounds:
            self._reports += 1
            self.report_next(out)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"reports": self._reports, "examples ended": self._examples_ended}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._reports, self._examples_ended = state["reports"], state["examples ended"]


class ReplayingWorker(_OfflineWorker, IterationListener):
    """Keeps nothing: the examples come again in every epoch, behind its parameters."""

    epochs_in_order = True

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._turn = 0
        """The epoch whose examples come now."""
        self._model_epoch = -1
        self._seen = 0
        """Rows of this epoch."""
        self._gradients = _GradientSum()

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("model",) if self._model_epoch < self._turn else None

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these."""
        self.follow(parameters)
        self._model_epoch = self._context.epoch or 0

    def process_examples_batch(self, batch: Batch, out: Output) -> None:
        """Add the gradient of those that belong to this round's mini-batch."""
        # Those that are none come again in every epoch, and are refused once.
        examples = self.checked(batch, out if self._turn == 0 else Output(policy="skip"))
        if examples is None:
            return
        first, behind_last = (max(row - self._seen, 0) for row in self._mini_batches.now())
        self._seen += len(examples)
        if len(part := examples[first:behind_last]):
            self._gradients.add(*self._model.gradient_and_loss(part))

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self.report(self._gradients, out)
        self._mini_batches.next(self._seen)
        self._gradients, self._seen, self._turn = _GradientSum(), 0, epoch_watermark + 1

    def snapshot(self) -> dict[str, Any]:
        gradient = self._gradients.gradient
        return {
            "parameters": self._model.parameters(),
            "turn": self._turn,
            "model epoch": self._model_epoch,
            "seen": self._seen,
            "next": self._mini_batches.start,
            "gradient": None if gradient is None else gradient.to_record(),
            "loss": self._gradients.loss,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._turn, self._model_epoch = state["turn"], state["model epoch"]
        self._seen, self._mini_batches.start = state["seen"], state["next"]
        if state["gradient"] is not None:
            self._gradients.add(Gradient.from_record(state["gradient"]), state["loss"])


class _GradientSum:
    """Gradients and losses of several parts."""

    def __init__(self) -> None:
        self.gradient: Gradient | None = None
        self.loss = 0.0

    def add(self, gradient: Gradient, loss: float) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.loss += loss


LOSSES: Final = OutputTag("losses")
"""The side output of an owner: for each step the mean loss before it."""


class SynchronousOfflineOwner(ParameterOwner, IterationListener):
    """A step in each epoch's callback, with the gradients of all workers, added in the workers' order.

    Owners of the parameters in offline training: as online, and they tell the loss of each step.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._gradients = EpochGradients()

    def process(self, record: dict[str, Any], out: Output) -> None:
        """Take in what a worker reports; there is one epoch under way at a time."""
        if record["gradient"] is not None:
            self._gradients.add(record["worker"], Gradient.from_record(record["gradient"]), record["loss"])

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if not self._gradients.gradients:
            raise _no_examples()
        gradient, loss = self._gradients.total()
        self._gradients = EpochGradients()
        self.step(gradient, loss, out)
        if gradient.weight:
            out.emit(loss / gradient.weight, tag=LOSSES)
        out.emit(self._model.parameters())

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"gradients": self._gradients.to_record()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._gradients = EpochGradients.from_record(state["gradients"])


class AsynchronousOfflineOwner(ParameterOwner):
    """A step for each gradient, as it comes; the answer goes to the worker that sent it.

    The loss is that of the last mini-batch of each worker; once it is as small as the tolerance nobody gets an
    answer any more, and the iteration ends.
    """

    def __init__(
        self,
        make_model: Callable[[], LinearModel],
        publish_every: int,
        *,
        workers: int,
        tolerance: float | None,
    ) -> None:
        super().__init__(make_model, publish_every)
        self._workers = workers
        self._tolerance = tolerance
        self._last: dict[int, tuple[float, float] | None] = {}
        """Losses and weights of the last mini-batch, each as a sum, by worker; None for one without examples."""

    def process(self, record: dict[str, Any], out: Output) -> None:
        """Take in a gradient, and answer."""
        worker = record["worker"]
        if record["gradient"] is None:
            self._last[worker] = None
            return
        gradient = Gradient.from_record(record["gradient"])
        self._last[worker] = (record["loss"], gradient.weight)
        self.step(gradient, record["loss"], out)
        if (mean := self._mean_loss()) is not None:
            out.emit(mean, tag=LOSSES)
        if not self._is_good_enough(mean):
            out.emit({"worker": worker, "parameters": self._model.parameters()})

    def _mean_loss(self) -> float | None:
        heard = [last for last in self._last.values() if last is not None]
        weight = sum(weight for _, weight in heard)
        return sum(loss for loss, _ in heard) / weight if weight else None

    def _is_good_enough(self, mean_loss: float | None) -> bool:
        if mean_loss is None or self._tolerance is None or len(self._last) < self._workers:
            return False
        return mean_loss <= self._tolerance

    def finish(self, out: Output) -> None:
        if not any(self._last.values()):
            raise _no_examples()
        super().finish(out)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"last": list(self._last.items())}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._last = dict(state["last"])


def _no_examples() -> ModelError:
    return ModelError("train_offline: expected examples to learn from, given none; look at what was read")


@dataclass(frozen=True)
class OfflineTraining:
    """What :func:`train_offline` gives.

    Offline training as part of a flow: a bounded iteration around a parameter owner and its workers.

    The workers keep their examples, or have them replayed. Synchronous, the owner makes a step in the callback of each
    epoch, with the gradients of all workers; asynchronous, with each gradient as it comes, and answers the worker
    that sent it. That is all there is between the two.
    """

    models: Stream
    """A ``ModelSnapshot``: the last one, and each n-th before it with ``publish_every=n``."""
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

    ``model()`` makes the (same) model for the owner and each worker; any optimizer will do, the usual one is
    ``GradientDescent``. ``extract(batch)`` gives the :class:`Examples` of a batch of records.

    In each round every worker takes its share of the next ``mini_batch`` rows of all workers: the next of the rows it
    has, fewer at their end, and then from their beginning. None takes all rows. Training ends after ``rounds``
    rounds, or after the first in which the mean loss, before its step, was ``tolerance`` or less.

    ``"synchronous"``: one step a round, with the mean of all rows' gradients. The result does not depend on timing;
    nor does it, but for the last digits, on the number of workers, where all rows are taken, or where their number
    divides the mini-batch, the mini-batch the rows, and rows are dealt out in turn (``workers=`` does so).
    ``"asynchronous"``: a step for each worker's share as soon as it is there; the worker goes on with what came of it
    while others are still at theirs.

    Workers keep their examples in memory. With ``replay`` they are read through again in every round, from memory
    and beyond a limit from disk (``IterationConfig(replay_memory_bytes=…)``): synchronous only.

    Rows that are no examples follow ``on_error`` or go to ``dead_letter``. ``name`` stands before the names of the
    steps. Raises GraphError for what cannot run; a job without examples fails.
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
    options = OfflineWorkerOptions(model, extract, mini_batch, rounds)

    def make_worker() -> SynchronousWorker | AsynchronousWorker | ReplayingWorker:
        if not synchronous:
            return AsynchronousWorker(options)
        return ReplayingWorker(options) if replay else SynchronousWorker(options)

    def make_owner() -> SynchronousOfflineOwner | AsynchronousOfflineOwner:
        if synchronous:
            return SynchronousOfflineOwner(model, every)
        return AsynchronousOfflineOwner(model, every, workers=workers, tolerance=tolerance)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [answers] = variables
        to_workers = answers.broadcast() if synchronous else answers.partition_by(_worker_of)
        gradients = connect(model=to_workers, examples=data[0]).process(
            make_worker, name=label("train"), parallelism=workers, on_error=on_error, dead_letter=dead_letter
        )
        # In the workers' task, where there is one of them only.
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


def _count(option: str, count: Any) -> int:
    return whole_number(f"train_offline({option}=)", count, 1, error=GraphError)


def _checked_mini_batch(mini_batch: Any, workers: int) -> int:
    rows = _count("mini_batch", mini_batch)
    if rows < workers:
        raise GraphError(
            f"train_offline(mini_batch=): expected at least a row for each of {workers} workers, given {rows}; "
            "make it larger, or take fewer workers"
        )
    return rows


def _check_tolerance(tolerance: Any) -> None:
    if tolerance is not None and not (is_number(tolerance) and not math.isnan(tolerance)):
        raise GraphError(
            f"train_offline(tolerance=): expected a number, given {tolerance!r}; leave it out for none"
        )


def _check_mode(mode: Any, replay: bool) -> None:
    if mode not in ("synchronous", "asynchronous"):
        raise GraphError(
            f'train_offline: expected mode "synchronous" or "asynchronous", given {mode!r}; choose one of them'
        )
    if replay and mode == "asynchronous":
        raise GraphError(
            "train_offline(replay=): expected the mode synchronous, given asynchronous, whose workers go through their "
            "examples each at its own pace; leave replay out, or take the mode synchronous"
        )
