"""Start-up logs -> figures, by the lines each engine knows of its own. A figure printed more than once (ranks,
restarts) keeps the last."""

from __future__ import annotations

from pathlib import Path

from tonnage.planner.engines.log import LogFigures
from tonnage.planner.engines.registry import ENGINES, engine_of
from tonnage.planner.errors import ConfigError

MAX_LOG_BYTES = 256 << 20


def read_log(path: Path) -> LogFigures:
    """Raises ConfigError when the file cannot be read or holds no line that is known here."""
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise ConfigError("is larger than a start-up log can be", field=str(path))
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(path)) from None
    found = parse_log(text)
    if not found.figures:
        *others, last = (engine.title for name in ENGINES if (engine := engine_of(name)).logs)
        raise ConfigError(
            f"holds no start-up line of {', '.join(others)} or {last}", field=str(path),
            hint="give the log from the engine's start, for example docker logs CONTAINER > start.log",
        )  # fmt: skip
    return found


def parse_log(text: str) -> LogFigures:
    out, engines = LogFigures(), [engine_of(name) for name in ENGINES]
    for line in text.splitlines():
        for engine in engines:
            engine.read_log_line(line, out)
    if out.cells:
        out.figures["max_model_len"] = out.cells
    if out.pools:
        out.figures.setdefault("kv_pool_bytes", out.pools)
    return out
