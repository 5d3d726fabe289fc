"""The update rules and learning rates, written out one plain number at a time from their formulas."""

import math


def soft(x, threshold):
    return math.copysign(max(abs(x) - threshold, 0.0), x)


def sgd(t, w, g, lr, state):
    return w - lr * g


def momentum(t, w, g, lr, state, mu=0.9):
    state["v"] = mu * state["v"] + g
    return w - lr * state["v"]


def adagrad(t, w, g, lr, state, epsilon=1e-8):
    state["n"] = state["n"] + g**2
    return w - lr * g / (math.sqrt(state["n"]) + epsilon)


def rmsprop(t, w, g, lr, state, beta=0.9, epsilon=1e-8):
    state["n"] = beta * state["n"] + (1 - beta) * g**2
    return w - lr * g / (math.sqrt(state["n"]) + epsilon)


def adadelta(t, w, g, lr, state, alpha=0.9, beta=0.9, epsilon=1e-7):
    state["n"] = alpha * state["n"] + (1 - alpha) * g**2
    delta = g * math.sqrt((state["v"] + epsilon) / (state["n"] + epsilon))
    state["v"] = beta * state["v"] + (1 - beta) * delta**2
    return w - lr * delta


def adam(t, w, g, lr, state, beta=0.9, gamma=0.99, epsilon=1e-8):
    state["m"] = beta * state["m"] + (1 - beta) * g
    state["v"] = gamma * state["v"] + (1 - gamma) * g**2
    return w - lr * (state["m"] / (1 - beta**t)) / (math.sqrt(state["v"] / (1 - gamma**t)) + epsilon)


def learn(formula, start, gradients, *, slots=(), rate=lambda t: 0.1, l1=0.0, l2=0.0, **settings):
    """Return weights and state by name after gradients, in which None is a weight that is not named."""
    weights = list(start)
    states = [dict.fromkeys(slots, 0.0) for _ in weights]
    for t, gradient in enumerate(gradients, start=1):
        for i, g in enumerate(gradient):
            if g is not None:
                w = weights[i]
                w = formula(t, w, g + l2 * w, rate(t), states[i], **settings)
                weights[i] = soft(w, rate(t) * l1)
    return weights, {slot: [state[slot] for state in states] for slot in slots}


def learn_ftrl(start, gradients, *, alpha=0.1, beta=1.0, l1=0.0, l2=0.0):
    """Do the same for FTRL, whose l1 and l2 are in other places."""
    weights = list(start)
    z, n = [0.0] * len(weights), [0.0] * len(weights)
    for gradient in gradients:
        for i, g in enumerate(gradient):
            if g is None:
                continue
            delta = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / alpha
            n[i] += g * g
            z[i] += g - delta * weights[i]
            if abs(z[i]) <= l1:
                weights[i] = 0.0
            else:
                sign = math.copysign(1.0, z[i])
                weights[i] = -(z[i] - sign * l1) / (l2 + (beta + math.sqrt(n[i])) / alpha)
    return weights, {"z": z, "n": n}


def gradient_descent(weights, gradient, *, lr, l1=0.0, l2=0.0):
    """Make one step of offline training, which shrinks the weights after the step."""
    moved = [(w - lr * g) * (1 - lr * l2) for w, g in zip(weights, gradient, strict=True)]
    return [w - lr * l1 * ((w > 0) - (w < 0)) for w in moved]


def warm_restarts(lr, alpha, interval, steps):
    """Return the rates of the first steps, as a scheduler with state computes them."""
    lr_min, lr_max, current, restarts = lr / 10, lr, 0, 0
    for _ in range(steps):
        current += 1
        yield lr_min + 0.5 * (lr_max - lr_min) * (1 + math.cos(math.pi * current / interval))
        if current == interval:
            current = 0
            interval *= 2
            restarts += 1
            lr_max /= math.sqrt(1 + restarts * alpha)
