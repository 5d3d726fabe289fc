"""All files with the same meaning have one canonical form, which is itself a valid file."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks.published import PUBLISHED, deep_fm, layer, published

from streamiter.networks.configuration import canonical, json_text, read_configuration


def form(source: Any) -> dict[str, Any]:
    return canonical(read_configuration(source))


def test_a_file_saved_by_angel_is_its_own_canonical_form():
    """graph.json is its own canonical form, key for key and in this order; other programs also read the file."""
    path = published("graph")
    saved = json.loads(path.read_text())
    assert json.dumps(form(path)) == json.dumps(saved)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_loaded_and_saved_means_the_same(name):
    """A saved model is loaded with the configuration that was saved with the model."""
    first = read_configuration(published(name))
    again = read_configuration(canonical(first))
    assert (again.data, again.model, again.train) == (first.data, first.model, first.train)
    assert again.layers == first.layers
    assert canonical(again) == canonical(first)


def test_the_canonical_form_contains_every_default():
    """Defaults may change in a later version, but the meaning of a saved file must not."""
    layers = {"wide": {"type": "simpleinputlayer", "outputdim": 1}, "loss": {"type": "losslayer", "inputlayer": "wide"}}
    assert form({"default_optimizer": {"type": "adam", "reg2": 0.5}, "layers": layers}) == {
        "data": {
            "format": "dummy",
            "indexrange": -1,
            "numfield": -1,
            "validateratio": 0.05,
            "sampleratio": 1.0,
            "useshuffle": False,
            "posnegratio": -1.0,
            "translabel": "NoTrans",
        },
        "model": {"modeltype": "T_FLOAT_DENSE", "modelsize": -1, "blockSize": 1_000_000},
        "train": {
            "epoch": 30,
            "numupdateperepoch": 10,
            "batchsize": 128,
            "lr": 0.5,
            "decayclass": "StandardDecay",
            "decayalpha": 0.001,
            "decaybeta": 0.001,
        },
        "layers": [
            {
                "name": "wide",
                "type": "SimpleInputLayer",
                "outputdim": 1,
                "transfunc": {"type": "Identity"},
                "optimizer": {"type": "Adam", "beta": 0.9, "gamma": 0.99, "reg2": 0.5},
            },
            {
                "name": "loss",
                "type": "LossLayer",
                "outputdim": -1,
                "inputlayer": "wide",
                "lossfunc": {"type": "LogLoss"},
            },
        ],
    }


def test_paths_and_another_way_of_initial_values_are_kept():
    """Angel does not save these settings, so the canonical form has them only if the file has them."""
    document = deep_fm()
    document["data"]["path"] = "rows"
    document["model"] |= {"loadpath": "before", "savepath": "after", "init": "angel"}
    saved = form(document)
    assert saved["data"]["path"] == "rows"
    assert {"loadpath": "before", "savepath": "after", "init": "angel"}.items() <= saved["model"].items()
    assert form(saved) == saved


def test_the_saved_text_is_read_as_the_same_document(tmp_path):
    """Names may contain characters that are not ASCII."""
    document = deep_fm()
    layer(document, "wide")["name"] = "größe"
    layer(document, "sum")["inputlayers"][0] = "größe"
    saved = form(document)
    path = tmp_path / "saved.json"
    path.write_text(json_text(saved), encoding="utf-8")
    assert form(path) == saved
    assert '"größe"' in path.read_text(encoding="utf-8")


CASES = st.sampled_from([str.lower, str.upper, str.title])


@st.composite
def rewritten(draw: st.DrawFn) -> dict[str, Any]:
    """Return a DeepFM with the same meaning in a different notation."""
    document = deep_fm()
    for found in document["layers"]:
        found["type"] = draw(CASES)(found["type"])
    if draw(st.booleans()):
        layer(document, "wide")["transfunc"] = {"type": "IDENTITY"}
    if draw(st.booleans()):
        layer(document, "deep")["transfuncs"][0] = {"type": "Relu"}
    if draw(st.booleans()):
        del layer(document, "wide")["transfunc"]
    if draw(st.booleans()):
        document["default_optimizer"] = {"type": "MOMENTUM", "reg1": 0}
    if draw(st.booleans()):
        layer(document, "deep")["optimizer"] = "momentum"
    if draw(st.booleans()):
        del layer(document, "cross")["outputdim"]
    if draw(st.booleans()):
        document["train"]["epoch"] = document["train"].pop("epoch")
    layers = draw(st.permutations(document["layers"]))
    document["layers"] = {found.pop("name"): found for found in layers} if draw(st.booleans()) else layers
    return document


@given(document=rewritten())
def test_files_that_mean_the_same_have_one_form(document):
    """The canonical form decides whether two models are equal, and whether a checkpoint is accepted."""
    assert json_text(form(document)) == json_text(form(deep_fm()))


def test_a_constant_rate_has_the_name_that_angel_uses():
    """Angel's own files contain ConstantLearningRate; other programs do not know the short name."""
    layers = {"wide": {"type": "simpleinputlayer", "outputdim": 1}, "loss": {"type": "losslayer", "inputlayer": "wide"}}
    written, short = (
        form({"train": {"decayclass": name}, "layers": layers}) for name in ("constantlearningrate", "Constant")
    )
    assert written == short
    assert short["train"]["decayclass"] == "ConstantLearningRate"
