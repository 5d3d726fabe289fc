"""A parameter server: matrices on shards, which workers read, add to and clock. Usable from any asyncio program.

``ParameterServer`` makes matrices and clients; ``psf`` has the functions that run where the parameters are. Errors are
those of ``streamiter.errors``: a ``ConfigurationError`` for settings, a ``ParameterServerError`` for calls.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.parameter_server import psf
    from streamiter.parameter_server.admission import Admission
    from streamiter.parameter_server.client import Client
    from streamiter.parameter_server.consistency import ASP, BSP, SSP, Consistency
    from streamiter.parameter_server.matrix import Matrix
    from streamiter.parameter_server.server import ParameterServer
else:
    from streamiter.values.helpers.lazy import lazy_names

    # Learners without a server import the optimizers from here.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "streamiter.parameter_server.admission": "Admission",
            "streamiter.parameter_server.client": "Client",
            "streamiter.parameter_server.consistency": "ASP BSP SSP Consistency",
            "streamiter.parameter_server.matrix": "Matrix",
            "streamiter.parameter_server.psf": "psf",
            "streamiter.parameter_server.server": "ParameterServer",
        },
    )

__all__ = ["ASP", "BSP", "SSP", "Admission", "Client", "Consistency", "Matrix", "ParameterServer", "psf"]
