"""The servers of tests/server, for the tests of what one client, tenant or file may not do to others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).resolve().parents[1] / "server" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("server_fixtures", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_server = sys.modules.setdefault("server_fixtures", importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(_server)

tokenizer_folder, tokenizer = _server.tokenizer_folder, _server.tokenizer
small_plan, run_server, server, checked = (
    _server.small_plan, _server.run_server, _server.server, _server.checked
)  # fmt: skip
