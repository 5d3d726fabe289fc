"""Optimizers as psfs on blocks of many shapes, compared with the same rule on whole rows."""

import numpy as np
import pytest
from optimizers import written_out
from parameter_server.psf.on_blocks import InBlocks

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    GradientDescent,
    InverseSquareRoot,
    Momentum,
    RMSProp,
)
from streamiter.parameter_server.psf.optimize import InitialSlots, Optimize
from streamiter.parameter_server.storage import make_block
from streamiter.parameter_server.storage.block import BlockRow

COLUMNS = 23
RULES = [
    SGD(InverseSquareRoot(0.3), l1=0.02, l2=0.1),
    GradientDescent(0.1, l1=0.02, l2=0.3),
    FTRL(0.3, 0.1, l1=0.05, l2=0.1),
    Momentum(0.1, l1=0.02, l2=0.1),
    AdaGrad(0.3, l1=0.02, l2=0.1),
    RMSProp(0.1, l1=0.02, l2=0.1),
    AdaDelta(epsilon=1e-2, l1=0.01, l2=0.1),
    Adam(InverseSquareRoot(0.3), l1=0.02, l2=0.1),
]
WIDTHS = [COLUMNS, 12, 5, 1]


class Blocks(InBlocks):
    """All blocks of one matrix."""

    def __init__(self, rows, *, width=COLUMNS, dtype="float64", sparse=False):
        super().__init__(Matrix("w", rows, COLUMNS, dtype, sparse=sparse, block=(rows, width)), 2)

    def add(self, row, values, columns=None):
        columns = np.arange(COLUMNS) if columns is None else np.asarray(columns)
        for block, mine, positions in self.partitioning.split(row, columns):
            self.blocks[block.number].add(row, mine, np.asarray(values)[positions].astype(self.matrix.dtype))

    def row(self, row):
        return self.values()[row]

    def updates(self):
        return [block.updates for block in self.blocks]


@pytest.fixture
def gradients():
    """Return an array of steps × columns; about half of the columns have a gradient in each step."""
    random = np.random.default_rng(8)
    return random.normal(size=(15, COLUMNS)) * (random.random((15, COLUMNS)) < 0.5)


def start(dtype="float64"):
    return np.random.default_rng(9).normal(size=COLUMNS).astype(dtype)


def on_whole_rows(rule, gradients, *, named_only, dtype="float64"):
    """Return the weights and then all slots after direct calls of the rule."""
    weights = start(dtype)
    slots = rule.new_slots(weights)
    for step, gradient in enumerate(gradients.astype(dtype), start=1):
        if named_only:
            at = np.flatnonzero(gradient)
            rule.update_at(at, weights, gradient[at], slots, step)
        else:
            rule.update(weights, gradient, slots, step)
    return [weights, *(slots[name] for name in rule.slot_names)]


def on_blocks(rule, gradients, **settings):
    """Return the same after updates of blocks; ``settings`` are those of ``Blocks``, and ``named_only``."""
    named_only = settings.pop("named_only", False)
    blocks = Blocks(Optimize.rows_needed(rule), **settings)
    optimize = Optimize("w", rule, sparse=named_only)
    blocks.add(0, start())
    for gradient in gradients:
        at = np.flatnonzero(gradient)
        half = gradient[at] / 2
        blocks.add(optimize.gradient_row(), half, at)
        blocks.add(optimize.gradient_row(), half, at)  # the gradient of another worker
        blocks.update(optimize)
    assert not blocks.row(optimize.gradient_row()).any()
    assert blocks.updates() == [len(gradients)] * len(blocks.blocks)
    return [blocks.row(row) for row in range(1 + len(rule.slot_names))]


def pairs(rule):
    """Yield each width of blocks with a dtype and a kind of matrix; over all rules, each pair of these four occurs."""
    number = RULES.index(rule)
    for place, width in enumerate(WIDTHS):
        yield width, ("float64", "float32")[(number + place) % 2], bool((number // 2 + place) % 2)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_blocks_of_any_shape_give_what_the_rule_gives_on_the_whole_row(rule, gradients):
    """A block that counted its own steps, or took the l2 of other columns, learned other weights."""
    for width, dtype, _ in pairs(rule):
        given = on_blocks(rule, gradients, width=width, dtype=dtype)
        expected = on_whole_rows(rule, gradients, named_only=False, dtype=dtype)
        assert [row.tobytes() for row in given] == [row.tobytes() for row in expected], (width, dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sparse_updates_touch_only_columns_with_a_gradient(rule, gradients):
    """Momentum and l2 moved millions of weights that no worker had named."""
    for width, dtype, sparse in pairs(rule):
        given = on_blocks(rule, gradients, width=width, dtype=dtype, sparse=sparse, named_only=not sparse)
        expected = on_whole_rows(rule, gradients, named_only=True, dtype=dtype)
        assert [row.tobytes() for row in given] == [row.tobytes() for row in expected], (width, dtype, sparse)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_of_several_pieces_is_updated_to_its_end(sparse):
    """The last, shorter piece of a row, or a piece without any gradient, was updated wrongly."""
    columns = 100_000
    matrix = Matrix("w", 4, columns, "float32")
    block = make_block(matrix, MatrixPartitioning(matrix, 1).blocks[0])
    random = np.random.default_rng(1)
    weights, gradient = random.normal(size=(2, columns)).astype(np.float32)
    gradient[32_000:66_000] = 0.0
    rule = Adam(0.1, l1=0.1)
    slots = rule.new_slots(weights)
    block.put(0, None, weights)
    for step in range(1, 4):
        block.add(3, None, gradient)
        Optimize("w", rule, sparse=sparse).partition_update(block, None)
        at = np.flatnonzero(gradient) if sparse else np.arange(columns)
        rule.update_at(at, weights, gradient[at], slots, step)
    rows = [weights, slots["m"], slots["v"], np.zeros(columns, np.float32)]
    assert [block.get(row, None).tobytes() for row in range(4)] == [row.tobytes() for row in rows]
    assert block.updates == 3


@pytest.mark.parametrize("sparse", [False, True])
def test_each_row_of_weights_has_slots_and_gradients_of_its_own(sparse):
    """The classes of a softmax shared one momentum."""
    rule = Adam(0.1)
    optimize = Optimize("w", rule, weights=3)
    assert Optimize.rows_needed(rule, weights=3) == 12
    assert [optimize.gradient_row(row) for row in range(3)] == [9, 10, 11]
    assert [optimize.slot_row("m", row) for row in range(3)] == [3, 4, 5]
    assert [optimize.slot_row("v", row) for row in range(3)] == [6, 7, 8]
    blocks = Blocks(14, width=5, sparse=sparse)  # two more rows, for other uses
    blocks.add(12, np.ones(COLUMNS))
    alone = [Blocks(4, sparse=sparse) for _ in range(3)]
    random = np.random.default_rng(2)
    for _ in range(5):
        for row in range(3):
            gradient = random.normal(size=COLUMNS)
            blocks.add(9 + row, gradient)
            alone[row].add(3, gradient)
            alone[row].update(Optimize("w", rule))
        blocks.update(optimize)
    for row in range(3):
        for place, name in enumerate(["weights", "m", "v", "gradient"]):
            assert blocks.row(3 * place + row).tobytes() == alone[row].row(place).tobytes(), name
    assert blocks.row(12).tolist() == [1.0] * COLUMNS
    assert not blocks.row(13).any()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("named_only", [False, True])
def test_the_gradient_is_divided_by_the_scale(sparse, named_only):
    """With four workers every step was four times too long."""
    gradient = np.random.default_rng(3).normal(size=COLUMNS)
    scaled, whole = Blocks(2, width=5, sparse=sparse), Blocks(2, width=5, sparse=sparse)
    for _ in range(4):
        scaled.add(1, gradient)
    whole.add(1, gradient)
    scaled.update(Optimize("w", SGD(0.5), scale=4, sparse=named_only))
    whole.update(Optimize("w", SGD(0.5), sparse=named_only))
    assert scaled.row(0) == pytest.approx(whole.row(0), rel=1e-14)
    assert whole.row(0) == pytest.approx(-0.5 * gradient)
    assert not scaled.row(1).any()


def test_a_given_step_replaces_the_step_of_the_block():
    """The rate decayed with the number of updates although the workers counted epochs."""
    blocks = Blocks(2)
    rule = SGD(InverseSquareRoot(1.0, decay=1.0))
    for step, expected in ((8, -1 / 3), (None, -1 / 3 - 1 / np.sqrt(3.0))):
        blocks.add(1, np.ones(COLUMNS))
        blocks.update(Optimize("w", rule, step=step))
        assert blocks.row(0) == pytest.approx(np.full(COLUMNS, expected))
    assert blocks.updates() == [2]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_block_without_gradients_counts_its_updates_too(sparse):
    """Columns of a block without gradients had another t than other blocks, so results depended on the partitioning."""
    blocks = Blocks(4, width=5, sparse=sparse)
    optimize = Optimize("w", Adam(0.1), sparse=True)
    for _ in range(3):
        blocks.add(3, [1.0], [7])
        blocks.update(optimize)
    assert blocks.updates() == [3, 3, 3, 3, 3]
    blocks.add(3, [1.0], [20])
    blocks.update(optimize)
    expected, _ = written_out.learn(written_out.adam, [0.0], [[None], [None], [None], [1.0]], slots=("m", "v"))
    assert blocks.row(0)[20] == pytest.approx(expected[0])


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_whose_sum_is_0_count_as_none_in_sparse_updates(sparse):
    """A sparse update changed a column whose gradients had cancelled out, against its documentation."""
    blocks = Blocks(3, sparse=sparse)
    blocks.add(2, [1.0], [4])
    blocks.update(Optimize("w", Momentum(1.0), sparse=True))
    for value in (3.0, -3.0):
        blocks.add(2, [value], [4])
    blocks.update(Optimize("w", Momentum(1.0), sparse=True))
    assert (blocks.row(0)[4], blocks.row(1)[4]) == (-1.0, 1.0)
    if not sparse:
        blocks.update(Optimize("w", Momentum(1.0)))
        assert (blocks.row(0)[4], blocks.row(1)[4]) == (-1.9, 0.9)


@pytest.mark.parametrize("sparse", [False, True])
def test_numbers_too_large_become_infinite_and_fail_no_worker(sparse):
    """A numpy warning, raised as an error, ended the job of a worker without a fault."""
    blocks = Blocks(4, dtype="float32", sparse=sparse)
    for value in (1e30, np.nan):  # the square of the first is too large for float32
        blocks.add(3, [value], [2])
        blocks.update(Optimize("w", Adam(1.0)))
    assert np.isnan(blocks.row(0)[2])
    assert not np.isnan(np.delete(blocks.row(0), 2)).any()


@pytest.mark.parametrize("sparse", [False, True])
def test_initial_slots_are_computed_from_the_weights_as_by_the_rule(sparse, gradients):
    """``FTRL(keep_start=True)`` lost its start weights with the first gradient when z began at 0."""
    rule = FTRL(0.3, 0.5, l1=0.1, l2=0.1, keep_start=True)
    blocks = Blocks(4, width=5, sparse=sparse)
    weights = start()
    weights[::3] = 0.0
    blocks.add(0, weights)
    blocks.add(2, np.ones(COLUMNS))
    blocks.update(InitialSlots("w", rule))
    slots = rule.new_slots(weights)
    assert blocks.row(1).tobytes() == (slots["z"] + 0.0).tobytes()
    assert not blocks.row(2).any()
    for step, gradient in enumerate(gradients, start=1):
        at = np.flatnonzero(gradient)
        rule.update_at(at, weights, gradient[at], slots, step)
        blocks.add(3, gradient[at], at)
        blocks.update(Optimize("w", rule))
    assert blocks.row(0).tobytes() == weights.tobytes()
    assert blocks.updates() == [15] * 5


def test_weights_of_a_sparse_matrix_may_have_a_default():
    """A column that no worker had touched started its learning at 0 instead of the default."""
    blocks = Blocks(4, width=5, sparse=True)
    rule = FTRL(0.3, 0.5, keep_start=True)
    for block in blocks.blocks:
        block.replace_row(0, BlockRow(np.empty(0, np.int64), np.empty(0), 0.25))
    blocks.update(InitialSlots("w", rule))
    weights = np.full(1, 0.25)
    slots = rule.new_slots(weights)
    assert blocks.row(1).tolist() == slots["z"].tolist() * COLUMNS
    blocks.add(3, [2.0], [6])
    blocks.update(Optimize("w", rule))
    rule.update(weights, np.array([2.0]), slots, 1)
    assert blocks.row(0)[6] == weights[0]
    assert np.delete(blocks.row(0), 6).tolist() == [0.25] * (COLUMNS - 1)


def test_a_gradient_for_all_absent_columns_is_refused_before_anything_changes():
    """The gradient was dropped silently, because no column was named."""
    blocks = Blocks(2, width=5, sparse=True)
    blocks.add(1, [1.0], [3])
    for block in blocks.blocks:
        block.replace_row(1, BlockRow(np.empty(0, np.int64), np.empty(0), 0.5))
    with pytest.raises(
        ParameterServerError,
        match=r"psf.Optimize on matrix 'w': expected gradients \(row 1\) with a default of 0, given a default of 0.5",
    ):
        blocks.update(Optimize("w", SGD()))
    with pytest.raises(ParameterServerError, match=r"a default of 0\.5"):
        Optimize("w", SGD()).partition_update(blocks.blocks[0], None)
    assert not blocks.row(0).any()
    assert blocks.updates() == [0] * 5


def test_equal_settings_are_equal():
    """A second worker made the same matrix, and its equal ``on_clock`` was refused as different."""
    assert Optimize("w", Adam(0.1), scale=2) == Optimize("w", Adam(0.1), scale=2.0)
    assert Optimize("w", Adam(0.1)) != Optimize("w", Adam(0.2))


class OfThisTest(SGD):
    """A rule at the top level of a module."""


def test_an_optimizer_that_another_process_cannot_import_is_refused_where_it_is_given():
    """The import failed in the shard's process, far from the line that was wrong."""

    class OfThisFunction(SGD):
        pass

    assert Optimize("w", OfThisTest()).require_importable() == Optimize("w", OfThisTest())
    with pytest.raises(
        ConfigurationError, match=r"psf.Optimize\(optimizer=\): expected its class at the top level of a module"
    ):
        Optimize("w", OfThisFunction()).require_importable()
