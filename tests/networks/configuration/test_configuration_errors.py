"""Whatever is wrong in a configuration file: one error that names the file, the layer and the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from networks.published import deep_fm, layer

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration import read_configuration

Change = Callable[[dict[str, Any]], object]


def refused(source: Any) -> str:
    """The error's text."""
    with pytest.raises(ConfigurationError) as caught:
        read_configuration(source)
    return str(caught.value)


def of_file(tmp_path: Path, document: Any) -> str:
    """The same for a file called net.json."""
    path = tmp_path / "net.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return refused(path)


def changed(change: Change) -> dict[str, Any]:
    document = deep_fm()
    change(document)
    return document


def replaced(name: str, /, **keys: Any) -> Change:
    """Keys of a layer, set to something else; ... takes one away."""

    def change(document: dict[str, Any]) -> None:
        found = layer(document, name)
        found.update(keys)
        for key in [key for key, value in found.items() if value is ...]:
            del found[key]

    return change


def at_top(**keys: Any) -> Change:
    return lambda document: document.update(keys)


def within(section: str, **keys: Any) -> Change:
    return lambda document: document[section].update(keys)


def added(**keys: Any) -> Change:
    return lambda document: document["layers"].append(keys)


# ---- the file as such


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"layers": [', "expected JSON, given something else in line 1, column 13: Expecting value"),
        ("", "expected JSON, given something else in line 1, column 1: Expecting value"),
        ("[]", "expected a JSON object, given the array []"),
        ("null", "expected a JSON object, given null"),
        ('{"train": {"lr": NaN}}', "expected JSON, given NaN, which is no number of JSON"),
        (
            '{"layers": {"a": {}, "b": {}, "a": {}}}',
            "expected each key of an object once, given 'a' twice; rename or remove one",
        ),
        ('{"layers": ' * 100_000, "expected JSON, given objects nested too deep to be read"),
    ],
    ids=["torn", "empty", "array", "null", "nan", "twice", "deep"],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text, said):
    """Of two layers of one name, plain JSON would keep the last and say nothing."""
    assert of_file(tmp_path, text) == f"net.json: {said}"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """A saved model given in place of its configuration."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"{\xff")
    assert refused(path) == "model.safetensors: expected JSON in UTF-8, given a wrong byte at 1"


def test_a_file_that_is_not_there_is_named_with_its_folder(tmp_path):
    """Most often it is the folder that is wrong."""
    missing = tmp_path / "no.json"
    assert refused(missing) == f"{missing}: expected a JSON file, given No such file or directory"
    assert refused(tmp_path) == f"{tmp_path}: expected a JSON file, given Is a directory"


def test_what_is_neither_a_path_nor_a_dict_is_refused():
    """JSON text, or what json.load gave for an array."""
    assert refused(7) == (
        "configuration: expected the path of a JSON file, or a dict with what it says, given int"
    )


# ---- what the list of the format asks for


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # missing
        (
            lambda document: document.pop("layers"),
            "expected the key 'layers', given 'data', 'model', 'train', 'default_optimizer'; add it",
        ),
        (
            lambda document: document["layers"].remove(layer(document, "loss")),
            "key 'layers': expected a loss layer, of type 'simplelosslayer', given 'wide' (SimpleInputLayer), "
            "'embedding' (Embedding), 'deep_0' (FCLayer), 'deep_1' (FCLayer), 'deep' (FCLayer), "
            "'cross' (BiInnerSumCross), 'sum' (SumPooling); add one",
        ),
        (
            at_top(layers=[]),
            "key 'layers': expected a loss layer, of type 'simplelosslayer', given no layers; add one",
        ),
        (
            replaced("wide", type=...),
            "layer 'wide': expected the key 'type', given 'name', 'outputdim', 'transfunc'; add it",
        ),
        (
            replaced("cross", name=...),
            "layer number 4: expected the key 'name', given 'type', 'inputlayer', 'outputdim'; add it",
        ),
        (
            replaced("wide", outputdim=...),
            "layer 'wide': expected the key 'outputdim', given 'name', 'type', 'transfunc'; add it",
        ),
        (
            replaced("embedding", numfactors=...),
            "layer 'embedding': expected the key 'numfactors', given 'name', 'type', 'outputdim', 'optimizer'; add it",
        ),
        (
            replaced("deep", outputdims=..., transfuncs=...),
            "layer 'deep': expected the key 'outputdim' or 'outputdims', given 'name', 'type', 'inputlayer'; add it",
        ),
        (
            replaced("cross", inputlayer=...),
            "layer 'cross': expected the key 'inputlayer', given 'name', 'type', 'outputdim'; add it",
        ),
        (
            replaced("sum", inputlayers=..., inputlayer="wide"),
            "layer 'sum': expected the key 'inputlayers', given 'name', 'type', 'outputdim', 'inputlayer'; add it",
        ),
        (
            replaced("embedding", optimizer={"momentum": 0.9}),
            "layer 'embedding', key 'optimizer': expected the key 'type', which names an optimizer, "
            "given 'momentum'; add it",
        ),
        (
            replaced("wide", type="ParamSharedFC", inputlayer="embedding", outputdim=26),
            "layer 'wide': expected the key 'weightdim', given 'name', 'type', 'outputdim', 'transfunc', "
            "'inputlayer'; add it",
        ),
        (
            replaced("deep", type="ParamSharedFC"),
            "layer 'deep': expected the key 'weightdims', given 'name', 'type', 'inputlayer', 'outputdims', "
            "'transfuncs'; add it",
        ),
        # unknown types
        (
            replaced("embedding", type="embeding"),
            "layer 'embedding', key 'type': expected a type of layer, given 'embeding'; did you mean 'Embedding'?",
        ),
        (
            replaced("embedding", type="lstm"),
            "layer 'embedding', key 'type': expected a type of layer, given 'lstm'; there are "
            "'SimpleInputLayer', 'Embedding', 'KmeansInputLayer', 'FCLayer', 'ParamSharedFC', 'BiInnerSumCross', "
            "'BiInnerCross', 'BiInteractionCross', 'BiInteractionCrossTiled', 'BiOuterCross', 'ConcatLayer', "
            "'SumPooling', 'MulPooling', 'DotPooling', 'CrossLayer', 'WeightedSumLayer', 'SimpleLossLayer', "
            "'LossLayer'",
        ),
        (
            at_top(default_optimizer="momentun"),
            "key 'default_optimizer': expected an optimizer, given 'momentun'; did you mean 'Momentum'?",
        ),
        (
            replaced("embedding", optimizer={"type": "adm"}),
            "layer 'embedding', key 'optimizer.type': expected an optimizer, given 'adm'; did you mean 'Adam'?",
        ),
        (
            replaced("deep", transfuncs=["relu", "rellu", "identity"]),
            "layer 'deep', key 'transfuncs[1]': expected a transfer function, given 'rellu'; did you mean 'Relu'?",
        ),
        (
            replaced("loss", lossfunc="log_loss"),
            "layer 'loss', key 'lossfunc': expected a loss function, given 'log_loss'; did you mean 'LogLoss'?",
        ),
        (
            at_top(default_lossfunc={"type": "mse"}),
            "key 'default_lossfunc.type': expected a loss function, given 'mse'; there are 'L2Loss', 'LogLoss', "
            "'HingeLoss', 'CrossEntropyLoss', 'SoftmaxLoss', 'HuberLoss', 'KmeansLoss'",
        ),
        (
            within("train", decayclass="WarmRestart"),
            "'train', key 'decayclass': expected one of 'Constant', 'StandardDecay', 'CorrectionDecay', "
            "'WarmRestarts', given 'WarmRestart'; did you mean 'WarmRestarts'?",
        ),
        (
            within("data", format="csv"),
            "'data', key 'format': expected one of 'libsvm', 'dummy', 'dense', given 'csv'",
        ),
        (
            within("data", translabel="NoTran"),
            "'data', key 'translabel': expected one of 'NoTrans', 'PosNegTrans', 'ZeroOneTrans', 'AddOneTrans', "
            "'SubOneTrans', given 'NoTran'; did you mean 'NoTrans'?",
        ),
        (
            within("model", modeltype="T_HALF_DENSE"),
            "'model', key 'modeltype': expected one of 'T_FLOAT_DENSE', 'T_FLOAT_SPARSE', "
            "'T_FLOAT_SPARSE_LONGKEY', 'T_DOUBLE_DENSE', 'T_DOUBLE_SPARSE', 'T_DOUBLE_SPARSE_LONGKEY', "
            "given 'T_HALF_DENSE'; did you mean 'T_FLOAT_DENSE'?",
        ),
        (
            within("model", init="zeros"),
            "'model', key 'init': expected one of 'xavier', 'angel', given 'zeros'",
        ),
        # wrong JSON types
        (
            at_top(layers="wide"),
            "key 'layers': expected an array or an object of layers, given the text 'wide'",
        ),
        (at_top(layers=["wide"]), "layer number 1: expected an object, given the text 'wide'"),
        (at_top(layers={"wide": 1}), "layer 'wide': expected an object, given 1"),
        (at_top(train=[]), "'train': expected an object, given the array []"),
        (at_top(data=None), "'data': expected an object, given null"),
        (
            at_top(default_optimizer=0.9),
            "key 'default_optimizer': expected an optimizer: its name, or an object with 'type', given 0.9",
        ),
        (
            at_top(default_transfunc={"type": 3}),
            "key 'default_transfunc.type': expected the name of a transfer function, given 3",
        ),
        (
            within("train", epoch="5"),
            "'train', key 'epoch': expected a whole number of at least 1, given the text '5'",
        ),
        (
            within("train", epoch=2.0),
            "'train', key 'epoch': expected a whole number of at least 1, given 2.0",
        ),
        (
            within("train", epoch=True),
            "'train', key 'epoch': expected a whole number of at least 1, given true",
        ),
        (within("train", lr="0.5"), "'train', key 'lr': expected a number above 0, given the text '0.5'"),
        (within("train", lr=False), "'train', key 'lr': expected a number above 0, given false"),
        (
            within("data", useshuffle="true"),
            "'data', key 'useshuffle': expected true or false, given the text 'true'",
        ),
        (
            within("data", path=["a"]),
            "'data', key 'path': expected a text that is not empty, given the array ['a']",
        ),
        (
            within("data", format=1),
            "'data', key 'format': expected one of 'libsvm', 'dummy', 'dense', given 1",
        ),
        (replaced("wide", name=7), "layer number 1, key 'name': expected a text that is not empty, given 7"),
        (replaced("wide", type=7), "layer 'wide', key 'type': expected the type of a layer, given 7"),
        (
            replaced("wide", outputdim="1"),
            "layer 'wide', key 'outputdim': expected a whole number of at least 1, given the text '1'",
        ),
        (
            replaced("deep", outputdims=100),
            "layer 'deep', key 'outputdims': expected an array of whole numbers, given 100",
        ),
        (
            replaced("deep", outputdims=[100, "100", 1]),
            "layer 'deep', key 'outputdims[1]': expected a whole number of at least 1, given the text '100'",
        ),
        (
            replaced("deep", transfuncs="relu"),
            "layer 'deep', key 'transfuncs': expected an array of transfer functions, given the text 'relu'",
        ),
        (
            replaced("cross", inputlayer=["embedding"]),
            "layer 'cross', key 'inputlayer': expected the name of a layer, given the array ['embedding']",
        ),
        (
            replaced("sum", inputlayers="wide"),
            "layer 'sum', key 'inputlayers': expected an array of names of layers, given the text 'wide'",
        ),
        (
            replaced("sum", inputlayers=["wide", 3]),
            "layer 'sum', key 'inputlayers[1]': expected the name of a layer, given 3",
        ),
        (
            replaced("embedding", optimizer={"type": "adam", "beta": "0.9"}),
            "layer 'embedding', key 'optimizer.beta': expected a number from 0 to below 1, given the text '0.9'",
        ),
        # numbers out of bounds
        (within("train", epoch=0), "'train', key 'epoch': expected a whole number of at least 1, given 0"),
        (within("train", lr=0), "'train', key 'lr': expected a number above 0, given 0"),
        (within("train", lr=10**400), "'train', key 'lr': expected a number above 0, given a whole number"),
        (
            within("train", decayalpha=-1),
            "'train', key 'decayalpha': expected a number of 0 or more, given -1",
        ),
        (
            within("train", decaybeta=1),
            "'train', key 'decaybeta': expected a number from 0 to below 1, given 1",
        ),
        (
            within("data", indexrange=0),
            "'data', key 'indexrange': expected a whole number of at least 1, or -1, given 0",
        ),
        (
            within("data", validateratio=1.5),
            "'data', key 'validateratio': expected a number from 0 to below 1, given 1.5",
        ),
        (
            within("data", sampleratio=0),
            "'data', key 'sampleratio': expected a number above 0, of at most 1, given 0",
        ),
        (
            within("data", posnegratio=-2),
            "'data', key 'posnegratio': expected a number above 0, or -1, given -2",
        ),
        (
            replaced("loss", lossfunc={"type": "huberloss", "delta": 0}),
            "layer 'loss', key 'lossfunc.delta': expected a number above 0, given 0",
        ),
        (
            replaced("embedding", optimizer={"type": "sgd", "reg2": -0.1}),
            "layer 'embedding', key 'optimizer.reg2': expected a number of 0 or more, given -0.1",
        ),
        # keys that do not go together
        (
            replaced("deep", transfuncs=["relu", "identity"]),
            "layer 'deep', key 'transfuncs': expected 3, one for each of outputdims, given 2; make both of one length",
        ),
        (
            replaced("deep", type="ParamSharedFC", weightdims=[1]),
            "layer 'deep', key 'weightdims': expected 3, one for each of outputdims, given 1; make both of one length",
        ),
        (
            replaced("deep", outputdims=[], transfuncs=[]),
            "layer 'deep', key 'outputdims': expected at least one number, given none",
        ),
        (
            replaced("deep", outputdim=1),
            "layer 'deep', key 'outputdim': expected one of 'outputdims' and 'outputdim', given both",
        ),
        (
            replaced("deep", outputdims=..., outputdim=1),
            "layer 'deep', key 'transfuncs': expected 'transfunc' beside 'outputdim', given 'transfuncs'",
        ),
        (
            replaced("deep", transfuncs=..., transfunc="relu"),
            "layer 'deep', key 'transfunc': expected 'transfuncs' beside 'outputdims', given 'transfunc'",
        ),
        (
            replaced("sum", inputlayers=["wide"]),
            "layer 'sum', key 'inputlayers': expected at least 2 layers, given 1: wide",
        ),
        (
            replaced("sum", type="crosslayer", inputlayers=["wide", "cross", "deep"]),
            "layer 'sum', key 'inputlayers': expected 2 layers, given 3: wide, cross, deep",
        ),
        (
            replaced("sum", type="concatlayer", inputlayers=[]),
            "layer 'sum', key 'inputlayers': expected at least 1 layer, given 0: none",
        ),
        (
            at_top(default_transfunc="relu", default_trandfunc="relu"),
            "key 'default_trandfunc': expected it once, given 'default_transfunc' too; keep 'default_transfunc'",
        ),
        (
            within("train", Epoch=7),
            "'train', key 'Epoch': expected each key once, given 'epoch' and 'Epoch'; keep one",
        ),
        (
            at_top(layers={"wide": {"name": "broad", "type": "simpleinputlayer", "outputdim": 1}}),
            "layer 'wide', key 'name': expected the key of the layer, 'wide', given 'broad'; leave it out",
        ),
        # the graph
        (
            replaced("cross", inputlayer="embeddings"),
            "layer 'cross', key 'inputlayer': expected the name of a layer, given 'embeddings'; "
            "did you mean 'embedding'?",
        ),
        (
            replaced("sum", inputlayers=["wide", "x", "deep"]),
            "layer 'sum', key 'inputlayers[1]': expected the name of a layer, given 'x'; there are 'wide', "
            "'embedding', 'deep_0', 'deep_1', 'deep', 'cross', 'loss'",
        ),
        (
            replaced("sum", inputlayers=["wide", "loss"]),
            "layer 'sum', key 'inputlayers[1]': expected a layer with an output, given 'loss', a loss layer, "
            "which has none",
        ),
        (
            added(name="wide", type="simpleinputlayer", outputdim=1),
            "layer 'wide', key 'name': expected a name that no other layer has, given two of it; rename one",
        ),
        (
            added(name="deep_1", type="simpleinputlayer", outputdim=1),
            "layer 'deep_1', key 'name': expected a name that no other layer has, given two of it, one of them a "
            "part of 'deep', which stands for several layers; rename one",
        ),
        (
            added(name="loss_2", type="losslayer", inputlayer="wide"),
            "layer 'loss_2', key 'type': expected one loss layer, given 'loss', 'loss_2'; keep one",
        ),
        (
            replaced("deep", inputlayer="sum"),
            "layer 'deep', key 'inputlayer': expected layers without a cycle, given 'sum' → 'deep_0' → 'deep_1' → "
            "'deep' → 'sum'; take one of its inputs away",
        ),
        (
            replaced("sum", inputlayers=["wide", "cross", "sum"]),
            "layer 'sum', key 'inputlayers[2]': expected layers without a cycle, given 'sum' → 'sum'; "
            "take one of its inputs away",
        ),
        (
            lambda document: document["layers"].extend(
                {"name": name, "type": "fclayer", "outputdim": 1, "inputlayer": source}
                for name, source in [("a", "b"), ("b", "a")]
            ),
            "layer 'b', key 'inputlayer': expected layers without a cycle, given 'a' → 'b' → 'a'; "
            "take one of its inputs away",
        ),
        (
            added(name="side", type="fclayer", outputdim=1, inputlayer="embedding"),
            "layer 'side': expected a layer that leads to the loss layer 'loss', given one that does not; "
            "name it as an input of another layer, or remove it",
        ),
        # dimensions
        (
            replaced("embedding", outputdim=100),
            "layer 'embedding', key 'outputdim': expected 104, 13 fields (numfield) × 8 factors (numfactors), "
            "given 100; change it, or its input",
        ),
        (
            replaced("cross", outputdim=2),
            "layer 'cross', key 'outputdim': expected 1, the one number that it gives, given 2; "
            "change it, or its input",
        ),
        (
            replaced("cross", type="biinnercross", outputdim=77),
            "layer 'cross', key 'outputdim': expected 78, one number for each pair of 13 vectors, given 77; "
            "change it, or its input",
        ),
        (
            replaced("cross", type="biinteractioncross", outputdim=104),
            "layer 'cross', key 'outputdim': expected 8, a vector as wide as those of its input, given 104; "
            "change it, or its input",
        ),
        (
            replaced("cross", type="biinteractioncrosstiled", outputdim=78),
            "layer 'cross', key 'outputdim': expected 624, 8 numbers for each of the 78 pairs of 13 vectors, "
            "given 78; change it, or its input",
        ),
        (
            replaced("cross", type="bioutercross", outputdim=624),
            "layer 'cross', key 'outputdim': expected 4992, 8 × 8 numbers for each of the 78 pairs of 13 vectors, "
            "given 624; change it, or its input",
        ),
        (
            replaced("cross", inputlayer="deep_0"),
            "layer 'cross', key 'inputlayer': expected vectors, as an embedding gives them, given 'deep_0' (FCLayer)",
        ),
        (
            replaced("sum", type="concatlayer", outputdim=4),
            "layer 'sum', key 'outputdim': expected 3, the sum of its inputs (1 + 1 + 1), given 4; "
            "change it, or its input",
        ),
        (
            replaced("wide", outputdim=2),
            "layer 'sum', key 'outputdim': expected 2, the dimension of its input 'wide', given 1; "
            "change it, or its input",
        ),
        (
            replaced("sum", type="mulpooling", outputdim=2),
            "layer 'sum', key 'outputdim': expected 1, the dimension of its input 'wide', given 2; "
            "change it, or its input",
        ),
        (
            replaced("sum", type="dotpooling", inputlayers=["wide", "cross", "deep"], outputdim=3),
            "layer 'sum', key 'outputdim': expected 1, the one number that it gives, given 3; "
            "change it, or its input",
        ),
        (
            replaced("sum", type="dotpooling", inputlayers=["wide", "cross", "deep", "deep_0"]),
            "layer 'sum', key 'inputlayers[3]': expected the dimension of 'wide', 1, given 'deep_0' with 100",
        ),
        (
            replaced("deep", type="ParamSharedFC", outputdims=[26, 12, 13], weightdims=[2, 1, 1]),
            "layer 'deep', key 'outputdims[1]': expected 13, 1 (weightdim) for each of the 13 vectors of 'deep_0', "
            "given 12; change it, or its input",
        ),
        (
            replaced("deep", type="ParamSharedFC", outputdims=[27, 13, 13], weightdims=[2, 1, 1]),
            "layer 'deep', key 'outputdims[0]': expected a multiple of 2 (weightdim), given 27",
        ),
        (
            replaced("deep", outputdims=[100, 100, 2], transfuncs=["relu", "relu", "identity"]),
            "layer 'sum', key 'outputdim': expected 2, the dimension of its input 'deep', given 1; "
            "change it, or its input",
        ),
        (
            replaced("loss", lossfunc="softmaxloss"),
            "layer 'loss', key 'inputlayer': expected a layer with an output for each class, 2 or more, for "
            "SoftmaxLoss, given 'sum' with 1",
        ),
        (
            replaced("loss", inputlayer="embedding"),
            "layer 'wide': expected a layer that leads to the loss layer 'loss', given one that does not; "
            "name it as an input of another layer, or remove it",
        ),
    ],
    ids=lambda value: value.partition(" given ")[0] if isinstance(value, str) else "",
)
def test_the_error_names_the_file_the_layer_and_the_key(tmp_path, change, said):
    """Before anything runs: hours later, in a worker, nobody would know which line of the file it was."""
    document = changed(change)
    assert of_file(tmp_path, document) == f"net.json: {said}"
    assert refused(document) == f"configuration: {said}"


# ---- dimensions that need a network of their own


def small(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"layers": list(layers)}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            small(
                {"name": "embedding", "type": "embedding", "numfactors": 8, "outputdim": 100},
                {"name": "loss", "type": "losslayer", "inputlayer": "embedding"},
            ),
            "layer 'embedding', key 'outputdim': expected fields × factors, a multiple of 8 (numfactors), given 100",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 3},
                {"name": "loss", "type": "losslayer", "lossfunc": "hingeloss", "inputlayer": "wide"},
            ),
            "layer 'loss', key 'inputlayer': expected a layer with 1 output for HingeLoss, given 'wide' with 3",
        ),
        (
            small(
                {"name": "one", "type": "embedding", "numfactors": 8, "outputdim": 8},
                {"name": "cross", "type": "biinnersumcross", "inputlayer": "one"},
                {"name": "loss", "type": "losslayer", "inputlayer": "cross"},
            ),
            "layer 'cross', key 'inputlayer': expected at least 2 vectors to cross, given 1 of 'one'",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 10},
                {
                    "name": "shared",
                    "type": "paramsharedfc",
                    "inputlayer": "wide",
                    "outputdim": 12,
                    "weightdim": 4,
                },
                {"name": "loss", "type": "losslayer", "inputlayer": "shared"},
            ),
            "layer 'shared', key 'outputdim': expected as many times 4 (weightdim) as its input has vectors, "
            "given 12, 3 times, which do not divide the 10 of 'wide'",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 3},
                {"name": "embedding", "type": "embedding", "numfactors": 2, "outputdim": 8},
                {
                    "name": "pooled",
                    "type": "weightedsumlayer",
                    "inputlayers": ["wide", "embedding"],
                    "outputdim": 2,
                },
                {"name": "loss", "type": "losslayer", "inputlayer": "pooled"},
            ),
            "layer 'pooled', key 'outputdim': expected the width of 3 vectors, one for each weight of 'wide', "
            "in the 8 of 'embedding', given 2",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 3},
                {"name": "cross", "type": "crosslayer", "inputlayers": ["wide", "wide"], "outputdim": 1},
                {"name": "loss", "type": "losslayer", "inputlayer": "cross"},
            ),
            "layer 'cross', key 'outputdim': expected 3, the dimension of its input 'wide', given 1; "
            "change it, or its input",
        ),
    ],
    ids=["embedding", "loss", "one vector", "shared", "weighted sum", "cross"],
)
def test_a_dimension_that_does_not_fit_is_told_with_both_numbers(document, said):
    """Which of the two is wrong only the one who wrote them knows."""
    assert refused(document) == f"configuration: {said}"


@pytest.mark.parametrize("loss", ["l2loss", "logloss", "hingeloss", "crossentropyloss", "huberloss"])
def test_every_loss_on_one_score_refuses_several(loss):
    """Each score after the first would be left out silently."""
    document = small(
        {"name": "wide", "type": "simpleinputlayer", "outputdim": 2},
        {"name": "loss", "type": "losslayer", "lossfunc": loss, "inputlayer": "wide"},
    )
    assert "expected a layer with 1 output" in refused(document)


def test_a_key_that_is_no_text_is_refused():
    """Only a dict of Python's can have one."""
    assert refused({1: 2}) == "configuration: expected keys that are texts, given 1"


@pytest.mark.parametrize("name", [1, ""])
def test_an_object_of_layers_has_their_names_as_keys(name):
    """Parameters are called after them."""
    said = f"configuration: key 'layers': expected the names of layers as keys, given {name!r}"
    assert refused({"layers": {name: {"type": "embedding"}}}) == said
