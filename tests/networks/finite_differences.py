"""Central finite differences of the loss are the reference for the gradients of a graph."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from streamiter.networks.network import LayerGraph

__all__ = ["assert_agree", "assert_gradients_agree", "differences", "give_values", "gradients_of"]

RELATIVE = 1e-6

# At this step the error of the formula (step²) and the rounding error (2e-16 / step) are both far below the tolerance.
STEP = 1e-5


def give_values(graph: LayerGraph, generator: np.random.Generator, scale: float = 0.5) -> None:
    """Set random values of all parameters for the current mini-batch."""
    for parameter in graph.parameters:
        values = generator.normal(scale=scale, size=graph.shape_of(parameter))
        parameter.values = values.astype(graph.place_holder.dtype)


def gradients_of(graph: LayerGraph) -> dict[str, npt.NDArray[np.float64]]:
    """Return the gradients of all parameters by name; feed the mini-batch first."""
    graph.loss()
    graph.backward()
    return {parameter.name: np.array(parameter.gradient) for parameter in graph.gradients()}


def assert_gradients_agree(graph: LayerGraph, feed: Callable[[], None]) -> None:
    """Compare every gradient in float64; ``feed`` feeds the same mini-batch each time."""
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
    """Return the derivative by each number of ``at``; each number is changed and then restored."""
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
    """Compare to 1e-6 relative. A number below a thousandth of the largest of its array, or a ten-thousandth of the
    largest of all, is compared with that limit, because rounding errors are not relative.
    """
    least = max(1e-3 * np.abs(expected).max(initial=1e-12), 1e-4 * largest_of_all)
    scale = np.maximum(np.abs(expected), least)
    worst = float((np.abs(given - expected) / scale).max(initial=0.0))
    assert worst < RELATIVE, f"{what}: {worst:.2e} off"
