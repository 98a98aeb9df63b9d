"""The command line for people: help, names, what was probably meant."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.planner.api import plan
from tonnage.planner.arguments import Parser
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, nearest
from tonnage.planner.flags import flags_of
from tonnage.server.cli import COMMANDS, main, parser_of
from tonnage.server.options import Options
from tonnage.server.security.keys import load_keys
from tonnage.server.settings import Settings, check_environment, load_settings, read_config

PARSERS = {name: parser_of(name) for name in COMMANDS}
# Of the server, the cache and the engines; the planner alone is installed with none of them.
LIBRARIES = {
    "numpy", "numba", "torch", "transformers", "vllm", "fastapi", "starlette", "pydantic", "pydantic_settings",
    "uvicorn", "uvloop", "tokenizers", "jinja2", "prometheus_client", "xxhash", "rich",
}  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.count("\n") == 1
    return out.err


def test_usage_line_shows_positional_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "plan", "-h").startswith("usage: tonnage plan [OPTIONS] MODEL [MODEL ...]\n\n")
    assert said(capsys, "fit-log", "--help").startswith("usage: tonnage fit-log [OPTIONS] FILE [FILE ...]\n\n")


def test_help_and_completion_import_no_optional_library() -> None:
    code = (
        "import contextlib, io, json, sys\nfrom tonnage.server.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert not any(main([name, '--help']) for name in COMMANDS)\n"
        "    assert not any(main(['completion', shell]) for shell in ('bash', 'zsh', 'fish', 'man'))\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout)) & LIBRARIES


@pytest.mark.parametrize("name", COMMANDS)
def test_options_in_help_examples_exist_and_parse(name: str) -> None:
    parser = PARSERS[name]
    examples = re.findall(r"^(?:example: | +)tonnage (.*)", parser.epilog or "", re.M)
    for line in examples:
        words = shlex.split(re.split(r" {2,}| > ", line)[0])
        assert words[0] == name
        parser.parse_args(words[1:])
        for word in words:
            assert not word.startswith("--") or word in parser.format_help()
    assert examples or name in ("fit-log", "verify", "demo", "status")


def test_help_lists_settings_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "serve", "--help")
    assert text.startswith("usage: tonnage serve [OPTIONS] [MODEL]\n\n")
    for flag in (*flags_of(Options).values(), *(flags_of(Deployment)[n] for n in ("dtype", "max_num_seqs"))):
        assert f"\n{flag.group}:\n" in text
        assert f"  {flag.option}" in text
    assert "--backend auto|hf|vllm|fake" in text
    assert "--log-level debug|info|warning|error" in text
    assert "--body-timeout SECONDS" in text
    assert "default: ()" not in text
    assert "None" not in text
    options = text.partition("\noptions:")[2]
    assert len(options.partition("\n\n")[0].splitlines()) < 8  # what is left outside the groups


def test_short_flags_of_vllm_are_accepted() -> None:
    """vllm/engine/arg_utils.py, 0.32."""
    words = "demo -tp 2 -pp=3 -dp 4 -q fp8 -ep"
    for name, more in (("plan", " -dcp 2"), ("serve", ""), ("verify", "")):
        found = PARSERS[name].parse_args((words + more).split())
        assert (found.tensor_parallel_size, found.pipeline_parallel_size, found.data_parallel_size) == (2, 3, 4)
        assert (found.quantization, found.enable_expert_parallel) == ("fp8", True)
    for cut in ("-t", "-d", "-tp2"):
        with pytest.raises(DeploymentError, match="no option"):
            PARSERS["plan"].parse_args(["demo", cut, "2"])


def test_short_flags_equal_those_of_the_installed_vllm() -> None:
    """Read in its source: importing it takes ten seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(found.origin).with_name("engine").joinpath("arg_utils.py").read_text()
    own = "llama.cpp"  # whose -ngl is not vLLM's
    ours = {f.option: f.short for f in flags_of(Deployment).values() if f.short and f.engine != own}
    theirs = dict(re.findall(r'"(--[a-z-]+)",\s+"(-[a-z]+)"', source))
    assert ours == {option: theirs[option] for option in ours}
    shared = theirs.keys() & {flag.option for flag in flags_of(Deployment).values()}
    assert shared == ours.keys()  # none of theirs is missing


def test_underscores_in_flags_are_read_as_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    found = PARSERS["plan"].parse_args(["some_model", "--max_model_len=5", "--kv_cache_dtype", "fp8_e4m3"])
    assert (found.model, found.max_model_len, found.kv_cache_dtype) == ("some_model", 5, "fp8_e4m3")


def test_positional_arguments_may_precede_and_follow_flags() -> None:
    found = PARSERS["plan"].parse_args(["A", "--gpu", "l4,l40s", "B", "-q", "INT4,none,Fp8", "C"])
    assert (found.model, found.others, found.quantization) == ("A", ["B", "C"], "w4a16,none,fp8")
    assert PARSERS["fit-log"].parse_args(["a.log", "--json", "b.log"]).logs == ["a.log", "b.log"]


def test_help_can_be_filtered_by_word_or_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "serve", "--help=LoRA")
    assert re.findall(r"^  (--[\w-]+)", text, re.M) == [
        "--enable-lora", "--max-loras", "--max-lora-rank", "--lora-modules",
    ]  # fmt: skip
    group = said(capsys, "serve", "--help=keys and TLS")
    assert re.findall(r"^  (--[\w-]+)", group, re.M)[0] == "--api-key"
    assert said(capsys, "serve", "--help=all") == said(capsys, "serve", "--help")
    assert "--max-num-seqs" in said(capsys, "plan", "--help=max_num")
    assert "--speculative-model" in said(capsys, "plan", "--help=draft")  # by its description
    assert "groups: " in refusal(capsys, "serve", "--help=parsec")
    assert said(capsys, "help", "plan") == said(capsys, "plan", "--help")
    assert "did you mean plan?" in refusal(capsys, "help", "plann")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("plan", "demo", "--max-model-length", "5"), "--max-model-len"),
        (("plan", "demo", "--sweeep"), "--sweep"),
        (("serve", "demo", "--gpu-memory-utilisation=0.5"), "--gpu-memory-utilization"),
        (("train", "demo", "--optimiser", "adamw"), "--optimizer"),
        (("replay", "x.csv", "--model", "demo", "--watermarks", "1"), "--watermark"),
        (("fit-log", "x.log", "--calibrat", "f"), "--calibrate"),
        (("dtype", "1", "--formt", "fp16"), "--format"),
        (("plan", "demo", "--engine", "vlm"), "vllm"),
        (("plan", "demo", "--dtype", "float61"), "float16"),
        (("plan", "demo", "-q", "nvfp5"), "nvfp4"),
        (("plan", "demo", "--kv-cache-dtype", "int8"), "int8_per_token_head"),
        (("plan", "demo", "--engine", "vllm", "--kv-cache-dtype", "fp8e4m3"), "fp8_e4m3"),
        (("plan", "demo", "--emit", "helm-value"), "helm-values"),
        (("train", "demo", "--emit", "deepsped"), "deepspeed"),
        (("train", "demo", "--find", "microbatch"), "micro-batch"),
        (("train", "demo", "--strategy", "zero33"), "zero3"),
        (("serve", "demo", "--backend", "vlm"), "vllm"),
        (("serve", "demo", "--admission-mode", "gready"), "greedy"),
        (("replay", "x.csv", "--model", "demo", "--policy", "noevict"), "no_evict"),
        (("dtype", "1", "--format", "bf61"), "bf16"),
        (("sevre",), "serve"),
    ],
)
def test_misspelled_argument_gets_a_suggestion(
    words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *words)
    assert said.startswith("tonnage: ")
    assert f"did you mean {meant}?" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reports_errors_in_one_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, name, "zsh" if name == "completion" else "a", "--frobnicate")
    assert said.startswith("tonnage: ")
    assert f"tonnage {name} --help" in said


def test_dissimilar_word_gets_no_suggestion() -> None:
    assert nearest("--frobnicate", PARSERS["plan"].options()) is None
    assert nearest("--MAX_NUM_SEQ", PARSERS["plan"].options()) == "--max-num-seqs"


def test_misspelled_config_file_key_and_field_get_suggestions(tmp_path) -> None:
    path = tmp_path / "tonnage.toml"
    path.write_text("model = 'demo'\nmax-model-length = 5\n")
    with pytest.raises(DeploymentError, match=r"length is not a setting \(did you mean max_model_len\?"):
        str(_raised(read_config, path))
    with pytest.raises(DeploymentError, match=r"did you mean max_num_seqs\?"):
        str(_raised(load_settings, model="demo", max_num_seq=5))


def test_misspelled_field_in_the_file_of_api_keys_gets_a_suggestion_that_shows_no_key(tmp_path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[key]]\nname = 'a'\nkey = 'long-enough'\nmax_num_seq = 5\n")
    with pytest.raises(DeploymentError, match=r"max_num_seq: .*did you mean max_num_seqs\?") as caught:
        _raised(load_keys, (), path)
    assert "long-enough" not in str(caught.value)


def _raised(call, *arguments, **named):
    """Call ``call``; raise its DeploymentError again with the message and hint that a user sees."""
    try:
        call(*arguments, **named)
    except DeploymentError as error:
        raise DeploymentError(str(error)) from None


def test_misspelled_environment_variable_is_rejected_and_unrelated_one_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubernetes = {
        "TONNAGE_SERVICE_HOST": "10.0.0.1", "TONNAGE_SERVICE_PORT_HTTP": "8000", "TONNAGE_PORT_8000_TCP": "x",
        "TONNAGE_PORT_8000_TCP_ADDR": "10.0.0.1", "TONNAGE_VLLM_PORT": "tcp://10.0.0.1:8000",
    }  # fmt: skip
    known = {f"TONNAGE_{name.upper()}": "" for name in Settings.model_fields}
    check_environment({**known, **kubernetes, "tonnage_port": "1", "TONNAGE_CACHE": "x", "HOME": "x"})
    assert capsys.readouterr().err == ""
    for variable, meant in (("TONNAGE_API_KEYS", "API_KEY"), ("TONNAGE_MAX_MODEL_LENGTH", "MAX_MODEL_LEN")):
        with pytest.raises(DeploymentError) as caught:
            check_environment({variable: "x"})
        assert caught.value.field == variable
        assert caught.value.hint == f"did you mean TONNAGE_{meant}?"
    check_environment({"TONNAGE_WHATEVER_THIS_IS": "x"})
    assert "TONNAGE_WHATEVER_THIS_IS is not a variable of Tonnage" in capsys.readouterr().err


def test_port_variable_set_by_kubernetes_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """TONNAGE_PORT is one of the variables of a Service named tonnage."""
    monkeypatch.setenv("TONNAGE_PORT", "tcp://10.0.0.1:80")
    assert load_settings(model="demo").port == 8000
    monkeypatch.setenv("TONNAGE_PORT", "8123")
    assert load_settings(model="demo").port == 8123


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dtype", "FP16", "float16"), ("dtype", "half", "float16"), ("dtype", "bf16", "bfloat16"),
        ("dtype", "float", "float32"), ("quantization", "NF4", "nf4"), ("quantization", "int4", "w4a16"),
        ("quantization", "FP8", "fp8"), ("kv_cache_dtype", "fp16", "float16"), ("kv_cache_dtype", "FP8", "fp8"),
        ("engine", "VLLM", "vllm"), ("engine", "llama_cpp", "llama.cpp"),
    ],
)  # fmt: skip
def test_aliases_of_option_values_work_in_flags_environment_config_file_and_python(
    name: str, text: str, value: str
) -> None:
    """On a command line, in the environment, in a file, from Python."""
    assert flags_of(Deployment)[name].read(text) == value
    assert getattr(plan("demo", **{name: text}).deployment, name) == value
    if name != "engine":
        settings = load_settings(model="demo", **{name: text})
        assert getattr(settings, name) == value


def test_server_setting_values_are_case_insensitive() -> None:
    settings = load_settings(model="demo", backend="HF", log_level="WARNING", admission_mode="Greedy")
    assert (settings.backend, settings.log_level, settings.admission_mode) == ("hf", "warning", "greedy")


def test_every_command_uses_the_argument_parser_class_that_all_share() -> None:
    assert all(isinstance(parser, Parser) for parser in PARSERS.values())


def test_error_messages_contain_no_api_key() -> None:
    with pytest.raises(DeploymentError) as caught:
        load_settings(model="demo", api_key=123456789)
    assert "123456789" not in str(caught.value)


@pytest.mark.parametrize("given", ["", ",", " , "])
def test_empty_api_key_is_rejected(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty TONNAGE_API_KEY is rejected instead of disabling authentication."""
    monkeypatch.setenv("TONNAGE_API_KEY", given)
    with pytest.raises(DeploymentError, match="is empty"):
        load_settings(model="demo")


# As a file may have them by mistake; no message names a type of Python or of a library.
VALUES = ("5", "1.5", "true", '"x"', '["a", 3]', "[]", "{a = 1}", "2020-01-01", '""')
TYPES = re.compile(r"\b(str|int|float|bool|tuple|Path|None|True|False|datetime|\w+Config|LogFormat|input)\b|\|")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_wrong_type_in_config_file_is_rejected_without_python_type_names(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tonnage.toml"
    told: list[DeploymentError] = []
    for value in VALUES:
        path.write_text(f"model = {value}" if name == "model" else f'model = "demo"\n{name} = {value}')
        try:
            load_settings(path)
        except DeploymentError as error:
            told.append(error)
    flag = (dict(flags_of(Options)) | dict(flags_of(Deployment))).get(name)
    assert len(told) >= 3
    for error in told:
        assert error.field == name
        assert not TYPES.search(error.message), error.message
        if flag is not None and flag.choices:
            assert error.message.endswith(f"is not one of {', '.join(flag.choices)}")


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("plan demo --serve-line --json", "--json"),
        ("plan demo --serve-line --explain", "--explain"),
        ("plan demo --emit helm-values --request 100+10", "--request"),
        ("plan demo --emit helm-values --trace trace.csv", "--trace"),
        ("plan demo --csv --explain", "--explain"),
        *(
            (f"plan demo --replicas auto --rate 2 --trace trace.csv {other}", other.split()[0])
            for other in ("--sweep", "--compare 0.19.0 0.32.0", "--request 1+1", "--html x", "--csv")
        ),
        *((f"{name} demo {other}=", other) for name in ("plan", "train") for other in ("--html", "--emit")),
        ("train demo --sweep micro-batch=1,2 --tricks", "--tricks"),
        ("train demo --sweep micro-batch=1,2 --find micro-batch", "--find"),
        ("train demo --sweep micro-batch=1,2 --emit peft", "--emit"),
        ("train demo --emit trainer --json", "--json"),
        ("train demo --emit trainer --html x", "--html"),
        ("replay trace.csv --model demo --wait-target 2s", "--wait-target"),
        ("dtype 3 --format bf16 --bits 1,17,3", "--bits"),
        ("page --build x --port 80", "--port"),
        ("page --build x --host ::1", "--host"),
        ("watch http://localhost:1 --once --interval 3", "--interval"),
        ("watch http://localhost:1 --host ::1", "--host"),
    ],
)  # fmt: skip
def test_flag_without_effect_is_rejected_naming_the_flag(
    line: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,5\n")
    assert flag in refusal(capsys, *line.split()).partition("(")[0]
    assert not (tmp_path / "x").exists()
