"""The command ``replay``: it predicts the rows of a service's log again, with another version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamiter.cli.figures import print_fields, print_json
from streamiter.engine.job.running import run_in_own_loop


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of the service.")] = Path("service.toml"),
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help="Such as 2.17; otherwise the newest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict the rows of a service's log of predictions with a version of its model, and compare with what was served.

    Rows that this very version has served must have the same prediction: the others are mismatches, and exit code 1.
    """
    from streamiter.service import read_settings
    from streamiter.service.replay import replay_of

    found = run_in_own_loop(replay_of(read_settings(file), version))
    figures = {
        "version": found.version,
        "rows": found.rows,
        "mean_difference": found.mean_difference,
        "largest_difference": found.largest_difference if found.rows else None,
        "changed_decisions": found.changed_decisions,
        "served_by_this_version": found.of_same_version,
        "mismatches": found.mismatched,
        "refused_rows": found.refused,
        "unreadable_records": found.unreadable,
    }
    if as_json:
        print_json(figures)
    else:
        print_fields((name.replace("_", " "), _shown(figure)) for name, figure in figures.items())
    if found.mismatched:
        raise typer.Exit(1)


def _shown(figure: object) -> str:
    if figure is None:
        return "–"
    return f"{figure:.3g}" if isinstance(figure, float) else f"{figure:,}" if isinstance(figure, int) else str(figure)
