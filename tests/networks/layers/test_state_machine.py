"""A layer passes Null, Forward, Backward, Gradient and Update once each, in this order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from networks.finite_differences import give_values
from networks.layers.cases import Nodes
from networks.rows_at_hand import rows_of

from streamiter.errors import ModelError
from streamiter.networks.data import PlaceHolder
from streamiter.networks.layers import StatusError
from streamiter.networks.layers.layer import Status
from streamiter.networks.network import LayerGraph

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
