"""The exceptions of streamiter: one tree.

::

    StreamiterError
    ├── GraphError                 the flow is wrong; raised while it is built
    ├── ConfigurationError         an option, a URL or an extra is wrong or missing
    │   └── SettingsError          (streamiter.service) the file of a service or network is wrong; it has all errors
    ├── PlainDataError             a value is not plain data, or bytes are not the encoding of plain data
    ├── DecodeError                the decoder cannot read bytes of a topic
    ├── EncodeError                the encoder cannot write a record
    ├── RejectRecords              raised by an operator that refuses single records of a batch
    ├── FunctionResultError        (streamiter.operators) a user's function returned a value that its step cannot take
    ├── ModelError                 a model was given data that it cannot take, or its arithmetic failed
    │   ├── NoModel                (streamiter.models) no model was published yet
    │   ├── NoSuchVersion          (streamiter.models) the topic does not have this version of the model
    │   ├── StatusError            (streamiter.networks) the steps of a layer were called out of order
    │   ├── Diverged               (streamiter.networks) a training has numbers that are not finite
    │   ├── OtherModel             a state, or parameters, are those of a model with other settings
    │   └── BadRows                (streamiter.learn) single rows of a mini-batch are wrong
    ├── TopicError                 a topic, its server or its file failed
    │   ├── TopicUnavailable       the server does not answer
    │   ├── TopicNotFound          the topic does not exist, or was deleted
    │   ├── TopicDenied            the credentials are wrong, or the user lacks a right
    │   ├── OffsetOutOfRange       the topic no longer has the position, or does not have it yet
    │   ├── RecordTooLarge         one record exceeds the limit of the topic
    │   ├── StorageFull            the disk of the topic is full
    │   └── ProducerFenced         a newer writer with the same transactional id has taken over
    │       └── TransactionExpired the transaction was open for longer than its timeout
    ├── CheckpointError            a checkpoint is missing or damaged, or cannot be taken or resumed from
    │   ├── CheckpointTimedOut     (streamiter.engine) a barrier did not pass through the job in time
    │   │   └── WorkersApart       (streamiter.engine) workers of a parameter server did not reach one clock in time
    │   └── JobIsOver              (streamiter.engine) the job has ended, so no checkpoint is taken
    ├── StoreUnavailable           the store of checkpoints does not answer
    ├── ParameterServerError       a parameter server cannot do what a call asks for
    │   ├── UnknownMatrix          the server has no such matrix
    │   ├── UnknownWorker          the worker is not registered
    │   │   └── WorkerHasLeft      the worker has left, or was taken for dead
    │   ├── OutOfRange             the matrix does not have the row or column
    │   ├── RowsInDifferentBlocks  a function needs all its rows in one row block
    │   ├── OutOfTurn              the consistency of the matrix forbids the call at this clock
    │   ├── ServerReset            the server was restarted or closed while the call waited
    │   └── ShardLost              the process of a shard is gone
    ├── RemoteError                (streamiter.values) an error in another process, of a class that is not streamiter's
    ├── LinkError                  (streamiter.engine.processes) a link between two processes was lost, or refused
    ├── ProcessLost                a process of a run in several processes has died, or was silent for too long
    ├── LoopOverflow               feedback, or replayed data, exceeded the disk limit of its loop
    ├── OutputOverflow             one call of an operator emitted more records than can wait
    ├── JobFailed                  a job ended because a step failed; the cause is its ``__cause__``
    └── InternalError              a bug in streamiter; please report it

A message has four parts: the step, topic or option; what was expected; what was given; what to do.

This module also describes the user's code in messages: the line of the user (`user_line`), a value (`shortened`), and a
name that is similar to an unknown one (`did_you_mean`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any, Final

DOCUMENTATION: Final = "https://streamiter.github.io/streamiter/newest"
"""The website of the pages in ``docs``, which a wheel does not contain: ``/service.html`` is ``docs/service.md``."""


class StreamiterError(Exception):
    """The base class of all errors that streamiter raises."""


class GraphError(StreamiterError):
    """The flow cannot run. The wrong line of the user raises this error, before the job starts.

    ``where`` is that line, as ``file:line``, and the end of the message. An error that is found only when the job
    starts names the line that added the step.

    >>> print(GraphError("step 'map': expected a function, given 3", where="job.py:12"))
    step 'map': expected a function, given 3 (at job.py:12)
    """

    def __init__(self, message: str, *, where: str | None = None) -> None:
        self.where = where or user_line()
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.args[0]} (at {self.where})"


class ConfigurationError(StreamiterError):
    """An option, a URL or an extra is wrong or missing."""


class PlainDataError(StreamiterError):
    """A value is not plain data, or bytes are not the encoding of plain data."""


class DecodeError(StreamiterError):
    """A decoder cannot read some values of a topic.

    ``failures`` has the reason for each bad value, by its index in the batch; all other values are good.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(_first_failure("value", self.failures))


class EncodeError(StreamiterError):
    """An encoder cannot write some records. ``failures`` is that of :class:`DecodeError`."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(_first_failure("record", self.failures))


def _first_failure(noun: str, failures: Mapping[int, str]) -> str:
    index, reason = next(iter(failures.items()))
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{noun} {index} of the batch: {reason}{more}"


class RejectRecords(StreamiterError):
    """An operator refuses single records of a batch. It raises this error before it has handled any of them.

    The refused records follow the step's policy (fail, skip or dead letter). Then the operator is called again with the
    other records. An operator that handles single records refuses index 0.

    >>> print(RejectRecords([1, 4], "negative price"))
    negative price (records 1, 4 of the batch)
    """

    def __init__(self, indices: Iterable[int], reason: str) -> None:
        self.indices = tuple(indices)
        self.reason = reason
        listed = ", ".join(str(index) for index in self.indices)
        super().__init__(f"{reason} (records {listed} of the batch)")


class ModelError(StreamiterError):
    """A model was given data that it cannot take, or its arithmetic failed (NaN, infinity)."""


class OtherModel(ModelError):
    """The state or the parameters that a model was given are those of a model with other settings."""


class TopicError(StreamiterError):
    """A topic, its server or its file failed."""


class TopicUnavailable(TopicError):
    """The topic's server does not answer."""


class TopicNotFound(TopicError):
    """The topic does not exist, or was deleted."""


class TopicDenied(TopicError):
    """The credentials are wrong, or the user has no right to read, write or create."""


class OffsetOutOfRange(TopicError):
    """The topic no longer has the position (retention), or does not have it yet."""


class RecordTooLarge(TopicError):
    """One record exceeds the limit of the topic."""


class StorageFull(TopicError):
    """The disk of the topic is full."""


class ProducerFenced(TopicError):
    """A newer writer with the same transactional id has taken over; this writer must stop."""


class TransactionExpired(ProducerFenced):
    """A transaction was open for longer than its timeout, and was aborted.

    If a job fails with this error, no other run has taken over, and it is safe to resume from the last checkpoint. If
    :class:`~streamiter.topics.Transactions` raises it, a newer writer may have taken over since.
    """


class CheckpointError(StreamiterError):
    """A checkpoint is missing, damaged, or of another flow or version, or it cannot be taken or resumed from."""

    changes: Mapping[str, Sequence[str]] = MappingProxyType({})
    """What was changed of each step since the checkpoint, if that is the reason, such as ``["task was …, now …"]``."""


class StoreUnavailable(StreamiterError):
    """The store of checkpoints does not answer."""


class ParameterServerError(StreamiterError):
    """A parameter server cannot do what a call asks for; its state has not changed."""


class UnknownMatrix(ParameterServerError):
    """The server has no such matrix."""


class UnknownWorker(ParameterServerError):
    """The worker is not registered."""


class WorkerHasLeft(UnknownWorker):
    """The worker has left, or was silent for too long."""


class OutOfRange(ParameterServerError):
    """The matrix does not have the row or column."""


class RowsInDifferentBlocks(ParameterServerError):
    """A function needs all its rows in one row block."""


class OutOfTurn(ParameterServerError):
    """The consistency of the matrix forbids the call at this clock."""


class ServerReset(ParameterServerError):
    """The server was restarted or closed while this call waited."""


class ShardLost(ParameterServerError):
    """The process of a shard is gone, and with it the requests that were under way."""


class LoopOverflow(StreamiterError):
    """Feedback, or replayed data, exceeded the disk limit of its loop."""


class OutputOverflow(StreamiterError):
    """One call of an operator emitted more records than can wait for room."""


class JobFailed(StreamiterError):
    """A job ended because one of its steps failed.

    ``step`` is the name of the step; ``__cause__`` is the error of the step.
    """

    def __init__(self, message: str, *, step: str) -> None:
        self.step = step
        super().__init__(message)


class ProcessLost(StreamiterError):
    """A process of a run in several processes has died, or was silent for too long."""


class InternalError(StreamiterError):
    """Streamiter has a bug. Please report it."""


# The packages of frames that are not the user's: streamiter, and the event loops that call its coroutines.
_NOT_THE_USERS: Final = frozenset(
    {"streamiter", "streamiter_files", "streamiter_kafka", "streamiter_sqlite", "asyncio", "uvloop"}
)

# The packages that call the commands of the program: their callers are no lines of the user.
_COMMAND_LINE: Final = frozenset({"typer", "click"})


def user_line() -> str:
    """Return ``file:line`` of the innermost frame outside the packages of streamiter: the line of the user.

    For streamiter's own commands, return "the command line".

    >>> user_line().count(":")
    1
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame = frame.f_back
    if _package(frame) in _COMMAND_LINE:
        return "the command line"
    return _place(frame, frame.f_lineno)


def raising_line(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame outside the packages of streamiter that has raised an error."""
    line, trace = "a function", error.__traceback__
    while trace is not None:
        if _package(trace.tb_frame) not in _NOT_THE_USERS:
            line = _place(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return line


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    # The file of a cell of a notebook has a number for a name, which no user knows.
    if ipython := sys.modules.get("IPython"):
        named = getattr(getattr(ipython.get_ipython(), "compile", None), "format_code_name", lambda file: None)(file)
        if named is not None:
            return f"{' '.join(named)}, line {line}"
    return f"{os.path.basename(file)}:{line}"


def _package(frame: FrameType) -> str:
    # By the module and not by the file: methods that dataclasses generate have no file.
    module: str = frame.f_globals.get("__name__", "")
    return module.partition(".")[0]


# Long enough to recognize a record in a log line, short enough for one line.
_SHOWN_CHARACTERS: Final = 200


def shortened(record: Any) -> str:
    """Return a record as messages show it: its repr in one line, cut after 200 characters.

    >>> import numpy as np
    >>> shortened({"km": np.float64(3.5)}), shortened(np.str_("many")), shortened(np.eye(2))
    ("{'km': 3.5}", "'many'", 'array([[1., 0.], [0., 1.]])')
    """
    if type(record) is dict:  # A row of columns has numpy's numbers and texts.
        record = {name: value.item() if _is_plain_of_numpy(value) else value for name, value in record.items()}
    shown = safe_repr(record.item() if _is_plain_of_numpy(record) else record)
    if "\n" in shown:
        shown = " ".join(shown.split())
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}… ({len(shown)} characters)"


def _is_plain_of_numpy(value: Any) -> bool:
    """Whether Python has this value, too. Values of other libraries are not asked; numpy's times may become ints."""
    kind = type(value)
    # An array without axes is shown as an array: that it is one is what is wrong with it.
    is_one = kind.__module__ == "numpy" and kind.__name__ != "ndarray" and getattr(value, "shape", None) == ()
    return is_one and value.dtype.kind not in "mM"


def safe_repr(record: Any) -> str:
    """Return the repr of a user's value; its type where ``repr`` fails, as for values that are nested too deeply.

    >>> class Broken:
    ...     def __repr__(self):
    ...         raise ValueError
    >>> safe_repr([1]), safe_repr(Broken())
    ('[1]', '<Broken without a repr>')
    """
    try:
        return repr(record)
    except Exception:
        return f"<{type(record).__name__} without a repr>"


def described(reason: str | BaseException) -> str:
    """Return the reason of a refusal or failure as text; the type of an exception whose text fails."""
    if isinstance(reason, str):
        return reason
    try:
        return f"{type(reason).__name__}: {reason}"
    except Exception:
        return type(reason).__name__


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


def did_you_mean(
    given: str, known: Iterable[str], *, likeness: float = 0.6, elsewhere: Mapping[str, str] = _NOTHING
) -> str:
    """Return ``; did you mean 'embedding'?``; empty if no name is that similar (0: any name, 1: equal).

    ``elsewhere`` has the names that other systems use, and what they are called here.

    >>> did_you_mean("embeding", ["wide", "embedding"]), did_you_mean("x", ["wide", "deep"])
    ("; did you mean 'embedding'?", '')
    """
    from difflib import get_close_matches  # Imported here: only errors need it.

    lower = {name.lower(): name for name in known}
    if (same := elsewhere.get(given.lower().replace("_", ""))) in lower.values():
        return f"; did you mean {same!r}?"
    found = get_close_matches(given.lower(), lower, n=1, cutoff=likeness)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""


def no_attribute(
    owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = _NOTHING
) -> AttributeError:
    """Return the error of an object or a module without this attribute, with the name that was probably meant.

    >>> no_attribute("'Stream' object", "flatmap", ["map", "flat_map"])
    AttributeError("'Stream' object has no attribute 'flatmap'; did you mean 'flat_map'?")
    """
    public = [each for each in known if not each.startswith("_")]
    meant = "" if name.startswith("_") else did_you_mean(name, public, elsewhere=elsewhere)
    return AttributeError(f"{owner} has no attribute {name!r}{meant}")
