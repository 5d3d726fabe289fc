"""The plot of a training: loss, accuracy and AUC, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from streamiter.errors import ConfigurationError

if TYPE_CHECKING:
    from streamiter.charts import Line, Panel
    from streamiter.networks.results import EpochResult

__all__ = ["PlotOption", "check_plot", "panels", "write_plot"]

PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw loss, accuracy and AUC per epoch: .svg or .png."),
]

_TITLES: Final = {"accuracy": "Accuracy", "auc": "Area under the ROC curve"}


def check_plot(output: Path | None) -> None:
    """Said before the training, not after it."""
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
        _line("training", [(result.epoch, result.training_loss) for result in results]),
        _line("validation", [(epoch, found.loss) for epoch, found in validation]),
    ]
    drawn = [Panel("Loss", "epoch", [line for line in losses if line.xs], has_whole_xs=True)]
    for name, title in _TITLES.items():
        line = _line("validation", [(epoch, getattr(found, name)) for epoch, found in validation])
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
        from streamiter.flow.drawing.png import png_of_svg

        content = png_of_svg(drawing)
    else:
        content = drawing.encode()
    try:
        output.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"--plot {output}: cannot write it: {error.strerror}") from error


def _line(name: str, points: Sequence[tuple[int, float | None]]) -> Line:
    from streamiter.charts import Line

    there = [(epoch, value) for epoch, value in points if value is not None]
    return Line(name, [float(epoch) for epoch, _ in there], [value for _, value in there])
