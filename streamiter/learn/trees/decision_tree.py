"""Decision trees: ``DecisionTree``, the tree as arrays, and the checks of its training rows.

Each inner node of a tree asks a question such as ``width ≤ 2.5``; each leaf has an answer, a class or a number. The
module ``tree_growing`` grows trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, shortened
from streamiter.flow.flow import Flow
from streamiter.learn.estimators import check_fit, examples_in_topic, run_offline
from streamiter.learn.rows import (
    Examples,
    Extract,
    Features,
    checked_rows,
    dense_features,
    holds,
    joined_examples,
    refuse_not_finite,
    refuse_rows_unless,
    row_vector,
    row_weights,
)
from streamiter.learn.trees.tree_growing import Growing, TreeOptions, grow_tree
from streamiter.models.saved_objects import Savable
from streamiter.operators.declared_state import COPIED, DeclaredState, Form, declared
from streamiter.topics.topic import Decoder, Topic
from streamiter.values.numbers import Floats, Indices, one_of, whole_number
from streamiter.values.records import Columns
from streamiter.values.tables import array_of, as_floats

TreeTask = Literal["classification", "regression"]


_NAME: Final = "DecisionTree"


_BINS_LIMIT: Final = 1 << 16  # The number of a bin fits into two bytes.


_TREE: Final = Form(
    lambda tree: {name: array.copy() for name, array in tree.as_plain_data().items()},
    lambda arrays: Tree.from_plain_data(arrays),
)


class DecisionTree(DeclaredState, Savable):
    """A tree of questions such as ``width ≤ 2.5``, each chosen so that it divides the rows best.

    ``task`` is ``"classification"`` (by Gini impurity) or ``"regression"`` (by variance). The tree grows level by
    level, and is at most ``maximum_depth`` questions deep. Each side of a question keeps at least ``minimum_rows``
    rows. A question lowers the impurity, as a mean over all rows, by more than 0 and by at least ``minimum_gain``. A
    feature with at most ``maximum_bins`` distinct values is divided between any two of them, another feature between
    ``maximum_bins`` quantiles. ``feature_names`` are for ``print(tree)``.

    The tree grows in a bounded iteration of workers, each with a part of the rows. With any number of workers the tree
    is the same, to the last bit.

    >>> features = [[1.4, 0.2], [1.3, 0.3], [4.7, 1.4], [4.5, 1.5], [6.0, 2.5], [5.9, 2.1]]
    >>> species = ["setosa", "setosa", "versicolor", "versicolor", "virginica", "virginica"]
    >>> tree = DecisionTree(feature_names=["length", "width"]).fit(features, species)
    >>> print(tree)
    length ≤ 2.95: setosa (2 rows)
    length > 2.95
    │   length ≤ 5.3: versicolor (2 rows)
    │   length > 5.3: virginica (2 rows)
    >>> tree.predict([[1.5, 0.1], [5.5, 2.0]]).tolist()
    ['setosa', 'virginica']
    """

    _tree: Tree | None = declared(None, form=_TREE)
    _width = declared(0)
    _classes: npt.NDArray[Any] | None = declared(None, form=COPIED)

    def __init__(
        self,
        task: TreeTask = "classification",
        *,
        maximum_depth: int = 8,
        minimum_rows: int = 1,
        minimum_gain: float = 0.0,
        maximum_bins: int = 256,
        feature_names: Sequence[str] | None = None,
    ) -> None:
        one_of(f"{_NAME}(task=)", task, "classification", "regression")
        self.task: TreeTask = task
        self.maximum_depth = whole_number(f"{_NAME}(maximum_depth=)", maximum_depth, 1)
        self.minimum_rows = whole_number(f"{_NAME}(minimum_rows=)", minimum_rows, 1)
        self.minimum_gain = _gain(minimum_gain)
        self.maximum_bins = whole_number(f"{_NAME}(maximum_bins=)", maximum_bins, 2, _BINS_LIMIT)
        self.feature_names = None if feature_names is None else list(map(str, feature_names))

    # ---- learning

    def fit(
        self,
        features: Features | Topic,
        labels: npt.ArrayLike | None = None,
        sample_weights: npt.ArrayLike | None = None,
        *,
        decode: Decoder | None = None,
        extract: Extract | None = None,
        parallelism: int = 1,
        progress: bool | None = None,
    ) -> Self:
        """Grow a new tree for these rows, or for the records that are in a topic now; return this object.

        ``features`` is a matrix (rows, features) of finite numbers or ``SparseRows``. ``labels`` has a class for each
        row (a whole number or a text), or a number for regression. Rows of weight 0 are ignored. ``parallelism``
        subtasks share the work, and hold all rows in memory, dense.

        For a topic, ``decode`` decodes its values, and ``extract(batch)`` returns the ``Examples`` of a batch of
        records; the records of libsvm and dummy files need no ``extract``.

        On a terminal a bar shows the levels (``progress`` True: everywhere, False: never). Ctrl-C ends the fit with the
        tree so far; while the flow reads rows, it raises KeyboardInterrupt.

        Raises ModelError for rows that cannot be learned from, JobFailed for records that cannot be read; then the old
        tree is kept.
        """
        title = f"{_NAME}.fit"
        arrays = {"labels": labels, "sample_weights": sample_weights}
        check_fit(title, features, parallelism, decode=decode, extract=extract, **arrays)
        if isinstance(features, Topic):
            examples = joined_examples(_NAME, examples_in_topic(features, decode, extract, owner=title))
        else:
            if labels is None:
                raise ModelError(f"{title}: expected labels, one for each row, given none; pass them second")
            examples = Examples(features, labels, sample_weights)
        rows = _training_rows(examples, self.task, self.feature_names)
        options = TreeOptions(
            classes=None if rows.classes is None else len(rows.classes),
            maximum_depth=self.maximum_depth,
            minimum_rows=self.minimum_rows,
            minimum_gain=self.minimum_gain,
            maximum_bins=self.maximum_bins,
        )
        self._tree = self._grown(rows.columns, options, parallelism, progress)
        self._width, self._classes = rows.columns["features"].shape[1], rows.classes
        return self

    def _grown(self, rows: Columns, options: TreeOptions, parallelism: int, progress: bool | None) -> Tree:
        flow = Flow(f"{_NAME}.fit", parallelism)
        outputs = grow_tree(flow.from_items(rows, name="rows"), options)
        grown, leaves = outputs["tree"].collect(), outputs["leaves"].collect()
        run_offline(
            flow,
            title=flow.name,
            rounds=self.maximum_depth + 1,
            progress=progress,
            describe=lambda: f"{leaves.items[-1]} leaves" if len(leaves) else "",
        )
        if not grown.items:  # Ctrl-C arrived before the rows were summarized.
            raise KeyboardInterrupt
        [last] = grown.items
        return grown_tree(last, options)

    # ---- predicting

    def predict(self, features: Features) -> npt.NDArray[Any]:
        """Return the class, or the number, for each row."""
        values = self._values(features)
        if self._classes is None:
            return values[:, 0]
        predicted: npt.NDArray[Any] = self._classes[values.argmax(axis=1)]
        return predicted

    def predict_probability(self, features: Features) -> Floats:
        """Return the probability of each class for each row: an array (rows, classes), in the order of ``classes``."""
        if self.task != "classification":
            raise ModelError(
                f"{_NAME}.predict_probability: expected a tree for classes, given one for regression; use predict"
            )
        return self._values(features)

    def _values(self, features: Features) -> Floats:
        tree = self._fitted()
        rows = as_floats(_NAME, "features", dense_features(features))
        checked_rows(_NAME, rows, self._width)
        refuse_not_finite(_NAME, rows)
        return tree.values[tree.leaves_of(rows)]

    # ---- reading the tree

    @property
    def classes(self) -> npt.NDArray[Any]:
        """The classes, in ascending order."""
        self._fitted()
        if self._classes is None:
            raise ModelError(f"{_NAME}.classes: expected a tree for classes, given one for regression; use predict")
        return self._classes

    @property
    def depth(self) -> int:
        """The largest number of questions for one row."""
        return self._fitted().depth

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return self._fitted().leaves

    def __str__(self) -> str:
        if self._tree is None:
            return repr(self)
        return "\n".join(tree_lines(self._tree, self.feature_names, self._described))

    def _described(self, leaf: int) -> str:
        tree = self._fitted()
        rows = f"{tree.rows[leaf]:,} row{'s' if tree.rows[leaf] != 1 else ''}"
        if self._classes is None:
            return f"{tree.values[leaf, 0]:.6g} ({rows})"
        shares = tree.values[leaf]
        # Rounded down to a tenth of a percent: a leaf with several classes never shows 100 %.
        percent = np.floor(1_000 * shares.max() + 1e-9) / 10
        share = "" if shares.max() == 1.0 else f", {percent:g}%"
        return f"{self._classes[shares.argmax()]} ({rows}{share})"

    def __repr__(self) -> str:
        if self._tree is None:
            return f"{_NAME}({self.task!r}, not fitted)"
        return f"{_NAME}({self.task!r}, depth {self.depth}, {self.leaves} leaves)"

    def _fitted(self) -> Tree:
        if self._tree is None:
            raise ModelError(f"{_NAME}: expected a fitted tree, given one without a fit; call fit first")
        return self._tree

    # ---- saving the tree

    def parameters(self) -> dict[str, Any]:
        """Return the tree and the settings that predictions need, as plain data."""
        tree = self._fitted()
        return {
            "task": self.task,
            "width": self._width,
            "classes": self._classes,
            "feature_names": self.feature_names,
            "tree": tree.as_plain_data(),
        }

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Return a tree that predicts like the tree that returned these :meth:`parameters`."""
        if missing := {"task", "width", "classes", "feature_names", "tree"} - parameters.keys():
            raise ModelError(
                f"{_NAME}.from_parameters: expected the result of parameters(), given one without {sorted(missing)}; "
                "give all of parameters()"
            )
        tree = cls(parameters["task"], feature_names=parameters["feature_names"])
        tree.restore(parameters)
        return tree


def _gain(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < np.inf:
        raise ConfigurationError(
            f"{_NAME}(minimum_gain=): expected a finite number of at least 0, given {given!r}; 0 takes every gain"
        )
    return float(given)


class _TrainingRows(NamedTuple):
    """The rows with a weight above 0, checked."""

    columns: Columns
    """``features``, a matrix; ``label``, a number or the number of a class; ``weight``."""
    classes: npt.NDArray[Any] | None
    """The classes in ascending order; None for regression."""


def _training_rows(examples: Examples, task: TreeTask, feature_names: Sequence[str] | None) -> _TrainingRows:
    """Return the checked rows. Raises ModelError for examples that a tree cannot learn from."""
    matrix = _matrix(examples.features, feature_names)
    given = np.ones(len(matrix)) if examples.weights is None else examples.weights
    weights = row_weights(_NAME, given, len(matrix))
    classes, labels = _classes_and_labels(task, examples.targets, len(matrix))
    if not holds(counting := weights > 0):
        if not counting.any():
            raise ModelError(
                f"{_NAME}: expected a row with a sample weight above 0, given none; give some of them such a weight"
            )
        matrix, labels, weights = matrix[counting], labels[counting], weights[counting]
    return _TrainingRows(Columns({"features": matrix, "label": labels, "weight": weights}), classes)


def _matrix(features: Features, feature_names: Sequence[str] | None) -> Floats:
    matrix = as_floats(_NAME, "features", dense_features(features))
    if matrix.ndim != 2 or not matrix.size:
        raise ModelError(
            f"{_NAME}: expected features as a matrix (rows, features) with at least one of each, given shape "
            f"{matrix.shape}; give a row for each label"
        )
    if feature_names is not None and len(feature_names) != matrix.shape[1]:
        raise ModelError(
            f"{_NAME}: expected as many features as feature_names, {len(feature_names)}, given "
            f"{matrix.shape[1]}; name each of them"
        )
    refuse_not_finite(_NAME, matrix)
    return matrix


def _classes_and_labels(task: TreeTask, labels: npt.ArrayLike, length: int) -> tuple[npt.NDArray[Any] | None, Floats]:
    """Return the classes, and for each row the number of its class; for regression None, and the labels."""
    if task == "classification":
        classes, of_rows = np.unique(_checked_classes(labels, length), return_inverse=True)
        return classes, of_rows.astype(np.float64)
    numbers = row_vector(_NAME, "labels", labels, length)
    refuse_rows_unless(np.isfinite(numbers), _NAME, "finite labels", numbers)
    return None, numbers


def _checked_classes(labels: npt.ArrayLike, length: int) -> npt.NDArray[Any]:
    given = array_of(f"{_NAME}: labels", labels)
    if given.shape != (length,):
        raise ModelError(
            f"{_NAME}: expected {length} labels, one for each row, given shape {given.shape}; give each row a class"
        )
    if given.dtype.kind == "f":
        expected = 'classes, whole numbers or texts (or task="regression" for any number)'
        refuse_rows_unless(np.isfinite(given) & (given == np.rint(given)), _NAME, expected, given)
    elif given.dtype.kind not in "biuU":
        raise ModelError(
            f"{_NAME}: expected classes to be whole numbers or texts, given {shortened(given[0])}; give each class "
            "a number or a name"
        )
    return given


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree as arrays, with an entry for each node; node 0 is the root.

    A row whose feature is at most the threshold continues at node ``child``, other rows at node ``child + 1``.

    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> tree.leaves_of(np.array([[9.0, 2.0], [9.0, 3.0]])).tolist(), tree.depth, tree.leaves
    ([1, 2], 1, 2)
    """

    feature: Indices
    """The number of the feature that each node asks about; -1 for a leaf."""
    threshold: Floats
    """The number that this feature is compared with."""
    child: Indices
    """The number of the first of the two child nodes."""
    rows: Indices
    """The number of rows that reached each node when the tree grew."""
    values: Floats
    """An array (nodes, values): the probability of each class, or the one number to predict."""

    def leaves_of(self, features: Floats) -> Indices:
        """Return the leaf of each row of a matrix (rows, features)."""
        nodes = np.zeros(len(features), dtype=np.intp)
        rows = np.arange(len(features))
        while len(rows := rows[self.feature[nodes[rows]] >= 0]):
            at = nodes[rows]
            right = features[rows, self.feature[at]] > self.threshold[at]
            nodes[rows] = self.child[at] + right
        return nodes

    @property
    def depths(self) -> Indices:
        """The distance of each node from the root."""
        depths = np.zeros(len(self.feature), dtype=np.intp)
        for node in np.flatnonzero(self.feature >= 0):  # Children have higher numbers than their parents.
            child = self.child[node]
            depths[child : child + 2] = depths[node] + 1
        return depths

    @property
    def depth(self) -> int:
        """The number of questions between the root and the farthest leaf."""
        return int(self.depths.max())

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return int(np.count_nonzero(self.feature < 0))

    def as_plain_data(self) -> dict[str, Indices | Floats]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain_data(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Tree:
        """Return the tree that :meth:`as_plain_data` returned."""
        return cls(*(arrays[name] for name in cls.__slots__))


def grown_tree(grown: Growing, options: TreeOptions) -> Tree:
    """Return the tree, with the predictions of its nodes, from the last state of the owner."""
    arrays, plan, criterion = grown["tree"], grown["plan"], options.criterion()
    statistics = arrays["statistics"]
    return Tree(
        feature=arrays["feature"],
        threshold=arrays["threshold"],
        child=arrays["child"],
        rows=criterion.rows(statistics).astype(np.intp),
        values=criterion.values(statistics) * plan["scale"] + plan["center"],
    )


_INDENT: Final = "│   "


def tree_lines(tree: Tree, feature_names: Sequence[str] | None, describe_leaf: Callable[[int], str]) -> Iterator[str]:
    """Yield a line for each branch: its question, then the leaf. Branches below it follow in the next lines.

    >>> import numpy as np
    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> for line in tree_lines(tree, ["length", "width"], lambda leaf: f"leaf {leaf}"):
    ...     print(line)
    width ≤ 2.5: leaf 1
    width > 2.5: leaf 2
    """
    if tree.feature[0] < 0:
        yield describe_leaf(0)
        return
    waiting = list(reversed(_branches(tree, 0, 0)))
    while waiting:
        node, sign, parent, indent = waiting.pop()
        feature = tree.feature[parent]
        name = f"x[{feature}]" if feature_names is None else feature_names[feature]
        branch = f"{_INDENT * indent}{name} {sign} {tree.threshold[parent]:.6g}"
        if tree.feature[node] < 0:
            yield f"{branch}: {describe_leaf(node)}"
        else:
            yield branch
            waiting.extend(reversed(_branches(tree, node, indent + 1)))


def _branches(tree: Tree, node: int, indent: int) -> list[tuple[int, str, int, int]]:
    child = int(tree.child[node])
    return [(child, "≤", node, indent), (child + 1, ">", node, indent)]
