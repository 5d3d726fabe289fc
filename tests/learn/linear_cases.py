"""The known case of linear models, and their state as bits."""

ROWS = [(0.1, 2), (0.2, 2), (0.3, 2), (0.4, 2), (0.5, 2), (11, 12), (12, 11), (13, 12), (14, 12), (15, 12)]
LABELS = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
START = (0.41233679404769874, -0.18088118293232122)


def bits(model):
    state = model.state()
    arrays = [state["weights"], state["bias"], *state["slots"].values(), *state["bias slots"].values()]
    return [array.tobytes() for array in arrays], state["version"], state["step"], state["records"]
