"""What becomes of an error: a line or two for whoever typed the command, and an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

import typer
from typer.core import TyperGroup

from streamiter.errors import InternalError, StreamiterError, TopicNotFound
from streamiter.topics.secrets import hide, secrets_in, shown_url

__all__ = ["INTERRUPTED", "Commands", "print_error"]

# What a shell reports of a program that Ctrl-C ended: 128 and the signal's number.
INTERRUPTED = 130


class Commands(TyperGroup):
    """The commands of the program. Exit code 1: an error; 2: wrong arguments; 130: Ctrl-C or SIGTERM."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; its errors become a message, with ``--debug`` a traceback too."""
        debug = bool(ctx.params.get("debug"))
        try:
            with _usage_without_secrets():
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

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the arguments that stand before the command."""
        with _usage_without_secrets():
            return super().make_context(*arguments, **options)


@contextlib.contextmanager
def _usage_without_secrets() -> Iterator[None]:
    """Wrong arguments are repeated by whoever refuses them, and one of them may be a URL with a password."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str) and _is_of_typer(error):
            error.message = _without_secrets(message)  # type: ignore[attr-defined]
        raise


def _without_secrets(text: str) -> str:
    """The text without what may be secret in the arguments of this program, and in URLs that the text quotes."""
    urls = [argument for argument in sys.argv[1:] if ":" in argument]
    for url in sorted(urls, key=len, reverse=True):
        if (shown := shown_url(url)) != url:
            text = text.replace(url, shown)
    text = hide(text, {secret for url in urls for secret in secrets_in(url)})
    return _QUOTED_URL.sub(lambda quoted: quoted[1] + shown_url(quoted[2]), text)


# In a line of the user's program, as a traceback shows it.
_QUOTED_URL: Final = re.compile(r"""(["'])(kafka://[^"'\s]*)""")


def _is_of_typer(error: Exception) -> bool:
    """Wrong arguments, an exit: they know how to show themselves."""
    return isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code")


def _report(error: Exception, *, debug: bool) -> None:
    if debug:
        sys.stderr.write(_without_secrets("".join(traceback.format_exception(error))))
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

    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]error:[/] {escape(_without_secrets(message))}"
    )


def _nobody_reads() -> None:
    """Whoever read our output, as in ``… | head``, has gone; what is still buffered goes nowhere, silently."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
