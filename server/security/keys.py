"""API keys, each of which identifies a tenant.

The server keeps only the SHA-256 of each key and compares it in constant time. A plain hash is sufficient,
because API keys are long random strings and not passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tonnage.planner.errors import DeploymentError, did_you_mean
from tonnage.server.security.tenants import Tenant

_MIN_KEY_LENGTH = 8


class _Entry(BaseModel):
    """One ``[[key]]`` table of a key file; it has the ``key`` itself or its ``sha256`` in hexadecimal."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # Names contain no slash, because a slash separates the tenant's name from the request's own salt
    # (tenants.py).
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    key: Annotated[str, Field(min_length=_MIN_KEY_LENGTH, max_length=1024)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False, strict=False)] = 1.0
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    share_prefixes: bool = False
    metrics: bool = False


class KeyRing:
    """The API keys of one server; a server without keys accepts every request."""

    def __init__(self, tenants: Iterable[tuple[bytes, Tenant]] = ()) -> None:
        self._tenants = tuple(tenants)  # pairs of the SHA-256 of a key and the key's tenant

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, key: bytes) -> Tenant | None:
        """Return the tenant that an API key identifies, or None for an unknown key.

        The key is compared with every known key, so the time taken reveals nothing about them.

        Args:
            key: The key's bytes as sent in the header, UTF-8 if it is not ASCII.
        """
        digest = hashlib.sha256(key).digest()
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def load_keys(plain: Iterable[str], file: Path | None) -> KeyRing:
    """Load the API keys given by ``--api-key`` and in the file of ``--api-key-file``.

    Raises:
        DeploymentError: A key is invalid; the message names the entry, never the key.
    """
    tenants: list[tuple[bytes, Tenant]] = []
    for number, key in enumerate(plain, 1):
        if len(key) < _MIN_KEY_LENGTH:
            raise DeploymentError(
                f"key {number} has fewer than {_MIN_KEY_LENGTH} characters",
                field="api_key",
                hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' generates one",
            )
        name = f"key-{number}"
        tenants.append((_digest(key), Tenant(name, cache_salt=name)))
    if file is not None:
        tenants += [_tenant(entry, number, file) for number, entry in enumerate(_entries(file), 1)]
    names = [tenant.name for _, tenant in tenants]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise DeploymentError(
            f"two keys have the name {min(doubled)!r}; give each key a name of its own", field="api_key_file"
        )
    if len({digest for digest, _ in tenants}) < len(tenants):
        raise DeploymentError("the same API key is given twice; remove one of them", field="api_key_file")
    return KeyRing(tenants)


def _entries(file: Path) -> list[Any]:
    try:
        document = tomllib.loads(file.read_text())
    except OSError as error:
        raise DeploymentError(f"cannot read {file}: {error.strerror}", field="api_key_file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{file} is not TOML: {error}", field="api_key_file") from None
    entries = document.get("key")
    if set(document) != {"key"} or not isinstance(entries, list) or not entries:
        raise DeploymentError(f"{file} must contain [[key]] tables only", field="api_key_file")
    return entries


def _tenant(entry: Any, number: int, file: Path) -> tuple[bytes, Tenant]:
    where = f"{file}, key {number}"
    try:
        parsed = _Entry.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        hint = did_you_mean(field, _Entry.model_fields) if first["type"] == "extra_forbidden" else None
        raise DeploymentError(f"{where}: {field}: {first['msg']}", field="api_key_file", hint=hint) from None
    if (parsed.key is None) == (parsed.sha256 is None):
        raise DeploymentError(f"{where}: give either key or sha256, not both or none", field="api_key_file")
    digest = bytes.fromhex(parsed.sha256) if parsed.sha256 else _digest(parsed.key or "")
    limits = parsed.model_dump(exclude={"key", "sha256", "share_prefixes"})
    return digest, Tenant(**limits, cache_salt="" if parsed.share_prefixes else parsed.name)


def _digest(key: str) -> bytes:
    # surrogateescape restores bytes of an environment variable that are not UTF-8, so that such a key can
    # match.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
