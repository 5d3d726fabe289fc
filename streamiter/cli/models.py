"""``streamiter models``: tail, show."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table

from streamiter.clock import SystemClock
from streamiter.errors import ConfigurationError
from streamiter.models import ModelUpdate, last_update, model_updates
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import Topic, topic

__all__ = ["models_app"]

models_app = typer.Typer(help="Follow published models.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(metavar="URL", help="The topic of the model updates.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Name of the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document for each update.")]


@models_app.command("tail")
def tail(
    url: Url,
    model: Model,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the updates of a model, a line each; with --follow from the newest on."""
    run_in_own_loop(_tail(topic(url), model, follow, as_json))


async def _tail(source: Topic, model: str, follow: bool, as_json: bool) -> None:
    start: Any = "latest_model" if follow else "earliest"
    async for update in model_updates(source, model, start=start, follow=follow):
        typer.echo(_json(update) if as_json else _line(update))
        sys.stdout.flush()


@models_app.command("show")
def show(url: Url, model: Model, as_json: AsJson = False) -> None:
    """Print the newest state of a model."""
    update = run_in_own_loop(last_update(topic(url), model))
    if update is None:
        raise ConfigurationError(f"{url}: expected updates of model {model!r}, given none; see streamiter topics tail")
    if as_json:
        typer.echo(_json(update))
        return
    Console().print(_table(update))


def _line(update: ModelUpdate) -> str:
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in update.metrics.items())
    records = "" if update.records is None else f"  records {update.records:,}"
    return f"{update.model} {update.generation}.{update.version}{records}  {metrics}".rstrip()


def _table(update: ModelUpdate) -> Table:
    table = Table("", "", show_header=False)
    table.add_row("model", update.model)
    table.add_row("generation", str(update.generation))
    table.add_row("version", f"{update.version:,}")
    table.add_row("age", f"{update.age_s(SystemClock()):,.1f} s")
    if update.records is not None:
        table.add_row("records", f"{update.records:,}")
    for name, value in update.metrics.items():
        table.add_row(name, f"{value:.6g}")
    parameters = update.parameters if isinstance(update.parameters, dict) else {"parameters": update.parameters}
    for name, value in parameters.items():
        table.add_row(name, _described(value))
    return table


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        head = np.array2string(value.ravel()[:6], precision=4)
        more = " …" if value.size > 6 else ""
        return f"{value.dtype}{list(value.shape)} {head}{more}"
    return str(value)


def _json(update: ModelUpdate) -> str:
    document = {
        "model": update.model,
        "generation": update.generation,
        "version": update.version,
        "epoch": update.epoch,
        "created_at_ms": update.created_at_ms,
        "records": update.records,
        "metrics": update.metrics,
        "parameters": update.parameters,
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
