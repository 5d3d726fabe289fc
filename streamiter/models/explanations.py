"""What a model has learned: the parts of a row's score, and the effect of each column that has tables.

Tables of several columns are split as in an analysis of variance: into a mean, an effect of each column, and the rest,
which only several columns have together. The shares of the rows of each bin are known; columns, and the comparisons of
a tree, are taken to be independent. Whatever is split, the parts of a row add up to its score.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.errors import ModelError
from streamiter.models.shape_scores import BinnedRows, MemberScores, ShapeScores
from streamiter.models.shapes import CELLS_OF_PAIR, COARSE_BINS, FINE_BINS, NO_EDGE, coarse_of
from streamiter.values.field_kinds import PARTS, part_of
from streamiter.values.hashes import place_of_text
from streamiter.values.helpers.notebooks import html_table, text_table, without_empty_columns
from streamiter.values.numbers import Array, Floats, Indices
from streamiter.values.records import Batch, Columns
from streamiter.values.tables import arrays_of_table

SEVERAL_FIELDS: Final = "(several fields)"
"""The name of the part that trees have beyond the effects of fields and pairs."""

EFFECT_OF: Final = "effect of "
"""The beginning of the names of metrics that say how much a column or a pair matters."""

_PLACE: Final = re.compile(r"^place (\d+)")

_SHOWN_CONTRIBUTIONS: Final = 10
_SHOWN_PARTS: Final = 22
_SHOWN_STRENGTH: Final = 0.0005  # A smaller one would be shown as 0.000.
_SHOWN_ROWS: Final = 8

# The logarithms of probabilities beyond these would be infinite.
_TINY: Final = 1e-300
_ONE_LESS: Final = 1e-14


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The score of a row as a sum, or the scores of several rows: then each contribution has a number for each row.

    ``print`` and notebooks show the ten greatest contributions, and the sum of all others.

    A model of classes has arrays, whose last axis has a number for each probability.
    """

    intercept: float | Floats
    """The score of a row of which nothing is known. If the model has tables, the mean score of rows: it differs a
    little by row, because a member that makes no difference where it is sure has little weight there."""
    contributions: dict[str, Any]
    """The part of each feature, by its field or the number of its column; a cross and a pair are named ``"a × b"``."""

    @property
    def score(self) -> float | Floats:
        """The sum of the intercept and all contributions; the link turns it into the prediction."""
        return sum(self.contributions.values(), start=self.intercept)

    @property
    def ranked(self) -> dict[str, Any]:
        """The contributions, the greatest first: by their distance from 0, of several rows by its mean.

        >>> Explanation(0.5, {"hour": 0.2, "sky": -3.0}).ranked
        {'sky': -3.0, 'hour': 0.2}
        """
        return dict(sorted(self.contributions.items(), key=lambda each: -float(np.abs(each[1]).mean())))

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headings, and a row of texts for each of the greatest parts and for the sum of all others."""
        ranked = list(self.ranked.items())
        parts = {"score": self.score, "intercept": self.intercept, **dict(ranked[:_SHOWN_CONTRIBUTIONS])}
        if rest := [part for _, part in ranked[_SHOWN_CONTRIBUTIONS:]]:
            parts[f"{len(rest):,} others together"] = sum(rest)
        cut = ["…"] if np.size(self.score) > _SHOWN_ROWS else []
        rows = [
            [name, *(f"{number:.3g}" for number in np.ravel(part)[:_SHOWN_ROWS]), *cut] for name, part in parts.items()
        ]
        return ["part", *[""] * (len(rows[0]) - 1)], rows

    def __repr__(self) -> str:
        return text_table(*self._cells())

    def _repr_html_(self) -> str:
        """Return a table of the contributions, the greatest first, for notebooks; of several rows the first ones."""
        return html_table("score = intercept + contributions", *self._cells())


def explanation_of(intercept: Any, parts: Mapping[str, Any], is_single: bool) -> Explanation:
    """Return the explanation from arrays with a number for each row: of all rows, or of the only row."""
    if not is_single:
        return Explanation(intercept, dict(parts))
    return Explanation(intercept, {name: part[0] if part.ndim == 2 else float(part[0]) for name, part in parts.items()})


@dataclass(frozen=True, slots=True)
class BinEffect:
    """What the values of one bin do to the score."""

    name: str
    """The values, such as ``"5 to 7.5"``, ``"place 1234"`` for a hashed text, ``"7"`` for an hour, or ``"missing"``."""
    low: float | None
    """The least number of the bin; None if there is none, or the column has no numbers."""
    high: float | None
    """The largest number of the bin."""
    rows: float
    """The share of the rows that have been in the bin."""
    effect: tuple[float, ...]
    """What is added to each score; the mean over all rows is 0."""


@dataclass(frozen=True, slots=True)
class ColumnEffect:
    """What a field does to the score, whatever the other fields are."""

    field: str
    """The field."""
    strength: float
    """The deviation of the effect over all rows, of several scores their root mean square: how much it matters."""
    bins: tuple[BinEffect, ...]
    """The effects of all bins that have had rows, in ascending order; missing values come first."""

    @property
    def extremes(self) -> tuple[str, str]:
        """The bins that lower and raise the score most, with their effects; empty for several scores."""
        if not self.bins or len(self.bins[0].effect) > 1:
            return "", ""
        by_effect = sorted(self.bins, key=lambda each: each.effect)
        low, high = (f"{each.name} ({each.effect[0]:+.2f})" for each in (by_effect[0], by_effect[-1]))
        return low, high


@dataclass(frozen=True, slots=True)
class PairEffect:
    """What two fields do together, beyond the effects of each of them."""

    fields: tuple[str, str]
    """The fields."""
    strength: float
    """The deviation of the effect over all rows, as of a column."""


@dataclass(frozen=True, slots=True, repr=False)
class Effects:
    """The effects of a model with tables, the strongest first. The score is the mean of the members' scores."""

    classes: list[Any] | None
    """The labels of the scores; None if there is one."""
    columns: list[ColumnEffect]
    """The effect of each column."""
    pairs: list[PairEffect]
    """The effect of each pair."""
    bits: int = 18
    """Texts are hashed to ``2**bits`` places."""

    def named(self, records: Batch) -> Effects:
        """Return these effects with the texts of records in place of the places of their hashes.

        ``records`` are dicts, ``Columns`` or a table, such as the rows that were learned from.

        >>> effect = ColumnEffect("sky", 0.5, (BinEffect("place 126089", None, None, 1.0, (0.5,)),))
        >>> Effects(None, [effect], []).named([{"sky": "rain"}]).columns[0].bins[0].name
        'rain'
        """
        named = [replace(column, bins=self._named_bins(column, records)) for column in self.columns]
        return replace(self, columns=named)

    def _named_bins(self, column: ColumnEffect, records: Batch) -> tuple[BinEffect, ...]:
        if not any(_PLACE.match(each.name) for each in column.bins):
            return column.bins
        table = records.arrays if isinstance(records, Columns) else arrays_of_table("effects", records, ModelError)
        rows = [row.get(column.field) for row in records] if table is None else table.get(column.field, ())
        texts = set(map(str, rows))
        at = {place_of_text(column.field, text, self.bits): text for text in texts}

        def name(match: re.Match[str]) -> str:
            return at.get(int(match[1]), match[0])

        return tuple(replace(each, name=_PLACE.sub(name, each.name)) for each in column.bins)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headings, and a row of texts for each field and pair, the strongest first."""
        rows = [(column.strength, column.field, column.extremes) for column in self.columns]
        rows += [(pair.strength, " × ".join(pair.fields), ("", "")) for pair in self.pairs]
        strongest = sorted(rows, key=lambda row: -row[0])
        shown = min(_SHOWN_PARTS, max(1, sum(strength >= _SHOWN_STRENGTH for strength, _, _ in rows)))
        cells = [[name, f"{strength:.3f}", *extremes] for strength, name, extremes in strongest[:shown]]
        if weaker := strongest[shown:]:
            cells.append([f"{len(weaker):,} others", f"≤ {weaker[0][0]:.3f}", "", ""])
        return without_empty_columns(["field", "strength", "lowers most", "raises most"], cells)

    def __repr__(self) -> str:
        return text_table(*self._cells())

    def _repr_html_(self) -> str:
        """Return a table of the fields, for notebooks."""
        return html_table("effects", *self._cells())


class Term(NamedTuple):
    """The score of a member as a sum."""

    intercept: Floats
    """(scores,)"""
    parts: Mapping[str, Floats]
    """The parts (rows, scores) by name."""


def mixed_parts(
    mixture: Floats, terms: Sequence[Term], rows: int, link: str, linked: Callable[[Floats], Floats]
) -> tuple[Floats, dict[str, Floats]]:
    """Return the intercepts (rows, scores) and the parts (rows, scores) of the mixture of members.

    The first term is the linear member; all its parts are returned. Of other members, the parts that are not 0 are.
    ``linked`` makes predictions of scores.
    """
    linear = terms[0].parts
    nothing = np.zeros((rows, len(terms[0].intercept)))
    means = np.stack([nothing + term.intercept for term in terms])
    scores = np.stack([sum(term.parts.values(), start=mean) for term, mean in zip(terms, means, strict=True)])
    values = np.stack([linked(each).reshape(nothing.shape) for each in scores])
    shares, shifts = _shares_of_members(mixture, scores, values, link)
    found: dict[str, Floats] = {}
    for share, term in zip(shares, terms, strict=True):
        for name, part in term.parts.items():
            found[name] = found.get(name, nothing) + share * part
    found = {name: part for name, part in found.items() if name in linear or part.any()}
    return (shares * (means + shifts)).sum(axis=0), found


def _shares_of_members(mixture: Floats, scores: Floats, values: Floats, link: str) -> tuple[Floats, Floats]:
    """Return the weights (members, rows, scores) by which scores add up to that of the mixture, and shifts of them.

    The mixture is a mean of predictions, its score therefore a mean of scores with other weights: each member's
    weight times the slope of the link between its score and that of the mixture. The scores of classes are
    logarithms of probabilities, so a number has to be added to the scores of each member first.
    """
    mixture = mixture[:, None, None]
    mixed = (mixture * values).sum(axis=0)
    shift = np.zeros_like(scores)
    if link == "softmax":
        shift = np.log(np.maximum(values, _TINY)).max(axis=2, keepdims=True) - scores.max(axis=2, keepdims=True)
        score, derivative = np.log(np.maximum(mixed, _TINY)), mixed
    elif link == "logit":
        inside = np.clip(mixed, _ONE_LESS, 1.0 - _ONE_LESS)
        score, derivative = np.log(inside / (1.0 - inside)), inside * (1.0 - inside)
    elif link == "log":
        score, derivative = np.log(np.maximum(mixed, _TINY)), mixed
    else:
        score, derivative = mixed, np.ones_like(mixed)
    away = scores + shift - score
    is_near = np.abs(away) < 1e-9
    slopes = np.where(is_near, derivative, (values - mixed) / np.where(is_near, 1.0, away))
    weights = mixture * np.maximum(slopes, 0.0)
    total = weights.sum(axis=0)
    shares: Floats = np.where(total > 0.0, weights / np.where(total > 0.0, total, 1.0), mixture)
    return shares, shift


class _MemberEffects:
    """The tables of a member, split into effects."""

    def __init__(self, scores: MemberScores, shares: Floats) -> None:
        member, count = scores.member, scores.tables.shape[1]
        self._scores = scores
        self._shares = shares
        self._above = shares[:, ::-1].cumsum(axis=1)[:, ::-1] - shares
        """(columns, fine bins): the share of the rows above the bin."""
        self.mean = np.zeros(count)
        self.of_columns = scores.tables[: scores.at_pairs].reshape(-1, FINE_BINS, count).copy()
        """(columns, fine bins, scores): the effects of columns; each has the mean 0."""
        self.of_pairs = (
            scores.tables[scores.at_pairs : scores.at_trees].reshape(-1, COARSE_BINS, COARSE_BINS, count).copy()
        )
        """(pairs, coarse bins, coarse bins, scores): what pairs add to the effects of their columns."""
        trees, depth = member.tree_columns.shape
        self._trees = scores.tables[scores.at_trees :].reshape(trees, 2**depth, count)
        self.coarse = np.add.reduceat(shares, [0, *range(1, FINE_BINS, 4)], axis=1)
        """(columns, coarse bins): the shares of the rows."""
        for table, (first, second) in zip(self.of_pairs, member.pairs, strict=True):
            of_first, of_second = self._take_out_means(table, first, second)
            self.of_columns[first] += of_first[coarse_of(np.arange(FINE_BINS))]
            self.of_columns[second] += of_second[coarse_of(np.arange(FINE_BINS))]
        own_mean = np.einsum("cf,cfk->ck", shares, self.of_columns)
        self.of_columns -= own_mean[:, None]
        self.mean += own_mean.sum(axis=0)
        self._of_trees = np.zeros_like(self.of_columns), np.zeros_like(self.of_pairs)
        """The parts that trees have of the effects of columns, and of pairs."""
        if trees:
            self._split_trees()

    def _take_out_means(self, table: Floats, first: int, second: int) -> tuple[Floats, Floats]:
        """Take the effects of both columns out of the table of a pair, and return them; the first has the mean."""
        of_first = np.einsum("b,abk->ak", self.coarse[second], table)
        of_second = np.einsum("a,abk->bk", self.coarse[first], table) - self.coarse[first] @ of_first
        table -= of_first[:, None] + of_second
        return of_first, of_second

    def _split_trees(self) -> None:
        """Add the parts of trees to the mean, and to the effects of columns and pairs."""
        member, depth = self._scores.member, self._scores.member.tree_columns.shape[1]
        cells, bits = np.arange(2**depth), depth - 1 - np.arange(depth)
        chances = self._above[member.tree_columns, member.tree_bins][:, :, None]
        of_bits = np.where(cells >> bits[:, None] & 1, chances, 1.0 - chances)
        self._mean_of_trees = np.einsum("tc,tck->k", of_bits.prod(axis=1), self._trees)
        self.mean += self._mean_of_trees

        def means(columns: Sequence[int], by_bin: Sequence[Indices]) -> Floats:
            """Return the mean of the trees that compare all of these columns, for each of their bins."""
            is_own = member.tree_columns[:, :, None] == np.asarray(columns)
            own = np.flatnonzero(is_own.any(axis=1).all(axis=1))
            is_fixed = is_own[own].any(axis=2)
            # The cells that differ only in the bits of other columns are added up, with the chances of these.
            others = np.where(is_fixed[:, :, None], 1.0, of_bits[own]).prod(axis=1)
            sums, at = np.zeros_like(self._trees[own]), np.arange(len(own))
            fixed = cells & (is_fixed << bits).sum(axis=1)[:, None]
            np.add.at(sums, (at[:, None], fixed), others[:, :, None] * self._trees[own])
            found = reduce(_all_with_all, (each[:, own] for each in by_bin))
            mean: Floats = sums[at, found].sum(axis=-2)
            return mean

        of_columns, of_pairs = self._of_trees
        of_bins = self._scores.bits_of_trees
        for column, shares in enumerate(self._shares):
            of_columns[column] = means([column], [of_bins[column]])
            of_columns[column] -= shares @ of_columns[column]
        # The commonest fine bin of each coarse bin stands for it.
        within = self._shares[:, 1:].reshape(-1, COARSE_BINS - 1, 4).argmax(axis=2)
        common = np.insert(1 + 4 * np.arange(COARSE_BINS - 1) + within, 0, 0, axis=1)
        for table, (first, second) in zip(of_pairs, member.pairs, strict=True):
            table += means([first, second], [of_bins[each][common[each]] for each in (first, second)])
            self._take_out_means(table, first, second)
        self.of_columns += of_columns
        self.of_pairs += of_pairs

    def rest_of_trees(self, fine: Indices) -> Floats:
        """Return the part of trees (rows, scores) that is not in the effects of columns and pairs."""
        total: Floats = self._scores.tables[self._scores.cells_of_trees(fine)].sum(axis=0) - self._mean_of_trees
        of_columns, of_pairs = self._of_trees
        for table, bins in zip(of_columns, fine, strict=True):
            total -= table[bins]
        coarse = coarse_of(fine)
        for table, (first, second) in zip(of_pairs, self._scores.member.pairs, strict=True):
            total -= table[coarse[first], coarse[second]]
        return total


def _all_with_all(first: Array, second: Array) -> Array:
    """Return the bits of trees (bins, bins, trees) from those of two columns (bins, trees)."""
    together: Array = first[:, None] | second
    return together


class ShapeEffects:
    """The effects of all members: of the linear one, with its ``weights`` by field and place, and of those with tables.

    ``classes`` are those of the model, and ``bits`` those of the places of texts.
    """

    def __init__(self, scores: ShapeScores, weights: Floats, classes: list[Any] | None, bits: int) -> None:
        self.scores = scores
        self._bits = bits
        self._weights = weights
        self._classes = classes
        rows = scores.shapes.rows.astype(np.float64)
        rows[:, 0] += rows.sum(axis=1) == 0.0
        self._shares = rows / rows.sum(axis=1, keepdims=True)
        self._members = [_MemberEffects(each, self._shares) for each in scores.members]

    # ---- rows

    def terms(self, rows: BinnedRows) -> list[Term]:
        """Return the intercept and the parts (rows, scores) of each member that has tables."""
        return [
            Term(*self._parts_of(effects, scores, rows))
            for effects, scores in zip(self._members, self.scores.members, strict=True)
        ]

    def _parts_of(
        self, effects: _MemberEffects, scores: MemberScores, rows: BinnedRows
    ) -> tuple[Floats, Mapping[str, Floats]]:
        shapes, member = self.scores.shapes, scores.member
        parts: dict[str, Floats] = {}

        def add(name: str, part: Floats) -> None:
            parts[name] = parts[name] + part if name in parts else part

        for name, distances, slope in zip(self.scores.fields, rows.distances, member.slopes, strict=True):
            add(name, distances[:, None] * slope)
        for name, table, bins in zip(shapes.fields, effects.of_columns, rows.fine, strict=True):
            add(name, table[bins])
        coarse = coarse_of(rows.fine)
        for (first, second), table in zip(member.pairs, effects.of_pairs, strict=True):
            add(f"{shapes.fields[first]} × {shapes.fields[second]}", table[coarse[first], coarse[second]])
        if len(member.tree_columns) > 0:
            add(SEVERAL_FIELDS, effects.rest_of_trees(rows.fine))
        return member.intercept + effects.mean, parts

    # ---- columns

    @cached_property
    def effects(self) -> Effects:
        """The effects of columns and pairs, the strongest first."""
        shapes, mixture = self.scores.shapes, self.scores.shapes.mixture
        columns = []
        for column, (field, kind) in enumerate(zip(shapes.fields, shapes.kinds, strict=True)):
            tables = [each.of_columns[column] for each in self._members]
            total = sum(weight * table for weight, table in zip(mixture[1:], tables, strict=True))
            total = total + (self._of_texts(column) if kind == "category" else self._of_slopes(column))
            columns.append(self._effect(column, field, total - self._shares[column] @ total))
        pairs: dict[tuple[str, str], float] = {}
        for weight, effects, scores in zip(mixture[1:], self._members, self.scores.members, strict=True):
            for (first, second), table in zip(scores.member.pairs, effects.of_pairs, strict=True):
                shares = np.outer(effects.coarse[first], effects.coarse[second])
                strength = float(weight) * _strength(shares.ravel(), table.reshape(CELLS_OF_PAIR, -1))
                names = shapes.fields[first], shapes.fields[second]
                pairs[names] = pairs.get(names, 0.0) + strength
        columns.sort(key=lambda each: -each.strength)
        strongest = sorted(pairs.items(), key=lambda each: -each[1])
        return Effects(self._classes, columns, [PairEffect(*each) for each in strongest], self._bits)

    def _of_slopes(self, column: int) -> Floats:
        """Return what weights of a field of numbers do in the middle of each bin."""
        field = self.scores.shapes.fields[column]
        nothing = np.zeros((FINE_BINS, self._weights.shape[1]))
        if field not in self.scores.fields:
            return nothing
        at = self.scores.fields.index(field)
        slope = self.scores.shapes.mixture[0] * self._weights[at]
        for weight, each in zip(self.scores.shapes.mixture[1:], self.scores.members, strict=True):
            slope = slope + weight * each.member.slopes[at]
        ends = np.stack(self._ends(column))
        known = np.isfinite(ends)
        middles = np.where(known, ends, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        nothing[1:] = self.scores.distance(at, middles)[:, None] * slope
        return nothing

    def _of_texts(self, column: int) -> Floats:
        """Return what the linear member's weights of texts do: the mean of those that share a bin."""
        found, counts = np.zeros((FINE_BINS, self._weights.shape[1])), np.zeros((FINE_BINS, 1))
        cells = self.scores.shapes.categories
        own = np.flatnonzero((cells // FINE_BINS == column) & (cells > 0))
        np.add.at(found, cells[own] % FINE_BINS, self._weights[len(self.scores.fields) + own])
        np.add.at(counts, cells[own] % FINE_BINS, 1.0)
        means: Floats = self.scores.shapes.mixture[0] * found / np.maximum(counts, 1.0)
        return means

    def _ends(self, column: int) -> tuple[Floats, Floats]:
        """Return the ends of the fine bins from 1 on."""
        edges = self.scores.shapes.edges[column]
        edges = np.where(edges >= NO_EDGE, np.inf, edges)
        return np.append(-np.inf, edges), np.append(edges, np.inf)

    def _effect(self, column: int, field: str, effects: Floats) -> ColumnEffect:
        shares = self._shares[column]
        low, high = self._ends(column)
        is_category = self.scores.shapes.kinds[column] == "category"
        known = self._parts_of_time(field) if is_category else {}
        bins = []
        for at in np.flatnonzero(shares).tolist():
            ends = (None, None) if at == 0 or is_category else (_finite(low[at - 1]), _finite(high[at - 1]))
            name = "missing" if at == 0 else self._texts_of(column, at, known) if is_category else _range(*ends)
            bins.append(BinEffect(name, *ends, float(shares[at]), tuple(effects[at].tolist())))
        return ColumnEffect(field, _strength(shares, effects), tuple(bins))

    def _texts_of(self, column: int, fine: int, known: Mapping[int, str]) -> str:
        own = self.scores.places[self.scores.shapes.categories == column * FINE_BINS + fine]
        if len(own) == 1 and int(own[0]) in known:
            return known[int(own[0])]
        more = f" and {len(own) - 1:,} more" if len(own) > 1 else ""
        return f"place {own[0]}{more}" if len(own) else "a text"

    def _parts_of_time(self, field: str) -> dict[int, str]:
        """Return the hours, weekdays or months of such a field by their places; texts of other fields are unknown."""
        values = next((values for part, values in PARTS.items() if field.endswith(part_of("", part))), range(0))
        return {place_of_text(field, str(value), self._bits): str(value) for value in values}


def _strength(shares: Floats, effects: Floats) -> float:
    """Return the deviation of effects (bins, scores), whose mean is 0."""
    return float(np.sqrt((shares @ effects**2).mean()))


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def _range(low: float | None, high: float | None) -> str:
    """Return the values of a bin.

    >>> _range(None, 5.0), _range(5.0, 7.25), _range(7.25, None), _range(None, None)
    ('up to 5', '5 to 7.25', 'above 7.25', 'any number')
    """
    if low is None:
        return "any number" if high is None else f"up to {high:.6g}"
    return f"above {low:.6g}" if high is None else f"{low:.6g} to {high:.6g}"
