"""A missing key or an invalid value gives one error that names the file, the layer and the key."""

import pytest
from networks.configuration.refusals import assert_refused, at_top, case_id, replaced, within
from networks.published import layer


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
        (at_top(layers=[]), "key 'layers': expected a loss layer, of type 'simplelosslayer', given no layers; add one"),
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
    ],
    ids=case_id,
)
def test_a_missing_key_is_named_with_the_given_keys(tmp_path, change, said):
    """The error must come before anything runs: hours later, in a worker, the file and its line would be unknown."""
    assert_refused(tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
            "'train', key 'decayclass': expected one of 'ConstantLearningRate', 'StandardDecay', 'CorrectionDecay', "
            "'WarmRestarts', 'Constant', given 'WarmRestart'; did you mean 'WarmRestarts'?",
        ),
        (within("data", format="csv"), "'data', key 'format': expected one of 'libsvm', 'dummy', 'dense', given 'csv'"),
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
        (within("model", init="zeros"), "'model', key 'init': expected one of 'xavier', 'angel', given 'zeros'"),
    ],
    ids=case_id,
)
def test_an_unknown_name_is_reported_with_the_nearest_known_one(tmp_path, change, said):
    """Most typing errors are one wrong letter."""
    assert_refused(tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at_top(layers="wide"), "key 'layers': expected an array or an object of layers, given the text 'wide'"),
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
        (within("train", epoch="5"), "'train', key 'epoch': expected a whole number of at least 1, given the text '5'"),
        (within("train", epoch=2.0), "'train', key 'epoch': expected a whole number of at least 1, given 2.0"),
        (within("train", epoch=True), "'train', key 'epoch': expected a whole number of at least 1, given true"),
        (within("train", lr="0.5"), "'train', key 'lr': expected a number above 0, given the text '0.5'"),
        (within("train", lr=False), "'train', key 'lr': expected a number above 0, given false"),
        (within("data", useshuffle="true"), "'data', key 'useshuffle': expected true or false, given the text 'true'"),
        (within("data", path=["a"]), "'data', key 'path': expected a text that is not empty, given the array ['a']"),
        (within("data", format=1), "'data', key 'format': expected one of 'libsvm', 'dummy', 'dense', given 1"),
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
    ],
    ids=case_id,
)
def test_a_value_of_another_json_type_is_refused(tmp_path, change, said):
    """True was read as 1 epoch, and the text '5' failed in the middle of the training."""
    assert_refused(tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (within("train", epoch=0), "'train', key 'epoch': expected a whole number of at least 1, given 0"),
        (within("train", lr=0), "'train', key 'lr': expected a number above 0, given 0"),
        (within("train", lr=10**400), "'train', key 'lr': expected a number above 0, given a whole number"),
        (within("train", decayalpha=-1), "'train', key 'decayalpha': expected a number of 0 or more, given -1"),
        (within("train", decaybeta=1), "'train', key 'decaybeta': expected a number from 0 to below 1, given 1"),
        (
            within("data", indexrange=0),
            "'data', key 'indexrange': expected a whole number of at least 1, or -1, given 0",
        ),
        (
            within("data", validateratio=1.5),
            "'data', key 'validateratio': expected a number from 0 to below 1, given 1.5",
        ),
        (within("data", sampleratio=0), "'data', key 'sampleratio': expected a number above 0, of at most 1, given 0"),
        (within("data", posnegratio=-2), "'data', key 'posnegratio': expected a number above 0, or -1, given -2"),
        (
            replaced("wide", transfunc={"type": "dropout", "proba": 1}),
            "layer 'wide', key 'transfunc.proba': expected a number from 0 to below 1, given 1",
        ),
        (
            replaced("loss", lossfunc={"type": "huberloss", "delta": 0}),
            "layer 'loss', key 'lossfunc.delta': expected a number above 0, given 0",
        ),
        (
            replaced("embedding", optimizer={"type": "sgd", "reg2": -0.1}),
            "layer 'embedding', key 'optimizer.reg2': expected a number of 0 or more, given -0.1",
        ),
    ],
    ids=case_id,
)
def test_a_number_out_of_bounds_is_reported_with_the_bounds(tmp_path, change, said):
    """A learning rate of 0 learns nothing, without an error."""
    assert_refused(tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
            "layer 'deep', key 'transfuncs': expected 'transfunc' with 'outputdim', given 'transfuncs'",
        ),
        (
            replaced("deep", transfuncs=..., transfunc="relu"),
            "layer 'deep', key 'transfunc': expected 'transfuncs' with 'outputdims', given 'transfunc'",
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
        (within("train", Epoch=7), "'train', key 'Epoch': expected each key once, given 'epoch' and 'Epoch'; keep one"),
        (
            at_top(layers={"wide": {"name": "broad", "type": "simpleinputlayer", "outputdim": 1}}),
            "layer 'wide', key 'name': expected the key of the layer, 'wide', given 'broad'; leave it out",
        ),
    ],
    ids=case_id,
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, change, said):
    """The user could not know which of two contradictory keys has an effect."""
    assert_refused(tmp_path, change, said)
