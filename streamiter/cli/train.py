"""Train and network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer

from streamiter.cli.figures import print_table, say
from streamiter.cli.run import Format, FormatOption, OutputOption, examples, format_for, write_drawing
from streamiter.cli.topics import AsJson
from streamiter.errors import ConfigurationError, ModelError
from streamiter.numbers import whole_number_in

if TYPE_CHECKING:
    from streamiter.charts import Line, Panel
    from streamiter.networks.data import LabelledRows
    from streamiter.networks.learner import Start
    from streamiter.networks.losses import Predictions
    from streamiter.networks.network import Network, NetworkSummary
    from streamiter.networks.serving import EpochResult, SavedNetwork
    from streamiter.networks.training import TrainedNetwork
    from streamiter.parameter_server.consistency.models import Consistency

__all__ = [
    "network_app",
    "predict",
    "train",
]


def consistency_of(given: str) -> Consistency:
    """``bsp``, ``asp`` or ``ssp:`` and the staleness.

    >>> consistency_of("ssp:2")
    SSP(staleness=2)
    """
    from streamiter.parameter_server.consistency.models import ASP, BSP, SSP

    name, _, staleness = given.lower().partition(":")
    if name == "bsp" and not staleness:
        return BSP()
    if name == "asp" and not staleness:
        return ASP()
    if name == "ssp" and (mini_batches := whole_number_in(staleness)) is not None:
        return SSP(staleness=mini_batches)
    raise ConfigurationError(
        f"--consistency: expected bsp, asp, or ssp: and how many mini-batches a worker may be ahead, as ssp:2, given "
        f"{given!r}"
    )


def initial_of(network: Network, start: Path | None) -> tuple[Network, Start]:
    """The parameters of a saved model to go on from, where one is named; the network then has its features."""
    from streamiter.networks.serving import load_network

    named = network.configuration.model.load_path
    folder = start if start is not None else None if named is None else Path(named)
    if folder is None:
        return network, None
    saved = load_network(folder)
    features = saved.network.features
    if network.features is None and features is not None:
        network = network.with_features(features)
    return network, saved.parameters


def rows_of(network: Network, data: str | None, validate: str | None) -> tuple[LabelledRows, LabelledRows]:
    """What is learned from, and what is judged by; both checked, for the message then names the file's option."""
    from streamiter.networks.data import part, read_rows
    from streamiter.networks.training import RowChecks, sized

    settings = network.configuration.data
    source = data or settings.path
    if source is None:
        raise ConfigurationError(
            "--data: expected a file of rows, given none, and no path in the data section of the network; "
            "write --data FILE"
        )
    rows = read_rows(source, settings, owner="--data")
    checks = RowChecks(sized(network, rows))
    rows = rows.widened(checks.features, "--data")
    checks.check("--data", rows)
    if validate is None:
        parted = part(rows, validate_ratio=settings.validate_ratio)
        return parted.training, parted.validation
    held_out = read_rows(validate, settings, owner="--validate").widened(checks.features, "--validate")
    checks.check("--validate", held_out)
    return rows, held_out


def train(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The network, as deepfm.json.")],
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows to learn from; data.path of the network."),
    ] = None,
    validate: Annotated[
        str | None,
        typer.Option(
            "--validate",
            metavar="FILE",
            help="Rows to judge by after each epoch, instead of a part of the data (validateratio).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Where to save it; model.savepath of the network, else its name and .model.",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start", metavar="DIR", help="A saved model to go on from; model.loadpath."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="How many; train.epoch of the network.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Workers that share the rows.")] = 1,
    consistency: Annotated[
        str, typer.Option("--consistency", help="How workers wait for each other: bsp, asp, or ssp:2.")
    ] = "bsp",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of all that is random: the same gives the same model.")
    ] = 0,
    plot: PlotOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on a file of rows, and save it; after each epoch it says how good it is.

    Ctrl-C ends the training early and keeps the model (exit code 0); a second one ends it at once, and keeps nothing
    (exit code 130). Of a training that diverges the model of the last epoch that was finite is saved (exit code 1).

    ``streamiter train``.

    What ``streamiter train`` is told, made into what training takes.
    """
    from streamiter.networks.losses import Diverged
    from streamiter.networks.serving import check_folder, is_saved_network, save_network
    from streamiter.networks.training import fit_network

    how = consistency_of(consistency)
    check_plot(plot)
    network = load_network(config)
    folder = model or Path(network.configuration.model.save_path or f"{config.stem}.model")
    check_folder(folder)
    network, beginning = initial_of(network, start)
    training, validation = rows_of(network, data, validate)
    if is_saved_network(folder):
        say(f"{folder} holds a model, which the new one will replace; --model saves it elsewhere", err=True)

    def tell(result: EpochResult) -> None:
        if not as_json:
            # Not typer.echo, which goes past the progress bar: the line would stand behind it, in the same row.
            sys.stdout.write(f"{_line(result)}\n")
            sys.stdout.flush()

    diverged: Diverged | None = None
    try:
        trained = fit_network(
            network,
            training,
            validation,
            epochs=epochs,
            workers=workers,
            consistency=how,
            start=beginning,
            seed=seed,
            progress=None if not as_json else False,
            on_epoch=tell,
        )
    except Diverged as error:
        if error.trained is None:
            say("The training diverged before its first epoch was over; there is no model to save.", err=True)
            raise
        diverged, trained = error, error.trained
    save_network(folder, trained.network, trained.parameters, trained.results)
    write_plot(trained.results, plot)
    _tell_end(trained, folder, plot, as_json=as_json)
    if diverged is not None:
        raise diverged


def _line(result: EpochResult) -> str:
    training = "" if result.training_loss is None else f"  training loss {result.training_loss:.4f}"
    judged = f"  validation {result.describe()}" if result.validation is not None else ""
    return f"epoch {result.epoch:>3}{training}{judged}"


def _tell_end(trained: TrainedNetwork, folder: Path, plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        document: dict[str, Any] = {
            "model": str(folder),
            "ended_by": trained.ended_by,
            "epochs": _documents(trained.results),
        }
        typer.echo(orjson.dumps(document).decode())
        return
    last = len(trained.results)
    if trained.ended_by == "interruption":
        say(f"Interrupted in epoch {last}; the model is what was learned until then.")
    elif trained.ended_by == "divergence":
        say(f"The training diverged; the model is that of epoch {last}, the last one that was finite.")
    also = f", the plot as {plot}" if plot is not None else ""
    say(f"Saved the model in {folder}{also}.")


def _documents(results: Sequence[EpochResult]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw loss, accuracy and AUC per epoch: .svg or .png."),
]

_TITLES: Final = {"accuracy": "Accuracy", "auc": "Area under the ROC curve"}


def check_plot(output: Path | None) -> None:
    """Said before the training, not after it.

    The plot of a training: loss, accuracy and AUC, epoch by epoch.
    """
    if output is None:
        return
    if output.suffix.lower() not in (".svg", ".png"):
        raise ConfigurationError(
            f"--plot {output}: expected a file named .svg or .png, given {output.suffix or 'no suffix'}; rename it"
        )
    if not output.parent.is_dir():
        raise ConfigurationError(
            f"--plot {output}: expected a file in a folder that is there, given {str(output.parent)!r}, which is not; "
            "make it, or plot elsewhere"
        )
    if output.suffix.lower() == ".png" and find_spec("resvg_py") is None:
        raise ConfigurationError(
            f"--plot {output}: expected the package resvg_py, which is not installed; install it with: "
            "pip install 'streamiter[draw]', or plot SVG"
        )


def panels(results: Sequence[EpochResult]) -> list[Panel]:
    """Of what there is: the loss in training and validation, and how good the predictions are."""
    from streamiter.charts import Panel

    validation = [(result.epoch, result.validation) for result in results if result.validation is not None]
    losses = [
        _plotted_line("training", [(result.epoch, result.training_loss) for result in results]),
        _plotted_line("validation", [(epoch, found.loss) for epoch, found in validation]),
    ]
    drawn = [Panel("Loss", "epoch", [line for line in losses if line.xs], has_whole_xs=True)]
    for name, title in _TITLES.items():
        line = _plotted_line("validation", [(epoch, getattr(found, name)) for epoch, found in validation])
        if line.xs:
            drawn.append(Panel(title, "epoch", [line], has_whole_xs=True))
    return drawn


def write_plot(results: Sequence[EpochResult], output: Path | None) -> None:
    """Write it, where it is wanted."""
    if output is None:
        return
    # Not for those who plot nothing, as below.
    from streamiter.charts import chart

    drawing = chart(panels(results))
    if output.suffix.lower() == ".png":
        from streamiter.flow.drawing.formats import png_of_svg

        content = png_of_svg(drawing)
    else:
        content = drawing.encode()
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"--plot {output}: cannot write it: {error.strerror}") from error


def _plotted_line(name: str, points: Sequence[tuple[int, float | None]]) -> Line:
    from streamiter.charts import Line

    there = [(epoch, value) for epoch, value in points if value is not None]
    return Line(name, [float(epoch) for epoch, _ in there], [value for _, value in there])


def predict(
    model: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="A saved model, as streamiter train makes it.")
    ],
    data: Annotated[str, typer.Option("--data", metavar="FILE", help="The rows.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write predictions to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict with a saved network: a line for each row of a file.

    Columns, with tabs between them, are what the loss of the network gives: of logloss score, probability and label;
    of hingeloss score and label; of softmaxloss score and probability of the class that is predicted, and the class
    as label; of regressions the value. How good they are by the labels of the file is said on stderr.

    ``streamiter predict``.
    """
    from streamiter.networks.data import read_rows
    from streamiter.networks.serving import load_network

    saved = load_network(model)
    rows = read_rows(data, saved.network.configuration.data, owner="--data")
    graph = saved.network.graph()
    rows = rows.widened(graph.place_holder.feature_dimension, "--data")
    columns = _columns(saved.predictor.predictions(rows.rows))
    if output is None:
        _write(columns, sys.stdout, as_json=as_json)
    else:
        try:
            with output.open("w", encoding="utf-8") as file:
                _write(columns, file, as_json=as_json)
        except OSError as error:
            raise ConfigurationError(f"--output {output}: cannot write it: {error.strerror}") from error
    _tell(saved, rows)


def _columns(predictions: Predictions) -> dict[str, list[Any]]:
    """Those that there are, by name."""
    has_classes = predictions.label is not None
    names = {
        "score" if has_classes else "value": predictions.value,
        "probability": predictions.probability,
        "label": None if predictions.label is None else predictions.label.astype(int),
    }
    return {name: column.tolist() for name, column in names.items() if column is not None}


def _write(columns: dict[str, list[Any]], to: IO[str], *, as_json: bool) -> None:
    rows = zip(*columns.values(), strict=True)
    if as_json:
        to.writelines(orjson.dumps(dict(zip(columns, row, strict=True))).decode() + "\n" for row in rows)
        return
    to.write("\t".join(columns) + "\n")
    to.writelines("\t".join(f"{value:.6g}" for value in row) + "\n" for row in rows)


def _tell(saved: SavedNetwork, rows: LabelledRows) -> None:
    from streamiter.networks.serving import EpochResult, evaluate

    try:
        found = evaluate(saved.network.graph(), saved.parameters, rows)
    except ModelError as error:  # Labels may be made up where they are to be predicted.
        say(f"{len(rows):,} rows; how good they are is not known: {error}", err=True)
        return
    say(f"{len(rows):,} rows: {EpochResult(0, None, found).describe()}", err=True)


ConfigurationFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A configuration file, as deepfm.json", show_default=False),
]


def load_network(file: Path) -> Network:
    """The network of the file; what it says that nothing knows is told on stderr, a line each.

    What the commands on configuration files of networks share.
    """
    # Networks are imported by the commands that need them: the others start without.
    from streamiter.networks.configuration import read_configuration
    from streamiter.networks.network import Network

    configuration = read_configuration(file)
    for text in configuration.warnings:
        say(f"warning: {text}", err=True)
    return Network(configuration)


def check(file: ConfigurationFile) -> None:
    """Check a configuration file, without running it: exit code 1 and what is wrong, or how large the network is.

    Keys that are unknown are warnings.

    ``streamiter network check``.
    """
    network = load_network(file)
    summary = network.summary()
    typer.echo(f"{summary.title}, {summary.totals}")


def draw_network(
    file: ConfigurationFile, output: OutputOption = None, drawing_format: FormatOption = None
) -> None:
    """Draw the layers of a network: as Mermaid text, SVG or PNG.

    ``streamiter network draw``.
    """
    chosen = format_for(output, drawing_format)
    write_drawing(_drawn(load_network(file), chosen), output)


def _drawn(network: Network, drawing_format: Format) -> str | bytes:
    match drawing_format:
        case Format.PNG:
            return network.draw(format="png")
        case Format.SVG:
            return network.draw(format="svg")
        case Format.MERMAID:
            return network.draw()


def show(
    file: ConfigurationFile,
    as_json: AsJson = False,
    as_canonical: Annotated[
        bool,
        typer.Option(
            "--canonical", help="The file in canonical form instead: all defaults said, layers in order."
        ),
    ] = False,
) -> None:
    """Show the layers of a network: inputs, outputs, parameters.

    ``streamiter network show``.
    """
    if as_json and as_canonical:
        raise typer.BadParameter(
            "expected one of --json and --canonical, given both", param_hint="'--canonical'"
        )
    network = load_network(file)
    if as_canonical:
        from streamiter.networks.configuration import as_text

        typer.echo(as_text(network.to_json()), nl=False)
        return
    summary = network.summary()
    if as_json:
        document = {
            "network": network.configuration.source,
            "features": network.features,
            "dtype": str(network.dtype),
        }
        typer.echo(orjson.dumps({**document, "layers": _rows(summary)}).decode())
    elif sys.stdout.isatty():
        print_table(
            summary.headings,
            [row.cells for row in summary.rows],
            numbers=("parameters",),
            title=summary.title,
            caption=summary.totals,
        )
    else:
        typer.echo(str(summary))


def _rows(summary: NetworkSummary) -> list[dict[str, Any]]:
    return [
        {
            "layer": row.layer,
            "type": row.type,
            "inputs": row.inputs,
            "output_dim": row.output_dim,
            "parameters": row.parameters,
            "parameters_per_feature": row.parameters_per_feature,
            "status": row.status,
        }
        for row in summary.rows
    ]


# ``streamiter network``: show, draw, check.

network_app = typer.Typer(
    help="Look at configuration files of networks.", no_args_is_help=True, rich_markup_mode=None
)
network_app.command(
    "show",
    epilog=examples(
        "streamiter network show deepfm.json",
        "streamiter network show deepfm.json --canonical > graph.json",
        "streamiter network show deepfm.json --json | jq .layers",
    ),
)(show)
network_app.command(
    "draw",
    epilog=examples(
        "streamiter network draw deepfm.json", "streamiter network draw deepfm.json -o deepfm.svg"
    ),
)(draw_network)
network_app.command(
    "check",
    epilog=examples(
        "streamiter network check deepfm.json",
        "streamiter network check deepfm.json && streamiter train --config deepfm.json --data census",
    ),
)(check)
