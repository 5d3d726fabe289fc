"""Settings of all update rules, for checks that hold for each rule."""

import numpy as np

from streamiter.parameter_server.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Correction,
    GradientDescent,
    InverseSquareRoot,
    Momentum,
    RMSProp,
    WarmRestarts,
)

SOME_NUMPY = np.float32(0.1)
"""A numpy scalar, as settings may come from arrays."""

RULES = [
    SGD(),
    SGD(0.1, l2=0.3),
    SGD(0.1, l1=0.2),
    SGD(InverseSquareRoot(0.3, decay=0.5), l1=0.02, l2=0.1),
    SGD(SOME_NUMPY, l1=np.float32(0.02), l2=np.float32(0.3)),
    SGD(InverseSquareRoot(np.float32(0.3), decay=SOME_NUMPY), l2=np.int64(1)),
    GradientDescent(0.1, l1=0.02, l2=0.3),
    FTRL(),
    FTRL(0.3, 0.0),
    FTRL(0.1, 0.1, l1=0.1, l2=0.1),
    FTRL(0.5, 1.0, l1=2.0, keep_start=True),
    FTRL(np.float32(0.3), SOME_NUMPY, l1=SOME_NUMPY, l2=SOME_NUMPY),
    Momentum(),
    Momentum(Correction(0.3, decay=0.1, beta=0.5), momentum=0.5, l1=0.02, l2=0.3),
    Momentum(SOME_NUMPY, momentum=np.float32(0.7), l1=SOME_NUMPY, l2=SOME_NUMPY),
    AdaGrad(),
    AdaGrad(0.3, epsilon=0.1, l1=0.02, l2=0.3),
    RMSProp(),
    RMSProp(InverseSquareRoot(0.3), beta=0.5, epsilon=0.1, l1=0.02, l2=0.3),
    AdaDelta(),
    AdaDelta(0.5, alpha=0.7, beta=0.6, epsilon=1e-3, l1=0.01, l2=0.3),
    Adam(),
    Adam(WarmRestarts(0.3, interval=3), beta=0.8, gamma=0.95, epsilon=1e-3, l1=0.02, l2=0.3),
    Adam(np.float32(0.3), beta=np.float32(0.8), gamma=np.float32(0.95), l1=SOME_NUMPY),
]
