"""A network is shown as a table."""

import numpy as np
import pytest
from networks.published import deep_fm, layer, published

from streamiter.networks.network import Network

DEEP_FM = """\
configuration: 148 features, 13 fields, float32

layer      type                        inputs             output       parameters  status
─────────  ──────────────────────────  ─────────────────  ───────────  ──────────  ──────
wide       SimpleInputLayer, Identity  mini-batch         (rows, 1)           149  Null
embedding  Embedding                   mini-batch         (rows, 104)       1,184  Null
cross      BiInnerSumCross             embedding          (rows, 1)             0  Null
deep_0     FCLayer, Relu               embedding          (rows, 100)      10,500  Null
deep_1     FCLayer, Relu               deep_0             (rows, 100)      10,100  Null
deep       FCLayer, Identity           deep_1             (rows, 1)           101  Null
sum        SumPooling                  wide, cross, deep  (rows, 1)             0  Null
loss       SimpleLossLayer, LogLoss    sum                (rows, 1)             0  Null
─────────  ──────────────────────────  ─────────────────  ───────────  ──────────  ──────
8 layers, 22,034 parameters"""


def test_the_table_of_a_deep_fm():
    """A user must see the structure of the network at a glance."""
    summary = Network.from_json(deep_fm()).summary()
    assert str(summary) == repr(summary) == DEEP_FM


def test_sizes_that_depend_on_the_data_are_shown_by_feature():
    """logreg.json does not give the number of features."""
    summary = Network.from_json(published("logreg")).summary()
    assert str(summary).splitlines()[4:] == [
        "wide             SimpleInputLayer, Identity  mini-batch  (rows, 1)  features + 1  Null",
        "simplelosslayer  SimpleLossLayer, LogLoss    wide        (rows, 1)             0  Null",
        "───────────────  ──────────────────────────  ──────────  ─────────  ────────────  ──────",
        "2 layers, features + 1 parameters",
    ]
    assert summary.title == "logreg.json: features from the data, float32"


def test_several_numbers_for_each_feature():
    """An embedding has several numbers for each feature."""
    document = deep_fm()
    document["data"]["indexrange"] = document["model"]["modelsize"] = -1
    document["model"]["modeltype"] = "T_DOUBLE_SPARSE"
    summary = Network.from_json(document).summary()
    assert summary.rows[1].cells[4] == "8 × features"
    assert summary.totals == "8 layers, 9 × features + 20,702 parameters"
    assert summary.title == "configuration: features from the data, 13 fields, float64"
    counted = Network.from_json(document).with_features(148).summary()
    assert counted.totals == "8 layers, 22,034 parameters"


def test_a_transfer_function_is_shown_with_its_parameters():
    """A network that drops a tenth of the values is another network than one that drops a half."""
    document = deep_fm()
    layer(document, "deep")["transfuncs"][1] = {"type": "dropout", "proba": 0.1}
    assert Network.from_json(document).summary().rows[4].type == "FCLayer, Dropout(proba 0.1)"


def test_a_running_graph_shows_the_status_of_each_layer():
    """If a user forgets a step, the table shows which layer waits for it."""
    network = Network.from_json(deep_fm())
    graph = network.graph()

    def statuses() -> list[str]:
        return [row.status for row in network.summary(graph).rows]

    assert set(statuses()) == {"Null"}
    graph.feed_data(np.ones((1, 148), np.float32)[:, :148] * (np.arange(148) < 13), [1], training=True)
    for parameter in graph.parameters:
        parameter.values = np.zeros(parameter.shape, np.float32)
    graph.layers[0].cal_output()
    assert statuses() == ["Forward", *["Null"] * 7]
    graph.loss()
    assert set(statuses()) == {"Forward"}
    graph.backward()
    assert set(statuses()) == {"Backward"}
    graph.gradients()
    assert set(statuses()) == {"Gradient"}
    graph.update()
    assert set(statuses()) == {"Update"}


def test_a_graph_of_another_size_is_shown_as_it_is():
    """The file contains -1, but the running graph knows the number of features."""
    network = Network.from_json(published("logreg"))
    graph = network.with_features(123).graph()
    summary = network.summary(graph)
    assert summary.title == "logreg.json: 123 features, float32"
    assert summary.totals == "2 layers, 124 parameters"


@pytest.mark.parametrize("depth", [2, 40])
def test_a_row_for_each_layer(depth):
    """Each part of a folded layer has its own row."""
    document = deep_fm()
    layer(document, "deep").update(outputdims=[2] * (depth - 1) + [1], transfuncs=["tanh"] * depth)
    assert len(Network.from_json(document).summary().rows) == 5 + depth
