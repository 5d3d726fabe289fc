"""Run the real program in its own process: with pipes, or on a terminal."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from support.processes import forked_run, process
from support.waiting import PATIENCE_S

PROGRAM = [sys.executable, "-m", "streamiter"]
OF_THE_SERVICE = ("httptools", "prometheus_client", "starlette", "uvicorn")
"""The packages that the service needs."""


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that change how the program prints."""
    left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERMINAL_WIDTH", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"TERM": "xterm-256color"}


def without(*packages: str, program: str = "from streamiter.cli import main; sys.argv[0] = 's'; main()") -> list[str]:
    """Return the command of a program where some of the packages that the service needs are missing."""
    forgotten = (
        f"import sys; needed = {OF_THE_SERVICE}\n"
        "for name in [*sys.modules]:\n"
        "    if name.partition('.')[0] in needed or name.startswith('streamiter.service'): del sys.modules[name]\n"
        f"sys.modules.update(dict.fromkeys({packages}))\n"
    )
    return [sys.executable, "-c", forgotten + program]


def streamiter(
    *arguments: str, cwd: Path, given: str | None = None, command: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program, or code, as a fork of a process that has imported the program; or start ``command``."""
    given = given or ""
    if command is None or "-c" in command:
        program = [*(command or PROGRAM), *arguments]
        return forked_run(program, given=given, limit_s=PATIENCE_S, cwd=cwd, env=environment())
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(),
        check=False,
    )


@contextlib.contextmanager
def started(*arguments: str, cwd: Path, shell: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start the program (or a line of a shell), whose output can be read line by line."""
    with process(
        [*PROGRAM, *arguments] if shell is None else ["/bin/sh", "-c", f"exec {shell}"],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        is_forked=shell is None,
    ) as program:
        yield program


def on_terminal(
    *arguments: str, cwd: Path, width: int = 80, interrupt_at: Sequence[str] = (), stdout: IO[bytes] | None = None
) -> tuple[int, str]:
    """Run the program on a terminal, and return its exit code and its raw output.

    Ctrl-C is typed when each text of ``interrupt_at`` is printed. ``stdout`` is a file that takes the standard output
    instead of the terminal.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    # The program leads a session with this terminal, because only then does Ctrl-C become a signal.
    with process(
        [*PROGRAM, *arguments],
        cwd=cwd,
        stdin=its,
        stdout=its if stdout is None else stdout,
        stderr=its,
        env=environment(),
        is_forked=True,
    ) as program:
        os.close(its)
        try:
            printed = _read_all(ours, list(interrupt_at))
            return program.wait(), printed
        finally:
            os.close(ours)


def _read_all(terminal: int, interrupt_at: list[str]) -> str:
    printed = b""
    deadline_s = time.monotonic() + PATIENCE_S
    while select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has closed its side
            return printed.decode()
        if not part:
            return printed.decode()
        printed += part
        if interrupt_at and interrupt_at[0].encode() in printed:
            os.write(terminal, b"\x03")
            del interrupt_at[0]
    raise AssertionError(f"the program did not end; it printed {printed.decode()}")
