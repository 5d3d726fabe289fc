"""A network is drawn as a picture in several formats."""

import io
from xml.etree import ElementTree

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
