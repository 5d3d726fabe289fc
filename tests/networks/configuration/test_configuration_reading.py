"""Configuration files are read with every key, and a file that is none is refused."""

import json
import random
from typing import Any

import pytest
from networks.configuration.refusals import refused
from networks.published import PUBLISHED, deep_fm, layer, published

from streamiter.networks.configuration import (
    Configuration,
    DataSettings,
    ModelSettings,
    TrainSettings,
    canonical,
    read_configuration,
)
from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    Adam,
    Constant,
    Correction,
    InverseSquareRoot,
    Momentum,
    RMSProp,
    WarmRestarts,
)
from streamiter.values.settings import SettingsError

LOGISTIC = [
    {"name": "wide", "type": "simpleinputlayer", "outputdim": 1},
    {"name": "loss", "type": "simplelosslayer", "inputlayer": "wide"},
]


def wide(**document: Any) -> Any:
    """Read a logistic regression with these keys, and return its input layer."""
    return read_configuration({"layers": LOGISTIC, **document}).layers[0]


# ---- the published files


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_file_is_read_without_a_warning(name):
    """An unknown key in a published file would change the meaning of the file."""
    configuration = read_configuration(published(name))
    assert configuration.warnings == ()
    assert configuration.source == f"{name}.json"
    assert configuration.loss_layer.loss.type == "LogLoss"


def test_every_key_of_the_published_deep_fm_is_read():
    """One whole file is checked, so that no key is read into a wrong setting."""
    read = read_configuration(published("deepfm"))
    assert read.data == DataSettings("dummy", index_range=148, num_field=13, validate_ratio=0.1, sample_ratio=0.2)
    assert read.model == ModelSettings("T_FLOAT_DENSE", model_size=148)
    assert read.train == TrainSettings(epoch=5, lr=0.5, decay_class="WarmRestarts", decay_alpha=0.05)
    assert [(found.name, found.type, found.output_dim, found.inputs) for found in read.layers] == [
        ("wide", "SimpleInputLayer", 1, ()),
        ("embedding", "Embedding", 104, ()),
        ("biinnersumcross", "BiInnerSumCross", 1, ("embedding",)),
        ("fclayer_0", "FCLayer", 100, ("embedding",)),
        ("fclayer_1", "FCLayer", 100, ("fclayer_0",)),
        ("fclayer", "FCLayer", 1, ("fclayer_1",)),
        ("sumPooling", "SumPooling", 1, ("wide", "biinnersumcross", "fclayer")),
        ("simplelosslayer", "SimpleLossLayer", -1, ("sumPooling",)),
    ]
    rate = WarmRestarts(0.5, 0.05)
    assert read.layers[0].optimizer == Momentum(rate, momentum=0.9)
    assert read.layers[1].optimizer == Momentum(rate, momentum=0.9, l2=0.01)
    assert read.layers[1].num_factors == 8
    functions = [found.transfer_function.type for found in read.layers[3:6]]
    assert functions == ["Relu", "Relu", "Identity"]


# ---- sections


def test_a_missing_key_has_the_published_default():
    """Most files omit most keys."""
    read = read_configuration({"layers": LOGISTIC})
    assert read.data == DataSettings(
        format="dummy",
        path=None,
        index_range=-1,
        num_field=-1,
        validate_ratio=0.05,
        sample_ratio=1.0,
        use_shuffle=False,
        pos_neg_ratio=-1.0,
        trans_label="NoTrans",
    )
    assert read.train == TrainSettings(30, 10, 128, 0.5, "StandardDecay", 0.001, 0.001)
    assert read.model == ModelSettings("T_FLOAT_DENSE", -1, 1_000_000, None, None, "xavier")
    assert read.layers[0].optimizer == Momentum(InverseSquareRoot(0.5, 0.001), momentum=0.9)
    assert (read.layers[0].transfer_function.type, read.layers[1].loss.type) == ("Identity", "LogLoss")


def test_every_key_of_the_sections_is_read():
    """A key that is accepted and then ignored looks like a key with an effect."""
    read = read_configuration(
        {
            "data": {
                "path": "rows.txt",
                "format": "libsvm",
                "indexrange": 9,
                "numfield": 3,
                "validateratio": 0.2,
                "sampleratio": 0.5,
                "useshuffle": True,
                "posnegratio": 0.01,
                "translabel": "posnegtrans",
            },
            "model": {
                "loadPath": "before",
                "savepath": "after",
                "modeltype": "t_double_sparse_longkey",
                "modelsize": 7,
                "blockSize": 100,
                "init": "angel",
            },
            "train": {
                "epoch": 2,
                "numupdateperepoch": 3,
                "batchsize": 4,
                "lr": 1,
                "decayclass": "correctiondecay",
                "decayalpha": 0.25,
                "decaybeta": 0.75,
            },
            "layers": LOGISTIC,
        }
    )
    assert read.warnings == ()
    assert read.data == DataSettings("libsvm", "rows.txt", 9, 3, 0.2, 0.5, True, 0.01, "PosNegTrans")
    assert read.model == ModelSettings("T_DOUBLE_SPARSE_LONGKEY", 7, 100, "before", "after", "angel")
    assert read.model.dtype == "float64"
    assert read.train == TrainSettings(2, 3, 4, 1.0, "CorrectionDecay", 0.25, 0.75)


@pytest.mark.parametrize(
    ("data", "model", "features"),
    [
        ({"indexrange": 9}, {"modelsize": 7}, 9),
        ({"indexrange": -1}, {"modelsize": 7}, 7),
        ({"indexrange": -1}, {"modelsize": -1}, None),
        ({}, {}, None),
    ],
)
def test_the_number_of_features_is_indexrange_or_modelsize_or_from_the_data(data, model, features):
    """logreg.json gives -1 as the number of features, so the number comes from the data."""
    assert read_configuration({"data": data, "model": model, "layers": LOGISTIC}).features == features


# ---- optimizers, transfer functions, losses


@pytest.mark.parametrize(
    ("written", "optimizer"),
    [
        ("SGD", SGD(0.5)),
        ("momentum", Momentum(0.5, momentum=0.9)),
        ("Adam", Adam(0.5, beta=0.9, gamma=0.99)),
        ("AdaGrad", RMSProp(0.5, beta=0.9)),
        ("ADADELTA", AdaDelta(0.5, alpha=0.9, beta=0.9)),
        ("FTRL", FTRL(alpha=0.1, beta=1.0)),
        ({"type": "sgd", "reg1": 0.1, "reg2": 0.2}, SGD(0.5, l1=0.1, l2=0.2)),
        ({"type": "Momentum", "momentum": 0.8, "reg1": 0.1, "reg2": 0.2}, Momentum(0.5, momentum=0.8, l1=0.1, l2=0.2)),
        ({"type": "adam", "beta": 0.8, "gamma": 0.7, "reg2": 1}, Adam(0.5, beta=0.8, gamma=0.7, l2=1.0)),
        ({"type": "adagrad", "beta": 0.8}, RMSProp(0.5, beta=0.8)),
        ({"type": "adadelta", "alpha": 0.8, "beta": 0.7}, AdaDelta(0.5, alpha=0.8, beta=0.7)),
        ({"type": "ftrl", "alpha": 0.2, "beta": 2, "reg1": 3, "reg2": 4}, FTRL(alpha=0.2, beta=2.0, l1=3.0, l2=4.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["layer", "default"])
def test_an_optimizer_is_a_name_or_an_object(written, optimizer, place):
    """The optimizer belongs to a layer, or to all layers without their own; Angel's AdaGrad is called RMSProp here."""
    train = {"lr": 0.5, "decayclass": "constant"}
    if place == "default":
        assert wide(train=train, default_optimizer=written).optimizer == optimizer
    else:
        layers = [{**LOGISTIC[0], "optimizer": written}, LOGISTIC[1]]
        assert wide(train=train, layers=layers, default_optimizer="ftrl").optimizer == optimizer


@pytest.mark.parametrize(
    ("decay", "rate"),
    [
        ({"decayclass": "ConstantLearningRate"}, Constant(0.5)),
        ({"decayclass": "constant"}, Constant(0.5)),
        ({"decayclass": "StandardDecay", "decayalpha": 0.2}, InverseSquareRoot(0.5, 0.2)),
        ({"decayclass": "CorrectionDecay", "decayalpha": 0.2, "decaybeta": 0.8}, Correction(0.5, 0.2, 0.8)),
        ({"decayclass": "warmrestarts", "decayalpha": 0.2, "decaybeta": 0.8}, WarmRestarts(0.5, 0.2)),
        ({}, InverseSquareRoot(0.5, 0.001)),
    ],
    ids=str,
)
def test_decayclass_chooses_the_decay_of_the_learning_rate(decay, rate):
    """All optimizers except FTRL use the decay."""
    assert wide(train={"lr": 0.5, **decay}).optimizer.learning_rate == rate


@pytest.mark.parametrize("key", ["default_transfunc", "default_trandfunc"])
def test_older_files_misspell_the_default_transfer_function(key):
    """Older files have this spelling, and must run without changes."""
    layers = {
        "embedding": {"type": "embedding", "numfactors": 2, "outputdim": 6},
        "deep": {"type": "fclayer", "inputlayer": "embedding", "outputdims": [3, 1]},
        "loss": {"type": "losslayer", "inputlayer": "deep"},
    }
    read = read_configuration({key: {"type": "Dropout", "proba": 0.25}, "layers": layers})
    assert read.warnings == ()
    assert [str(found.transfer_function) for found in read.layers] == [
        "None",
        "Dropout(proba 0.25)",
        "Dropout(proba 0.25)",
        "None",
    ]


def test_the_key_actiontype_of_dropout_is_ignored():
    """The network itself knows whether it trains or predicts, so Angel's key ``actiontype`` is ignored."""
    layers = [{**LOGISTIC[0], "transfunc": {"type": "dropout", "proba": 0.1, "actiontype": "train"}}, LOGISTIC[1]]
    read = read_configuration({"layers": layers})
    assert read.warnings == ()
    assert read.layers[0].transfer_function.parameters == {"proba": 0.1}


def test_a_loss_has_its_own_function_or_the_default():
    """The loss function of a layer replaces the default."""
    document = {"default_lossfunc": {"type": "huberloss", "delta": 2}, "layers": LOGISTIC}
    loss = read_configuration(document).loss_layer.loss
    assert (loss.type, loss.parameters) == ("HuberLoss", {"delta": 2.0})
    document["layers"] = [LOGISTIC[0], {**LOGISTIC[1], "lossfunc": "HINGELOSS"}]
    assert read_configuration(document).loss_layer.loss.type == "HingeLoss"


# ---- layers


def same(first: Configuration, second: Configuration) -> bool:
    """Return whether two configurations have the same meaning; their names may differ."""
    return canonical(first) == canonical(second) and first.layers == second.layers


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_an_array_of_layers_does_not_matter(seed):
    """Angel finds layers by name, so the order of parameters must not depend on the order in the file."""
    document = deep_fm()
    expected = read_configuration(document)
    random.Random(seed).shuffle(document["layers"])
    assert same(read_configuration(document), expected)


def test_layers_may_be_an_object_by_name():
    """Some versions save the layers as an object."""
    document = deep_fm()
    expected = read_configuration(document)
    document["layers"] = {found.pop("name"): found for found in document["layers"]}
    assert same(read_configuration(document), expected)
    document["layers"]["wide"]["name"] = "wide"
    assert same(read_configuration(document), expected)


def test_the_case_of_types_and_of_functions_does_not_matter():
    """Some files contain FCLayer, and others fclayer."""
    document = deep_fm()
    expected = read_configuration(document)
    for found in document["layers"]:
        found["type"] = found["type"].upper()
    layer(document, "deep")["transfuncs"] = ["RELU", {"type": "ReLU"}, "Identity"]
    assert same(read_configuration(document), expected)


def test_an_outer_cross_has_two_spellings():
    """Published files of attention FM spell the type with two t."""
    for spelled in ("biOuterCross", "bioutterCross"):
        document = {
            "layers": {
                "embedding": {"type": "embedding", "numfactors": 2, "outputdim": 6},
                "outer": {"type": spelled, "inputlayer": "embedding", "outputdim": 12},
                "deep": {"type": "fclayer", "inputlayer": "outer", "outputdim": 1, "transfunc": "tanh"},
                "loss": {"type": "losslayer", "inputlayer": "deep"},
            }
        }
        assert read_configuration(document).layers[1].type == "BiOuterCross"


def test_a_folded_layer_is_as_many_layers_as_it_has_dimensions():
    """Published models name the parameters so: name_0, name_1, …, and the last part is called name."""
    document = deep_fm()
    folded = read_configuration(document)
    document["layers"].remove(layer(document, "deep"))
    document["layers"] += [
        {"name": name, "type": "fclayer", "inputlayer": source, "outputdim": dim, "transfunc": function}
        for name, source, dim, function in [
            ("deep", "deep_1", 1, "identity"),
            ("deep_1", "deep_0", 100, "relu"),
            ("deep_0", "embedding", 100, "relu"),
        ]
    ]
    written_out = read_configuration(document)

    def described(configuration: Configuration) -> list[Any]:
        return [
            (found.name, found.output_dim, found.inputs, found.transfer_function, found.optimizer)
            for found in configuration.layers
        ]

    assert described(written_out) == described(folded)


def test_the_parts_of_a_folded_layer_may_be_inputs_themselves():
    """The parts of a folded layer are layers like any other."""
    document = deep_fm()
    document["layers"].append(
        {"name": "side", "type": "fclayer", "inputlayer": "deep_0", "outputdim": 1, "transfunc": "tanh"}
    )
    layer(document, "sum")["inputlayers"].append("side")
    names = [found.name for found in read_configuration(document).layers]
    assert names.index("deep_0") < names.index("side") < names.index("sum")


def test_the_attention_fm_as_it_was_published_is_read():
    """The folded layer of this file also has weight dimensions."""
    document = {
        "data": {"indexrange": 148, "numfield": 13},
        "layers": [
            {"name": "embedding", "type": "embedding", "numfactors": 8, "outputdim": 104},
            {"name": "pairs", "type": "BiInteractionCrossTiled", "outputdim": 624, "inputlayer": "embedding"},
            {
                "name": "attention",
                "type": "ParamSharedFC",
                "outputdims": [780, 78],
                "transfuncs": ["relu", "softmax"],
                "weightdims": [10, 1],
                "inputlayer": "pairs",
            },
            {"name": "pooled", "type": "WeightedSumLayer", "outputdim": 8, "inputlayers": ["attention", "pairs"]},
            {"name": "score", "type": "FCLayer", "outputdims": [1], "transfuncs": ["identity"], "inputlayer": "pooled"},
            {"name": "loss", "type": "losslayer", "inputlayer": "score"},
        ],
    }
    read = read_configuration(document)
    shared = [(found.name, found.output_dim, found.weight_dim) for found in read.layers[2:4]]
    assert shared == [("attention_0", 780, 10), ("attention", 78, 1)]
    # Written as two layers, each has its own weight dimension.
    folded = document["layers"].pop(2)
    for name, source, part in [("attention_0", "pairs", 0), ("attention", "attention_0", 1)]:
        single = {key: folded[f"{key}s"][part] for key in ("outputdim", "transfunc", "weightdim")}
        document["layers"].append({"name": name, "type": folded["type"], "inputlayer": source, **single})
    assert [
        (found.name, found.output_dim, found.weight_dim) for found in read_configuration(document).layers[2:4]
    ] == shared


def test_a_chain_of_thousands_of_layers_is_read():
    """Python's stack allows about a thousand nested calls."""
    depth = 3_000
    layers = [{"name": "0", "type": "simpleinputlayer", "outputdim": 1}]
    layers += [
        {"name": str(number), "type": "fclayer", "inputlayer": str(number - 1), "outputdim": 1}
        for number in range(1, depth)
    ]
    layers.append({"name": "loss", "type": "losslayer", "inputlayer": str(depth - 1)})
    read = read_configuration({"layers": layers[::-1]})
    assert [found.name for found in read.layers[:-1]] == [str(number) for number in range(depth)]


# ---- unknown keys


def test_an_unknown_key_is_a_warning_with_the_nearest_known_key(tmp_path):
    """Other versions have other keys, but a typing error must not be ignored silently."""
    document = deep_fm()
    document["deafult_optimizer"] = "adam"
    document["train"]["decay"] = 0.01
    document["data"]["indexrnage"] = 3
    layer(document, "sum")["colour"] = "blue"
    layer(document, "embedding")["optimizer"]["momentun"] = 0.5
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    assert read_configuration(path).warnings == (
        "mine.json:1: deafult_optimizer: unknown, and left out; did you mean 'default_optimizer'?",
        "mine.json:1: data.indexrnage: unknown, and left out; did you mean 'indexrange'?",
        "mine.json:1: train.decay: unknown, and left out",
        "mine.json:1: layers.embedding.optimizer.momentun: unknown, and left out; did you mean 'momentum'?",
        "mine.json:1: layers.sum.colour: unknown, and left out",
    )


def test_all_wrong_values_are_told_at_once_with_their_lines(tmp_path):
    """A file with four wrong values needed four starts, and a reader had to search for each key."""
    document = deep_fm()
    document["train"] |= {"epoch": "5", "lr": -1}
    layer(document, "wide")["outputdim"] = 0
    layer(document, "deep")["transfuncs"][1] = 'a "quoted" text: relu'
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document, indent=2))
    lines = path.read_text().split("\n")
    with pytest.raises(SettingsError) as caught:
        read_configuration(path)
    found = [(problem.key, lines[(problem.line or 0) - 1].strip().rstrip(",")) for problem in caught.value.problems]
    assert found == [
        ("train.epoch", '"epoch": "5"'),
        ("train.lr", '"lr": -1'),
        ("layers.wide.outputdim", '"outputdim": 0'),
        ("layers.deep.transfuncs[1]", '"transfuncs": ['),
    ]


def test_a_key_that_another_type_of_layer_has_is_unknown_to_this_one():
    """An optimizer of a layer without parameters has no effect, and the author should know that."""
    document = deep_fm()
    layer(document, "sum")["optimizer"] = "adam"
    assert read_configuration(document).warnings == ("configuration: layers.sum.optimizer: unknown, and left out",)


@pytest.mark.parametrize(("function", "is_probability"), [("identity", False), ("relu", False), ("sigmoid", True)])
def test_a_cross_entropy_without_a_probability_is_refused(function, is_probability):
    """With the default transfer function, the loss was −20 and continued to fall."""
    document = {
        "default_lossfunc": "crossentropyloss",
        "layers": {
            "wide": {"type": "simpleinputlayer", "outputdim": 1, "transfunc": function},
            "loss": {"type": "simplelosslayer", "inputlayer": "wide"},
        },
    }
    expected = (
        "configuration: layers.loss.inputlayer: expected probabilities for CrossEntropyLoss, given 'wide', "
        f"which ends with {function.capitalize()}; end it with Sigmoid, or take LogLoss"
    )
    assert read_configuration(document).warnings == (() if is_probability else (expected,))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """The user gave a saved model instead of its configuration."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"{\xff")
    assert refused(path) == "model.safetensors: expected JSON in UTF-8, given a wrong byte at 1"


def test_a_missing_file_is_named_with_its_folder(tmp_path):
    """In most cases the folder is wrong, so the error shows the whole path."""
    missing = tmp_path / "no.json"
    assert refused(missing) == f"{missing}: expected a JSON file, given No such file or directory"
    assert refused(tmp_path) == f"{tmp_path}: expected a JSON file, given Is a directory"
