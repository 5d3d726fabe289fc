"""``EmbeddingWeights``: the members of the ready-made model that have a vector for each feature.

``streamiter.learn.ready_made.embedding_steps`` has the arithmetic, ``streamiter.learn.ready_made.embedding_layers``
describes the arrays, and ``streamiter.parameter_server.storage.feature_table`` has the features. All are imported when
the first member is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.labels import LabelKind
from streamiter.learn.ready_made.embeddings import Embeddings
from streamiter.learn.ready_made.expert_weights import ROWS_OF_A_START, SQUARES_KEPT, ExpertWeights, actions_of, plain
from streamiter.learn.ready_made.model_rows import BEHIND_KEYS, ModelRows, RowSteps
from streamiter.parameter_server.admission import UNKNOWN_TIME
from streamiter.values.hashes import drawn_hashes
from streamiter.values.helpers.compiled import saying_that_it_compiles
from streamiter.values.numbers import Float32s, Floats, Integers, Truths

# Which numbers begin with these drawn numbers: part of what is hashed.
_OF_VECTORS, _OF_NUMBERS, _OF_FIELD_INPUTS, _OF_NUMBER_INPUTS, _OF_LAYERS = range(5)  # Then layer by layer.
# The largest number whose four parts have tags, from 4 · 62 + 1 on, of eight bits; those of layers grow from below.
_OF_FEATURES: Final = 62
# By the rule of He, of a layer with as many inputs as ten fields have factors. Fields come one by one.
_FIELDS_OF_A_LAYER: Final = 10


class EmbeddingWeights:
    """Two experts with embeddings, of the features and the numeric columns of rows with keys.

    A *head* is what an expert has for a score; ``streamiter.learn.ready_made.embedding_layers`` has their order.
    """

    def __init__(self, embeddings: Embeddings, task: LabelKind, scores: int = 1) -> None:
        # Imported here: they import Numba, which takes most of a second.
        from streamiter.learn.ready_made import embedding_layers, embedding_steps, row_losses, row_steps
        from streamiter.parameter_server.storage.feature_files import FeatureFiles
        from streamiter.parameter_server.storage.feature_table import FeatureTable

        self._steps, self._layout, self._row_steps = embedding_steps, embedding_layers, row_steps
        self.embeddings = embeddings
        self.task = task
        self.fields = 0
        """The number of fields, the one of missing values included."""
        self.numeric = 0
        """The number of numeric columns."""
        self.experts = embedding_layers.EXPERTS
        self.scores = scores
        """The number of scores of a row."""
        self.heads = self.experts * scores
        self.table = FeatureTable.of_bytes(
            self.heads * embeddings.factors,
            weights=self.heads,
            admit=embeddings.admit,
            size_bytes=embeddings.size_bytes,
            expire_ms=embeddings.expire_ms,
            early=scores * embeddings.factors,  # A byte for both experts.
        )
        self._files = FeatureFiles(self.table, name="embeddings")
        facts = np.zeros(embedding_layers.FACTS_OF_EMBEDDINGS, np.int64)
        facts[embedding_layers.FACTOR_COUNT] = embeddings.factors
        facts[embedding_layers.LAYER_COUNT] = len(embeddings.units)
        facts[embedding_layers.HAS_PRODUCTS] = embeddings.kind != "wide and deep"
        kinds = {"binary": row_losses.BINARY, "classes": row_losses.CLASSES, "number": row_losses.SQUARED}
        facts[embedding_layers.LOSS_KIND] = kinds[task]
        facts[embedding_layers.EXPIRES] = embeddings.expire_ms > 0
        facts[embedding_layers.TIME_MS] = embedding_layers.NO_TIME
        nothing, first = np.zeros(0, np.float32), embedding_layers.SQUARES_AT_FIRST
        layers = np.tile(self._first_layers(), scores)
        facts[embedding_layers.HEAD_COUNT], facts[embedding_layers.LAYER_SIZE] = self.heads, len(layers) // scores
        facts[embedding_layers.UNIT_COUNT] = sum(embeddings.units)
        self.arrays = embedding_layers.EmbeddingArrays(
            commons=nothing,
            numbers=nothing,
            statistics=np.zeros(0),
            weights_of_fields=nothing,
            squares_of_fields=nothing,
            weights_of_numbers=nothing,
            squares_of_numbers=nothing,
            layers=layers,
            squares_of_layers=np.full(len(layers), first, np.float32),
            intercepts=np.repeat([0.0, first], self.heads),
            totals=np.zeros(9),
            units=np.array(embeddings.units or (0,), np.int64),
            facts=facts,
        )
        self.add_fields(1)
        row = ModelRows(np.array([0, 1]), np.zeros(1, np.intp), np.zeros(1))
        with saying_that_it_compiles("the arithmetic of embeddings"):
            self.step(row, RowSteps.one_each(1, learns=False), np.zeros(1), np.zeros((0, self.heads)))

    # ---- fields and columns

    def _first_layers(self) -> Float32s:
        """Return the layers of a score behind the inputs: their biases are 0."""
        units = (*self.embeddings.units, 1)
        if len(units) == 1:
            return np.zeros(0, np.float32)
        parts = [np.zeros(units[0], np.float32)]
        for layer, (inputs, outputs) in enumerate(pairwise(units)):
            is_last = layer == len(units) - 2
            deviation = self._layout.DEVIATION_OF_OUTPUT if is_last else np.sqrt(2.0 / inputs)
            drawn = _drawn(_OF_LAYERS + layer, np.arange(inputs), outputs)
            parts.append((deviation * drawn).astype(np.float32).ravel())
            if not is_last:
                parts.append(np.zeros(outputs, np.float32))
        return np.concatenate(parts)

    def add_fields(self, count: int) -> None:
        """Add this number of fields; they have the next numbers."""
        first, factors = self.fields, self.embeddings.factors
        self.fields += count
        vectors = self._first_vectors(_OF_VECTORS, np.arange(first, self.fields))
        inputs = _drawn(_OF_FIELD_INPUTS, np.arange(first * factors, self.fields * factors), self._units)
        self._add("fields", "commons", vectors, inputs.reshape(count, factors * self._units))

    def add_numeric(self, count: int) -> None:
        """Add this number of numeric columns."""
        first = self.numeric
        self.numeric += count
        new = np.arange(first, self.numeric)
        numbers = np.zeros((count, 2, self.heads, self.embeddings.width), np.float32)
        numbers[:, 0, :, 1:] = self._first_vectors(_OF_NUMBERS, new)
        numbers[:, 1] = self._layout.SQUARES_AT_FIRST
        statistics = np.append(self.arrays.statistics, np.zeros(count * self._row_steps.STATISTICS))
        self.arrays = self.arrays._replace(statistics=statistics)
        self._add("numbers", "numbers", numbers, _drawn(_OF_NUMBER_INPUTS, new, self._units))

    @property
    def _units(self) -> int:
        """The number of units of the first layer, 0 without one."""
        return (*self.embeddings.units, 0)[0]

    def _first_vectors(self, which: int, rows: Integers) -> Float32s:
        """Return the first vectors of all heads, for fields, columns or keys.

        They are the same for all scores, whether the field or the score comes first: batches may be cut in other ways.
        """
        factors = self.embeddings.factors
        drawn = _drawn(which, rows, self.experts * factors) * self._layout.DEVIATION_OF_VECTORS
        by_expert = drawn.astype(np.float32).reshape(len(rows), self.experts, factors)
        return by_expert.repeat(self.scores, axis=1)

    def _add(self, inputs: str, of_vectors: str, numbers: Float32s, drawn: Floats) -> None:
        """Add vectors, and the weights of the first layer for them, which are drawn for each field or column."""
        layout, arrays = self._layout, self.arrays._asdict()
        weights, squares = f"weights_of_{inputs}", f"squares_of_{inputs}"
        scale = np.sqrt(2.0 / (_FIELDS_OF_A_LAYER * self.embeddings.factors))
        arrays[of_vectors] = np.append(arrays[of_vectors], numbers)
        first = np.tile((drawn * scale).astype(np.float32), self.scores)
        arrays[weights] = np.append(arrays[weights], first)
        arrays[squares] = np.append(arrays[squares], np.full(first.size, layout.SQUARES_AT_FIRST, np.float32))
        self.arrays = layout.EmbeddingArrays(**arrays)
        facts = self.arrays.facts
        facts[layout.FIELD_COUNT], facts[layout.COLUMN_COUNT] = self.fields, self.numeric

    # ---- steps

    def step(self, rows: ModelRows, steps: RowSteps, targets: Floats, asked: Floats) -> Floats:
        """Predict and learn rows of keys; return the predictions of both experts for each step: by head.

        ``asked`` has the predictions of each question. A step that predicts a question writes them there.
        """
        predictions = np.zeros((len(steps.rows), self.heads))
        indptr = plain(rows.indptr, np.intp)
        self._steps.step_embeddings(
            self.table.arrays,
            self.arrays,
            self._room(int(np.diff(indptr).max(initial=0))),
            indptr,
            plain(rows.indices, np.intp),
            plain(rows.values, np.float64),
            plain(steps.rows, np.intp),
            actions_of(steps, self.task),
            plain(targets, np.float64),
            plain(steps.weights, np.float64),
            plain(steps.questions, np.intp),
            asked,
            predictions,
        )
        return predictions

    def without_columns(self, rows: ModelRows, columns: Collection[int]) -> ModelRows:
        """Return the rows without these numeric columns."""
        if not columns:
            return rows
        return rows.with_values(~np.isin(rows.indices - BEHIND_KEYS - 1, list(columns)))

    def _room(self, features: int) -> Any:
        """Return memory for the work on rows with at most this number of features."""
        factors, units = self.heads * self.embeddings.factors, self.scores * sum(self.embeddings.units)
        whole = [np.empty(size, np.int64) for size in (2, *[features] * 4)]
        sizes = (features, self.heads, features * factors, 2 * factors, factors, units, units)
        floats = [np.empty(size, np.float32) for size in sizes]
        return self._layout.RowRoom._make((*whole, *floats, np.empty(2 * self.heads)))

    def raise_rates(self) -> None:
        """Reduce the sums of squared gradients, so that rates that have become small are large again."""
        arrays = self.arrays
        for squares in (arrays.squares_of_fields, arrays.squares_of_numbers, arrays.squares_of_layers):
            squares *= np.float32(SQUARES_KEPT)
        self._numbers()[:, 1] *= np.float32(SQUARES_KEPT)
        arrays.intercepts[self.heads :] *= SQUARES_KEPT
        self.table.scale_squares(SQUARES_KEPT)

    def standardize_as(self, linear: ExpertWeights) -> None:
        """Take over the statistics of the numeric columns, and of the targets, of another model."""
        self.arrays.statistics[:] = linear.statistics_of_numbers().ravel()
        self.arrays.totals[:] = linear.totals

    # ---- scores

    def with_scores(self, sources: Sequence[int | None]) -> EmbeddingWeights:
        """Return members for several classes, each of which begins with one of these scores; None: with nothing.

        They have another table, with the same features, as far as there is room.
        """
        made, layout = EmbeddingWeights(self.embeddings, "classes", len(sources)), self._layout
        made.add_fields(self.fields - made.fields)
        made.add_numeric(self.numeric)
        blocks = {
            "commons": self.fields * self.experts,
            "numbers": self.numeric * 2 * self.experts,
            "weights_of_fields": self.fields,
            "squares_of_fields": self.fields,
            "weights_of_numbers": self.numeric,
            "squares_of_numbers": self.numeric,
            "layers": 1,
            "squares_of_layers": 1,
            "intercepts": 2 * self.experts,
        }
        for name, count in blocks.items():
            self._take_scores(getattr(self.arrays, name), sources, getattr(made.arrays, name), count)
        made.arrays.statistics[:], made.arrays.totals[:] = self.arrays.statistics, self.arrays.totals
        made.arrays.facts[layout.TIME_MS] = self.arrays.facts[layout.TIME_MS]
        parts = ((0, made._part_of(self, part, sources)) for part in self.table.parts())
        made.table.restore_parts(self.table.totals(), parts)
        return made

    def begin_class(self, score: int, intercept: float) -> None:
        """Begin a score with this intercept."""
        self.arrays.intercepts[: self.heads].reshape(self.experts, self.scores)[:, score] = intercept

    def _part_of(
        self, earlier: EmbeddingWeights, part: Mapping[str, Any], sources: Sequence[int | None]
    ) -> dict[str, Any]:
        """Return a part of the table of earlier members as one of these."""
        table, keys, two = self.table, part["keys"][part["is admitted"]], 2 * self.experts
        weights = np.zeros((len(part["keys"]), 2 * self.heads), np.float32)
        rows = np.zeros((len(keys), 2 * table.width), np.float32)
        rows[:, : table.width] = self._first_vectors(_OF_FEATURES, keys).reshape(len(keys), table.width)
        weights[:, self.heads :] = rows[:, table.width :] = self._layout.SQUARES_AT_FIRST
        early = np.zeros((len(part["early"]), table.early_bytes), np.int8)
        earlier._take_scores(part["weights"], sources, weights, two * len(weights))
        earlier._take_scores(part["rows"], sources, rows, two * len(rows))
        earlier._take_scores(part["early"], sources, early, len(early))
        return {**part, "weights": weights, "rows": rows, "early": early}

    def _take_scores(self, given: Any, sources: Sequence[int | None], new: Any, blocks: int) -> None:
        """Put the numbers of the ``sources`` in each block of ``given`` into the blocks of new scores."""
        if new.size:
            own, of_new = given.reshape(blocks, self.scores, -1), new.reshape(blocks, len(sources), -1)
            for score, source in enumerate(sources):
                if source is not None:
                    of_new[:, score] = own[:, source]

    # ---- publishing and state

    def _commons(self) -> Float32s:
        """Return by field the vectors of all heads."""
        return self.arrays.commons.reshape(self.fields, self.heads, self.embeddings.factors)

    def _numbers(self) -> Float32s:
        """Return by column the weights and vectors, then their sums of squares, by head."""
        return self.arrays.numbers.reshape(self.numeric, 2, self.heads, self.embeddings.width)

    def published(
        self, names: Sequence[str], dead: Sequence[int], unused: Collection[int], shares: Floats
    ) -> dict[str, Any]:
        """Return the experts as they are served, with the names of their fields of texts, and without ``dead`` columns.

        ``shares`` are those of the experts in the mixture, and ``unused`` the columns that they do not see.
        """
        keys, row_of, weights, vectors, early = self.table.entries()
        counts = self.table.counts()
        arrays, factors, is_number = self.arrays, self.embeddings.factors, self.task == "number"
        totals, time_ms = arrays.totals, int(arrays.facts[self._layout.TIME_MS])
        scale = float(np.sqrt(totals[3] / totals[0])) if is_number and totals[0] > 0.0 else float(not is_number)
        is_used = ~np.isin(np.arange(self.numeric), list(unused))
        numbers = np.delete(self._numbers()[:, 0] * is_used[:, None, None], dead, axis=0)
        middle = float(totals[2]) if is_number else 0.0
        experts = [
            {
                "weights": weights[:, head].copy(),
                "vectors": vectors[:, head * factors : (head + 1) * factors].copy(),
                "commons": self._commons()[:, head].copy(),
                "numbers": numbers[:, head].copy(),
                "products": head >= self.scores or self.embeddings.kind != "wide and deep",
                "layers": self._published_layers(head, dead, is_used) if head < self.scores else [],
                "early_steps": self._steps.early_steps(head // self.scores),
                "intercept": middle + scale * float(arrays.intercepts[head]),
                "share": float(shares[head // self.scores]),
            }
            for head in range(self.heads)
        ]
        return {
            "kind": self.embeddings.kind,
            "factors": factors,
            "text_fields": list(names),
            "keys": keys,
            "admitted": keys[row_of > 0],
            "early": (early if early.any() else early[:0]).view(np.uint8),
            "scale": scale,
            **({"scores": self.scores} if self.task == "classes" else {}),
            "experts": experts,
            "expired": counts.expired,
            "evicted": counts.evicted,
            **({} if time_ms == self._layout.NO_TIME else {"time_ms": time_ms}),
        }

    def _published_layers(self, score: int, dead: Sequence[int], is_used: Truths) -> list[dict[str, Float32s]]:
        arrays, units = self.arrays, (*self.embeddings.units, 1)
        if len(units) == 1:
            return []
        of_fields = arrays.weights_of_fields.reshape(self.fields, self.scores, -1, units[0])[:, score]
        of_numbers = arrays.weights_of_numbers.reshape(self.numeric, self.scores, units[0])[:, score]
        of_numbers = np.delete(of_numbers * is_used[:, None], dead, axis=0)
        own, at = arrays.layers.reshape(self.scores, -1)[score], units[0]
        weights = np.concatenate([of_fields.reshape(-1, units[0]), of_numbers])
        layers = [{"weights": weights, "bias": own[:at].copy()}]
        for inputs, outputs in pairwise(units):
            stop = at + inputs * outputs
            weights, bias = own[at:stop].reshape(inputs, outputs).copy(), own[stop : stop + outputs]
            layers.append({"weights": weights, "bias": bias.copy()})
            at = stop + outputs
        layers[-1]["bias"] = np.zeros(1, np.float32)  # The intercept is the bias of the output.
        return layers

    def start_from(self, published: Mapping[str, Any], linear: ExpertWeights) -> None:
        """Take on published experts of the same settings, beside a linear model that has begun with its version.

        The last occurrence of all features was at the time of the version.
        """
        arrays, experts, learned = self.arrays, published["experts"], ROWS_OF_A_START / 4
        self.standardize_as(linear)
        scale, middle = 1.0, 0.0
        if self.task == "number":
            scale, middle = float(published["scale"]), float(linear.totals[2])
            arrays.totals[3] = arrays.totals[0] * scale**2
        for head, given in enumerate(experts):
            arrays.intercepts[head] = (given["intercept"] - middle) / scale if scale > 0.0 else 0.0
            self._commons()[:, head], self._numbers()[:, 0, head] = given["commons"], given["numbers"]
        arrays.intercepts[self.heads :] = learned
        self._numbers()[:, 1] = learned
        if experts[0]["layers"]:
            for score in range(self.scores):
                self._start_layers_from(score, experts[score]["layers"])
            for squares in (arrays.squares_of_fields, arrays.squares_of_numbers, arrays.squares_of_layers):
                squares[:] = learned
        time_ms = published.get("time_ms", UNKNOWN_TIME)
        arrays.facts[self._layout.TIME_MS] = published.get("time_ms", self._layout.NO_TIME)
        weights = np.stack([given["weights"] for given in experts], axis=1)
        vectors = np.concatenate([given["vectors"] for given in experts], axis=1)
        row_of = np.isin(published["keys"], published["admitted"])
        early = np.zeros((len(row_of), self.table.early_bytes), np.int8)
        if len(given := np.asarray(published["early"], np.uint8)):
            early = given.view(np.int8)
        first = self._layout.SQUARES_AT_FIRST
        self.table.start_from(published["keys"], row_of, weights, vectors, early, time_ms, first)

    def _start_layers_from(self, score: int, layers: Sequence[Mapping[str, Any]]) -> None:
        arrays, units, inputs = self.arrays, self._units, self.fields * self.embeddings.factors
        of_inputs = np.asarray(layers[0]["weights"])
        of_fields = of_inputs[:inputs].reshape(self.fields, -1, units)
        arrays.weights_of_fields.reshape(self.fields, self.scores, -1, units)[:, score] = of_fields
        arrays.weights_of_numbers.reshape(self.numeric, self.scores, units)[:, score] = of_inputs[inputs:]
        parts = [np.ravel(layers[0]["bias"])]
        for layer in layers[1:]:
            parts += [np.ravel(layer["weights"]), np.ravel(layer["bias"])]
        arrays.layers.reshape(self.scores, -1)[score] = np.concatenate(parts[:-1])

    def state(self, *, frozen: bool = False) -> dict[str, Any]:
        """Return a copy of the state as plain data; a large table may be a piece of files, if it is ``frozen``."""
        arrays = {name: array.copy() for name, array in self.arrays._asdict().items() if name not in ("facts", "units")}
        return {
            **self.embeddings.definition(),
            "fields": self.fields,
            "numeric": self.numeric,
            "time": int(self.arrays.facts[self._layout.TIME_MS]),
            "arrays": arrays,
            "table": self._files.snapshot() if frozen else self.table.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state` of the same settings; this is a new member, without columns."""
        self.add_fields(state["fields"] - self.fields)
        self.add_numeric(state["numeric"] - self.numeric)
        for name, array in state["arrays"].items():
            own = getattr(self.arrays, name)
            if own.shape != np.shape(array):
                raise ModelError(
                    f"AdaptiveLinearModel: expected {own.shape} numbers of {name!r} of embeddings, given "
                    f"{np.shape(array)}; the state is damaged, use another one"
                )
            own[:] = array
        self.arrays.facts[self._layout.TIME_MS] = state["time"]
        self._files.restore(state["table"])


def fold_rows(rows: ModelRows, places: int) -> ModelRows:
    """Return rows of keys as rows of hashed places, of which there are ``places``, as without embeddings."""
    from streamiter.learn.ready_made import embedding_steps

    indptr = np.zeros(len(rows.indptr), np.intp)
    indices, values = np.empty(len(rows.indices), np.intp), np.empty(len(rows.values))
    count = embedding_steps.fold_keys(
        plain(rows.indptr, np.intp),
        plain(rows.indices, np.intp),
        plain(rows.values, np.float64),
        places,
        indptr,
        indices,
        values,
    )
    return ModelRows(indptr, indices[:count], values[:count])


def _drawn(which: int, rows: Integers, columns: int) -> Floats:
    """Return numbers with mean 0 and deviation 1, nearly normal, for these rows.

    They are made of hashes alone, by exact arithmetic, so each row has the same on all machines, whenever it is added.
    """
    row, column = rows.astype(np.uint64)[:, None], np.arange(columns, dtype=np.uint64)[None, :]
    total = np.full((len(rows), columns), -2.0)
    for part in range(4):
        base = np.uint64((which * 4 + part + 1) << 56)
        hashes = drawn_hashes(base ^ (row << np.uint64(20)) ^ column)
        total += (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray(total * np.sqrt(3.0))
