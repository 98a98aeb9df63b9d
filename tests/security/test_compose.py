"""No service of compose.yaml can write to its root, has a capability or gets one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]

# Where each image writes (the flags and variables of its entry point): data, and Grafana its plugins' sockets.
WRITES = {
    "tonnage": {"/var/cache/tonnage", "/tmp", "/home/tonnage"},
    "prometheus": {"/prometheus"},
    "alertmanager": {"/alertmanager"},
    "grafana": {"/var/lib/grafana", "/tmp"},
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_and_can_write_what_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "network_mode"} & service.keys()
    volumes = [volume.split(":") for volume in service.get("volumes", ())]
    writable = {target for _, target, *options in volumes if options != ["ro"]} | set(service.get("tmpfs", ()))
    assert writable == WRITES[name]
    for port in service["ports"]:
        assert port.startswith("127.0.0.1:")
