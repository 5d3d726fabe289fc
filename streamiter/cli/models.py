"""The commands ``streamiter models tail · show``: they print the updates of a model from a topic."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import Annotated, Final

import numpy as np
import orjson
import typer

from streamiter.cli.figures import print_fields
from streamiter.cli.run import examples
from streamiter.cli.topics import lasting_topic
from streamiter.clock import SystemClock
from streamiter.models import ModelUpdate, find_update, model_updates
from streamiter.models.versions import last_updates
from streamiter.runtime.running import run_in_own_loop
from streamiter.topics import Topic

models_app = typer.Typer(help="Follow published models.", no_args_is_help=True, rich_markup_mode=None)

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The topic of the updates, such as kafka://127.0.0.1:9092/models",
        show_default=False,
    ),
]
Model = Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="The name of the model.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document for each update, with its parameters.")]

# The number of values of an array that `show` prints.
_HEAD: Final = 6


# -- tail


@models_app.command(
    "tail",
    epilog=examples(
        "streamiter models tail kafka://127.0.0.1:9092/models --model ctr --follow",
        "streamiter models tail 'sqlite:///demo-data/streamiter.db?topic=model-updates' -m late-flights",
    ),
)
def tail(
    url: Url,
    model: Model,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also print what arrives later, until Ctrl-C or SIGTERM.")
    ] = False,
    count: Annotated[
        int,
        typer.Option("--count", "-n", metavar="N", min=0, help="The number of last updates to start with."),
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Print the last updates of a model.

    A line has generation.version, the number of records learned from, metrics, and the age.
    """
    try:
        run_in_own_loop(_tail(lasting_topic(url), model, count, follow, as_json))
    except KeyboardInterrupt:
        if not follow:
            raise


async def _tail(source: Topic, model: str, count: int, follow: bool, as_json: bool) -> None:
    show = _json if as_json else _line
    updates, start = await last_updates(source, model, count, lambda update: update)
    for update in updates:
        typer.echo(show(update))
    if not follow:
        if not updates:
            await find_update(source, model)  # raises if the topic has no update of the model
        return
    sys.stdout.flush()
    # Start before the found updates, not after them: another update may be written there only in part.
    shown = updates[-1].rank if updates else (0, 0)
    async for update in model_updates(source, model, start=start):
        if update.rank > shown:
            typer.echo(show(update))
            sys.stdout.flush()


def _line(update: ModelUpdate) -> str:
    parts = [f"{update.model} {update.generation}.{update.version}"]
    if update.records is not None:
        parts.append(f"records {update.records:,}")
    parts += [f"{name} {value:.4f}" for name, value in update.metrics.items()]
    return "  ".join([*parts, f"age {_duration(update.age_s(SystemClock()))}"])


def _duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one.

    >>> [_duration(seconds) for seconds in (0.0123, 7.25, 150, 40_000, 400_000)]
    ['12 ms', '7.2 s', '2 min', '11 h', '4 days']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= (2 if unit == "days" else 1) * length:
            return f"{int(seconds // length):,} {unit}"
    raise AssertionError(seconds)


# -- show


@models_app.command(
    "show",
    epilog=examples(
        "streamiter models show kafka://127.0.0.1:9092/models --model ctr",
        "streamiter models show 'sqlite:///data.db?topic=models' -m ctr --json | jq .parameters.weights",
    ),
)
def show(url: Url, model: Model, as_json: AsJson = False) -> None:
    """Print the newest update of a model."""
    update = run_in_own_loop(find_update(lasting_topic(url), model))
    if as_json:
        typer.echo(_json(update))
    else:
        print_fields(_fields(update))


def _fields(update: ModelUpdate) -> list[tuple[str, str]]:
    """Return names and values as pairs, because a metric or a parameter may also be called "version"."""
    fields = [
        ("model", update.model),
        ("generation", str(update.generation)),
        ("version", f"{update.version:,}"),
        ("age", _duration(update.age_s(SystemClock()))),
    ]
    if update.records is not None:
        fields.append(("records", f"{update.records:,}"))
    fields += [(name, f"{value:.6g}") for name, value in update.metrics.items()]
    parameters = update.parameters if isinstance(update.parameters, dict) else {"parameters": update.parameters}
    return fields + [(name, _described(value)) for name, value in parameters.items()]


def _described(value: object) -> str:
    """Return a value in one line; for an array its type, its shape and the first values.

    >>> _described({"rate": 0.5, "names": np.array(["late", "on time"]), "bias": np.array(3.0)})
    "{rate: 0.5, names: text[2] 'late' 'on time', bias: float64[] 3}"
    """
    if isinstance(value, np.ndarray):
        kind = "text" if value.dtype.kind == "U" else str(value.dtype)
        head = [repr(item) if isinstance(item, str) else f"{item:.4g}" for item in value.ravel()[:_HEAD].tolist()]
        return " ".join([f"{kind}{list(value.shape)}", *head, *(["…"] if value.size > _HEAD else [])])
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_described(part)}' for name, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def _json(update: ModelUpdate) -> str:
    return orjson.dumps(update, default=_json_value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _json_value(value: object) -> object:
    """Convert values that orjson cannot write: arrays of text or without axes, and bytes."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return {"bytes": b64encode(value).decode("ascii")}
    raise TypeError(type(value).__name__)
