"""Every layer is compared with finite differences, passes its states in order, and refuses rows that do not fit."""

import itertools

import numpy as np
import pytest
from networks.finite_differences import assert_gradients_agree, give_values, gradients_of
from networks.functions_by_name import LAYER_TYPES
from networks.layers.cases import CASES, FACTORS, FIELDS, Nodes, graph_around
from networks.rows_at_hand import KINDS, rows_of

from streamiter.errors import ModelError
from streamiter.learn.rows import BadRows
from streamiter.networks.data import PlaceHolder
from streamiter.networks.layers import StatusError
from streamiter.networks.layers.layer import Status
from streamiter.networks.network import LayerGraph
from streamiter.values.sparse_rows import SparseRows


def _features(kind: str) -> int:
    return FIELDS if kind == "dense" else 9


def _fed(graph: LayerGraph, kind: str, rows: int = 6, seed: int = 3) -> None:
    generator = np.random.default_rng(seed)
    features = graph.place_holder.feature_dimension
    given = rows_of(kind, rows, features, FIELDS, generator)
    labels = generator.normal(size=rows)

    def feed() -> None:
        graph.feed_data(given, labels, training=True, number=0)

    feed()
    give_values(graph, generator)
    assert_gradients_agree(graph, feed)


def test_every_type_of_layer_has_a_case():
    """A layer was added without a test of its gradient."""
    assert set(CASES) == set(LAYER_TYPES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_name", list(CASES))
def test_gradients_agree_with_finite_differences(type_name, kind):
    """A gradient that was wrong by a factor, or wrong for dense rows only, trained to nearly the same accuracy."""
    _fed(graph_around(type_name, PlaceHolder(_features(kind), "float64")), kind)


@pytest.mark.parametrize("type_name", list(CASES))
def test_a_batch_of_one_row_has_the_right_gradients(type_name):
    """A reshape by -1, or a product that drops an axis, fails for one row first."""
    _fed(graph_around(type_name, PlaceHolder(9, "float64")), "sparse", rows=1)


@pytest.mark.parametrize("kind", ["sparse", "dense with zeros"])
def test_several_consumers_of_one_layer_have_their_gradients_summed(kind):
    """The embedding received the gradient of the last consumer only."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    vectors = nodes.vectors()
    parts = [
        nodes.add("biinnersumcross", 1, vectors),
        nodes.add("fclayer", 1, vectors, transfer="tanh"),
        nodes.add("dotpooling", 1, vectors, vectors),
        nodes.hidden(1),
    ]
    _fed(nodes.graph(nodes.add("sumpooling", 1, *parts)), kind)


def test_a_layer_may_be_an_input_of_another_one_twice():
    """The gradient of the first input was counted twice, or the second input had none."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    hidden = nodes.hidden(3)
    joined = nodes.add("mulpooling", 3, hidden, hidden, hidden)
    _fed(nodes.graph(nodes.add("concatlayer", 6, joined, hidden)), "sparse")


def test_a_diamond_of_layers_has_the_right_gradients():
    """Gradients of two paths of different length were added before the longer path had finished."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    top = nodes.hidden(4)
    longer = top
    for _ in range(3):
        longer = nodes.add("fclayer", 4, longer, transfer="tanh")
    _fed(nodes.graph(nodes.add("sumpooling", 4, top, longer)), "sparse")


def gradients_of_first(graph: LayerGraph) -> np.ndarray:
    gradient = graph.parameters[0].gradient
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("type_name", list(CASES))
def test_a_last_short_batch_has_its_own_gradients(type_name):
    """A layer kept an array with the size and the sums of the previous mini-batch."""
    place_holder = PlaceHolder(9, "float64")
    graph, other = graph_around(type_name, place_holder), graph_around(type_name, PlaceHolder(9, "float64"))
    generator = np.random.default_rng(7)
    rows, labels = rows_of("sparse", 8, 9, FIELDS, generator), generator.normal(size=8)
    graph.feed_data(rows[:6], labels[:6], training=True)
    give_values(graph, generator)
    gradients_of(graph)
    for one in (graph, other):
        one.feed_data(rows[6:], labels[6:], training=True)
        give_values(one, np.random.default_rng(8))
    short, alone = gradients_of(graph), gradients_of(other)
    for name, gradient in alone.items():
        np.testing.assert_array_equal(short[name], gradient, err_msg=name)


@pytest.mark.parametrize("type_name", list(CASES))
def test_sparse_and_dense_rows_give_the_same(type_name):
    """A dense row with a 0 had one vector more than the same row in sparse form."""
    graph = graph_around(type_name, PlaceHolder(9, "float64"))
    generator = np.random.default_rng(11)
    sparse, labels = rows_of("sparse", 12, 9, FIELDS, generator), generator.normal(size=12)
    found = []
    for rows in (sparse, sparse.to_dense()):
        graph.feed_data(rows, labels, training=True)
        assert len(graph.place_holder.indices) == 9, "all features must be there, or the parameters differ"
        give_values(graph, np.random.default_rng(12))
        found.append(gradients_of(graph))
    for name, gradient in found[0].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type_name", list(CASES))
def test_float32_is_close_to_float64_and_stays_float32(type_name, kind):
    """One float64 array made all later arrays float64, at half the speed."""
    found = []
    for dtype in ("float64", "float32"):
        graph = graph_around(type_name, PlaceHolder(_features(kind), dtype))
        generator = np.random.default_rng(13)
        rows = rows_of(kind, 6, graph.place_holder.feature_dimension, FIELDS, generator)
        graph.feed_data(rows, generator.normal(size=6), training=True)
        give_values(graph, generator)
        scores = np.array(graph.forward())
        gradients = gradients_of(graph)
        for layer in graph.layers:
            assert layer.output.dtype == dtype, layer.name
        assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(dtype)}
        found.append({"scores": scores, **gradients})
    scale = max(np.abs(array).max() for array in found[0].values())
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, rtol=1e-3, atol=1e-5 * scale, err_msg=name)


def test_no_layer_changes_its_inputs():
    """Two layers read one output, and the relu of the first changed the output in place."""
    generator = np.random.default_rng(17)
    for type_name in CASES:
        graph = graph_around(type_name, PlaceHolder(9, "float64"))
        graph.feed_data(rows_of("sparse", 5, 9, FIELDS, generator), generator.normal(size=5), training=True)
        give_values(graph, generator)
        values = {parameter.name: np.array(parameter.values) for parameter in graph.parameters}
        graph.forward()
        outputs = [layer.output.copy() for layer in graph.layers]
        gradients_of(graph)
        for layer, output in zip(graph.layers, outputs, strict=True):
            np.testing.assert_array_equal(layer.output, output, err_msg=layer.name)
        for parameter in graph.parameters:
            np.testing.assert_array_equal(parameter.values, values[parameter.name], err_msg=parameter.name)


def test_an_embedding_has_as_many_vectors_as_there_are_fields():
    """The cases of the tests need one vector for each field."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    assert nodes.vectors().output_dim == FIELDS * FACTORS


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(PlaceHolder(9, "float64"))


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_of_another_number_of_features_than_fields_is_named(nodes, dense):
    """The vectors of such a row shifted the vectors of all later rows."""
    graph = nodes.graph(nodes.vectors())
    rows = SparseRows.from_rows([([0, 2, 5, 8], [1.0] * 4), ([0, 2, 5], [1.0] * 3)], 9)
    graph.feed_data(rows.to_dense() if dense else rows)
    for parameter in graph.parameters:
        parameter.values = np.ones(graph.shape_of(parameter))
    with pytest.raises(BadRows, match=r"'embedding0': expected 4 features in each row .*, given 3;.*\(row 1 of") as bad:
        graph.forward()
    assert bad.value.rows == (1,)


def test_vectors_stay_vectors_through_layers_that_keep_them(nodes):
    """A factorization machine over the sum of two embeddings was refused."""
    both = nodes.add("sumpooling", 12, nodes.vectors(), nodes.vectors(), vector_width=FACTORS)
    assert nodes.add("biinnercross", 6, both).output_dim == 6
    side_by_side = nodes.add("concatlayer", 24, both, nodes.vectors(), vector_width=FACTORS)
    assert nodes.add("biinnercross", 28, side_by_side).output_dim == 28


STEPS = ["cal_output", "cal_backward", "cal_gradients", "update"]


class _Counting:
    """Records the computing steps of a layer."""

    def __init__(self, layer) -> None:
        self.calls: list[str] = []
        for step in ("_forward", "_backward", "_gradients"):
            setattr(layer, step, self._counted(step, getattr(layer, step)))

    def _counted(self, step, function):
        def counted(*arguments):
            self.calls.append(step)
            return function(*arguments)

        return counted


def _graph() -> tuple[LayerGraph, Nodes]:
    nodes = Nodes(PlaceHolder(9, "float64"))
    shared = nodes.hidden(3)
    graph = nodes.graph(nodes.add("mulpooling", 3, nodes.add("fclayer", 3, shared), shared))
    return graph, nodes


def _feed(graph: LayerGraph) -> None:
    generator = np.random.default_rng(1)
    graph.feed_data(rows_of("sparse", 4, 9, 4, generator), generator.normal(size=4), training=True)
    give_values(graph, generator)


def test_a_repeated_step_returns_its_first_result():
    """A layer with two consumers computed its output and its gradient twice."""
    graph, nodes = _graph()
    counting = _Counting(nodes.layers[0])
    _feed(graph)
    graph.loss_layer.cal_output()
    for step in STEPS:
        first, again = (getattr(nodes.layers[0], step)() for _ in range(2))
        assert first is again
    assert counting.calls == ["_forward", "_backward", "_gradients"]
    assert nodes.layers[0].status == Status.UPDATE


def test_a_step_of_the_whole_graph_computes_each_layer_once():
    """The recursion over consumers took exponentially many steps in a chain of diamonds."""
    graph, nodes = _graph()
    countings = [_Counting(layer) for layer in nodes.layers]
    _feed(graph)
    graph.loss(), graph.backward(), graph.gradients(), graph.update()
    for counting in countings:
        assert counting.calls == ["_forward", "_backward", "_gradients"]
    assert {layer.status for layer in nodes.layers} == {Status.UPDATE}


@pytest.mark.parametrize(("done", "step"), list(itertools.product(range(5), range(4))))
def test_a_step_out_of_order_is_an_error_that_names_layer_status_and_the_one_needed(done, step):
    """The gradients of the previous mini-batch were pushed again, because no error reported the missing step."""
    graph, nodes = _graph()
    _feed(graph)
    layer = nodes.layers[0]
    if done:
        graph.loss_layer.cal_output()
    for name in STEPS[:done]:
        getattr(layer, name)()
    assert layer.status == done
    if step in (done, done - 1):
        getattr(layer, STEPS[step])()
        return
    with pytest.raises(StatusError) as raised:
        getattr(layer, STEPS[step])()
    assert str(raised.value) == (
        f"layer 'simpleinputlayer0': expected status {Status(step)} for {STEPS[step]}, given {Status(done)}; "
        "the steps are feed_data, cal_output, cal_backward, cal_gradients, update"
    )
    assert layer.status == done


@pytest.mark.parametrize("done", range(5))
def test_data_that_is_fed_sets_all_layers_to_null(done):
    """A layer continued with the output of the previous mini-batch."""
    graph, nodes = _graph()
    _feed(graph)
    for step in [graph.forward, graph.backward, graph.gradients, graph.update][:done]:
        step()
    before = nodes.layers[0].output.copy() if done else None
    graph.feed_data(rows_of("sparse", 2, 9, 4, np.random.default_rng(9)), [1.0, 2.0], training=True)
    assert {layer.status for layer in nodes.layers} == {Status.NULL}
    with pytest.raises(StatusError, match="'simpleinputlayer0': expected status Forward or later, given Null"):
        _ = nodes.layers[0].output
    give_values(graph, np.random.default_rng(2))
    graph.forward()
    assert before is None or before.shape != nodes.layers[0].output.shape


def test_a_step_that_failed_leaves_the_layer_where_it_was():
    """A layer without values counted as computed, and the next call returned nothing."""
    graph, nodes = _graph()
    _feed(graph)
    weight = nodes.layers[0].parameters[0]
    kept, weight.values = weight.values, None
    with pytest.raises(ModelError, match=r"'simpleinputlayer0\.weight': expected values of shape"):
        graph.forward()
    assert nodes.layers[0].status == Status.NULL
    weight.values = kept
    assert nodes.layers[0].cal_output().shape == (4, 3)


def test_a_backward_pass_before_the_end_of_the_forward_pass_names_the_layer():
    """The first layer had run, but its consumer had not, so the backward pass began without a gradient."""
    graph, nodes = _graph()
    _feed(graph)
    nodes.layers[0].cal_output()
    with pytest.raises(StatusError, match=r"layer 'fclayer1': expected status Forward for cal_backward, given Null"):
        nodes.layers[0].cal_backward()
    assert nodes.layers[0].status == Status.FORWARD


def test_a_layer_without_a_reader_has_no_gradient():
    """The layer would wait for a gradient for ever, or use 0 as its gradient."""
    nodes = Nodes(PlaceHolder(9, "float64"))
    layer = nodes.hidden(2)
    nodes.place_holder.feed_data(rows_of("sparse", 4, 9, 4, np.random.default_rng(1)))
    for parameter, shape in zip(layer.parameters, [(len(nodes.place_holder.indices), 2), (2,)], strict=True):
        parameter.values = np.ones(shape)
    layer.cal_output()
    with pytest.raises(ModelError, match="'simpleinputlayer0': expected a layer that takes its output, given none"):
        layer.cal_backward()


def test_statuses_are_called_as_the_documents_call_them():
    """Error messages contained Status.NULL instead of Null."""
    assert [str(status) for status in Status] == ["Null", "Forward", "Backward", "Gradient", "Update"]
