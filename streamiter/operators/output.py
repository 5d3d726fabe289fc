"""The output of an operator, and the checks of what a user's function gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NoReturn

import numpy as np

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.operators.rejection import (
    DEAD_LETTERS,
    DeadLetter,
    Origin,
    RecordFailure,
    RejectionPolicy,
    described,
    shortened,
)
from streamiter.records import Batch, BatchOrigin, Columns, OutputTag
from streamiter.tables import rows_of_table

__all__ = [
    "FunctionResultError",
    "Output",
    "Receiver",
    "asynchronous_kind",
    "checked_batch",
    "field_or_function",
    "misfit",
    "plain_function",
    "rows_if_table",
]


Function = Callable[..., Any]


class FunctionResultError(StreamiterError, TypeError):
    """A function given to a step returned what the step cannot take.

    Checks of the functions that users give to built-in operators, and of what these return.
    """


def plain_function(argument: str, f: Function) -> Function:
    """``f``, if it can be called once for each record; ``argument`` names it in the error.

    >>> plain_function("Map(f)", 3)
    Traceback (most recent call last):
    streamiter.errors.ConfigurationError: Map(f): expected a function, given 3
    """
    if not callable(f):
        raise ConfigurationError(f"{argument}: expected a function, given {shortened(f)}")
    if kind := asynchronous_kind(f):
        raise ConfigurationError(
            f"{argument}: expected a plain function, given the {kind} {f!r}; "
            "write an Operator whose process method is async and use .process(…)"
        )
    return f


def asynchronous_kind(f: Function) -> str | None:
    """What a function is that cannot be called without being awaited; None for a plain one.

    >>> async def ask(record): ...
    >>> asynchronous_kind(ask), asynchronous_kind(len)
    ('coroutine function', None)
    """
    # An object that can be called is asynchronous if its __call__ is; a class makes an object at once.
    called = f if inspect.isroutine(f) or isinstance(f, (type, partial)) else type(f).__call__
    if inspect.iscoroutinefunction(called):
        return "coroutine function"
    return "asynchronous generator function" if inspect.isasyncgenfunction(called) else None


def misfit(f: Function, arguments: Sequence[str], *, unbound: bool = False) -> str | None:
    """Why ``f`` cannot be called with these arguments, by position: its signature, and what Python says.

    None if it can, and where its signature is not known, as of many functions in C. ``unbound``: it is the function of
    a method, which is given ``self`` first.

    >>> misfit(lambda a, b=1, *c: a, ["record"]), misfit(max, ["record"])
    (None, None)
    >>> def scaled(record, factor): ...
    >>> misfit(scaled, ["record"])
    "scaled(record, factor): missing a required argument: 'factor'"
    """
    if _takes(f, len(arguments) + unbound):
        return None
    try:
        # As it is called: a decorator may pass on more arguments than it is given.
        signature = inspect.signature(f, follow_wrapped=False)
    except Exception:  # ValueError for functions in C; what an object says of itself may raise anything.
        return None
    try:
        signature.bind(*(["self"] if unbound else []), *arguments)
    except TypeError as error:
        name = getattr(f, "__name__", type(f).__name__)
        return f"{name}({', '.join(map(_shown, signature.parameters.values()))}): {error}"
    return None


def _takes(f: Any, count: int) -> bool:
    """Whether it is a function or class of Python that takes so many arguments; False where that has to be looked at.

    Most are: a signature takes 20 µs, and that of a class several times as much, which is longer than adding a step.
    """
    kind: Any = f
    if type(f) is type and kind.__new__ is object.__new__:
        if kind.__init__ is object.__init__:
            return count == 0
        f, count = kind.__init__, count + 1
    elif isinstance(f, MethodType):
        f, count = f.__func__, count + 1
    if not isinstance(f, FunctionType):
        return False
    code = f.__code__
    if len(f.__kwdefaults__ or ()) < code.co_kwonlyargcount:
        return False
    required = code.co_argcount - len(f.__defaults__ or ())
    return required <= count and (count <= code.co_argcount or bool(code.co_flags & inspect.CO_VARARGS))


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    has_default = parameter.default is not parameter.empty
    return (
        f"{parameter.name}=…" if has_default or parameter.kind is parameter.KEYWORD_ONLY else parameter.name
    )


def field_or_function(argument: str, field_or_f: str | Function) -> Function:
    """The function that reads a field, if a name is given: of a dict by key, else by attribute.

    >>> field_or_function("Sort(key)", "age")({"age": 41})
    41
    """
    if not isinstance(field_or_f, str):
        return plain_function(argument, field_or_f)
    name = field_or_f

    def field(record: Any) -> Any:
        return record[name] if isinstance(record, (dict, np.void)) else getattr(record, name)

    return field


def rows_if_table(function: str, result: Any) -> Any:
    """The rows of a table of pandas, polars or Arrow; anything else as it is.

    Raises FunctionResultError for any other table: iterated, most give the names of their columns.
    """
    rows = rows_of_table(function, result, FunctionResultError)
    return result if rows is None else rows


def batch_of(where: str, given: Any) -> Batch:
    """``given``, if it is a sequence of records, or its rows, if it is a table."""
    given = rows_if_table(where, given)
    if isinstance(given, (Mapping, str, bytes)) or not hasattr(given, "__len__"):
        raise FunctionResultError(
            f"{where}: expected a list, a numpy array or Columns, given {type(given).__name__}: {shortened(given)}; "
            "for one record write [record]"
        )
    batch: Batch = given
    return batch


def checked_batch(function: str, result: object) -> Batch:
    """``result``, if it is a batch, or its rows, if it is a table."""
    if not isinstance(result, (list, Columns, np.ndarray)):
        result = rows_if_table(function, result)
    if isinstance(result, (list, Columns)) or (isinstance(result, np.ndarray) and result.ndim > 0):
        return result
    given = "an array without axes" if isinstance(result, np.ndarray) else type(result).__name__
    raise FunctionResultError(
        f"{function}: expected the function to return a list, a numpy array whose first axis is the record, "
        f"or Columns, given {given}: {shortened(result)}; for one record return [record]"
    )


Receiver = Callable[[Batch], object]
"""Takes a batch: a chained operator's entry, or the writer of a channel."""

# Single emitted records are gathered to batches of at most this many: large enough that the cost of a
# hop (about 2 µs) disappears, small enough that an operator's output of one call stays in the CPU cache.
_GATHER_RECORDS: Final = 1024

_BATCHES: Final = frozenset({list, np.ndarray, Columns})


class Output:
    """Handed to every method of an operator that may emit.

    ``emit(record)`` gathers records; the engine sends them on when the call returns, or earlier when
    many have gathered. ``emit_batch(batch)`` sends a list, a numpy array or ``Columns`` as it is, in order
    with the records emitted before. With ``tag=`` either goes to that side output instead. What was
    emitted must not be changed afterwards.

    Used by one task. What nobody reads is dropped.

    Where an operator emits.
    """

    __slots__ = (
        "_gathered",
        "_origin_now",
        "_policy",
        "_receivers",
        "_step",
        "_tagged_gathered",
        "_tagged_receivers",
        "records_emitted",
        "rejected",
    )

    def __init__(self, step: str = "operator", policy: RejectionPolicy = "fail") -> None:
        self._step = step
        self._policy = policy
        self.rejected = 0
        self._origin_now: Callable[[], BatchOrigin | None] | None = None
        self._receivers: list[Receiver] = []
        self._tagged_receivers: dict[OutputTag, list[Receiver]] = {}
        self._gathered: list[Any] = []
        self._tagged_gathered: dict[OutputTag, list[Any]] = {}
        self.records_emitted = 0

    def connect(self, receiver: Receiver, tag: OutputTag | None) -> None:
        """For the engine: let ``receiver`` have what is emitted (to ``tag``)."""
        if tag is None:
            self._receivers.append(receiver)
        else:
            self._tagged_receivers.setdefault(tag, []).append(receiver)

    def ask_for_origin(self, origin_now: Callable[[], BatchOrigin | None]) -> None:
        """For the engine: ``origin_now`` gives the origin of the batch that the operator is handling."""
        self._origin_now = origin_now

    @property
    def batch_origin(self) -> BatchOrigin | None:
        """Where the batch that the operator is handling was read, as far as known: for ``reject`` of its records."""
        return None if self._origin_now is None else self._origin_now()

    def detach(self) -> Callable[[], None]:
        """For the engine: gather what is emitted, until the function given back is called: it sends that on.

        So an operator may be called in another thread than those who receive what it emits.
        """
        receivers, tagged_receivers = self._receivers, self._tagged_receivers
        gathered: list[tuple[Receiver, Batch]] = []

        def gathering(receiver: Receiver) -> Receiver:
            return lambda batch: gathered.append((receiver, batch))

        def attach() -> None:
            self._receivers, self._tagged_receivers = receivers, tagged_receivers
            for receiver, batch in gathered:
                receiver(batch)

        self._receivers = [gathering(receiver) for receiver in receivers]
        self._tagged_receivers = {
            tag: [gathering(receiver) for receiver in several] for tag, several in tagged_receivers.items()
        }
        return attach

    def emit(self, record: Any, tag: OutputTag | None = None) -> None:
        """Emit one record."""
        if tag is not None:
            self._tagged_gathered.setdefault(tag, []).append(record)
            return
        self._gathered.append(record)
        if len(self._gathered) >= _GATHER_RECORDS:
            self._send_gathered()

    def emit_batch(self, batch: Batch, tag: OutputTag | None = None) -> None:
        """Emit the records of a batch; those of a table of pandas, polars or Arrow are its rows."""
        if type(batch) not in _BATCHES:
            batch = batch_of(f"step {self._step!r}, emit_batch", batch)
        if tag is not None:
            self._send_tagged(tag)
            self._deliver(self._tagged_receivers.get(tag, ()), batch)
            return
        if self._gathered:
            self._send_gathered()
        self.records_emitted += len(batch)
        if len(batch):
            for receiver in self._receivers:
                receiver(batch)

    @property
    def step(self) -> str:
        """The name of the step."""
        return self._step

    @property
    def tolerates_rejections(self) -> bool:
        """Whether the step goes on after a refused record (policy ``skip`` or ``dead_letter``)."""
        return self._policy != "fail"

    def reject(
        self,
        record: Any,
        reason: str | Exception,
        *,
        origin: Origin | BatchOrigin | None = None,
        key: bytes | None = None,
    ) -> None:
        """Refuse a record: by the step's policy it is skipped, becomes a dead letter, or ends the job.

        ``origin`` says where the record was read: ``out.batch_origin`` for a record of the batch at hand, nothing for
        one that the operator has kept from earlier.
        """
        if self._policy == "fail":
            self.fail(reason, record, origin=origin if isinstance(origin, Origin) else None)
        self.rejected += 1
        if self._policy == "dead_letter":
            self.emit(DeadLetter(record, self._step, described(reason), origin, key), tag=DEAD_LETTERS)

    def fail(self, reason: str | Exception, record: Any, *, origin: Origin | None = None) -> NoReturn:
        """End the job, naming the step and the record."""
        cause = reason if isinstance(reason, Exception) else ValueError(reason)
        raise RecordFailure(self._step, record, has_record=True, origin=origin) from cause

    def flush(self) -> None:
        """For the engine: send on what has gathered."""
        if self._gathered:
            self._send_gathered()
        if self._tagged_gathered:
            for tag in list(self._tagged_gathered):
                self._send_tagged(tag)

    def _send_gathered(self) -> None:
        batch, self._gathered = self._gathered, []
        self.records_emitted += len(batch)
        for receiver in self._receivers:
            receiver(batch)

    def _send_tagged(self, tag: OutputTag) -> None:
        batch = self._tagged_gathered.pop(tag, None)
        if batch:
            self._deliver(self._tagged_receivers.get(tag, ()), batch)

    def _deliver(self, receivers: list[Receiver] | tuple[()], batch: Batch) -> None:
        self.records_emitted += len(batch)
        if len(batch):
            for receiver in receivers:
                receiver(batch)
