"""How an operator's own methods become the calls that the engine makes.

An *entry* takes a batch for one input of one operator instance. Every combination of single records or
batches, keyed or not, called directly or awaited, is one small closure here, so that nothing of this is
decided again for each record.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from streamiter.checkpoints.keys import check_keys
from streamiter.errors import GraphError, RejectRecords
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RecordFailure
from streamiter.records import Batch, take
from streamiter.runtime.graph import SINGLE_INPUT

__all__ = ["AsyncEntry", "Entry", "handler_of", "is_awaited", "make_async_entry", "make_entry"]

Entry = Callable[[Batch], None]
AsyncEntry = Callable[[Batch], Awaitable[None]]
KeyOf = Callable[[Any], Any]


def handler_of(operator: Operator | type[Operator], input_name: str, *, step: str) -> tuple[str, bool]:
    """Name of the method that handles an input, and whether it takes whole batches.

    Raises GraphError when there is none.
    """
    if input_name == SINGLE_INPUT:
        choices = (("process_batch", True), ("process", False))
    else:
        choices = ((f"process_{input_name}_batch", True), (f"process_{input_name}", False))
    for method, whole_batches in choices:
        if callable(getattr(operator, method, None)):
            return method, whole_batches
    kind = operator if isinstance(operator, type) else type(operator)
    raise GraphError(
        f"step {step!r}: expected {kind.__name__} to define {choices[1][0]}(record, out) or "
        f"{choices[0][0]}(batch, out), given neither; define one of them"
    )


def is_awaited(operator: Operator, input_names: Sequence[str], *, step: str) -> bool:
    """Whether handling records is a coroutine, or done in a thread: then the task has to await it."""
    if operator.runs_in_thread:
        return True
    methods = [getattr(operator, handler_of(operator, name, step=step)[0]) for name in input_names]
    return any(inspect.iscoroutinefunction(method) for method in methods)


def make_entry(
    operator: Operator, input_name: str, out: Output, context: Context, key_of: KeyOf | None
) -> Entry:
    """The entry of an operator that is called directly."""
    method, whole_batches = handler_of(operator, input_name, step=context.name)
    handle = getattr(operator, method)
    if key_of is not None:
        _refuse_batches_by_key(operator, whole_batches, step=context.name)
        return _keyed(handle, out, context, key_of)
    return _by_batch(handle, out, context) if whole_batches else _by_record(handle, out, context)


def make_async_entry(
    operator: Operator, input_name: str, out: Output, context: Context, key_of: KeyOf | None
) -> AsyncEntry:
    """The entry of an operator whose handling of records is a coroutine."""
    method, whole_batches = handler_of(operator, input_name, step=context.name)
    handle = getattr(operator, method)
    if key_of is not None:
        _refuse_batches_by_key(operator, whole_batches, step=context.name)
    if whole_batches:
        return _awaited_by_batch(handle, out, context)
    return _awaited_by_record(handle, out, context, key_of)


def _refuse_batches_by_key(operator: Operator, whole_batches: bool, *, step: str) -> None:
    if whole_batches:
        raise GraphError(
            f"step {step!r}: expected {type(operator).__name__} to define process(record, out), since a keyed "
            "step works record by record, given a method for whole batches; define process, or leave out key_by"
        )


def _by_batch(handle: Callable[[Batch, Output], None], out: Output, context: Context) -> Entry:
    def entry(batch: Batch) -> None:
        try:
            handle(batch, out)
        except RecordFailure:
            raise
        except RejectRecords as rejected:
            entry(_without_rejected(batch, rejected, out))
        except Exception as error:
            raise RecordFailure(context.name) from error
        out.flush()

    return entry


def _by_record(handle: Callable[[Any, Output], None], out: Output, context: Context) -> Entry:
    def entry(batch: Batch) -> None:
        record: Any = None
        records = iter(batch)
        while True:
            try:
                for record in records:
                    handle(record, out)
            except RecordFailure:
                raise
            except RejectRecords as rejected:
                out.reject(record, rejected)
                continue
            except Exception as error:
                out.fail(error, record)
            break
        out.flush()

    return entry


def _keyed(handle: Callable[[Any, Output], None], out: Output, context: Context, key_of: KeyOf) -> Entry:
    def entry(batch: Batch) -> None:
        keys = _keys(batch, key_of, out)
        for key, record in zip(keys, batch, strict=True):
            context.key = key
            try:
                handle(record, out)
            except RecordFailure:
                raise
            except RejectRecords as rejected:
                out.reject(record, rejected)
            except Exception as error:
                out.fail(error, record)
        out.flush()

    return entry


def _awaited_by_batch(
    handle: Callable[[Batch, Output], Awaitable[None]], out: Output, context: Context
) -> AsyncEntry:
    async def entry(batch: Batch) -> None:
        try:
            await handle(batch, out)
        except RecordFailure:
            raise
        except RejectRecords as rejected:
            await entry(_without_rejected(batch, rejected, out))
        except Exception as error:
            raise RecordFailure(context.name) from error
        out.flush()

    return entry


def _awaited_by_record(
    handle: Callable[[Any, Output], Awaitable[None]], out: Output, context: Context, key_of: KeyOf | None
) -> AsyncEntry:
    async def entry(batch: Batch) -> None:
        keys = _keys(batch, key_of, out) if key_of is not None else [None] * len(batch)
        for key, record in zip(keys, batch, strict=True):
            context.key = key
            try:
                await handle(record, out)
            except RecordFailure:
                raise
            except RejectRecords as rejected:
                out.reject(record, rejected)
            except Exception as error:
                out.fail(error, record)
        out.flush()

    return entry


def _keys(batch: Batch, key_of: KeyOf, out: Output) -> list[Any]:
    try:
        return check_keys([key_of(record) for record in batch])
    except Exception as error:
        for record in batch:
            try:
                check_keys([key_of(record)])
            except Exception as single:
                out.fail(single, record)
        raise RecordFailure("key_by") from error


def _without_rejected(batch: Batch, rejected: RejectRecords, out: Output) -> Batch:
    refused = sorted(set(rejected.indices))
    if not refused or refused[0] < 0 or refused[-1] >= len(batch):
        out.fail(
            ValueError(
                f"RejectRecords: expected indices of a batch of {len(batch)}, given {rejected.indices}"
            ),
            None,
        )
    for index in refused:
        out.reject(batch[index], rejected.reason)
    return take(batch, [index for index in range(len(batch)) if index not in set(refused)])
