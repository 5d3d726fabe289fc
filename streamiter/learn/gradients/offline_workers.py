"""The workers of offline training: each has its share of the examples, and reports gradients to the owner.

Workers keep their examples in memory (:class:`KeptExamples`), or read them again in every round
(:class:`ReplayedExamples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from streamiter.errors import CheckpointError
from streamiter.learn.gradients.linear import LinearModel
from streamiter.learn.gradients.training import GradientSum, GradientWorker, MakeModel
from streamiter.learn.rows import (
    CheckedExamples,
    ExampleBlocks,
    Extract,
    MiniBatches,
    as_examples,
    blaming_rows,
    of_good_rows,
    share_of,
)
from streamiter.operators.declared_state import (
    FIRST,
    GREATEST,
    JOINED,
    NESTED,
    DeclaredState,
    Form,
    declared,
    of_nested,
)
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.records import Batch

OfflineExtract = Extract | Callable[[Any], CheckedExamples]
"""Returns the examples of a batch of records. Examples that are checked already are not checked again."""


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
    """Reports the gradient of its share of each round's mini-batch, also if it has no rows.

    Synchronous, the worker reports at the end of each epoch. Asynchronous, it reads all examples first; then it reports
    when an answer of the owner arrives, once for each round.
    """

    _examples: KeptExamples | ReplayedExamples = declared(form=NESTED, share=FIRST)
    _reports = declared(0, share=FIRST)

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options.make_model, in_epochs=options.synchronous)
        # Kept examples arrive in epoch 0 only, so no record arrives early.
        self.epochs_in_order = options.replay
        self._options = options

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

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Deal the examples; mini-batches begin at the first row again."""
        if not self._in_epochs:
            raise CheckpointError("in asynchronous training each worker has its own rounds")
        kept = ReplayedExamples if self._options.replay else KeptExamples
        examples = kept.redistribute([state["examples"] for state in states], parallelism)
        shared = super().redistribute(states, parallelism)
        return [state | {"examples": own} for state, own in zip(shared, examples, strict=True)]


def _cut(name: str, of_subtasks: Sequence[list[Any]], parallelism: int) -> list[list[Any]]:
    """Cut each block of rows into as many parts as there are subtasks now."""
    blocks = [CheckedExamples.from_record(record) for records in of_subtasks for record in records]
    parts = [[block[share_of(len(block), subtask, parallelism)] for block in blocks] for subtask in range(parallelism)]
    return [[part.to_record() for part in of_subtask if len(part)] for of_subtask in parts]


_BLOCKS: Final = Form(ExampleBlocks.to_records, take_on=ExampleBlocks.add_records)


class KeptExamples(DeclaredState):
    """Examples that arrive once and stay in memory."""

    _mini_batches: MiniBatches = declared(form=NESTED, share=of_nested(MiniBatches.redistribute))
    _blocks = declared(made=ExampleBlocks, form=_BLOCKS, share=_cut)

    def __init__(self, mini_batch: int | None) -> None:
        self._mini_batches = MiniBatches(mini_batch)

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


# A gradient of this many rows takes far longer than a numpy call. Replayed examples may be more than the memory has
# room for, so a block is short: 8 MB with a thousand features.
_REPLAYED_BLOCK_ROWS: Final = 1_024


def _added(name: str, records: Sequence[Any], parallelism: int) -> list[Any]:
    """Give the sums of old subtask i to the new subtask i modulo ``parallelism``."""
    totals = [GradientSum() for _ in range(parallelism)]
    for subtask, record in enumerate(records):
        if (sums := GradientSum.from_record(record)).gradient is not None:
            totals[subtask % parallelism].add(sums.gradient, sums.loss)
    return [total.to_record() for total in totals]


class ReplayedExamples(DeclaredState):
    """Examples that arrive again in every round, after the round's parameters; with the methods of KeptExamples.

    Gradients are computed of blocks of equal length, so that sums do not depend on the cuts of batches.
    """

    _mini_batches: MiniBatches = declared(form=NESTED, share=of_nested(MiniBatches.redistribute))
    _seen = declared(0, share=GREATEST)
    """Rows that have arrived in this round."""
    _sums = declared(made=GradientSum, form=Form(GradientSum.to_record, GradientSum.from_record), share=_added)
    _waiting: ExampleBlocks = declared(form=_BLOCKS, share=JOINED)
    """Rows of this round's mini-batch that do not fill a block yet."""

    def __init__(self, mini_batch: int | None) -> None:
        self._mini_batches = MiniBatches(mini_batch)
        self._waiting = ExampleBlocks(_REPLAYED_BLOCK_ROWS)

    def add(self, examples: CheckedExamples, model: LinearModel) -> None:
        """Add the gradient of the rows that belong to this round's mini-batch."""
        first, behind_last = (max(row - self._seen, 0) for row in self._mini_batches.bounds())
        self._seen += len(examples)
        self._waiting.add(examples[first:behind_last])
        self._add_sums(self._waiting.take_blocks(), model)

    def _add_sums(self, parts: Iterable[CheckedExamples], model: LinearModel) -> None:
        for part in parts:
            self._sums.add(*model.gradient_and_loss(part))

    def take_round(self, model: LinearModel) -> GradientSum:
        self._add_sums(self._waiting.between(0, len(self._waiting)), model)
        self._waiting = ExampleBlocks(_REPLAYED_BLOCK_ROWS)
        sums = self._sums
        self._mini_batches.advance(self._seen)
        self._sums, self._seen = GradientSum(), 0
        return sums
