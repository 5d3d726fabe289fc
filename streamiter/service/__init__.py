"""The online-learning service: a flow that learns and publishes, with health, metrics, predictions and a page."""

from typing import TYPE_CHECKING

from streamiter.service.settings.field_comparison import FieldComparison
from streamiter.service.settings.file import SettingChange, changed, read_settings
from streamiter.service.settings.tables import (
    ChallengerSettings,
    CheckpointSettings,
    HealthSettings,
    HttpSettings,
    InputSettings,
    LabelSettings,
    LearnSettings,
    LogSettings,
    PredictionSettings,
    PublishSettings,
    ServiceSettings,
)
from streamiter.values.settings import SettingProblem, SettingsError

if TYPE_CHECKING:
    from streamiter.service.service import OnlineLearningService
    from streamiter.service.surfaces import ServiceReplica
else:
    from streamiter.values.helpers.lazy import lazy_names

    # The file is read, checked and proposed without the HTTP server, which is an extra.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {"streamiter.service.service": "OnlineLearningService", "streamiter.service.surfaces": "ServiceReplica"},
    )

__all__ = [
    "ChallengerSettings",
    "CheckpointSettings",
    "FieldComparison",
    "HealthSettings",
    "HttpSettings",
    "InputSettings",
    "LabelSettings",
    "LearnSettings",
    "LogSettings",
    "OnlineLearningService",
    "PredictionSettings",
    "PublishSettings",
    "ServiceReplica",
    "ServiceSettings",
    "SettingChange",
    "SettingProblem",
    "SettingsError",
    "changed",
    "read_settings",
]
