"""The columns that have tables: which they are, where the edges of their bins are, and the bins of categories.

The edges of a number are at quantiles of the last rows. They are placed after 64, 256, 1,024 and 4,096 rows. Then they
are looked at each 4,096 rows, and placed again where too many rows share a bin. The most frequent texts of a category
have a bin each, and the others share one; the parts of a time have theirs in the order of time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.learn.ready_made.model_rows import ModelRows
from streamiter.models.shapes import FINE_BINS, NO_EDGE, Shapes
from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import ABSENT, NamedRows
from streamiter.values.numbers import Floats, Indices

# Constants that are not said to be measured are those of the first guess, see docs/decisions.
_SAMPLE: Final = 1024
LOOKS: Final = (64, 256, 1024, 4096)
"""The numbers of rows after which edges are placed and weak tables replaced: these, then each 4,096."""
_CROWDED: Final = 0.25
_CROWDED_BY_ITS_COMMONEST: Final = 1.5
_NO_BIN: Final = -1
# A text gets the bin of another one if it has at least 16 of the last rows, and twice as many more. Measured on five
# streams of 40,000 rows with 100 to 3,000 texts: 4.1 % less loss where the first texts are rare, and .1 % less on the
# others. With 4 and 8 rows loss grows by 1.2 % and .2 % where 1,000 texts are distributed by Zipf's law; other
# factors than 2 change less than .1 %.
_ROWS_OF_A_FREQUENT: Final = 16
_TIMES_AS_FREQUENT: Final = 2
COLUMNS_MAX: Final = 128
"""At most this many columns have tables, so that their memory and the time of a row are bounded."""


def next_look(rows: int) -> int:
    """Return the number of rows at which the next look is."""
    return next((look for look in LOOKS if look > rows), (rows // LOOKS[-1] + 1) * LOOKS[-1])


class Categories:
    """The bins of texts, by their places: the texts of a field have bins in the order in which they come.

    The first 59 texts of a field have a fine bin each, and all later ones share a bin, until looks show that one of
    these is more frequent. The parts of a time have their bins in the order of time. A field that has ever had a list
    of texts gets no further bins.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """The number of each category, from 1 on."""
        self._counts: dict[str, int] = {}
        """The number of texts of each category."""
        self._closed: set[str] = set()
        """The fields that have had a list of texts."""
        self._place_of_bin: dict[int, Indices] = {}
        """By category the place of each fine bin that one text has; -1 for others."""
        self.bin_of_place: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """For each hashed column ``FINE`` times the number of its category, plus the fine bin; -1 without a bin, and 0
        as long as no row has had it."""

    def learn(
        self,
        named: NamedRows,
        hashed: int,
        texts: Container[str],
        crosses: Container[str],
        parts_of_times: Mapping[str, Indices],
    ) -> None:
        """Give bins to texts that come for the first time, in the order of the rows.

        Each place belongs to the first value that has it, which may be a value without a bin; so no later row changes
        the bins of this one. ``parts_of_times`` has by field the places of all of its values, in their order.
        """
        fields, count = named.text_fields, len(named)
        of_field = {field: position for position, field in reversed(list(enumerate(fields))) if field not in crosses}
        order = [of_field[field] for field in sorted(of_field, key=lambda field: (len(field), field)) if field in texts]
        categories = [fields[position] for position in order]
        others = [each for each in range(named.places.shape[1]) if each >= len(fields) or fields[each] in texts]
        order += [each for each in others if each not in order]
        lists = self._first_lists(named, of_field)
        if order:
            if not len(self.bin_of_place):
                self.bin_of_place = np.zeros(hashed, np.int32)
            places = named.places[:, order]
            rows, columns = np.nonzero((places != ABSENT) & (self.bin_of_place[places] == 0))
            new = places[rows, columns]
            for at in np.sort(np.unique(new, return_index=True)[1]).tolist():
                field = categories[columns[at]] if columns[at] < len(categories) else None
                if self.bin_of_place[new[at]]:
                    continue  # It is a part of a time.
                if field is None or field in self._closed or rows[at] >= lists.get(field, count):
                    self.bin_of_place[new[at]] = _NO_BIN
                else:
                    self._add(field, int(new[at]), parts_of_times)
        self._closed |= lists.keys()

    @staticmethod
    def _first_lists(named: NamedRows, of_field: Mapping[str, int]) -> dict[str, int]:
        """Return for each field with a list of texts the first row that has one."""
        found: dict[str, int] = {}
        for position, field in enumerate(named.text_fields):
            if field in of_field and position != of_field[field]:
                is_list = named.places[:, position] != ABSENT
                if is_list.any():
                    found[field] = min(int(is_list.argmax()), found.get(field, len(named)))
        return found

    def _add(self, field: str, place: int, parts_of_times: Mapping[str, Indices]) -> None:
        from streamiter.learn.ready_made.cell_steps import BINS, FINE, SPLIT

        if field not in self.numbers and len(self.numbers) == COLUMNS_MAX:
            self.bin_of_place[place] = _NO_BIN
            return
        number = self.numbers.setdefault(field, len(self.numbers) + 1)
        if (parts := parts_of_times.get(field)) is not None:
            bins = FINE * number + 1 + np.arange(len(parts)) * BINS // len(parts)
            self.bin_of_place[parts] = np.where(self.bin_of_place[parts] == 0, bins, self.bin_of_place[parts])
            return
        text = self._counts.get(field, 0)
        self._counts[field] = text + 1
        text = min(text, BINS - 1)
        own = 1 + SPLIT * (text % (BINS // SPLIT)) + text // (BINS // SPLIT)
        self.bin_of_place[place] = FINE * number + own
        if own < BINS:
            self._place_of_bin.setdefault(number, np.full(BINS, -1))[own] = place

    def exchange(self, number: int, places: Indices, counts: Indices) -> Indices:
        """Give frequent texts of a category that share a bin the bins of rare ones, which share it from now on.

        ``counts`` are those of ``places`` among the last rows. Returns the fine bins that are given to other texts.
        """
        from streamiter.learn.ready_made.cell_steps import BINS, FINE

        bins = self.bin_of_place[places] % FINE
        rows = np.zeros(BINS + 1, np.intp)
        rows[bins] = counts
        rare = 1 + np.argsort(rows[1:BINS], kind="stable")
        shared = np.flatnonzero(bins == BINS)
        frequent = shared[np.argsort(-counts[shared], kind="stable")][: len(rare)]
        rare = rare[: len(frequent)]
        is_better = counts[frequent] >= _ROWS_OF_A_FREQUENT + _TIMES_AS_FREQUENT * rows[rare]
        taken, given = rare[is_better], places[frequent[is_better]]
        if len(taken):
            before = self._place_of_bin[number][taken]
            self.bin_of_place[before[before >= 0]] = FINE * number + BINS
            self.bin_of_place[given] = FINE * number + taken
            self._place_of_bin[number][taken] = given
        return taken

    def state(self) -> dict[str, Any]:
        """Return a copy as plain data."""
        places = np.flatnonzero(self.bin_of_place)
        return {
            "fields": list(self.numbers),
            "counts": [self._counts.get(field, 0) for field in self.numbers],
            "closed": sorted(self._closed),
            "hashed": len(self.bin_of_place),
            "places": places,
            "bins": self.bin_of_place[places],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`."""
        from streamiter.learn.ready_made.cell_steps import BINS, FINE

        self.numbers = {field: number for number, field in enumerate(state["fields"], 1)}
        self._counts = dict(zip(state["fields"], state["counts"], strict=True))
        self._closed = set(state["closed"])
        self.bin_of_place = np.zeros(state["hashed"], np.int32)
        self.bin_of_place[state["places"]] = state["bins"]
        places = np.asarray(state["places"], np.intp)
        numbers, fine = np.divmod(np.maximum(np.asarray(state["bins"], np.intp), 0), FINE)
        self._place_of_bin = {}
        for number in self.numbers.values():
            own = (numbers == number) & (fine < BINS)
            self._place_of_bin[number] = np.full(BINS, -1)
            self._place_of_bin[number][fine[own]] = places[own]


class Moved(NamedTuple):
    """Columns whose edges have moved: for each of their bins the earlier bin that held its middle."""

    column: int
    fine: Indices
    coarse: Indices


class CellColumns:
    """The columns with tables, the edges of their bins, and the last rows.

    A column gets tables with the first learned row that has its value, wherever batches are cut.
    """

    def __init__(self, categories: Categories) -> None:
        from streamiter.learn.ready_made import cell_steps

        self.steps = cell_steps
        self.categories = categories
        self.sources: list[int] = []
        """By column: the number of the numeric column, or minus the number of the category."""
        self.rows = 0
        """The number of learned rows."""
        self.edges: Floats = np.zeros((0, cell_steps.EDGES))
        self.used: Indices = np.zeros(0, np.intp)
        """The number of coarse bins of each column that have values."""
        self._is_placed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.is_category: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._sample: Floats = np.zeros((_SAMPLE, 0))
        self._column_of_number: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._column_of_category: npt.NDArray[np.int32] = np.full(1 + COLUMNS_MAX, -1, np.int32)
        self._column_of_category[0] = 0  # Of places without a bin, which are not new.

    def add_numeric(self, count: int) -> None:
        """Know of ``count`` more numeric columns; they have no tables yet."""
        self._column_of_number = np.append(self._column_of_number, np.full(count, -1, np.int32))

    def has_new(self) -> bool:
        """Whether there are columns without tables, and room for them."""
        known = len(self._column_of_number) + len(self.categories.numbers)
        return len(self.sources) < min(known, COLUMNS_MAX)

    def first_new(self, rows: ModelRows, order: Indices, is_observed: npt.NDArray[np.bool_], hashed: int) -> int:
        """Return the first learned step whose row has a value of a column without tables; else the number of steps."""
        of_rows = (rows.indptr, rows.indices, rows.values, order, is_observed, hashed)
        return self.steps.first_new_column(
            *of_rows, self._column_of_number, self.categories.bin_of_place, self._column_of_category
        )

    def add_columns_of(self, rows: ModelRows, row: int, hashed: int) -> int:
        """Give tables to the columns of this row that have none, as there is room; return how many got them."""
        part = slice(rows.indptr[row], rows.indptr[row + 1])
        indices = rows.indices[part][np.abs(rows.values[part]) <= HUGE]
        of_numbers = indices[indices > hashed] - hashed - 1
        new = sorted({number for number in of_numbers.tolist() if self._column_of_number[number] < 0})
        if len(bins := self.categories.bin_of_place):
            numbers = {max(int(bins[place]), 0) // self.steps.FINE for place in indices[indices < hashed].tolist()}
            own = sorted((field, -number) for field, number in self.categories.numbers.items() if number in numbers)
            new += [source for _, source in own if self._column_of_category[-source] < 0]
        new = new[: COLUMNS_MAX - len(self.sources)]
        for source in new:
            self._add(source)
        return len(new)

    def _add(self, source: int) -> None:
        column = len(self.sources)
        self.sources.append(source)
        if source >= 0:
            self._column_of_number[source] = column
        else:
            self._column_of_category[-source] = column
        self.edges = np.vstack([self.edges, np.full(self.steps.EDGES, np.inf)])
        self.used = np.append(self.used, 2)
        self._is_placed = np.append(self._is_placed, False)
        self.is_category = np.append(self.is_category, source < 0)
        self._sample = np.column_stack([self._sample, np.full(_SAMPLE, np.nan)])

    def values(self, rows: ModelRows, order: Indices, hashed: int) -> Floats:
        """Return for each step the values of all columns: numbers, the places of categories, NaN where missing."""
        found = np.full((len(order), len(self.sources)), np.nan)
        self.steps.values_of_steps(
            rows.indptr,
            rows.indices,
            rows.values,
            order,
            hashed,
            self._column_of_number,
            self.categories.bin_of_place,
            self._column_of_category,
            found,
        )
        return found

    def bins(self, values: Floats) -> npt.NDArray[np.uint8]:
        """Return the fine bins of these values."""
        found = np.empty(values.shape, np.uint8)
        self.steps.fill_in_bins(values, self.edges, self.is_category, self.categories.bin_of_place, found)
        return found

    def observe(self, values: Floats) -> None:
        """Count learned rows; the last ones are kept, to place edges."""
        self.rows += len(values)
        last = values[-_SAMPLE:]
        self._sample[np.arange(self.rows - len(last), self.rows) % _SAMPLE] = last

    def bins_of_places(self, places: Indices, fine: int) -> Indices:
        """Return for each of these hashed columns ``fine`` times its column, plus its fine bin; 0 if it has none."""
        if not len(self.categories.bin_of_place):
            return np.zeros(len(places), np.intp)
        found = np.maximum(self.categories.bin_of_place[places].astype(np.intp), 0)
        category, bins = np.divmod(found, self.steps.FINE)
        column = np.where(category > 0, self._column_of_category[category], -1)
        return np.where(column >= 0, fine * column + bins, 0)

    def rows_of_bins(self, fine: int) -> npt.NDArray[np.float32]:
        """Return for each column how many of the last rows each of its fine bins had."""
        bins = self.bins(self._sample[: min(self.rows, _SAMPLE)])
        counts = [np.bincount(column, minlength=fine) for column in bins.T]
        return np.array(counts, np.float32).reshape(-1, fine)

    # ---- edges

    def look(self) -> list[Moved]:
        """Place edges where it is time to; return what has moved."""
        moved = []
        seen = self._sample[: min(self.rows, _SAMPLE)]
        for column in range(len(self.sources)):
            given = np.sort(seen[np.abs(seen[:, column]) <= HUGE, column])
            distinct, counts = np.unique(given, return_counts=True)
            if self.is_category[column] and len(given):
                self.used[column] = min(self.steps.BINS // self.steps.SPLIT, len(distinct))
                if len(taken := self.categories.exchange(-self.sources[column], distinct.astype(np.intp), counts)):
                    moved.append(self._of_exchanged(column, taken))
            elif len(given) and self._is_due(column, given, distinct, counts):
                moved.append(self._place(column, given, distinct))
        return moved

    def _of_exchanged(self, column: int, taken: Indices) -> Moved:
        """Return that texts begin in these fine bins with the weights of the bin that they had shared."""
        fine = np.arange(self.steps.FINE)
        fine[taken] = self.steps.BINS
        return Moved(column, fine, np.arange(self.steps.COARSE))

    def _is_due(self, column: int, given: Floats, distinct: Floats, counts: Indices) -> bool:
        if self.rows <= LOOKS[-1] or not self._is_placed[column]:
            return True
        if len(distinct) <= self.steps.BINS // self.steps.SPLIT:
            return False
        coarse = (np.searchsorted(self.edges[column], given) + self.steps.SPLIT) // self.steps.SPLIT
        share = np.bincount(coarse).max() / len(given)
        return bool(share > max(_CROWDED, _CROWDED_BY_ITS_COMMONEST * counts.max() / len(given)))

    def _place(self, column: int, given: Floats, distinct: Floats) -> Moved:
        steps = self.steps
        edges = quantile_edges(distinct, given, steps.EDGES, steps.SPLIT)
        low = np.minimum(np.append(given[0], edges), given[-1])
        high = np.minimum(np.append(edges, given[-1]), given[-1])
        fine = np.arange(steps.FINE)
        fine[1 : steps.BINS + 1] = np.searchsorted(self.edges[column], (low + high) / 2) + 1
        coarse = np.zeros(steps.COARSE, np.intp)
        coarse[1:] = (fine[2 :: steps.SPLIT][: steps.COARSE - 1] + steps.SPLIT - 1) // steps.SPLIT
        self.edges[column], self._is_placed[column] = edges, True
        self.used[column] = min(steps.BINS // steps.SPLIT, len(distinct))
        return Moved(column, fine, coarse)

    # ---- state

    def start_from(self, shapes: Shapes, fields: Sequence[str], places: Indices, hashed: int) -> None:
        """Take on the columns of a published model, whose linear member has these fields and places.

        Its edges stay where they are until too many rows share a bin.
        """
        categories: list[str] = []
        counts, found = [], np.zeros(len(places), np.int32)
        column_of, bins = np.divmod(shapes.categories, FINE_BINS)
        for column, (name, kind) in enumerate(zip(shapes.fields, shapes.kinds, strict=True)):
            is_number = kind == "number" and name in fields
            if not is_number:
                own = (shapes.categories > 0) & (column_of == column)
                found[own] = self.steps.FINE * (len(categories) + 1) + bins[own]
                categories.append(name if kind == "category" else f"{name} as numbers before")
                counts.append(int(own.sum()))
            self._add(fields.index(name) if is_number else -len(categories))
        known = {"fields": categories, "counts": counts, "closed": [], "hashed": hashed, "places": places}
        self.categories.restore({**known, "bins": found})
        self.rows = LOOKS[-1]
        self.edges[:] = np.where(shapes.edges >= NO_EDGE, np.inf, shapes.edges)
        self._is_placed[:] = True
        self._sample[:] = np.column_stack(
            [np.zeros((_SAMPLE, 0)), *map(self._sample_of, range(len(shapes.rows)), shapes.rows)]
        )
        coarse = shapes.rows[:, 1:].reshape(len(self.sources), -1, self.steps.SPLIT).any(axis=2)
        self.used[:] = np.maximum(coarse.sum(axis=1), 2)

    def _sample_of(self, column: int, rows: npt.NDArray[np.float32]) -> Floats:
        """Return values of a column that are in the bins of ``rows``, as many in each as its share."""
        tops = np.append(self.edges[column], np.inf)
        if self.is_category[column]:
            bin_of_place = self.categories.bin_of_place
            own = np.flatnonzero(bin_of_place // self.steps.FINE == -self.sources[column])
            tops = np.full(self.steps.BINS, np.nan)
            tops[bin_of_place[own] % self.steps.FINE - 1] = own
        else:
            finite = tops[np.isfinite(tops)]
            tops[len(finite) :] = np.nextafter(finite[-1], np.inf) if len(finite) else 0.0
        shares = rows.cumsum(dtype=np.float64) / max(float(rows.sum()), 1.0)
        return np.append(np.nan, tops)[np.searchsorted(shares, (np.arange(_SAMPLE) + 0.5) / _SAMPLE) % FINE_BINS]

    def state(self) -> dict[str, Any]:
        """Return a copy as plain data."""
        return {
            "sources": list(self.sources),
            "rows": self.rows,
            "edges": self.edges.copy(),
            "used": self.used.copy(),
            "placed": self._is_placed.copy(),
            "sample": self._sample[: min(self.rows, _SAMPLE)].copy(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`, with the numeric columns and the categories of then."""
        for source in state["sources"]:
            self._add(source)
        self.rows = state["rows"]
        self.edges[:], self.used[:], self._is_placed[:] = state["edges"], state["used"], state["placed"]
        self._sample[: len(state["sample"])] = state["sample"]


def quantile_edges(distinct: Floats, given: Floats, count: int, split: int) -> Floats:
    """Return the edges of bins: between distinct values, if these have a coarse bin each, else at quantiles of all.

    ``given`` has the values in ascending order. An edge at a quantile is in the middle of the two values next to it.
    """
    edges, middles = np.full(count, np.inf), (distinct[1:] + distinct[:-1]) / 2
    if len(distinct) <= (count + 1) // split:
        edges[: len(middles) * split] = np.repeat(middles, split)
        return edges
    at = np.quantile(given, np.arange(1, count + 1) / (count + 1), method="hazen")
    return middles[np.clip(np.searchsorted(distinct, at, side="right"), 1, len(distinct) - 1) - 1]
