"""Layers that do not fit together give one error that names the file, the layer and the key."""

import pytest
from networks.configuration.refusals import added, assert_refused, case_id, refused, replaced, small


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
            "part of 'deep', which is several layers; rename one",
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
    ],
    ids=case_id,
)
def test_layers_that_make_no_graph_are_refused(tmp_path, change, said):
    """A cycle would compute for ever, and a layer without a reader would learn nothing."""
    assert_refused(tmp_path, change, said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
            "layer 'cross', key 'outputdim': expected 8, the width of the vectors of its input, given 104; "
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
            "layer 'cross', key 'inputlayer': expected vectors, such as an embedding gives, given 'deep_0' (FCLayer)",
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
            "layer 'sum', key 'outputdim': expected 1, the one number that it gives, given 3; change it, or its input",
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
    ids=case_id,
)
def test_a_dimension_that_does_not_fit_is_reported_with_both_numbers(tmp_path, change, said):
    """Only the author knows which of the two numbers is wrong."""
    assert_refused(tmp_path, change, said)


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
                {"name": "shared", "type": "paramsharedfc", "inputlayer": "wide", "outputdim": 12, "weightdim": 4},
                {"name": "loss", "type": "losslayer", "inputlayer": "shared"},
            ),
            "layer 'shared', key 'outputdim': expected as many times 4 (weightdim) as its input has vectors, "
            "given 12, 3 times, which do not divide the 10 of 'wide'",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 3},
                {"name": "embedding", "type": "embedding", "numfactors": 2, "outputdim": 8},
                {"name": "pooled", "type": "weightedsumlayer", "inputlayers": ["wide", "embedding"], "outputdim": 2},
                {"name": "loss", "type": "losslayer", "inputlayer": "pooled"},
            ),
            "layer 'pooled', key 'outputdim': expected the width of 3 vectors, one for each weight of 'wide', "
            "in the 8 of 'embedding', given 2",
        ),
        (
            small(
                {"name": "wide", "type": "simpleinputlayer", "outputdim": 2},
                {"name": "embedding", "type": "embedding", "numfactors": 2, "outputdim": 8},
                {"name": "pooled", "type": "weightedsumlayer", "inputlayers": ["wide", "embedding"], "outputdim": 4},
                {"name": "loss", "type": "losslayer", "inputlayer": "pooled"},
            ),
            "layer 'pooled', key 'outputdim': expected the width of 2 vectors, one for each weight of 'wide', "
            "in the 8 of 'embedding', given 4",
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
    ids=["embedding", "loss", "one vector", "shared", "weighted sum", "vectors of another width", "cross"],
)
def test_a_dimension_of_a_small_network_is_checked_too(document, said):
    """A network without ``numfield``, and layers that a DeepFM does not have, are checked too."""
    assert refused(document) == f"configuration: {said}"


@pytest.mark.parametrize("loss", ["l2loss", "logloss", "hingeloss", "crossentropyloss", "huberloss"])
def test_every_loss_on_one_score_refuses_several(loss):
    """The loss would silently ignore every score after the first."""
    document = small(
        {"name": "wide", "type": "simpleinputlayer", "outputdim": 2},
        {"name": "loss", "type": "losslayer", "lossfunc": loss, "inputlayer": "wide"},
    )
    assert "expected a layer with 1 output" in refused(document)
