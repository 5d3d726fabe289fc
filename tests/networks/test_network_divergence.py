"""Training that diverges gives an error and keeps the last finite model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from files.files_support import data_file
from networks.published import published
from networks.training_support import document, records, rows

from streamiter import Flow
from streamiter.errors import JobFailed
from streamiter.networks import Diverged, LabelledRows, Network, fit_network, read_rows
from streamiter.networks.training import train_network, train_network_online
from streamiter.parameter_server import ASP, BSP, ParameterServer


def steep(**train: Any) -> Network:
    """Return a linear regression with unscaled features and a learning rate that is too high. Each step makes the
    error nine times as large, so in float32 the loss overflows in step 23.
    """
    layers = {
        "value": {"type": "simpleinputlayer", "outputdim": 1},
        "loss": {"type": "losslayer", "lossfunc": "l2loss", "inputlayer": "value"},
    }
    settings = {"epoch": 50, "numupdateperepoch": 5, "lr": 0.1, "decayclass": "Constant", **train}
    return Network.from_json(
        {"data": {"indexrange": 2}, "train": settings, "default_optimizer": "SGD", "layers": layers}
    )


def unscaled(count: int, seed: int = 1) -> LabelledRows:
    x = 10.0 * np.random.default_rng(seed).normal(size=(count, 2))
    return LabelledRows(x, x @ [1.0, -2.0])


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("validation", [None, unscaled(50, seed=2)], ids=["", "with validation"])
def test_the_model_of_the_last_epoch_that_was_finite_is_kept(workers: int, validation: LabelledRows | None) -> None:
    """After an hour of training the result was only an error, although the earlier epochs had been good."""
    options: Any = {"workers": workers, "progress": False}
    with pytest.raises(Diverged) as caught:
        fit_network(steep(), unscaled(100), validation, **options)
    assert str(caught.value) == (
        "epoch 5, step 3 of 5: layer 'loss': expected a finite loss, given inf; lower lr, scale the features, or take "
        "another seed"
    )
    kept = caught.value.trained
    assert kept is not None
    assert (kept.ended_by, [result.epoch for result in kept.results]) == ("divergence", [1, 2, 3, 4])
    alone = fit_network(steep(), unscaled(100), validation, epochs=4, **options)
    assert kept.results == alone.results
    for name, array in alone.parameters.items():
        assert np.isfinite(array).all()
        assert kept.parameters[name].tobytes() == array.tobytes()
    assert np.isfinite(kept.predictor([[1.0, 1.0]])).all()


def test_without_a_finite_epoch_there_is_no_model() -> None:
    """No model is better than the initial model."""
    with pytest.raises(Diverged, match=r"^epoch 1, step 2 of 5: .*; lower lr") as caught:
        fit_network(steep(lr=1e30), unscaled(100), progress=False)
    assert caught.value.trained is None


def test_rows_for_validation_may_show_the_divergence_first() -> None:
    """The training returned the model of an epoch that could not be evaluated."""
    far = LabelledRows(np.full((1, 2), 1e12), np.zeros(1))
    with pytest.raises(
        Diverged, match=r"^epoch 2, rows for validation: layer 'loss': expected a finite loss"
    ) as caught:
        fit_network(steep(), unscaled(100), far, progress=False)
    assert caught.value.trained is not None
    assert len(caught.value.trained.results) == 1


def test_a_gradient_that_is_not_finite_is_named() -> None:
    """The error did not say which of twenty arrays was infinite."""
    rows = LabelledRows(np.full((4, 2), 1e30), np.zeros(4))  # The loss is 3e37, but its gradient exceeds float32.
    layers = {
        "wide": {"type": "simpleinputlayer", "outputdim": 1, "transfunc": "tanh"},
        "value": {"type": "fclayer", "outputdim": 1, "inputlayer": "wide"},
        "loss": {"type": "losslayer", "lossfunc": "l2loss", "inputlayer": "value"},
    }
    made = Network.from_json({"data": {"indexrange": 2}, "layers": layers})
    start = {
        "wide.weight": np.zeros((2, 1)),
        "wide.bias": np.ones(1),
        "value.weight": np.full((1, 1), 1e19),
        "value.bias": np.zeros(1),
    }
    with pytest.raises(
        Diverged, match=r"^epoch 1, step 1 of 4: gradient of 'wide\.weight': expected finite numbers, given inf; lower"
    ):
        fit_network(made, rows, start=start, progress=False)


def test_a_last_version_that_is_not_finite_is_an_error() -> None:
    """No step computes with the last version, so NaN in a saved model would be found weeks later."""
    data = LabelledRows(np.full((4, 2), 1e12), np.ones(4))
    with pytest.raises(Diverged, match=r"^parameter 'value\.weight': expected finite numbers, given -?inf; lower"):
        fit_network(steep(epoch=1, numupdateperepoch=1, lr=1e30), data, progress=False)


@pytest.mark.parametrize("how", [BSP(), ASP()], ids=repr)
def test_a_users_flow_fails_with_the_epoch_and_the_step(how: Any) -> None:
    """A version that is not finite must not be published."""
    flow = Flow("training")
    training = train_network(flow, unscaled(100), steep(), ParameterServer(), consistency=how)
    models = training.models.collect()
    with pytest.raises(JobFailed, match=r"step 'train' \(test_network_divergence.py:\d+\) on record 22: epoch 5, "):
        flow.run()
    assert len(models.items) == 4


def test_on_a_stream_the_error_names_the_mini_batch_and_the_worker() -> None:
    """A stream has no epochs, so the error names the mini-batch and the worker."""
    flow, data = Flow("online"), rows(400)
    made = Network.from_json(
        document(train={"lr": 1e200}, model={"modeltype": "T_FLOAT_DENSE"}, data={"indexrange": 24})
    )
    train_network_online(
        flow.from_items(records(data)), made, ParameterServer(), consistency=ASP(), batch=10
    ).models.collect()
    with pytest.raises(
        JobFailed, match=r"mini-batch \d of worker 0: .* expected .*finite .*, given (inf|-inf|nan); lower lr"
    ):
        flow.run()


def test_the_published_deepfm_does_not_diverge_at_the_default_seed() -> None:
    """The whole file and seed 0 are a user's first attempt, and the training diverged in epoch 3."""
    made = Network.from_json(published("deepfm"))
    data, held_out = (
        read_rows(data_file(f"census/census_148d_{kind}.dummy"), made.configuration.data) for kind in ("train", "test")
    )
    results = fit_network(made, data, held_out, progress=False).results
    assert len(results) == 5
    assert results[-1].validation is not None
    assert results[-1].validation.loss < 0.331
