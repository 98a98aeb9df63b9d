"""Tests of gated models, revisions and hub addresses, and of the hosts that receive a token.

A server on loopback answers as the hub does. Rules that huggingface_hub shares are compared with it.
"""

from __future__ import annotations

import json
import runpy
import struct
import sys
import urllib.request

import huggingface_hub
import pytest
from hub_server import NO_ACCESS, TOKEN, hub_server
from huggingface_hub import constants

from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import CheckpointError, ModelNotFound, TonnageError
from tonnage.planner.headers import hub as access
from tonnage.planner.headers import remote
from tonnage.planner.headers.names import HubModel, hub_model
from tonnage.planner.planning.advice import serve_lines
from tonnage.planner.planning.build import make_plan
from tonnage.planner.source.resolve import resolve_model

_VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HF_OIDC_RESOURCE", "XDG_CACHE_HOME", "VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE", "MODELSCOPE_ENDPOINT",
    "MODELSCOPE_API_TOKEN", "MODELSCOPE_CACHE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_hub_login(monkeypatch, tmp_path):
    for name in _VARIABLES:
        monkeypatch.setenv(name, "")  # restored afterwards, even where --hf-token has set it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    monkeypatch.setattr(access, "_explicit", False)


@pytest.fixture
def hub(monkeypatch, tiny_llama):
    """Yield a hub with org/open, org/gated and weights in its storage; org/old was renamed to org/open."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0, 128]}}).encode()
    files = {
        "config.json": json.dumps(tiny_llama).encode(),
        "model.safetensors": struct.pack("<Q", len(header)) + header + b"\0" * 128,
    }
    with hub_server() as found:
        found.files = {("org/open", "main"): files, ("org/gated", "main"): files}
        found.gated, found.renamed = {"org/gated"}, {"org/old": "org/open"}
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setattr(remote, "_HUB_STORAGE", (".localhost",))
        yield found


def test_gated_model_token_is_not_sent_to_storage_host(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    found = resolve_model("org/gated")
    assert [t.shape for t in found.tensors] == [(8, 8)]
    assert found.config["model_type"] == "llama"
    assert {sent for _, sent in hub.asked} == {f"Bearer {TOKEN}"}
    assert any(path.startswith("/api/resolve-cache/") for path, _ in hub.asked)  # a redirect within the hub
    assert hub.asked_of_storage
    assert {sent for _, sent in hub.asked_of_storage} == {None}


def test_request_without_token_has_no_authorization_header(hub):
    assert resolve_model("org/old").id == "org/old"
    assert {sent for _, sent in hub.asked + hub.asked_of_storage} == {None}


def test_redirect_to_other_host_is_rejected_before_request(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(remote, "_HUB_STORAGE", (".hf.co",))
    with pytest.raises(CheckpointError, match="another host, localhost") as caught:
        resolve_model("org/gated")
    assert hub.asked_of_storage == []
    assert TOKEN not in str(caught.value)


def test_redirect_from_http_to_https_of_same_host_keeps_token():
    """HF_ENDPOINT is http://, which its server redirects to https:// of the same host."""
    request = urllib.request.Request("http://mirror.example/org/m/resolve/main/config.json")
    request.add_unredirected_header("Authorization", f"Bearer {TOKEN}")

    def follow(to):
        return remote._SameHost().redirect_request(request, None, 308, "", {}, to)

    following = follow("https://mirror.example/org/m/resolve/main/config.json")
    assert following.get_header("Authorization") == f"Bearer {TOKEN}"
    for other in ("https://mirror.example:8443/x", "https://other.example/x", "http://mirror.example:81/x"):
        with pytest.raises(CheckpointError, match="another host"):
            follow(other)


@pytest.mark.parametrize(
    ("model", "token", "words"),
    [
        ("org/nothing", None, ["401", "no such model", "private or gated", "HF_TOKEN", "--hf-token"]),
        ("org/nothing", TOKEN, ["404", "no such model", "private to others"]),
        ("org/open", "hf_expired", ["401", "not valid", "/settings/tokens"]),
        (
            "org/gated",
            None,
            ["401", "gated", "no token was sent", "licence at {url}/org/gated", "hf auth login"],
        ),
        ("org/gated", NO_ACCESS, ["403", "no access", "licence at {url}/org/gated", "fine-grained"]),
        ("org/open@v9", TOKEN, ["org/open@v9", "404", "no revision v9", "{url}/org/open"]),
        ("org/busy", None, ["429", "try again in 55 s", "a token of your own"]),
        ("org/busy", TOKEN, ["429", "try again in 55 s"]),
        ("org/later", TOKEN, ["429", "try again later"]),
        ("org/down", TOKEN, ["503 Service Unavailable", "has an error", "local folder"]),
        ("org/odd", TOKEN, ["418", "{url}/org/odd"]),
    ],
)
def test_hub_error_message_says_what_to_do(hub, monkeypatch, capsys, model, token, words):
    hub.failing = {name: (code, {}) for name, code in (("org/later", 429), ("org/down", 503), ("org/odd", 418))}
    hub.failing["org/busy"] = (429, {"Retry-After": "55"})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert run([model, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert all(word.format(url=hub.url) in shown.err for word in words), shown.err
    assert token is None or token not in shown.err


def test_retry_after_header_with_a_date_is_converted_to_seconds(hub):
    hub.failing = {"org/busy": (429, {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"})}
    with pytest.raises(ModelNotFound, match=r"429.*try again in \d{9,} s"):
        resolve_model("org/busy")
    hub.failing = {"org/busy": (429, {"Retry-After": "soon"})}
    with pytest.raises(ModelNotFound, match=r"429.*try again later"):
        resolve_model("org/busy")


def test_sweep_fetches_model_and_draft_once(hub, tiny_llama, capsys):
    """The rows of a table need both files repeatedly, but each is fetched once."""
    config = {"config.json": json.dumps(tiny_llama).encode()}
    hub.files |= {("org/model", "main"): config, ("org/draft", "main"): config}
    flags = ["--gpu", "l4,h100,b200", "--speculative-model", "org/draft", "--num-speculative-tokens", "2"]
    assert run(["org/model", *flags]) == 0, capsys.readouterr()
    paths = [path for path, _ in hub.asked]
    assert "/org/draft/resolve/main/config.json" in paths
    assert len(paths) == len(set(paths))


def test_revision_with_slashes_is_percent_encoded_in_the_hub_request(hub):
    files = hub.files["org/open", "main"]
    hub.files["org/open", "refs/pr/7"] = files
    found = resolve_model(f"{hub.url}/org/open/tree/refs/pr/7")
    assert (found.id, found.path) == ("org/open@refs/pr/7", "org/open@refs/pr/7")
    assert hub.asked[0][0] == "/org/open/resolve/refs%2Fpr%2F7/config.json"


def test_vision_model_from_hub_has_processor_files(hub, tmp_path, tiny_llama):
    """The processor files from the hub equal the processor files of a folder."""
    files = {
        "config.json": tiny_llama | {"vision_config": {}},
        "preprocessor_config.json": {"max_pixels": 1000},
    }
    hub.files["org/sees", "main"] = {name: json.dumps(content).encode() for name, content in files.items()}
    for name, content in hub.files["org/sees", "main"].items():
        (tmp_path / name).write_bytes(content)
    found = resolve_model("org/sees").config
    assert found["preprocessor_config"] == {"max_pixels": 1000}
    assert found == resolve_model(str(tmp_path)).config


def test_cached_snapshot_of_revision_is_found_offline(monkeypatch, tmp_path, tiny_llama):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit = "0123456789" * 4
    folder = tmp_path / "home" / "hub" / "models--org--name"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs" / "refs" / "pr").mkdir(parents=True)
    (folder / "refs" / "refs" / "pr" / "7").write_text(commit)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(tiny_llama))
    for revision in ("refs/pr/7", commit):
        assert resolve_model(f"org/name@{revision}").config["model_type"] == "llama"
    with pytest.raises(ModelNotFound, match="org/name is not in the local hub cache and HF_HUB_OFFLINE is set"):
        resolve_model("org/name")


@pytest.mark.parametrize("installed", [True, False])
def test_hub_token_is_taken_from_its_sources_in_order_of_precedence(monkeypatch, tmp_path, installed):
    """The rules are huggingface_hub's, with and without that package."""
    if not installed:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert access.token() is None
    stored = tmp_path / "home" / "token"
    stored.parent.mkdir()
    stored.write_text(" hf_stored\n")
    assert access.token() == "hf_stored"
    if installed:
        assert huggingface_hub.get_token() == "hf_stored"
    else:
        own = tmp_path / "own"
        own.write_text("hf_own")
        monkeypatch.setenv("HF_TOKEN_PATH", str(own))
        assert access.token() == "hf_own"
    for name, value in (("HUGGING_FACE_HUB_TOKEN", "hf_old\n"), ("HF_TOKEN", " hf_new")):
        monkeypatch.setenv(name, value)
        assert access.token() == value.strip()
        assert huggingface_hub.get_token() == value.strip()
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert access.token() is None


def test_hub_environment_variables_match_huggingface_hub(monkeypatch, tmp_path):
    file = str(constants.__file__)
    for variables in (
        {},
        {"HF_HOME": "~/somewhere"},
        {"HF_HOME": "", "XDG_CACHE_HOME": "/cache"},
        {"HF_HUB_CACHE": "$HF_HOME/there", "TRANSFORMERS_OFFLINE": "true"},
        {"HUGGINGFACE_HUB_CACHE": "/older", "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hf-mirror.com/"},
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value) if value else patch.delenv(name)
            theirs = runpy.run_path(file)
            assert str(access.hub_cache()) == theirs["HF_HUB_CACHE"]
            assert access.offline() == theirs["HF_HUB_OFFLINE"]
            assert access.endpoint() == theirs["ENDPOINT"]
            assert str(access._home() / "token") == theirs["HF_TOKEN_PATH"]


def test_invalid_token_is_rejected_without_printing_it(monkeypatch, tmp_path, capsys):
    for value in ("hf_a b", "hf_\N{SNOWMAN}", "hf_\x1b[31m"):
        monkeypatch.setenv("HF_TOKEN", value)
        with pytest.raises(ModelNotFound, match="characters that a hub token cannot") as caught:
            access.token()
        assert "hf_" not in str(caught.value)
        assert run(["demo", "--hf-token", value]) == 2
        shown = capsys.readouterr()
        assert "--hf-token" in shown.err
        assert "hf_" not in shown.err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "home" / "token").mkdir(parents=True)
    with pytest.raises(ModelNotFound, match="cannot be read: Is a directory"):
        access.token()


def test_hf_token_flag_is_sent_to_hub_and_never_printed(hub, capsys):
    del hub.files["org/gated", "main"]["model.safetensors"]
    assert run(["org/gated", "--device-memory", "16GiB", "--hf-token", TOKEN, "--json", "--explain"]) in (0, 1)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"]["id"] == "org/gated"
    assert TOKEN not in shown.out + shown.err
    assert {sent for _, sent in hub.asked} == {f"Bearer {TOKEN}"}


_NAMES = {
    "org/name": ("org/name", None),
    "org/name@v1.0": ("org/name", "v1.0"),
    "hf://org/name": ("org/name", None),
    "hf://models/org/name@refs/pr/3": ("org/name", "refs/pr/3"),
    "https://huggingface.co/org/name": ("org/name", None),
    "https://huggingface.co/org/name/": ("org/name", None),
    "https://huggingface.co/org/name?show=1#files": ("org/name", None),
    "huggingface.co/org/name/tree/v1.0": ("org/name", "v1.0"),
    "https://hf.co/org/name/tree/main": ("org/name", "main"),
    "https://huggingface.co/org/name/tree/refs%2Fpr%2F1": ("org/name", "refs/pr/1"),
    "https://huggingface.co/org/name/tree/refs/pr/1": ("org/name", "refs/pr/1"),
    "https://huggingface.co/org/name/blob/main/config.json": ("org/name", "main"),
    "https://huggingface.co/org/name/resolve/abc123/config.json?download=true": ("org/name", "abc123"),
}


@pytest.mark.parametrize(("name", "expected"), _NAMES.items(), ids=_NAMES)
def test_model_names_and_urls_are_parsed_into_repository_and_revision(name, expected):
    repo, revision = expected
    assert hub_model(name) == HubModel(repo, revision or "main")
    if "://" in name:
        theirs = huggingface_hub.parse_hf_uri(name)
        assert (theirs.type, theirs.id, theirs.revision) == ("model", repo, revision)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("https://example.org/org/name", ["example.org is not the hub", "huggingface.co", "HF_ENDPOINT"]),
        ("https://huggingface.co.example.org/org/name", ["is not the hub"]),
        ("https://huggingface.co/name", ["names no model", "org/name"]),
        ("https://huggingface.co/datasets/org/name", ["one of its datasets"]),
        ("https://huggingface.co/org/name/discussions/1", ["org/name", "none of its files"]),
        ("https://huggingface.co/org/name/blob/main/model.gguf", ["org/name", "model.gguf"]),
        ("https://huggingface.co/org/name/tree/..%2F..%2Fx", ["no branch, tag or commit"]),
        ("https://[", ["'https://['", "Invalid IPv6"]),
        ("org/name@..", ["neither a folder"]),
        ("org/name@v1..v2", ["no branch, tag or commit"]),
        ("hf://nothing", ["neither a folder"]),
    ],
)
def test_invalid_model_url_is_rejected_with_reason(name, words):
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_revision_is_passed_as_flag_in_serve_lines(hub):
    hub.files["org/open", "v1.0"] = {"config.json": hub.files["org/open", "main"]["config.json"]}
    for engine, start in (
        ("vllm", "vllm serve org/open --revision v1.0"),
        ("sglang", "python -m sglang.launch_server --model-path org/open --revision v1.0"),
    ):
        plan = make_plan("org/open@v1.0", Deployment(engine=engine, gpu="h100-80g"))
        assert any(line.startswith(start) for line in serve_lines(plan))


def test_model_url_of_hf_endpoint_mirror_is_accepted(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.org/huggingface/")
    assert hub_model("https://hub.example.org/huggingface/org/name/tree/v1") == HubModel("org/name", "v1")
    with pytest.raises(ModelNotFound, match=r"other\.example\.org is not the hub, which is hub\.example\.org"):
        hub_model("https://other.example.org/org/name")


def test_path_of_a_single_config_json_is_accepted_as_a_model(tmp_path, tiny_llama):
    own = tmp_path / "my-model.json"
    own.write_text(json.dumps(tiny_llama))
    assert resolve_model(str(own)).config == tiny_llama
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    found = resolve_model(str(tmp_path / "config.json"))
    assert (found.id, found.path, found.config) == (str(tmp_path), str(tmp_path), tiny_llama)
    own.write_text("[]")
    with pytest.raises(TonnageError, match="my-model"):
        resolve_model(str(own))


@pytest.fixture
def modelscope(hub, monkeypatch, tmp_path):
    """Return ``hub`` as ModelScope, whose branch is master; the hub itself would be another server."""
    hub.files = {(repo, "master"): files for (repo, _), files in hub.files.items()}
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_hub_alone")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    return hub


@pytest.mark.parametrize("name", ["org/gated", "org/gated@master", "{url}/models/org/gated/summary"])
def test_modelscope_model_is_read_with_modelscope_token(modelscope, monkeypatch, name):
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    found = resolve_model(name.format(url=modelscope.url))
    assert [t.shape for t in found.tensors] == [(8, 8)]
    assert modelscope.asked[0][0] == "/models/org/gated/resolve/master/config.json"
    assert {sent for _, sent in modelscope.asked} == {f"Bearer {TOKEN}"}
    assert {sent for _, sent in modelscope.asked_of_storage} == {None}
    assert set(modelscope.cookies) == {f"m_session_id={TOKEN}", None}
    assert modelscope.cookies.count(None) == len(modelscope.asked_of_storage)


def test_hf_token_is_not_sent_to_modelscope(modelscope, capsys):
    assert run(["org/gated", "--hf-token", TOKEN]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tonnage: --hf-token: is not sent to ModelScope, from which VLLM_USE")
    assert "set MODELSCOPE_API_TOKEN, or unset VLLM_USE_MODELSCOPE" in said
    assert modelscope.asked == []
    assert run(["org/gated"]) == 2
    assert "set MODELSCOPE_API_TOKEN" in capsys.readouterr().err
    assert {sent for _, sent in modelscope.asked} == {None}
    assert set(modelscope.cookies) == {None}


def test_modelscope_local_cache_is_found_offline(modelscope, monkeypatch, tmp_path, tiny_llama):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = tmp_path / "modelscope"
    for folder in ("models/org--one/snapshots/master", "models/org/two___5", "hub/models/org/three"):
        (base / folder).mkdir(parents=True)
        (base / folder / "config.json").write_text(json.dumps(tiny_llama))
    for name in ("org/one", "org/two.5", "org/three"):
        assert resolve_model(name).config["model_type"] == "llama"
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        resolve_model("org/three@v2")  # a folder of an older version may hold any revision


def test_modelscope_url_without_its_environment_switch_names_the_variable_to_set(monkeypatch):
    address = "https://www.modelscope.cn/models/org/name/files"
    with pytest.raises(ModelNotFound, match="set VLLM_USE_MODELSCOPE=True"):
        hub_model(address)
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    assert hub_model(address) == HubModel("org/name")
    assert access.endpoint() == "https://modelscope.cn/models"
