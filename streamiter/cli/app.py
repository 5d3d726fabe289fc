"""The commands together, and what becomes of their errors."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import click
import typer
from rich.console import Console

from streamiter.cli.demo import demo
from streamiter.cli.draw import draw
from streamiter.cli.models import models_app
from streamiter.cli.run import run
from streamiter.cli.topics import topics_app
from streamiter.errors import InternalError, StreamiterError

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="streamiter",
    help="Learning on streams: run flows, look into topics, follow models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(run)
app.command()(draw)
app.add_typer(topics_app, name="topics")
app.add_typer(models_app, name="models")


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command."""
    click.get_current_context().obj = debug


def run_app() -> None:
    """Run a command; an error is one or two lines, with ``--debug`` a traceback."""
    debug = "--debug" in sys.argv[1:]
    try:
        status = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # Whoever read our output has gone; there is nobody to tell.
        sys.exit(0)
    except StreamiterError as error:
        if debug or isinstance(error, InternalError):
            traceback.print_exception(error)
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
