"""States of models as data, for tests that compare all bits."""

from typing import Any

import numpy as np

from streamiter.learn import AdaptiveLinearModel


def frozen(state: Any) -> Any:
    """Return a state as data that is equal if all bits are."""
    if isinstance(state, np.ndarray):
        return state.shape, str(state.dtype), state.tobytes()
    if isinstance(state, dict):
        return {name: frozen(value) for name, value in state.items()}
    return [frozen(value) for value in state] if isinstance(state, (list, tuple)) else state


def learned(model: AdaptiveLinearModel) -> Any:
    """Return the state, without the number of batches."""
    state: Any = frozen(model.state())
    return {name: value for name, value in state.items() if name != "version"}
