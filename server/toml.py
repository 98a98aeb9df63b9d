"""Reading of TOML files that a setting names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tonnage.planner.errors import DeploymentError


def read_toml(path: Path, field: str) -> dict[str, Any]:
    """Return the contents of the TOML file ``path``, which the setting ``field`` names.

    Raises:
        DeploymentError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise DeploymentError(f"cannot read {path}: {error.strerror}", field=field) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{path} is not TOML: {error}", field=field) from None
