"""A network is shown as a table, and drawn as a picture in several formats."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from networks.published import PUBLISHED, deep_fm, layer, published
from PIL import Image

from streamiter.errors import ConfigurationError
from streamiter.networks.network import Network

DEEP_FM = """\
---
title: configuration
---
flowchart LR
    s0[("mini-batch<br>dummy, 148 features<br>13 fields")]
    s1["wide<br>SimpleInputLayer, Identity<br>149 parameters<br>Momentum(momentum 0.9)"]
    s2["embedding<br>Embedding, 8 factors<br>1,184 parameters<br>Momentum(momentum 0.9, reg2 0.01)"]
    s3["cross<br>BiInnerSumCross"]
    s4["deep_0<br>FCLayer, Relu<br>10,500 parameters<br>Momentum(momentum 0.9)"]
    s5["deep_1<br>FCLayer, Relu<br>10,100 parameters<br>Momentum(momentum 0.9)"]
    s6["deep<br>FCLayer, Identity<br>101 parameters<br>Momentum(momentum 0.9)"]
    s7["sum<br>SumPooling"]
    s8[/"loss<br>SimpleLossLayer, LogLoss"/]
    s0 --> s1
    s0 --> s2
    s2 -->|104| s3
    s2 -->|104| s4
    s4 -->|100| s5
    s5 -->|100| s6
    s1 -->|1| s7
    s3 -->|1| s7
    s6 -->|1| s7
    s7 -->|1| s8
"""


def test_mermaid_shows_layers_and_their_links():
    """Mermaid is the default format, for use in documents."""
    network = Network.from_json(deep_fm())
    assert network.draw() == network.draw("mermaid") == network.draw(format="mermaid") == DEEP_FM


def texts(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in found]


@pytest.mark.parametrize("name", PUBLISHED)
def test_svg_has_every_layer_of_a_published_network(name):
    """The drawing reuses the code for flows and must not omit a layer."""
    network = Network.from_json(published(name))
    written = texts(network.draw("svg"))
    assert f"{name}.json" in written
    for row in network.summary().rows:
        assert row.layer in written
    assert written.count("104") == sum("embedding" in row.inputs for row in network.summary().rows)


def test_png_is_a_picture():
    """Some pages cannot show SVG, so PNG is possible."""
    with Image.open(io.BytesIO(Network.from_json(deep_fm()).draw("png"))) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > image.height > 200


def test_an_input_that_is_taken_twice_is_two_links():
    """A cross layer can have the embedding as both of its inputs."""
    document = deep_fm()
    document["layers"].remove(layer(document, "cross"))
    document["layers"] += [
        {"name": "crossed", "type": "crosslayer", "inputlayers": ["embedding", "embedding"], "outputdim": 104},
        {"name": "flat", "type": "fclayer", "inputlayer": "crossed", "outputdim": 1, "transfunc": "identity"},
    ]
    layer(document, "sum")["inputlayers"][1] = "flat"
    assert Network.from_json(document).draw().count("s2 -->|104| s3\n") == 2


def test_a_picture_shows_that_the_number_of_features_is_unknown():
    """A guessed number would look like a number from the file."""
    drawn = Network.from_json(published("logreg")).draw()
    assert "mini-batch<br>libsvm, features from the data" in drawn
    assert "features + 1 parameters" in drawn


def test_an_unknown_format_of_a_picture_is_refused():
    """The error lists the known formats."""
    with pytest.raises(ConfigurationError) as caught:
        Network.from_json(deep_fm()).draw("jpeg")
    assert str(caught.value) == (
        "network 'configuration': draw expected the format 'mermaid', 'svg', 'png', given 'jpeg'; choose one of these"
    )


PUBLISHED_DEEP_FM = """\
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
    assert str(summary) == repr(summary) == PUBLISHED_DEEP_FM


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
