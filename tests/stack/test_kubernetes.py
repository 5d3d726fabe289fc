"""``kubernetes.yaml`` and ``kuberay.yaml`` follow their schemas, and their processes and services fit into the pods."""

import json
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from stack.stack_files import EXAMPLE, LONGEST_STOP_S
from support.waiting import PATIENCE_S

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


def test_two_pods_are_standbys_of_each_other_and_see_the_same_checkpoints() -> None:
    """An update started the new service before the old one had ended; each took over from the other for ever."""
    spec = BY_KIND["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (2, "RollingUpdate")
    assert "standby" in tomllib.loads(BY_KIND["ConfigMap"]["data"]["service.toml"])["service"]
    assert BY_KIND["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert POD["topologySpreadConstraints"][0]["labelSelector"] == spec["selector"]
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


ROOT = Path(__file__).parents[2]
RAY_MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray" / "kuberay.yaml").read_text(encoding="utf-8"))
SPEC: dict[str, Any] = RAY_MANIFEST["spec"]
CLUSTER: dict[str, Any] = SPEC["rayClusterSpec"]
[WORKERS] = CLUSTER["workerGroupSpecs"]

# The operator is a Go module, which has its schemas.
OPERATOR = "github.com/ray-project/kuberay/ray-operator@v1.4.2"


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The schema of a RayJob; unknown keys are errors, as for ``kubectl apply``."""
    if shutil.which("go") is None:
        pytest.skip("expected Go, which fetches the schemas of KubeRay, given none")
    folder = tmp_path_factory.mktemp("kuberay")
    command = ["go", "mod", "download", "-json", OPERATOR]
    got = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert got.returncode == 0, got.stderr
    text = (Path(json.loads(got.stdout)["Dir"]) / "config/crd/bases/ray.io_rayjobs.yaml").read_text(encoding="utf-8")
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    [version] = [each for each in versions if RAY_MANIFEST["apiVersion"].endswith(f"/{each['name']}")]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """Return the schema without unknown keys in objects that have named ones."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    given = {key: strict(value) for key, value in schema.items()}
    if given.get("type") == "object" and isinstance(given.get("properties"), dict):
        given.setdefault("additionalProperties", False)
    if given.get("x-kubernetes-int-or-string"):
        given.pop("anyOf", None)
    return given


def test_the_manifest_follows_the_schema(schema: dict[str, Any]) -> None:
    """The operator refused the job, or ignored a key with a spelling error."""
    given = RAY_MANIFEST | {"metadata": {}}  # The schema has no fields of it.
    validator = jsonschema.Draft202012Validator(schema)  # Without a check of the schema itself, for a second each.
    validator.validate(given)
    wrong = given | {"spec": SPEC | {"entryPoint": "streamiter run"}}
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        validator.validate(wrong)


@pytest.mark.parametrize("pods", [CLUSTER["headGroupSpec"], WORKERS], ids=["head", "processes"])
def test_pods_follow_the_schema_of_kubernetes(pods: dict[str, Any]) -> None:
    """The operator accepted the job, and Kubernetes refused its pods."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pods["template"]["spec"]}
    kubernetes_validate.validate(pod, "1.30", strict=True)


def test_each_process_has_a_pod() -> None:
    """The flow waited for ever for a processor that no pod had."""
    words = shlex.split(SPEC["entrypoint"])
    processes = int(words[words.index("--processes") + 1])
    assert WORKERS["replicas"] * int(WORKERS["rayStartParams"]["num-cpus"]) == processes
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
