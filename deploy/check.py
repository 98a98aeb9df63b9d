"""Check every deployment file with the tool that reads it: ``make deploy-check``.

- Hadolint checks the Dockerfiles, and Compose its files.
- Helm's own code renders the chart, and the schemas of Kubernetes validate the result.
- systemd-analyze checks the unit, and a systemd starts it.
- Linters check YAML and shell files. The image is built and started.

No cluster and no container engine is needed. A check without its tool fails; ``--without image`` leaves one
out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm" / "tonnage"
BIN = Path(sys.executable).parent
# Maximum exposure of the unit on systemd-analyze's scale from 0 to 10.
MAX_EXPOSURE = 3.0

# Required settings of every service in the Compose files.
CONFINED = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}

# Minimal schemas of custom resources, whose own schemas are not shipped with Kubernetes.
CUSTOM: dict[str, dict[str, Any]] = {
    "ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "properties": {
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "required": ["port", "path", "interval"],
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"const": "/metrics"},
                        "interval": {"type": "string"},
                        "relabelings": {"type": "array"},
                        "authorization": {
                            "required": ["credentials"],
                            "additionalProperties": False,
                            "properties": {"credentials": {"required": ["name", "key"]}},
                        },
                    },
                },
            }
        },
    },
    "InferencePool": {
        "required": ["selector", "targetPorts", "endpointPickerRef"],
        "additionalProperties": False,
        "properties": {
            "selector": {"required": ["matchLabels"]},
            "targetPorts": {"type": "array", "minItems": 1, "items": {"required": ["number"]}},
            "endpointPickerRef": {"required": ["name", "port"]},
        },
    },
    "PrometheusRule": {"required": ["groups"], "properties": {"groups": {"type": "array", "minItems": 4}}},
    "ScaledObject": {
        "required": ["scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"],
        "additionalProperties": False,
        "properties": {
            "scaleTargetRef": {"type": "object", "required": ["name"]},
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "cooldownPeriod": {"type": "integer"},
            "triggers": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "required": ["type", "metadata"],
                    "properties": {
                        "type": {"const": "prometheus"},
                        "metricType": {"enum": ["AverageValue", "Value"]},
                        "metadata": {
                            "required": ["serverAddress", "query", "threshold"],
                            "additionalProperties": {"type": "string"},
                        },
                    },
                },
            },
        },
    },
}

VLLM_SERVE: dict[str, Any] = {"vllmServe": {"enabled": True}, "backend": "vllm", "model": "org/model"}

# (values, part of the message): values that contradict the plan or each other, which must not render.
CONTRADICTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"plan": {"id": "p", "usedBytes": 3 << 30}, "resources": {"memoryBytes": 2 << 30}},
        "is less than the 3221225472 bytes that plan p uses",
    ),
    (
        {
            "plan": {"id": "p", "gpus": 1, "hostBytes": 3 << 30},
            "resources": {"memoryBytes": 2 << 30, "gpus": 1},
        },
        "is less than the 3221225472 bytes of host memory that plan p needs",
    ),
    ({"sharedMemoryBytes": 3 << 30}, "sharedMemoryBytes: 3221225472 is more than"),
    ({"plan": {"id": "p", "gpus": 2}, "resources": {"gpus": 1}}, "but plan p needs 2"),
    ({"plan": {"id": "p", "kvPoolBytes": 1 << 30}}, "but plan p sizes the pool at 1073741824"),
    ({"settings": {"device_memory": 8 << 30}}, "but the container gets 2147483648"),
    ({"resources": {"gpus": 1}}, "settings.device: cpu"),
    ({"drainSeconds": 600}, "requests would be cut off"),
    ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is above"),
    ({"replicas": 2, "podDisruptionBudget": {"minAvailable": 2}}, "would block every drain"),
    ({"settings": {"drain_seconds": 5}}, "drain_seconds"),
    ({"inferencePool": {"enabled": True}}, "the name of the picker's service"),
    ({"apiKeys": {"secretName": "s"}, "serviceMonitor": {"enabled": True}}, "apiKeys.metricsSecretKey"),
    (
        {"apiKeys": {"secretName": "s"}, "inferencePool": {"enabled": True, "endpointPicker": "p"}},
        "reads /metrics without a key",
    ),
    ({"vllmServe": {"enabled": True}}, "make the plan with --engine vllm"),
    ({"vllmServe": {"enabled": True}, "backend": "vllm"}, "demo is Tonnage's own"),
    ({**VLLM_SERVE, "settings": {"metrics_compat": "vllm"}}, "settings.metrics_compat: vllm serve has no such"),
    ({**VLLM_SERVE, "apiKeys": {"secretName": "s"}}, "one key in plain text"),
    ({**VLLM_SERVE, "vllmServe": {"enabled": True, "admissionMode": "best"}}, "admissionMode"),
    ({"backend": "sglang"}, "backend"),
    ({"resources": {"memoryBytes": "2Gi"}}, "memoryBytes"),
    ({"replcias": 2}, "replcias"),
)


class CheckFailed(Exception):
    """A failed check; the message is the tool's output."""


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Return the output of a tool.

    Raises:
        CheckFailed: the tool fails or is missing.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **(env or {})}
        )
    except FileNotFoundError:
        raise CheckFailed(f"{command[0]} is not installed") from None
    if done.returncode:
        raise CheckFailed((done.stdout + done.stderr).strip() or f"exit status {done.returncode}")
    return done.stdout + done.stderr


def dockerfile() -> str:
    """Check the Dockerfiles with Hadolint."""
    for file in (DEPLOY / "Dockerfile", DEPLOY / "vllm" / "Dockerfile"):
        run(BIN / "hadolint", file)
    return "hadolint: no findings"


def compose() -> str:
    """Check the Compose files, and that each service is confined."""
    checked = 0
    for file in (DEPLOY / "compose.yaml", DEPLOY / "vllm" / "compose.yaml"):
        said = run(
            BIN / "docker-compose", "-f", file, "config", "--format", "json",
            env={"MODEL": "org/model", "POOL": "8589934592"},
        )  # fmt: skip
        for name, service in json.loads(said)["services"].items():
            for key, value in CONFINED.items():
                if service.get(key) != value:
                    raise CheckFailed(f"{file}: {name}: {key} is {service.get(key)}, not {value}")
            if "" in (service.get("command") or ()):
                raise CheckFailed(f"{file}: {name}: an empty argument in {service['command']}")
            checked += 1
    return f"compose config: ok, {checked} services without a writable root or a capability"


@contextmanager
def without_notices() -> Iterator[None]:
    """Hide the notices that Helm's code prints on standard error for each symbolic link in the chart."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as told:
        os.dup2(told.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            told.seek(0)
            for line in told.read().decode(errors="replace").splitlines():
                if "INFO found symbolic link in path" not in line:
                    print(line, file=sys.stderr)


def chart() -> str:
    """Check the chart."""
    with without_notices():
        return _chart()


def _chart() -> str:
    sets = sorted((CHART / "ci").glob("*-values.yaml"))
    objects = 0
    for path in sets:
        values = yaml.safe_load(path.read_text())
        report = helm.lint(str(CHART), values, strict=True)
        findings = [message for message in report["messages"] if message["severity"] >= 2]
        if findings or report["errors"]:
            raise CheckFailed(f"{path.name}: {findings or report['errors']}")
        for item in render(values):
            check_object(item, path.name)
            objects += 1
    for values, reason in CONTRADICTIONS:
        try:
            render(values)
        except helm.HelmError as error:
            if reason not in str(error):
                raise CheckFailed(f"{values}: refused, but not for {reason!r}: {error}") from None
        else:
            raise CheckFailed(f"{values} rendered; it should fail with {reason!r}")
    return f"{len(sets)} value sets, {objects} objects valid, {len(CONTRADICTIONS)} contradictions refused"


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that the chart renders with ``values``."""
    loaded = helm.Chart.load(str(CHART))
    loaded.validate_schema(loaded.merge_values(values))
    files = loaded.render(values, name="check", namespace="serving")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


def check_object(item: dict[str, Any], where: str) -> None:
    """Validate one object.

    Raises:
        CheckFailed: a tool rejects the object, or a dashboard differs from its file.
    """
    kind = item["kind"]
    if kind in CUSTOM:
        jsonschema.validate(item["spec"], CUSTOM[kind])
    else:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    if kind == "PrometheusRule":
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            yaml.safe_dump({"groups": item["spec"]["groups"]}, file)
            file.flush()
            run("promtool", "check", "rules", file.name)
    if kind == "ConfigMap":
        for name, text in item["data"].items():
            if json.loads(text) != json.loads((DEPLOY / "grafana" / "dashboards" / name).read_text()):
                raise CheckFailed(f"{where}: {name} differs from the dashboard")


def unit() -> str:
    """Check the systemd unit and start it."""
    text = (DEPLOY / "systemd" / "tonnage.service").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tonnage.service"
        # Verify requires an existing file.
        path.write_text(text.replace("/opt/tonnage/bin/tonnage", "/bin/true"))
        said = run("systemd-analyze", "verify", path)  # reports unknown keys, but exits with 0
        about_us = [line for line in said.splitlines() if "tonnage.service" in line]
        if about_us:
            raise CheckFailed("\n".join(about_us))
        report = run("systemd-analyze", "security", "--no-pager", "--offline=true", path)
    exposure = float(re.search(r"exposure level for \S+: ([\d.]+)", report)[1])  # type: ignore[index]
    if exposure > MAX_EXPOSURE:
        raise CheckFailed(f"exposure {exposure}, at most {MAX_EXPOSURE}\n{report}")
    started = run("bash", DEPLOY / "unit_check.sh").strip().splitlines()[-1]
    return f"verify: ok, exposure {exposure}; {started}"


def lint() -> str:
    """Check YAML and shell files with their linters."""
    files = [path for path in DEPLOY.rglob("*.y*ml") if "templates" not in path.parts and not _linked(path)]
    config = """
        extends: default
        rules:
          line-length: {max: 125, ignore: "*_test.yml"}
          document-start: disable
          braces: disable
    """
    run(BIN / "yamllint", "-s", "-d", config, *files)
    scripts = sorted(DEPLOY.rglob("*.sh"))
    run(BIN / "shellcheck", *scripts)
    return f"yamllint: {len(files)} files, shellcheck: {len(scripts)}"


def _linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in (path, *path.parents))


def image() -> str:
    """Build the image and start it."""
    return run("bash", DEPLOY / "image_check.sh").strip().splitlines()[-1]


CHECKS: dict[str, Callable[[], str]] = {
    "dockerfile": dockerfile,
    "compose": compose,
    "chart": chart,
    "unit": unit,
    "lint": lint,
    "image": image,
}


def main() -> int:
    """Run all checks; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="append", default=[], choices=CHECKS, help="skip this check")
    left_out = parser.parse_args().without
    failed = 0
    for name, check in CHECKS.items():
        if name in left_out:
            print(f"{name}: LEFT OUT")
            continue
        try:
            print(f"{name}: {check()}", flush=True)
        except (
            CheckFailed,
            helm.HelmError,
            jsonschema.ValidationError,
        ) as error:  # kubernetes_validate's is one
            failed += 1
            print(f"{name}: FAILED\n{error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
