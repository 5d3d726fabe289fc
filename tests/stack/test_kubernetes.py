"""``kubernetes.yaml`` follows the schemas of Kubernetes, and one service runs at a time."""

from __future__ import annotations

import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from stack.stack_files import EXAMPLE, LONGEST_STOP_S

MANIFEST: list[dict[str, Any]] = list(yaml.safe_load_all((EXAMPLE / "kubernetes.yaml").read_text(encoding="utf-8")))
BY_KIND = {each["kind"]: each for each in MANIFEST}
POD: dict[str, Any] = BY_KIND["Deployment"]["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", BY_KIND)
def test_an_object_follows_the_schema(kind: str, version: str) -> None:
    """``kubectl apply`` refused an object, or ignored a key with a spelling error."""
    kubernetes_validate.validate(BY_KIND[kind], version, strict=True)


def test_the_check_of_the_schema_finds_an_error() -> None:
    """The check passed for every object."""
    wrong = BY_KIND["Service"] | {"spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_one_service_runs_at_a_time() -> None:
    """An update started the new service before the old one had ended; each took over from the other for ever."""
    spec = BY_KIND["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert BY_KIND["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert POD["terminationGracePeriodSeconds"] >= LONGEST_STOP_S


def test_probes_restart_a_blocked_service_and_not_one_that_waits_for_its_broker() -> None:
    """The liveness probe asked whether Kafka answers, so an outage of the broker restarted all services."""
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    assert {port["name"] for port in CONTAINER["ports"]} == {"http"}


def test_labels_claims_and_mounts_fit_together() -> None:
    """The Service selected no pod, or a pod waited for a volume that no object describes."""
    spec = BY_KIND["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == BY_KIND["Service"]["spec"]["selector"] == labels
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    claim, settings = BY_KIND["PersistentVolumeClaim"], BY_KIND["ConfigMap"]
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes["settings"]["configMap"]["name"] == settings["metadata"]["name"]


def test_the_pod_has_no_rights_that_it_does_not_need() -> None:
    """A cluster with the restricted standard of pod security refused the pod."""
    security, rights = POD["securityContext"], CONTAINER["securityContext"]
    assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["automountServiceAccountToken"] is False


def test_the_settings_are_those_of_the_stack() -> None:
    """The manifest had a key that a later version had renamed; the stack was tested, the manifest was not."""
    given = tomllib.loads(BY_KIND["ConfigMap"]["data"]["service.toml"])
    assert given == tomllib.loads((EXAMPLE / "service.toml").read_text(encoding="utf-8"))
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert "/".join(given["checkpoints"]["store"].split("/")[:-1]) in mounts
    assert given["http"]["token_file"].rpartition("/")[0] in mounts
