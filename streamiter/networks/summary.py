"""A network as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.networks.configuration.settings import Configuration, LayerConfiguration
from streamiter.networks.graph import Graph
from streamiter.networks.parameters import Parameter

__all__ = ["Summary", "SummaryRow", "summary_of"]

_HEADINGS: Final = ("layer", "type", "inputs", "output", "parameters", "status")


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One layer."""

    layer: str
    type: str
    """With its transfer function, or its loss."""
    inputs: tuple[str, ...]
    output_dim: int
    """Numbers for each row."""
    parameters: int
    """Numbers it learns, without those for each feature where it is not known how many features there are."""
    parameters_per_feature: int
    """0 where the features are known."""
    status: str

    @property
    def cells(self) -> tuple[str, ...]:
        """As in the table."""
        return (
            self.layer,
            self.type,
            ", ".join(self.inputs) or "mini-batch",
            f"(rows, {self.output_dim})",
            _count(self.parameters, self.parameters_per_feature),
            self.status,
        )


@dataclass(frozen=True)
class Summary:
    """All layers, each behind its inputs; printed, it is a table."""

    title: str
    rows: tuple[SummaryRow, ...]

    headings = _HEADINGS

    @property
    def totals(self) -> str:
        """How much is learned in all."""
        parameters = sum(row.parameters for row in self.rows)
        per_feature = sum(row.parameters_per_feature for row in self.rows)
        return f"{len(self.rows)} layers, {_count(parameters, per_feature)} parameters"

    def __str__(self) -> str:
        lines = [self.headings, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head, *body = (_line(cells, widths) for cells in lines)
        rule = "  ".join("─" * width for width in widths)
        return "\n".join([self.title, "", head, rule, *body, rule, self.totals])

    __repr__ = __str__


def summary_of(configuration: Configuration, graph: Graph, *, features_are_known: bool) -> Summary:
    """The table of a network whose layers are those of ``graph``."""
    by_name = {layer.name: layer for layer in graph.layers}
    rows = []
    for layer in configuration.layers:
        built = by_name[layer.name]
        numbers, per_feature = _sizes(built.parameters, features_are_known)
        rows.append(
            SummaryRow(
                layer.name,
                _described(layer),
                layer.inputs,
                built.output_dim,
                numbers,
                per_feature,
                str(built.status),
            )
        )
    features = graph.place_holder.feature_dimension if features_are_known else None
    return Summary(_title(configuration, features), tuple(rows))


def _title(configuration: Configuration, features: int | None) -> str:
    data = configuration.data
    parts = ["features from the data" if features is None else f"{features:,} features"]
    if data.num_field > 0:
        parts.append(f"{data.num_field:,} fields")
    return f"{configuration.source}: {', '.join((*parts, configuration.model.dtype))}"


def _described(layer: LayerConfiguration) -> str:
    function = layer.transfer_function or layer.loss
    return layer.type if function is None else f"{layer.type}, {function}"


def _sizes(parameters: Sequence[Parameter], features_are_known: bool) -> tuple[int, int]:
    """Numbers, and numbers for each feature where those are not counted."""
    if features_are_known:
        return sum(parameter.size for parameter in parameters), 0
    numbers = sum(parameter.size for parameter in parameters if not parameter.by_feature)
    per_feature = sum(
        parameter.size // parameter.shape[0] for parameter in parameters if parameter.by_feature
    )
    return numbers, per_feature


def _count(numbers: int, per_feature: int) -> str:
    if not per_feature:
        return f"{numbers:,}"
    by_feature = "features" if per_feature == 1 else f"{per_feature:,} × features"
    return f"{by_feature} + {numbers:,}" if numbers else by_feature


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(_padded(cells, widths)).rstrip()


def _padded(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True):
        yield cell.rjust(width) if heading == "parameters" else cell.ljust(width)
