"""``streamiter train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from streamiter.cli.network_arguments import load_network
from streamiter.cli.topic_arguments import AsJson
from streamiter.cli.train_arguments import consistency_of, initial_of, rows_of
from streamiter.cli.train_plot import PlotOption, check_plot, write_plot
from streamiter.cli.wrapping import say

if TYPE_CHECKING:
    from streamiter.networks.fitting import TrainedNetwork
    from streamiter.networks.results import EpochResult

__all__ = ["train"]


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
    """
    from streamiter.networks.diverging import Diverged
    from streamiter.networks.fitting import fit_network
    from streamiter.networks.saved_models import check_folder, is_saved_network, save_network

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
