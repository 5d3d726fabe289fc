"""``streamiter predict``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import orjson
import typer

from streamiter.cli.topic_arguments import AsJson
from streamiter.cli.wrapping import say
from streamiter.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from streamiter.networks.data import LabelledRows
    from streamiter.networks.losses import Predictions
    from streamiter.networks.saved_models import SavedNetwork

__all__ = ["predict"]


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
    """
    from streamiter.networks.data import read_rows
    from streamiter.networks.saved_models import load_network

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
    from streamiter.networks.results import EpochResult, evaluate

    try:
        found = evaluate(saved.network.graph(), saved.parameters, rows)
    except ModelError as error:  # Labels may be made up where they are to be predicted.
        say(f"{len(rows):,} rows; how good they are is not known: {error}", err=True)
        return
    say(f"{len(rows):,} rows: {EpochResult(0, None, found).describe()}", err=True)
