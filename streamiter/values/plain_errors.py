"""How an error travels from one process to another: as plain data.

Classes of streamiter survive, because callers check them; any other error becomes a :class:`RemoteError` with its text
and its traceback.
"""

from __future__ import annotations

import traceback
from typing import Any, Final

from streamiter.errors import PlainDataError, StreamiterError, described
from streamiter.values.deferred import PlainValue
from streamiter.values.plain_data import PlainData

# The end of a traceback has the line of the user; deep recursions and huge messages are cut.
_TRACE_CHARACTERS: Final = 10_000


class RemoteError(StreamiterError):
    """An error of another process whose class is none of streamiter. Its text begins with the name of the class."""


def error_to_plain(error: BaseException) -> PlainValue:
    """Return an error as plain data: its class, arguments, attributes, notes and cause.

    >>> from streamiter.errors import JobFailed
    >>> unknown = error_from_plain(error_to_plain(JobFailed("flow 'f', step 'a': no", step="a")))
    >>> unknown, unknown.step, error_from_plain(error_to_plain(KeyError("x")))
    (JobFailed("flow 'f', step 'a': no"), 'a', RemoteError("KeyError: 'x'"))
    """
    kind = type(error)
    if _own_classes().get(f"{kind.__module__}.{kind.__qualname__}") is not kind:
        trace = "".join(traceback.format_exception(error))[-_TRACE_CHARACTERS:]
        kind, error = RemoteError, RemoteError(described(error))
        error.add_note(f"In its process:\n{trace}")
    attributes = {name: value for name, value in vars(error).items() if _is_plain(value)}
    cause = None if error.__cause__ is None else error_to_plain(error.__cause__)
    return [f"{kind.__module__}.{kind.__qualname__}", [str(part) for part in error.args], attributes, cause]


def error_from_plain(plain: Any) -> BaseException:
    """Return the error of ``error_to_plain``."""
    name, arguments, attributes, cause = plain
    kind = _own_classes()[name]
    error = kind.__new__(kind, *arguments)  # The arguments of ``__init__`` are others in some classes.
    vars(error).update(attributes)
    error.__cause__ = None if cause is None else error_from_plain(cause)
    return error


def _own_classes() -> dict[str, type[StreamiterError]]:
    """Return the classes of streamiter's tree that are defined in streamiter, by name."""
    found: dict[str, type[StreamiterError]] = {}
    waiting: list[type[StreamiterError]] = [StreamiterError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.partition(".")[0] == "streamiter":
            found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


def _is_plain(value: object) -> bool:
    try:
        PlainData().encode(value)
    except PlainDataError:
        return False
    return True
