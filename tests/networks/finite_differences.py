"""The reference for the gradients of a graph: central finite differences of its loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamiter.networks.network import LayerGraph

__all__ = ["assert_agree", "assert_gradients_agree", "differences", "give_values", "gradients_of"]

RELATIVE = 1e-6

# At this step the error of the formula (step²) and the rounding error (2e-16 / step) are both far below the tolerance.
STEP = 1e-5


def give_values(graph: LayerGraph, generator: np.random.Generator, scale: float = 0.5) -> None:
    """Set random values of all parameters for the mini-batch that was fed."""
    for parameter in graph.parameters:
        values = generator.normal(scale=scale, size=graph.shape_of(parameter))
        parameter.values = values.astype(graph.place_holder.dtype)


def gradients_of(graph: LayerGraph) -> dict[str, npt.NDArray[np.float64]]:
    """Return the gradients of all parameters by name; the mini-batch must have been fed."""
    graph.loss()
    graph.backward()
    return {parameter.name: np.array(parameter.gradient) for parameter in graph.gradients()}


def assert_gradients_agree(graph: LayerGraph, feed: Callable[[], None]) -> None:
    """Check every number of every parameter in float64; ``feed`` feeds the same mini-batch each time."""
    feed()
    gradients = gradients_of(graph)
    largest = max(float(np.abs(gradient).max(initial=0.0)) for gradient in gradients.values())
    assert largest > 0.0, "nothing to compare with"
    for parameter in graph.parameters:
        assert parameter.values is not None

        def loss() -> float:
            feed()
            return graph.loss()

        expected = differences(loss, parameter.values)
        assert gradients[parameter.name].shape == expected.shape, parameter.name
        assert_agree(gradients[parameter.name], expected, parameter.name, largest)


def differences(function: Callable[[], float], at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the derivative by each number of ``at``, which is changed and restored."""
    slopes = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        number, losses = at[place], []
        for step in (STEP, -STEP):
            at[place] = number + step
            losses.append(function())
        at[place] = number
        slopes[place] = (losses[0] - losses[1]) / (2 * STEP)
    return slopes


def assert_agree(
    given: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], what: str, largest_of_all: float = 0.0
) -> None:
    """Check to 1e-6 relative.

    Rounding is not relative: numbers below a thousandth of the largest of their array, or a ten-thousandth of
    the largest of all, count as that much.
    """
    least = max(1e-3 * np.abs(expected).max(initial=1e-12), 1e-4 * largest_of_all)
    scale = np.maximum(np.abs(expected), least)
    worst = float((np.abs(given - expected) / scale).max(initial=0.0))
    assert worst < RELATIVE, f"{what}: {worst:.2e} off"
