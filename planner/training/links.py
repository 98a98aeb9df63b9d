"""Speeds of links between GPUs and between nodes, and the parser of link names and speeds."""

from __future__ import annotations

from tonnage.planner.errors import DeploymentError

# Bytes per second, per direction and GPU. NVIDIA's data sheets state the sum of both directions of NVLink.
NETWORKS = {
    "nvlink3": 300 * 10**9,  # A100 data sheet: 600 GB/s both directions
    "nvlink4": 450 * 10**9,  # H100 data sheet: 900 GB/s both directions
    "nvlink5": 900 * 10**9,  # B200 data sheet: 1,800 GB/s both directions
    "pcie3": 16 * 10**9,  # PCI-SIG's figure for PCIe 3.0 with 16 lanes
    "pcie4": 32 * 10**9,
    "pcie5": 64 * 10**9,
}
"""Links between the GPUs of one node, in bytes per second, per direction and GPU."""

LINKS = {
    "10gbe": 10, "25gbe": 25, "100gbe": 100, "hdr": 200, "ndr": 400, "xdr": 800, "efa": 400,
}  # fmt: skip
"""Links between nodes in Gbit/s per port (IEEE 802.3, InfiniBand Trade Association's roadmap, AWS EFA)."""


def parse_speed(text: str, field: str) -> int:
    """Return a link's bytes per second from its name (`ndr`, `nvlink4`) or a speed (`400Gbps`, `50GB/s`).

    Raises:
        DeploymentError: for text that is neither a known link nor a speed.
    """
    low = text.strip().lower()
    if low in NETWORKS:
        return NETWORKS[low]
    if low in LINKS:
        return LINKS[low] * 10**9 // 8
    for suffix, factor in (("gbps", 10**9 / 8), ("gbit/s", 10**9 / 8), ("gb/s", 10**9)):
        number = low.removesuffix(suffix)
        if number != low and number.strip().replace(".", "", 1).isdecimal() and float(number) > 0:
            return int(float(number) * factor)
    known = ", ".join([*NETWORKS, *LINKS])
    raise DeploymentError(f"{text[:40]!r} is not a speed", field=field, hint=f"{known}, 400Gbps or 50GB/s")
