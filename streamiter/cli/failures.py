"""What becomes of an error: a line or two for whoever typed the command, and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from streamiter.errors import InternalError, StreamiterError, TopicNotFound

__all__ = ["INTERRUPTED", "Commands", "print_error"]

# What a shell reports of a program that Ctrl-C ended: 128 and the signal's number.
INTERRUPTED = 130


class Commands(TyperGroup):
    """The commands of the program. Exit code 1: an error; 2: wrong arguments; 130: Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; its errors become a message, with ``--debug`` a traceback too."""
        debug = bool(ctx.params.get("debug"))
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _nobody_reads()
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if _is_of_typer(error):
                raise
            _report(error, debug=debug or isinstance(error, InternalError))
            raise typer.Exit(1) from None
        return result


def _is_of_typer(error: Exception) -> bool:
    """Wrong arguments, an exit: they know how to show themselves."""
    return isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code")


def _report(error: Exception, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, TopicNotFound):
        print_error(f"{error}\nFrom the command line: streamiter topics create URL")
    elif isinstance(error, (StreamiterError, OSError)):
        print_error(str(error))
    else:
        print_error(f"unexpected {type(error).__name__}: {error}\nPlease report it, with what --debug shows.")


def print_error(message: str) -> None:
    """The message on stderr, as long as it is: whoever wants to search or copy it gets it unbroken."""
    # Not for commands that do what they are asked to.
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}")


def _nobody_reads() -> None:
    """Whoever read our output, as in ``… | head``, has gone; what is still buffered goes nowhere, silently."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
