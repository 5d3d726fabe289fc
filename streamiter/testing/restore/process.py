"""The fresh process that states are restored in."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from struct import Struct
from types import TracebackType
from typing import IO, Any, Final

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import ConfigurationError

__all__ = [
    "RestoreProcess",
    "read_frame",
    "write_frame",
]


# Longer than any restored run may take (see driving), so that it is the run that says what is stuck.
_ANSWER_S: Final = 120.0
_CLOSING_S: Final = 5.0
_LENGTH: Final = Struct("<Q")
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from streamiter.testing.restore.child import main; main()"
)


class RestoreProcess:
    """A Python interpreter of its own, with another PYTHONHASHSEED, in which checks restore.

    Several checks may share one, such as all of a test session: it starts with the first and ends with
    ``close``, or the ``with`` block. It is fresh for the state of what is checked, not for module globals of earlier
    checks. Used from one thread at a time.

    >>> from streamiter.testing import RestoreProcess
    >>> with RestoreProcess() as process:
    ...     process.is_running
    False
    """

    def __init__(self, hash_seed: int | None = None) -> None:
        """``hash_seed`` is its PYTHONHASHSEED; None: one that this process does not have."""
        mine = os.environ.get("PYTHONHASHSEED", "random")
        # Where mine is random, any fixed one is another: so what fails there fails there again.
        self._hash_seed = hash_seed if hash_seed is not None else (1 if mine != "1" else 2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and not closed."""
        return self._process is not None

    def ask(self, structs: Sequence[type[msgspec.Struct]], described: Any, request: Any) -> Any:
        """For the check: have ``request`` done there; ``described`` names the structs as references do."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(_ANSWER_S, process.kill)
        deadline.start()
        try:
            write_frame(process.stdin, PlainData().encode((sys.path, described)))
            write_frame(process.stdin, PlainData(structs).encode(request, name="records"))
            answer = read_frame(process.stdout)
        except (EOFError, OSError) as error:
            self.close()
            raise ConfigurationError(
                "check_restore: expected an answer of the process that restores, given its end; what it wrote to "
                "stderr says why"
            ) from error
        finally:
            deadline.cancel()
        return PlainData().decode(answer)

    def close(self) -> None:
        """End it. May be called more than once."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # It has ended already.
            process.stdin.close()
        try:
            process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> RestoreProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter, our own program)
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": str(self._hash_seed)},
        )
        return self._process


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Its length, then itself."""
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame; EOFError at the end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    [length] = _LENGTH.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content
