"""No service of the compose files can write to its root, has a capability or gets one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from compose import filled

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILES = {name: DEPLOY / name for name in ("compose.yaml", "vllm/compose.yaml")}

# Where each image writes (the flags and variables of its entry point): data, and Grafana its plugins' sockets.
WRITES = {
    "tonnage": {"/var/cache/tonnage", "/tmp", "/home/tonnage"},
    "vllm": {"/var/cache/tonnage", "/tmp", "/home/vllm"},
    "prometheus": {"/prometheus"},
    "alertmanager": {"/alertmanager"},
    "grafana": {"/var/lib/grafana", "/tmp"},
}


def services(file: str) -> dict[str, dict[str, Any]]:
    """Return the services of a compose file by name, merged with the services that they extend."""
    found = yaml.safe_load(FILES[file].read_text())["services"]
    for name, service in found.items():
        if "extends" in service:
            other, of = service["extends"]["file"], service["extends"]["service"]
            assert (FILES[file].parent / other).resolve() == FILES["compose.yaml"]
            assert service.keys() == {"extends"}
            found[name] = services("compose.yaml")[of]
    return dict(found)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in FILES for name in services(file)])
def test_compose_service_has_no_privileges_but_can_write_its_volumes(file: str, name: str) -> None:
    service = services(file)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "network_mode"} & service.keys()
    volumes = [volume.split(":") for volume in service.get("volumes", ())]
    writable = {target for _, target, *options in volumes if options != ["ro"]}
    assert writable | {mount.partition(":")[0] for mount in service.get("tmpfs", ())} == WRITES[name]
    for port in service["ports"]:
        assert port.startswith("127.0.0.1:")


def test_compose_overlay_for_gpus_adds_only_the_gpus() -> None:
    """What compose.gpu.yaml lays over the server."""
    over = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]
    assert over.keys() == {"tonnage"}
    assert over["tonnage"].keys() == {"build", "mem_limit", "shm_size", "deploy"}
    assert over["tonnage"]["build"] == {"target": "cuda"}
    (device,) = over["tonnage"]["deploy"]["resources"]["reservations"]["devices"]
    assert filled(device["count"], {"GPUS": "3"}) == "3"
    # without a plan nothing is known of the host's memory
    assert filled(over["tonnage"]["mem_limit"], {}) == "0"
    assert filled(over["tonnage"]["mem_limit"], {"MEMORY_LIMIT": "8589934592"}) == "8589934592"
    assert filled(over["tonnage"]["shm_size"], {}) == "64m"


def test_every_compose_volume_is_declared() -> None:
    for file, path in FILES.items():
        named = {volume.split(":")[0] for s in services(file).values() for volume in s["volumes"]}
        declared = yaml.safe_load(path.read_text())["volumes"].keys()
        assert {name for name in named if not name.startswith(".")} == declared
