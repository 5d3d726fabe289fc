"""The names of Numba that compiled functions need, in one module.

Threads that import Numba at the same time see parts of it half-made, because its modules import each other in circles.
Python lets one thread at a time execute a module, so that all others wait here until Numba is complete.
"""

from numba import njit
from numba.core import types
from numba.core.event import Event, Listener, install_listener
from numba.extending import intrinsic

__all__ = ["Event", "Listener", "install_listener", "intrinsic", "njit", "types"]
