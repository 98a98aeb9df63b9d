"""``tonnage status``, the page at / and the operator's log lines, on a real server over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import Loading
from pages import pages
from serving import PATIENCE, free_port
from terminal import Terminal
from watched import vllm

from tonnage.planner import bars
from tonnage.planner.errors import TonnageError
from tonnage.planner.page import pyodide
from tonnage.planner.page.build import build
from tonnage.planner.units import gib
from tonnage.server import state as server_state
from tonnage.server.api import plan_page
from tonnage.server.app import create_app
from tonnage.server.commands.serve import _Stop
from tonnage.server.commands.status import run
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.stats import MeasuredMemory
from tonnage.server.engines.supervisor import SupervisedEngine
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.observe import failed_requests, logs
from tonnage.server.observe.status import POOL_STATES, Status, memory_rows, span, status_of
from tonnage.server.settings import load_settings
from tonnage.server.watch.client import Client, WatchError
from tonnage.server.watch.screens import Screen
from tonnage.server.watch.status import drawn, observe, plain, pool_bar

KEY = "a-key-of-the-status-tests"
BROWSER = {"accept": "text/html,application/xhtml+xml"}


async def ask(server: Any, count: int, **body: Any) -> list[asyncio.Task[httpx.Response]]:
    tasks = [asyncio.create_task(server.complete(prompt=[9] * 40, **body)) for _ in range(count)]
    await server.until(lambda: server.engine.stats().running + server.engine.stats().waiting == count)
    return tasks


async def test_status_of_a_busy_server_equals_its_metrics(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    """Two requests run and one waits; every value shown equals the server's metric for it."""
    engine = FakeEngine(small_plan(max_num_seqs=2), token_rate=50)
    async with run_server(engine, served=SupervisedEngine(lambda: engine)) as server:
        for _ in range(3):
            assert (await server.complete(max_tokens=2)).status_code == 200
        tasks = await ask(server, 3, max_tokens=1000)
        await server.until(
            lambda: engine.stats().running == 2 and server.state.accounts.oldest()[0] is not None
        )
        found = await asyncio.to_thread(observe, Client(server.url))
        metrics = (await server.http.get("/metrics")).text
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: engine.stats().running == 0)
        idle = (await asyncio.to_thread(observe, Client(server.url))).report
    report, status = found.report, found.status
    assert (report["state"], report["restarts"]) == ("ready", 0)
    assert report["since"] <= report["time"]
    requests = report["requests"]
    assert (requests["in_flight"], requests["running"], requests["waiting"]) == (3, 2, 1)
    assert requests["longest_running_seconds"] >= requests["longest_waiting_seconds"] > 0
    assert f'tonnage_headroom_requests{{model="demo"}} {report["headroom"]["requests"]}' in metrics
    assert report["drain_seconds"] > 0
    blocks = report["pool"]["blocks"]
    assert sum(status.pool.values()) == status.usable == blocks["usable"] == 255
    assert (status.pool["used"], status.pool["reserved"]) == (blocks["used"], blocks["promised_unused"])
    text = plain(found)
    assert text.startswith("ready since ")
    assert re.search(r"^running +2 of at most 2, the longest for [\d.]+ s$", text, re.M)
    assert re.search(r"^waiting +1, the longest for [\d.]+ s$", text, re.M)
    assert re.search(r"^drain +.* for the 3 in flight$", text, re.M)
    assert re.search(r"^kv_pool +94,371,840 \(90\.0 MiB\)", text, re.M)
    assert report["plan"]["plan_id"] in text
    assert (idle["requests"]["longest_running_seconds"], idle["drain_seconds"]) == (None, 0)


async def test_status_reports_phases_from_loading_to_draining(
    run_server: Callable[..., Any], small_plan: Callable[..., Any], caplog
) -> None:
    caplog.set_level(logging.INFO, "tonnage.server")
    engine = Loading(small_plan(), token_rate=50)
    async with run_server(engine, ready=False) as server:

        async def phase() -> str:
            report = (await server.http.get("/memory")).json()
            assert status_of(report).state == report["state"]
            return str(report["state"])

        assert await phase() == "loading"
        engine.loaded.set()
        await server.until(lambda: server.state.started)
        assert await phase() == "ready"
        tasks = await ask(server, 2, max_tokens=1000)
        server_state.DRAIN_PROGRESS_SECONDS, usual = 0.05, server_state.DRAIN_PROGRESS_SECONDS
        try:
            draining = asyncio.create_task(server.state.drain(0.3))
            await asyncio.sleep(0)
            assert await phase() == "draining"
            await draining
        finally:
            server_state.DRAIN_PROGRESS_SECONDS = usual
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    lines = [record.getMessage() for record in caplog.records]
    first, second, *more = lines
    assert re.fullmatch(r"tonnage [\d.]+\S*: loading demo", first)
    assert vars(caplog.records[0])["plan_id"] == server.state.plan.plan_id
    assert second == "ready"
    assert more.count("draining: 2 requests in flight") >= 2
    assert more[-1] == "the time to drain is over: 2 requests are cut off"


async def test_second_stop_signal_logs_that_requests_are_cut_off(
    run_server: Callable[..., Any], small_plan: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=50)) as server:
        tasks = await ask(server, 2, max_tokens=1000)
        caplog.set_level(logging.INFO, "tonnage.server")
        caplog.clear()
        stop = _Stop(PATIENCE)
        stop.state = server.state
        stop.on_signal(signal.SIGINT)
        await server.until(lambda: server.state.draining)
        stop.on_signal(signal.SIGINT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: server.state.accounts.idle.is_set())
        await asyncio.sleep(0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["draining: 2 requests in flight", "second stop signal: 2 requests are cut off"]


async def test_rejected_requests_are_logged_without_their_content(
    run_server: Callable[..., Any], small_plan: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tonnage.server")
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,), key=KEY) as server:
        caplog.clear()
        await server.complete(max_tokens=10**6, request_id="r-1")
        await server.complete(temperature=9, prompt="a secret of the client")
        await server.complete(model="another secret")
        await server.http.get("/memory", headers={"authorization": "Bearer a-third-secret"})
        await server.http.get("/v1/v1/models%0aINFO: a line of my own?text=another-secret")
        own = "secret\nINFO a line of my own \x1b[31m"
        await server.complete(**{own: 1})
        await server.complete(**{own: {str(at): 1 for at in range(10_001)}})
        await server.complete(stream_options={own: 1})
        server.state.draining_since = 1.0
        assert (await server.http.get("/ready")).status_code == 503  # probes ask again and again
    never, bad, unknown, stranger, lost, *theirs = caplog.records
    codes = [vars(record)["code"] for record in theirs]
    assert codes == ["unknown_parameter", "invalid_value", "unknown_parameter"]
    assert lost.getMessage() == "request refused: unknown url"
    assert vars(lost)["endpoint"] == ascii("/v1/v1/models\nINFO: a line of my own")
    assert never.getMessage().startswith("request refused: this model's maximum context length is 2048 tokens")
    assert (vars(never)["request_id"], vars(never)["code"]) == ("r-1", "context_length_exceeded")
    assert bad.getMessage() == "request refused: invalid value"
    assert vars(bad)["param"] == "temperature"
    assert vars(unknown)["code"] == "model_not_found"
    assert stranger.getMessage() == "request refused: incorrect API key; send Authorization: Bearer KEY"
    assert vars(stranger)["endpoint"] == "/memory"
    assert not any("secret" in str(vars(line)) for line in caplog.records)


def test_log_record_is_one_line_without_control_characters() -> None:
    record = logging.makeLogRecord({"msg": "request", "param": "a\nINFO b \x1b[31m", "model": "caf\u00e9"})
    record.vllm_process_name = "MainProcess"  # as where vLLM is in the process
    line = logs.TextFormatter().format(record)
    assert line.isprintable()
    assert line.endswith(r"request param='a\nINFO b \x1b[31m' model=" + "caf\u00e9")


async def test_repeated_rejections_are_summarized_in_one_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tonnage.server")
    monkeypatch.setattr(failed_requests, "WINDOW_SECONDS", 0.05)
    told = failed_requests.FailedRequestLog()
    full = ApiError(ErrorCode.SERVER_OVERLOADED, "the queue is full")
    for _ in range(2):
        for number in range(failed_requests.AT_ONCE + 20):
            told.refused(full, "/v1/completions", str(number))
        async with asyncio.timeout(PATIENCE):
            while "more" not in caplog.messages[-1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        *each, last = caplog.records
        assert [vars(line)["request_id"] for line in each] == [*map(str, range(failed_requests.AT_ONCE))]
        assert (last.getMessage(), vars(last)["server_overloaded"]) == (
            "20 more requests refused or failed",
            20,
        )
        caplog.clear()


class Fetched(HTMLParser):
    """The text of an HTML page and the resources that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "form", "img", "iframe", "object", "base")
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "style") and tag != "a"]

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_status_page_requires_a_key_and_loads_nothing_external(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    """Check that the status page has no external script, style or file, and needs the key of /memory."""
    name = "<b>demo</b>"
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,), served_model_name=name) as server:
        basic = {"authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()}
        wrong = {"authorization": "Basic " + base64.b64encode(b"me:wrong-key-of-mine").decode()}
        for headers in ({}, wrong, {"authorization": "Basic !"}):
            refused = await server.http.get("/", headers=BROWSER | headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith('Basic realm="')
            assert (await server.http.get("/", headers=headers)).headers["www-authenticate"] == "Bearer"
        for headers in (basic, {"authorization": f"Bearer {KEY}"}):
            answer = await server.http.get("/", headers=headers)
            assert answer.status_code == 200
        assert (await server.http.get("/memory", headers=basic)).status_code == 200
        # A browser also sends Basic credentials on requests of other sites, so they authorize no action.
        for method, path in (("POST", "/v1/completions"), ("POST", "/"), ("GET", "/v1/models")):
            answer_to = await server.http.request(method, path, headers=basic | BROWSER)
            assert (answer_to.status_code, answer_to.headers["www-authenticate"]) == (401, "Bearer")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    page = Fetched(answer.text)
    assert page.loads == []
    assert name in page.text
    assert "<b>" not in answer.text
    for shown in (
        "ready since",
        "plan ",
        "kv_pool",
        "of 255 blocks of 16 tokens",
        "more of the longest requests",
    ):
        assert shown in re.sub(r"\s+", " ", page.text)


async def test_api_documentation_pages_need_no_network(server: Any) -> None:
    for page, scripts in (("/docs", 2), ("/redoc", 2)):
        answer = await server.http.get(page)
        assert answer.status_code == 200
        assert "script-src 'self';" in answer.headers["content-security-policy"]
        found = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
        assert sum(name.endswith(".js") for name in found) == scripts
        for name in found:
            file = await server.http.get(f"/{name}")
            assert file.status_code == 200, name
            kind = {"js": "text/javascript", "css": "text/css", "png": "image/png", "json": "application/json"}
            assert file.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
    for name in ("nothing.js", "..%2fconsts.py", "%2e%2e/core.py"):
        assert (await server.http.get(f"/docs/{name}")).status_code == 404


async def test_planner_page_is_served_at_the_path_plan_once_pyodide_is_downloaded(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path))
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places))
    assert (await server.http.get("/plan")).headers["location"] == "plan/"
    answer = await server.http.get("/plan/")
    assert answer.status_code == 404
    said = answer.json()["error"]["message"]
    assert "run `tonnage page` once on the server's machine" in said
    assert list(places.iterdir()) == []
    made = tmp_path / f"pyodide-{pyodide.VERSION}"
    made.mkdir()
    digest = hashlib.sha256(b"as if").hexdigest()  # its bytes are not what this test is about
    monkeypatch.setattr(pyodide, "FILES", dict.fromkeys(pyodide.FILES, digest))
    for name in pyodide.FILES:
        (made / name).write_bytes(b"no")
    broken = (await server.http.get("/plan/")).json()["error"]["message"]
    assert broken == said  # without the server's folders
    for name in pyodide.FILES:
        (made / name).write_bytes(b"as if")
    built = []
    monkeypatch.setattr(plan_page, "build", lambda *given: (built.append(given), build(*given)))
    first = await asyncio.gather(*(server.http.get("/plan/page.js") for _ in range(4)))
    assert [answer.status_code for answer in first] == [200] * 4
    assert len(built) == len(list(places.iterdir())) == 1
    kinds = {
        "": "text/html",
        "page.js": "text/javascript",
        "planner.zip": "application/",
        "pyodide/pyodide.mjs": "text/javascript",
        "pyodide/pyodide.asm.wasm": "application/wasm",
    }
    for name, kind in kinds.items():
        answer = await server.http.get(f"/plan/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(kind)
    for name in ("nothing.js", "pyodide", "..%2f..%2fetc", "%2e%2e/page/page.js"):
        assert (await server.http.get(f"/plan/{name}")).status_code == 404, name


@pytest.fixture(scope="module")
def report(small_plan: Callable[..., Any], tokenizer: Any) -> str:
    """Return /memory of a server that is still loading and has measured its memory."""
    measured = MeasuredMemory(
        weights=269_060_352, kv_pool=94_371_840, framework=300 * 2**20, process_peak=700 * 2**20
    )
    engine = FakeEngine(small_plan(), memory=measured)
    app = create_app(load_settings(model="demo"), engine, tokenizer, operations_only=True)

    async def fetched() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as http:
            return (await http.get("/memory")).text

    return asyncio.run(fetched())


def test_status_command_prints_text_and_json(report: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pages(memory=report) as server:
        assert run([server.url]) == 0
        text = capsys.readouterr().out
        assert run([server.url.removeprefix("http://"), "--json", "--api-key", KEY]) == 0
        found = json.loads(capsys.readouterr().out)
        assert server.asked[-1][1]["Authorization"] == f"Bearer {KEY}"
    assert found == {"url": server.url} | json.loads(report)
    assert "\x1b" not in text
    assert f"demo at {server.url}\n" in text
    assert re.search(r"^all processes +[\d,]+ \([\d.]+ [MG]iB\) +[\d,]+ ", text, re.M)


def test_status_with_an_interval_repeats_the_report(report: str) -> None:
    with pages(memory=report) as server:
        command = [
            sys.executable,
            "-m",
            "tonnage.server.cli",
            "status",
            server.url,
            "--json",
            "--interval",
            "0.1",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert [look["url"] for look in looks] == [server.url] * 2
    assert process.returncode == 0


def test_status_needs_no_optional_package(report: str) -> None:
    """Run the command where only the planner is installed, as on an operator's machine."""
    names = ("numpy", "numba", "rich", "fastapi", "pydantic", "prometheus_client", "starlette", "tokenizers")
    code = f"import sys; sys.modules.update(dict.fromkeys({names!r})); "
    code += "from tonnage.server.cli import main; sys.exit(main(sys.argv[1:]))"
    with pages(memory=report) as server:
        command = [sys.executable, "-c", code, "status", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("loading since ")


def test_status_reads_api_key_from_environment(report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_API_KEY", f"{KEY},another-key-of-it")
    with pages(memory=report) as server:
        assert run([server.url]) == 0
        assert server.asked[-1][1]["Authorization"] == f"Bearer {KEY}"


def test_status_of_a_server_that_cannot_be_read_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str], report: str
) -> None:
    """The error is one line with what to do."""
    older = json.loads(report)
    del older["requests"]
    unused = f"http://127.0.0.1:{free_port()}"
    with vllm() as other, pages(memory=json.dumps(older)) as old:
        for url, said in (
            (unused, "is it running"),
            (other.url, f"tonnage watch {other.url} shows vLLM"),
            (old.url, "use the server's release of tonnage"),
        ):
            assert run([url]) == 1
            told = capsys.readouterr()
            assert (told.out, told.err.count("\n")) == ("", 1)
            assert told.err.startswith("tonnage: ")
            assert said in told.err


async def test_status_error_for_a_missing_api_key_names_the_key_options(
    run_server: Callable[..., Any], small_plan: Callable[..., Any]
) -> None:
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,)) as server:
        with pytest.raises(WatchError, match=r"--api-key KEY, or TONNAGE_API_KEY"):
            await asyncio.to_thread(observe, Client(server.url))


@pytest.mark.parametrize(
    "arguments", [["--interval", "0", "--watch"], ["--timeout", "x"], ["--api-key", "a\nb"]]
)
def test_invalid_status_arguments_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(TonnageError) as told:
        run(["http://127.0.0.1:9", *arguments])
    assert not isinstance(told.value, WatchError)


@pytest.mark.parametrize(("encoding", "full"), [("utf-8", bars.SHADES[0]), ("latin-1", bars.ASCII[0])])
def test_status_screen_works_in_any_terminal_encoding(
    report: str, monkeypatch: pytest.MonkeyPatch, encoding: str, full: str
) -> None:
    terminal = Terminal(encoding)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    busy = json.loads(report)
    busy["pool"]["blocks"] |= {"used": 100, "free": 155}
    with pages(memory=json.dumps(busy)) as server, Screen(drawn) as screen:
        screen.show(observe(Client(server.url)))
        screen.lost(WatchError("no server there", hint="start one"))
    shown = terminal.shown()
    assert full in shown
    assert "no server there (start one)" in shown


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_narrow_status_screen_truncates_no_figure(
    report: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    said = {}
    for columns in (30, 60, 80, 120):
        terminal = Terminal(encoding)
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setenv("COLUMNS", str(columns))
        with pages(memory=report) as server:
            assert run([server.url]) == 0
        said[columns] = [re.sub(r"\x1b\[\d*m", "", line) for line in terminal.shown().splitlines()]
        assert not any("\u2026" in line for line in said[columns])
        assert max(map(len, said[columns])) <= columns
    measured = json.loads(report)["measured"]["process_peak_bytes"]
    assert any(f"{measured:,} ({gib(measured)})" in line for line in said[120])
    for columns in (60, 80):
        (row,) = (line for line in said[columns] if line.startswith("all processes"))
        assert gib(measured) in row
        assert f"{measured:,}" not in row


def test_dumb_terminal_gets_plain_status_output(
    report: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal("utf-8")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with pages(memory=report) as server:
        shown = plain(observe(Client(server.url)))
        looks = 0

        def slept(_: float) -> None:
            nonlocal looks
            looks += 1
            assert terminal.shown() == "\n".join([f"{shown}\n"] * looks)  # before it ends, looks apart
            if looks == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr("time.sleep", slept)
        assert run([server.url, "--watch"]) == 0
    assert looks == 2


def test_status_before_the_first_request_counts_headroom_in_requests_of_the_longest_size(
    report: str,
) -> None:
    fresh = json.loads(report)
    assert "1 more of the longest requests" in dict(status_of(fresh).facts)["headroom"]
    fresh["requests"]["received"] = 1
    assert "1 more requests of the average size so far" in dict(status_of(fresh).facts)["headroom"]


def test_status_bar_of_the_kv_pool_has_a_constant_width() -> None:
    for counts in ((1, 1, 1, 252), (84, 86, 85, 0), (0, 0, 0, 255)):
        status = Status("demo", "ready", "", "", (), dict(zip(POOL_STATES, counts, strict=True)), ())
        assert len(re.sub(r"\[[^]]*\]", "", pool_bar(status, bars.ASCII))) == 48


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.6, "1 min"), (185, "3 min 5 s"),
        (7441, "2 h 4 min"), (180_000, "2 d 2 h"),
    ],
)  # fmt: skip
def test_seconds_are_formatted_as_a_readable_duration(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    "odd", [{"memory": []}, {"since": 1e300}, {"drain_seconds": 1e400}, {"requests": 3}, {"state": "a\x1b[2Jb"}]
)
def test_malformed_status_response_prints_no_control_characters(
    report: str, odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps(json.loads(report) | odd)
    client = Client("http://localhost:1")
    monkeypatch.setattr(client, "get", lambda _: httpx.Response(200, text=answer))
    try:
        shown = plain(observe(client))
    except WatchError as error:
        shown = str(error)
    assert "\x1b" not in shown


def test_status_gives_each_memory_component_the_same_verdict_as_the_demo_command():
    mib = 1 << 20
    planned = {"weights": 10 * mib, "activations": 30 * mib, "framework": 600 * mib, "free": 5}
    measured = {"weights": 10 * mib, "activations": 44 * mib, "framework": 100 * mib, "free": 7}
    bounds = {
        "weights": (10 * mib,) * 2,
        "activations": (15 * mib, 60 * mib),
        "framework": (400 * mib, 700 * mib),
    }

    def verdicts(**changed: int) -> list[str]:
        return [row[4] for row in memory_rows(planned, {**measured, **changed}, bounds)]

    inside = "ok, 15.0 MiB to 60.0 MiB"  # the difference is +46.7 %
    assert verdicts() == ["ok", inside, "below, 400.0 MiB to 700.0 MiB", ""]
    above = verdicts(weights=10 * mib + 1, activations=61 * mib)
    assert above[:2] == ["OUTSIDE", "OUTSIDE, 15.0 MiB to 60.0 MiB"]
    assert {row[4] for row in memory_rows(planned, measured)} == {""}
