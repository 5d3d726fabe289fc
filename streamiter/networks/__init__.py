"""Networks from configuration files: coarse layers, trained by workers that share parameters through a server.

``Network`` reads a file, ``fit_network`` trains it on rows at hand; ``train_network`` and ``train_network_online`` are
for flows of your own. What is public is imported from here.

======================  =================================================================================
``configuration``       the file: read, checked whole before anything runs, written in canonical form
``network``             ``Network``: what the file says; ``summary`` and ``drawing``: what is seen of it
``training``            ``train_network``: epochs over rows that are there
``fitting``             ``fit_network``: the same in one call, with progress and a Ctrl-C that keeps the model
``diverging``           ``Diverged``: what ends a training whose numbers are not finite any more
``online``              ``train_network_online``: a stream that may never end
``learner``             a network as one of the learners on the parameter server; ``layout``: which columns are whose
``mini_batches``        the steps that epochs are made of
``data``                ``LabelledRows``: from files and arrays, with labels as the loss wants them
``results``             loss, accuracy, AUC
``saved_models``        networks on disk; ``versions``: published ones
``prediction``          ``NetworkPredictor``; ``serving``: ``ServedNetwork``, which follows a topic
``graph``               the layers of one worker, and the steps of a mini-batch through them
``layers``              one a file
``losses``              one a file
``transfer_functions``  one a file
``initial_values``      how parameters begin
``place_holder``        the mini-batch at hand
``parameters``          what layers and training know of each other
======================  =================================================================================
"""

from streamiter.networks.data import LabelledRows, part, read_rows
from streamiter.networks.learner import Published
from streamiter.networks.losses import Diverged
from streamiter.networks.network import ConfigurationWarning, Network
from streamiter.networks.serving import (
    EpochResult,
    Evaluation,
    NetworkPredictor,
    SavedNetwork,
    ServedNetwork,
    load_network,
    save_network,
)
from streamiter.networks.training import (
    NetworkTraining,
    TrainedNetwork,
    fit_network,
    train_network,
    train_network_online,
)

__all__ = [
    "ConfigurationWarning",
    "Diverged",
    "EpochResult",
    "Evaluation",
    "LabelledRows",
    "Network",
    "NetworkPredictor",
    "NetworkTraining",
    "Published",
    "SavedNetwork",
    "ServedNetwork",
    "TrainedNetwork",
    "fit_network",
    "load_network",
    "part",
    "read_rows",
    "save_network",
    "train_network",
    "train_network_online",
]
