"""What a command needs is what the extra of its name installs, and is looked for before anything else."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hub_server import hub_server
from packaging.requirements import Requirement

from tonnage.planner.errors import DeploymentError, ModelNotFound
from tonnage.planner.source.resolve import ModelSource
from tonnage.server.cli import COMMANDS, EXTRAS, main
from tonnage.server.commands.launch import plan_for_loading, select_backend, settings_from
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines import choice
from tonnage.server.extras import INCLUDES, MODULES, ExtraMissing, missing, require, require_serving
from tonnage.server.parsers import serve as parser
from tonnage.server.settings import Settings

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}


def brought(extra: str) -> set[str]:
    """Return the distributions of an extra and of the extras that it includes."""
    found = set()
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]):
        wanted = Requirement(line)
        if wanted.name == "tonnage":
            found |= {name for other in wanted.extras for name in brought(other)}
        else:
            found.add(wanted.name)
    return found


@pytest.mark.parametrize("extra", MODULES)
def test_each_extra_installs_the_modules_its_command_requires(extra: str) -> None:
    found = {dist for name in MODULES[extra] for dist in DISTRIBUTIONS[name.partition(".")[0]]}
    own = {dist.lower().replace("_", "-") for dist in found}
    assert own & brought(extra)
    # Every other package of these extras is imported by each of their commands.
    checked_where_used = {"fastapi-offline", "msgpack"}
    if extra in ("replay", "server"):
        included = {name for other in INCLUDES.get(extra, ()) for name in brought(other)} | CORE
        assert own - included == brought(extra) - included - checked_where_used
    for other in INCLUDES.get(extra, ()):
        assert brought(other) <= brought(extra)


def test_package_extra_named_all_installs_every_compatible_extra() -> None:
    one = {extra for extra in MODULES if extra != "all"}
    assert all(brought(extra) <= brought("all") for extra in one)
    assert not {"gptqmodel", "ray"} & brought("all")  # they pin what the others cannot have


def test_every_command_requires_an_existing_extra() -> None:
    assert set(EXTRAS) <= set(COMMANDS)
    assert set(EXTRAS.values()) <= set(MODULES)
    home = {name for name, (module, _) in COMMANDS.items() if module.startswith("tonnage.planner.")}
    assert set(EXTRAS) == set(COMMANDS) - home - {"completion", "status"}


AUTO = ("serve", "demo", "--backend", "auto")
NO_ENGINE = (("torch", "vllm"), AUTO, ("the hf backend needs torch", "vllm]'"))


@pytest.mark.parametrize(
    ("without", "arguments", "words"),
    [
        NO_ENGINE,
        (("torch",), ("serve", "demo", "--backend", "hf"), ("the hf backend needs torch", "'tonnage[hf]'")),
        (("vllm",), ("serve", "demo", "--backend", "vllm"), ("the vllm backend needs vllm", "on a GPU")),
        (("torch",), ("demo",), ("demo needs torch", "'tonnage[demo]'")),
        (("openai",), ("demo",), ("demo needs openai", "'tonnage[demo]'")),
        (("numba",), ("plan", "demo", "--replicas", "auto"), ("--replicas needs numba", "'tonnage[replay]'")),
        (
            ("bitsandbytes",),
            ("serve", "demo", "--backend", "hf", "--quantization", "nf4"),
            ("--quantization nf4 needs bitsandbytes", "'tonnage[bnb]'"),
        ),
        (
            ("zmq",),
            ("serve", "demo", "--backend", "hf", "--kv-events-config", '{"enable_kv_cache_events": true}'),
            ("--kv-events-config needs zmq", "'tonnage[events]'"),
        ),
        (
            ("opentelemetry.sdk",),
            ("serve", "demo", "--backend", "fake", "--otlp-traces-endpoint", "http://localhost:1"),
            ("--otlp-traces-endpoint needs opentelemetry.sdk", "'tonnage[otel]'"),
        ),
    ],
)
def test_missing_packages_are_reported_before_a_plan_is_made(
    without: tuple[str, ...],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in without:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    if arguments[0] == "serve":
        with pytest.raises(ExtraMissing) as caught:
            select_backend(settings_from(parser().parse_args(arguments[1:])), sys.stdout)
        said = str(caught.value)
    else:
        assert main(arguments) == 2
        said = capsys.readouterr().err
    assert capsys.readouterr().out == ""
    assert all(word in said for word in words), said


NO_PAGES = (("fastapi_offline",), AUTO, ("/docs needs fastapi_offline", "'tonnage[server]'"))


@pytest.mark.parametrize(("without", "arguments", "words"), [NO_ENGINE, NO_PAGES])
def test_serve_reports_missing_packages_in_one_line(
    without: tuple[str, ...], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({without!r})); "
    code = block + "from tonnage.server.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_only_absent_packages_are_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("replay", "server", "hf", "demo"):
        assert missing(extra) == []
        require(extra, "a command")
    require_serving("auto")
    require_serving("fake")
    for name in ("torch", "transformers", "fastapi", "numba", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ExtraMissing) as caught:
        require("hf", "it")
    assert str(caught.value) == (
        "it needs numba, fastapi, jinja2 and 2 more, not installed here (pip install 'tonnage[hf]')"
    )


def model_of(*arguments: str) -> tuple[Settings, ModelSource]:
    return select_backend(settings_from(parser().parse_args(arguments)), sys.stderr)


@pytest.mark.parametrize("backend", ["hf", "auto"])
def test_serve_requires_downloaded_hub_weights_before_planning(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan takes the headers alone; that `serve` wants the files is said before it prints one."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "vllm_version", lambda: None)
    demo, out = ensure_demo(), io.StringIO()
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.files = {("org/model", "v1"): {"config.json": (demo / "config.json").read_bytes()}}
        with pytest.raises(ModelNotFound, match=r"hf download org/model --revision v1 brings it"):
            plan_for_loading(*model_of("org/model@v1", "--backend", backend, "--max-model-len", "512"), out)
        asked = [path for path, _ in hub.asked]
        assert len(asked) == len(set(asked)), "the hub is asked for nothing twice"
    assert out.getvalue() == ""
    commit = "0123456789" * 4
    here = tmp_path / "models--org--model" / "snapshots" / commit
    here.parent.mkdir(parents=True)
    here.symlink_to(demo)
    plan = plan_for_loading(*model_of(f"org/model@{commit}", "--backend", "hf", "--max-model-len", "512"), out)
    assert Path(plan.model.path) == here
    assert "Fits." in out.getvalue()


def test_model_unsupported_by_the_hf_engine_is_rejected_before_the_plan() -> None:
    out = io.StringIO()
    with pytest.raises(DeploymentError, match="gptq needs a calibration"):
        plan_for_loading(*model_of("demo", "--backend", "hf", "--quantization", "gptq"), out)
    assert out.getvalue() == ""
