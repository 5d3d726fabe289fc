"""Write the report: Markdown tables for people, and ``results.json`` for programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measuring import Figure

__all__ = ["as_json", "as_markdown", "environment", "markdown_table", "write"]

Results = Mapping[str, Sequence[Figure]]
"""The figures by the name of their benchmark."""

_HEADER = ("", "figure", "spread", "compared with", "ratio", "spread", "ratio by CPU time", "target", "")
_PACKAGES = ("streamiter", "aiokafka", "confluent-kafka", "numpy", "orjson", "msgspec", "uvloop")


def write(directory: Path, results: Results) -> str:
    """Write both files and return the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    markdown = as_markdown(results)
    (directory / "results.md").write_text(markdown)
    (directory / "results.json").write_text(json.dumps(as_json(results), indent=2) + "\n")
    return markdown


def as_json(results: Results) -> dict[str, Any]:
    """Return all values of all figures, and the versions and the machine that they were measured with."""
    return {
        "environment": environment(),
        "benchmarks": {
            name: [asdict(figure) | {"median": figure.median, "ratio": figure.ratio} for figure in figures]
            for name, figures in results.items()
        },
    }


def as_markdown(results: Results) -> str:
    """Return one table for each benchmark."""
    machine = ", ".join(f"{name} {value}" for name, value in environment().items())
    parts = [f"# Benchmarks\n\n{machine}. Medians; spread is lowest–highest.\n"]
    for name, figures in results.items():
        parts.append(f"## {name}\n\n{markdown_table([_HEADER, *map(_row, figures)])}")
    return "\n".join(parts)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row is the header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _row(figure: Figure) -> tuple[str, ...]:
    cpu_ratio = figure.cpu.ratio if figure.cpu is not None else None
    return (
        figure.name + (f" ({figure.note})" if figure.note else ""),
        f"{_shown(figure.median)} {figure.unit}",
        _spread(figure.values),
        figure.compared_with,
        "" if figure.ratio is None else _shown(figure.ratio),
        _spread(figure.ratios),
        "" if cpu_ratio is None else _shown(cpu_ratio),
        "" if figure.target is None else str(figure.target),
        figure.verdict,
    )


def _spread(values: Sequence[float]) -> str:
    return f"{_shown(min(values))}–{_shown(max(values))}" if len(values) > 1 else ""


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def environment(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions and the machine, without packages that are not installed."""
    installed = {found.name for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in packages if name in installed}
    return {"Python": platform.python_version(), "cores": str(os.cpu_count()), **versions}
