"""The commands ``streamiter models``: they print, compare and keep published versions, and roll back to one."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import orjson
import typer

from streamiter.cli.figures import errors_of_output, print_fields, print_json, print_rows, say
from streamiter.cli.run import command_group
from streamiter.cli.topics import Follow, lasting_topic
from streamiter.engine.job.running import run_in_own_loop
from streamiter.errors import ConfigurationError, ModelError
from streamiter.models import (
    LinearPredictor,
    ModelDifference,
    ModelUpdate,
    ModelVersion,
    exported,
    find_update,
    import_model,
    model_comparison,
    model_difference,
    model_updates,
    promote,
    read_model,
    roll_back,
)
from streamiter.models.differences import texts_of_records, with_texts
from streamiter.models.documents import EMBEDDINGS, SHAPES, members_in
from streamiter.models.explanations import EFFECT_OF, Effects
from streamiter.models.published_embeddings import EmbeddingFigures
from streamiter.models.update import NO_RANK, shown_rank
from streamiter.models.versions import last_updates
from streamiter.topics import Topic
from streamiter.values.helpers.clock import SystemClock

UpdatesUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The topic of the updates, such as kafka://127.0.0.1:9092/models", show_default=False
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="NAME", help="The name of the model.", show_default=False)
]
UpdatesAsJson = Annotated[
    bool, typer.Option("--json", help="Print a JSON document for each update, with its parameters.")
]

# The number of values of an array that `show` prints.
_HEAD: Final = 6

# The number of effects of fields, and of pairs of fields, that `show` prints.
_EFFECTS: Final = 8

_BLOCKS: Final = "▁▂▃▄▅▆▇█"


# -- tail


def tail(
    url: UpdatesUrl,
    model: ModelOption,
    follow: Follow = False,
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=0, help="The number of last updates to start with.")
    ] = 10,
    as_json: UpdatesAsJson = False,
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
    shown = updates[-1].rank if updates else NO_RANK
    async for update in model_updates(source, model, start=start):
        if update.rank > shown:
            typer.echo(show(update))
            sys.stdout.flush()


def _line(update: ModelUpdate) -> str:
    parts = [f"{update.model} {shown_rank(update.rank)}"]
    if update.records is not None:
        parts.append(f"records {update.records:,}")
    parts += [f"{name} {value:.4f}" for name, value in update.metrics.items() if not name.startswith(EFFECT_OF)]
    parts += [] if update.rollback_to is None else [f"rollback to {shown_rank(update.rollback_to)}"]
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


def show(url: UpdatesUrl, model: ModelOption, as_json: UpdatesAsJson = False) -> None:
    """Print the newest update of a model."""
    update = run_in_own_loop(find_update(lasting_topic(url), model))
    if as_json:
        typer.echo(_json(update))
    else:
        print_fields(_fields(update))


# -- diff


Version = Annotated[
    str, typer.Argument(metavar="VERSION", help="Such as 2.17; 2 is the last of generation 2.", show_default=False)
]
CountOption = Annotated[
    int, typer.Option("--count", "-n", metavar="N", min=1, help="The number of weights and scales.")
]


def diff(
    url: UpdatesUrl,
    old: Version,
    model: ModelOption,
    new: Annotated[
        str | None, typer.Argument(metavar="[NEW]", help="The newest, unless one is given.", show_default=False)
    ] = None,
    count: CountOption = 20,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A topic that the model learns from: texts of its newest records get their names, instead of the "
            "places of their hashes.",
            show_default=False,
        ),
    ] = None,
    as_json: UpdatesAsJson = False,
) -> None:
    """Compare two versions of a model: metrics, and the weights and scales that changed most.

    A weight's change is that of the score at the limit of its field, or one deviation from its mean.
    """

    async def two(source: Topic) -> tuple[ModelUpdate, ModelUpdate]:
        return await find_update(source, model, old), await find_update(source, model, new)

    versions = run_in_own_loop(two(lasting_topic(url)))
    sample = [] if records is None else run_in_own_loop(newest_records(lasting_topic(records)))
    changed = with_texts(model_difference(*versions, count), texts_of_records(sample, versions[1].parameters))
    if records is None and any(each.name.startswith("place ") for each in changed.weights):
        say("Texts are known by the places of their hashes; --records URL names those of a topic's records.", err=True)
    if as_json:
        typer.echo(_json(changed))
        return
    names = changed.old.name, changed.new.name
    rows: list[tuple[str | float | None, ...]] = [("records", changed.old.records, changed.new.records)]
    rows += [(name, *values) for name, values in changed.metrics.items()]
    rows += [(_labelled("intercept", label), before, after) for label, before, after in changed.intercepts]
    rows += [(_labelled(each.name, each.label), each.old, each.new, each.moved) for each in changed.weights]
    for each in changed.scales:
        rows.append((f"center of {each.name}", each.old_center, each.new_center))
        rows.append((f"scale of {each.name}", each.old_scale, each.new_scale))
    rows += [(f"{name} is different",) for name in changed.other]
    cells = [[str(name), *map(_figure, values), *[""] * (3 - len(values))] for name, *values in rows]
    print_rows(["", *names, "moved"], cells, numbers=[*names, "moved"])


async def newest_records(source: Topic) -> list[Any]:
    """Return the newest records of a topic, without those that cannot be read."""
    from streamiter.service.settings.proposal import sample_of_topic  # Only with --records.

    return (await sample_of_topic(source)).records


def _labelled(name: str, label: object) -> str:
    return name if label is None else f"{name} of {label!r}"


def _figure(value: object) -> str:
    """Return a figure for a table; an unknown one is a dash.

    >>> [_figure(value) for value in (0.123456789, 12_000, None)]
    ['0.123457', '12,000', '–']
    """
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}"


# -- compare


def compare(
    url: UpdatesUrl,
    models: Annotated[
        list[str], typer.Option("--model", "-m", metavar="NAME", help="A model; give several.", show_default=False)
    ],
    versions: Annotated[
        list[str] | None,
        typer.Option(
            "--version", metavar="VERSION", help="Such as 2.17; 2 is the last of generation 2.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare models, or versions of a model, by the metrics that they were published with."""

    async def found(source: Topic) -> list[ModelUpdate]:
        return [await find_update(source, model, version) for model in models for version in wanted]

    wanted: list[str | None] = [*versions] if versions else [None]
    updates = run_in_own_loop(found(lasting_topic(url)))
    names = [f"{update.model} {shown_rank(update.rank)}" for update in updates]
    compared = model_comparison(updates)
    if as_json:
        print_json({"versions": [ModelVersion.of(update) for update in updates], "metrics": compared})
        return
    ages = [_duration(update.age_s(SystemClock())) for update in updates]
    rows = [["age", *ages], *([name, *map(_figure, values)] for name, values in compared.items())]
    if not sys.stdout.isatty():
        rows.insert(0, ["", *names])
    print_rows(["", *names], rows, numbers=names)


# -- export


def export(
    url: UpdatesUrl,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .json or .safetensors file.", show_default=False)],
    model: ModelOption,
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Such as 2.17; otherwise the newest.")] = None,
) -> None:
    """Write a version of a model to a file, to predict with, to keep, or to import it elsewhere.

    The file has what a record of the update has: model, generation, version, metrics and parameters, and the state of
    the learner if the version carries it.
    """
    forms: dict[str, Literal["json", "safetensors"]] = {".json": "json", ".safetensors": "safetensors"}
    if file.suffix not in forms:
        raise ConfigurationError(f"FILE: expected a name that ends in .json or .safetensors, given {file}")
    update = run_in_own_loop(find_update(lasting_topic(url), model, version))
    with errors_of_output("FILE", file):
        file.write_bytes(exported(update, forms[file.suffix]))
    say(f"Wrote {model} {shown_rank(update.rank)} to {file}. A linear model predicts with")
    say(f"LinearPredictor(read_model({str(file)!r}).parameters), both of streamiter.models.")


# -- import


def import_(
    url: UpdatesUrl,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of export.", show_default=False)],
    model: ModelOption,
) -> None:
    """Publish the model of a file as a new version that is later than all others.

    A trainer that follows rollbacks (train_online(rollbacks=…)) resumes from it. Stop another one first.
    """
    try:
        given = read_model(file)
    except OSError as error:
        raise ConfigurationError(f"FILE: expected a file of export, given {file}: {error.strerror}") from error
    written = run_in_own_loop(import_model(lasting_topic(url), model, given))
    state = "with the state of its learner" if written.has_state else "without a state, so learning rates start again"
    say(f"{given.model} {shown_rank(given.rank)} of {file} is now {model} {shown_rank(written.rank)}, {state}.")


# -- rollback


def rollback(url: UpdatesUrl, version: Version, model: ModelOption) -> None:
    """Publish an earlier version again, as a new version that is later than all others.

    A trainer that follows rollbacks (train_online(rollbacks=…)) resumes from it. Stop another one first.
    """
    written = run_in_own_loop(roll_back(lasting_topic(url), model, version))
    assert written.rollback_to is not None
    say(f"{model} {shown_rank(written.rollback_to)} is now also {shown_rank(written.rank)}, the newest version.")


# -- promote


def promote_(
    url: UpdatesUrl,
    challenger: Annotated[
        str, typer.Argument(metavar="CHALLENGER", help="The name of the challenger.", show_default=False)
    ],
    model: ModelOption,
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Such as 2.17; otherwise the newest.")] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also if the challenger is not known to be better.")] = False,
) -> None:
    """Publish a version of a challenger as a new version of a service's model, later than all others.

    From then on the service publishes the versions of the challenger. It is refused unless the version says that the
    challenger is better than the champion beyond chance. To go back, roll back to a version of before.
    """
    from streamiter.learn.online.challengers import ComparedRows

    async def promoted(source: Topic) -> tuple[ModelUpdate, ModelUpdate]:
        given = await find_update(source, challenger, version)
        compared = ComparedRows.of(given.metrics)
        if not anyway and (compared is None or compared.verdict != "better"):
            told = "one that tells no comparison" if compared is None else compared.in_words
            raise ModelError(
                f"model {challenger!r}: expected a challenger that is better than the champion beyond chance, given "
                f"version {shown_rank(given.rank)}, {told}; wait for more rows, or promote it with --anyway"
            )
        return given, await promote(source, model, challenger, shown_rank(given.rank))

    given, written = run_in_own_loop(promoted(lasting_topic(url)))
    names = f"{challenger} {shown_rank(given.rank)} is now {model} {shown_rank(written.rank)}"
    say(f"{names}, the newest version. To go back, roll back to a version of before.")


def _fields(update: ModelUpdate) -> list[tuple[str, str]]:
    """Return names and values as pairs, because a metric or a parameter may also be called "version"."""
    fields = [
        ("model", update.model),
        ("generation", str(update.generation)),
        ("version", f"{update.version:,}"),
        ("age", _duration(update.age_s(SystemClock()))),
    ]
    if update.rollback_to is not None:
        fields.append(("rollback to", shown_rank(update.rollback_to)))
    if update.records is not None:
        fields.append(("records", f"{update.records:,}"))
    fields += [(name, f"{value:.6g}") for name, value in update.metrics.items() if not name.startswith(EFFECT_OF)]
    parameters = update.parameters if isinstance(update.parameters, dict) else {"parameters": update.parameters}
    members = [name for name in (SHAPES, EMBEDDINGS) if members_in(parameters, name) is not None]
    fields += [(name, _described(value)) for name, value in parameters.items() if name not in members]
    if (figures := EmbeddingFigures.of(parameters)) is not None:
        fields.append((EMBEDDINGS, _embeddings(figures)))
    return fields + (_effects(LinearPredictor(parameters).effects) if SHAPES in members else [])


def _embeddings(figures: EmbeddingFigures) -> str:
    """Return embeddings in one line.

    >>> _embeddings(EmbeddingFigures("fm", 8, 1, 5_000, 2_500, 0, 0, 0.75))
    'fm, 8 factors, 5,000 features of 1 field, 2,500 of them with a vector, share 0.75'
    """
    features = f"{figures.features:,} features of {figures.fields} field{'s' * (figures.fields != 1)}"
    has_vector = f"{figures.admitted:,} of them with a vector"
    return f"{figures.kind}, {figures.factors} factors, {features}, {has_vector}, share {figures.share:.3g}"


def _effects(effects: Effects | None) -> list[tuple[str, str]]:
    """Return a line for each of the strongest effects: the deviation, and the course of a single score."""
    assert effects is not None
    lines = []
    for column in effects.columns[:_EFFECTS]:
        course = ""
        if effects.classes is None:
            numbers = [each.effect[0] for each in column.bins]
            ends = f"{numbers[0]:.4g} ({column.bins[0].name}) to {numbers[-1]:.4g} ({column.bins[-1].name})"
            course = f"  {_course(numbers)}  {ends}"
        lines.append((f"{EFFECT_OF}{column.field}", f"{column.strength:.4g}{course}"))
    return lines + [(EFFECT_OF + " × ".join(each.fields), f"{each.strength:.4g}") for each in effects.pairs[:_EFFECTS]]


def _course(numbers: Sequence[float]) -> str:
    """Return numbers as a line of blocks.

    >>> _course([-1.0, 0.0, 0.5, 1.0])
    '▁▄▆█'
    """
    least = min(numbers)
    span = max(numbers) - least or 1.0
    return "".join(_BLOCKS[int((number - least) / span * (len(_BLOCKS) - 1))] for number in numbers)


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


def _json(update: ModelUpdate | ModelDifference) -> str:
    return orjson.dumps(update, default=_json_value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _json_value(value: object) -> object:
    """Convert values that orjson cannot write: arrays of text or without axes, and bytes."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return {"bytes": b64encode(value).decode("ascii")}
    raise TypeError(type(value).__name__)


models_app = command_group(
    "Show, compare, export, import, promote and roll back published models.",
    tail=(
        tail,
        "streamiter models tail kafka://127.0.0.1:9092/models --model ctr --follow",
        "streamiter models tail 'sqlite:///demo-data/streamiter.db?topic=model-updates' -m late-flights",
    ),
    show=(
        show,
        "streamiter models show kafka://127.0.0.1:9092/models --model ctr",
        "streamiter models show 'sqlite:///data.db?topic=models' -m ctr --json | jq .parameters.weights",
    ),
    diff=(
        diff,
        "streamiter models diff kafka://127.0.0.1:9092/models 2.17 --model ctr",
        "streamiter models diff kafka://127.0.0.1:9092/models 2.17 2.40 -m ctr --json",
        "streamiter models diff kafka://127.0.0.1:9092/models 2.17 -m ctr --records kafka://127.0.0.1:9092/clicks",
    ),
    compare=(
        compare,
        "streamiter models compare kafka://127.0.0.1:9092/models -m champion -m challenger",
        "streamiter models compare kafka://127.0.0.1:9092/models -m ctr --version 1 --version 2 --version 3.12",
    ),
    export=(
        export,
        "streamiter models export kafka://127.0.0.1:9092/models ctr.json --model ctr",
        "streamiter models export kafka://127.0.0.1:9092/models ctr.safetensors -m ctr --version 2.17",
    ),
    **{"import": (import_, "streamiter models import kafka://127.0.0.1:9092/models ctr.safetensors --model ctr")},
    rollback=(rollback, "streamiter models rollback kafka://127.0.0.1:9092/models 2.17 --model ctr"),
    promote=(promote_, "streamiter models promote kafka://127.0.0.1:9092/models ctr-b --model ctr --version 3.17"),
)
