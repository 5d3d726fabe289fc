"""The files of the stack as data: what docker compose and Kubernetes read from them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from streamiter.service.service import _ANSWER_S, _STOP_ANSWERED_S

__all__ = ["COMPOSE", "EXAMPLE", "LONGEST_STOP_S", "PROGRAMS", "ROOT", "SERVICES", "environment_of", "interpolated"]

ROOT = Path(__file__).parents[2]
LONGEST_STOP_S = _STOP_ANSWERED_S + _ANSWER_S + 8
"""A service that is told to stop ends within this time; 8 s are for an abort without the broker."""
EXAMPLE = ROOT / "examples" / "online_service"


def interpolated(text: str, environment: Mapping[str, str]) -> str:
    """Replace ``${NAME:-default}`` as docker compose does.

    >>> interpolated("${SPEED:-500} a second", {}), interpolated("${SPEED:-500}", {"SPEED": "9"})
    ('500 a second', '9')
    """
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: environment.get(match[1]) or match[2], text)


COMPOSE: dict[str, Any] = yaml.safe_load(interpolated((ROOT / "docker-compose.yml").read_text(encoding="utf-8"), {}))
SERVICES: dict[str, Any] = COMPOSE["services"]
PROGRAMS = tuple(name for name, config in SERVICES.items() if "build" in config)


def environment_of(service: str) -> dict[str, str]:
    """Return the environment of a service of the file."""
    return dict(SERVICES[service].get("environment", {}))
