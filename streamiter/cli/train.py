"""The commands on networks: ``train``, ``predict``, and ``network show · draw · check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import orjson
import typer

from streamiter.cli.figures import errors_of_output, print_json, print_table, say
from streamiter.cli.run import FormatOption, OutputOption, command_group, format_for, write_drawing
from streamiter.cli.topics import AsJson
from streamiter.errors import ConfigurationError, ModelError
from streamiter.values.helpers.importing import need_package
from streamiter.values.numbers import whole_number_in

if TYPE_CHECKING:
    from streamiter.flow.drawing.charts import Line, Panel
    from streamiter.networks.data import LabelledRows
    from streamiter.networks.functions import Predictions
    from streamiter.networks.learner import Start
    from streamiter.networks.network import Network
    from streamiter.networks.serving import EpochResult, SavedNetwork, TrainedNetwork
    from streamiter.parameter_server.consistency import Consistency


def consistency_of(given: str) -> Consistency:
    """Parse ``bsp``, ``asp``, or ``ssp:`` with the staleness.

    >>> consistency_of("ssp:2")
    SSP(staleness=2)
    """
    from streamiter.parameter_server.consistency import ASP, BSP, SSP

    name, _, staleness = given.lower().partition(":")
    if name == "bsp" and not staleness:
        return BSP()
    if name == "asp" and not staleness:
        return ASP()
    if name == "ssp" and (mini_batches := whole_number_in(staleness)) is not None:
        return SSP(staleness=mini_batches)
    raise ConfigurationError(
        f"--consistency: expected bsp, asp, or ssp: and the mini-batches that a worker may be ahead, as ssp:2, given "
        f"{given!r}"
    )


def initial_of(network: Network, start: Path | None) -> tuple[Network, Start]:
    """Return the parameters of the saved model to start from, if any, and the network with its features."""
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


def training_rows(network: Network, data: str | None, validate: str | None) -> tuple[LabelledRows, LabelledRows]:
    """Return the rows for training and for validation, both checked, so that errors name the option of the file."""
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
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="The configuration file of the network, such as deepfm.json.")
    ],
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="The rows for training; data.path of the network by default.")
    ] = None,
    validate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The rows for validation after each epoch, instead of a part of the data (validateratio).",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to save the model; by default model.savepath of the network, else its name with .model.",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A saved model to start from; model.loadpath of the network by default."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="The number of epochs; train.epoch of the network by default.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers that share the rows.")] = 1,
    consistency: Annotated[str, typer.Option(help="How workers wait for each other: bsp, asp, or ssp:2.")] = "bsp",
    seed: Annotated[
        int, typer.Option(min=0, help="The seed of all random numbers: the same seed gives the same model.")
    ] = 0,
    plot: PlotOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on a file of rows and save it; print an evaluation after each epoch.

    Ctrl-C ends the training early and keeps the model (exit code 0); a second Ctrl-C ends it at once and keeps nothing
    (exit code 130). If the training diverges, the model of the last epoch with finite numbers is saved (exit code 1).
    """
    from streamiter.networks.serving import Diverged, check_folder, is_saved_network, save_network
    from streamiter.networks.training import fit_network

    how = consistency_of(consistency)
    check_plot(plot)
    network = read_network(config)
    folder = model or Path(network.configuration.model.save_path or f"{config.stem}.model")
    check_folder(folder)
    network, beginning = initial_of(network, start)
    training, validation = training_rows(network, data, validate)
    if is_saved_network(folder):
        say(f"{folder} holds a model, which the new one will replace; --model saves it elsewhere", err=True)

    def tell(result: EpochResult) -> None:
        if not as_json:
            # Not typer.echo, which bypasses the progress bar: the line would be printed after it, in the same row.
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
        document = {"model": str(folder), "ended_by": trained.ended_by, "epochs": trained.results}
        print_json(document)
        return
    last = len(trained.results)
    if trained.ended_by == "interruption":
        say(f"Interrupted in epoch {last}; the model is what was learned until then.")
    elif trained.ended_by == "divergence":
        say(f"The training diverged; the model is that of epoch {last}, the last one that was finite.")
    also = f", the plot as {plot}" if plot is not None else ""
    say(f"Saved the model in {folder}{also}.")


PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw loss, accuracy and AUC of each epoch: .svg or .png.")
]

_TITLES: Final = {"accuracy": "Accuracy", "auc": "Area under the ROC curve"}


def check_plot(output: Path | None) -> None:
    """Raise ConfigurationError, before the training, if the plot cannot be written."""
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
    if output.suffix.lower() == ".png":
        need_package(f"--plot {output}", "resvg_py", "draw", ", or plot SVG")


def panels(results: Sequence[EpochResult]) -> list[Panel]:
    """Return the charts of a training: loss in training and validation, accuracy, and AUC."""
    from streamiter.flow.drawing.charts import Panel

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
    """Write the plot of a training to a file, if one is given."""
    if output is None:
        return
    # Imported only for a plot.
    from streamiter.flow.drawing.charts import chart

    drawing = chart(panels(results))
    if output.suffix.lower() == ".png":
        from streamiter.flow.drawing.formats import png_of_svg

        content = png_of_svg(drawing)
    else:
        content = drawing.encode()
    with errors_of_output("--plot", output):
        output.write_bytes(content)


def _plotted_line(name: str, points: Sequence[tuple[int, float | None]]) -> Line:
    from streamiter.flow.drawing.charts import Line

    there = [(epoch, value) for epoch, value in points if value is not None]
    return Line(name, [float(epoch) for epoch, _ in there], [value for _, value in there])


def predict(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A saved model of streamiter train.")],
    data: Annotated[str, typer.Option(metavar="FILE", help="The rows.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write predictions to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict with a saved network, a line for each row of a file.

    The columns, with tabs between them, depend on the loss of the network. logloss: score, probability and label;
    hingeloss: score and label; softmaxloss: score and probability of the predicted class, and the class as label;
    a regression: the value. The quality of the predictions, by the labels of the file, is printed on stderr.
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
        with errors_of_output("--output", output), output.open("w", encoding="utf-8") as file:
            _write(columns, file, as_json=as_json)
    _tell(saved, rows)


def _columns(predictions: Predictions) -> dict[str, list[object]]:
    """Return the columns that the loss defines, by name."""
    has_classes = predictions.label is not None
    names = {
        "score" if has_classes else "value": predictions.value,
        "probability": predictions.probability,
        "label": None if predictions.label is None else predictions.label.astype(int),
    }
    return {name: column.tolist() for name, column in names.items() if column is not None}


def _write(columns: dict[str, list[object]], to: IO[str], *, as_json: bool) -> None:
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
    except ModelError as error:  # The labels of rows to predict may be placeholders.
        say(f"{len(rows):,} rows; how good they are is not known: {error}", err=True)
        return
    say(f"{len(rows):,} rows: {EpochResult(0, None, found).describe()}", err=True)


ConfigurationFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A configuration file, such as deepfm.json", show_default=False)
]


def read_network(file: Path) -> Network:
    """Read the network of a file; print each warning on stderr."""
    # Slow to import; only commands on networks need it.
    from streamiter.networks.configuration import read_configuration
    from streamiter.networks.network import Network

    configuration = read_configuration(file)
    for text in configuration.warnings:
        say(f"warning: {text}", err=True)
    return Network(configuration)


def check(file: ConfigurationFile) -> None:
    """Check a configuration file without running it; print the error (exit code 1), or the size of the network.

    An unknown key is a warning.
    """
    network = read_network(file)
    summary = network.summary()
    typer.echo(f"{summary.title}, {summary.totals}")


def draw_network(file: ConfigurationFile, output: OutputOption = None, drawing_format: FormatOption = None) -> None:
    """Draw the layers of a network, as Mermaid text, SVG or PNG."""
    chosen = format_for(output, drawing_format)
    write_drawing(read_network(file), chosen, output)


def show(
    file: ConfigurationFile,
    as_json: AsJson = False,
    as_canonical: Annotated[
        bool, typer.Option("--canonical", help="Print canonical JSON instead: with all defaults, and layers in order.")
    ] = False,
) -> None:
    """Show the layers of a network: inputs, outputs, parameters."""
    if as_json and as_canonical:
        raise typer.BadParameter("expected one of --json and --canonical, given both", param_hint="'--canonical'")
    network = read_network(file)
    if as_canonical:
        from streamiter.networks.configuration import json_text

        typer.echo(json_text(network.to_json()), nl=False)
        return
    summary = network.summary()
    if as_json:
        document = {"network": network.configuration.source, "features": network.features, "dtype": str(network.dtype)}
        print_json({**document, "layers": summary.rows})
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


# ``streamiter network``: show, draw, check.

network_app = command_group(
    "Check, show and draw configuration files of networks.",
    show=(
        show,
        "streamiter network show deepfm.json",
        "streamiter network show deepfm.json --canonical > graph.json",
        "streamiter network show deepfm.json --json | jq .layers",
    ),
    draw=(draw_network, "streamiter network draw deepfm.json", "streamiter network draw deepfm.json -o deepfm.svg"),
    check=(
        check,
        "streamiter network check deepfm.json",
        "streamiter network check deepfm.json && streamiter train --config deepfm.json --data census",
    ),
)
