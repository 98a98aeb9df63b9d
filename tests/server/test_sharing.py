"""Settings that share cache state: KV events, and a system prompt for several tenants; and Retry-After."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from endpoints import cached_tokens
from hf_steps import finish, publish_and_fork
from serving import PATIENCE, serving
from vllm.distributed import kv_events as vllm_events

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.request import GenerationRequest, SamplingParams
from tonnage.server.engines.sharing import Sharing
from tonnage.server.requests import accounts as accounts_module
from tonnage.server.requests.accounts import Accounts
from tonnage.server.requests.submission import Submission
from tonnage.server.settings import load_settings
from tonnage.server.text.chat_template import ChatTemplate
from tonnage.server.text.shared_prefix import shared_prefix
from tonnage.server.text.tokenizer import Tokenizer

SYSTEM = "You answer questions about the harbour: ships, cranes, tides and the price of a berth. " * 4


def demo_plan() -> Plan:
    ensure_demo()
    return make_plan("demo", Deployment(dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 * 2**20))


def run(scheduler: HFScheduler, prompt: list[int], salt: str) -> int:
    """Run a request to its end; return the number of its cached tokens."""
    params = SamplingParams(max_tokens=2, temperature=0.0)
    scheduler.add(GenerationRequest(salt, tuple(prompt), params, cache_salt=salt))
    cached = -1
    while not scheduler.idle:
        batch, picked, _ = scheduler.schedule()
        assert batch is not None
        draws = publish_and_fork(scheduler, picked)
        for chunk in finish(scheduler, draws, [7] * len(draws)):
            cached = chunk.cached_tokens
    return cached


def test_tenants_share_only_the_configured_system_prompt(tmp_path: Path) -> None:
    plan, file = demo_plan(), tmp_path / "system.txt"
    file.write_text(SYSTEM + "\n")
    folder, size = Path(plan.model.path), plan.kv_cache.layout.block_size
    prefix = shared_prefix(file, folder, size)
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    assert template is not None
    text = template.render(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "berths? " * 40}]
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    assert tuple(prompt[: len(prefix)]) == prefix
    for prefixes, shared in (((), 0), ((prefix,), len(prefix) // size * size)):
        scheduler = HFScheduler(plan, sharing=Sharing(prefixes=prefixes))
        assert run(scheduler, prompt, "one tenant") == 0
        assert run(scheduler, prompt, "another") == shared
        assert run(scheduler, prompt, "another") == (len(prompt) - 1) // size * size > shared


def test_short_or_missing_system_prompt_file_is_rejected(tmp_path: Path) -> None:
    folder = Path(demo_plan().model.path)
    with pytest.raises(DeploymentError, match="cannot read"):
        shared_prefix(tmp_path / "none", folder, 16)
    (tmp_path / "short").write_text("Hi")
    with pytest.raises(DeploymentError, match="less than a KV block"):
        shared_prefix(tmp_path / "short", folder, 256)


def test_engine_publishes_kv_events_at_the_configured_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    value = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv"})
    settings = load_settings(model="demo", kv_events_config=value)
    plan = demo_plan()
    scheduler = HFScheduler(plan, sharing=Sharing(settings.kv_events_config))
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoint)
        subscriber.subscribe("kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 200)
        for attempt in range(100):  # until the subscription has arrived: what was sent before is gone
            size = plan.kv_cache.layout.block_size
            run(scheduler, [attempt + 1] * (2 * size + 1), "")
            try:
                topic, _, payload = subscriber.recv_multipart()
                break
            except zmq.Again:
                continue
        else:
            pytest.fail("no event in 100 requests")
    _, events, _ = msgspec.msgpack.decode(payload)
    assert topic == b"kv"
    assert events[0]["type"] == "BlockStored"
    assert events[0]["block_size"] == size
    with pytest.raises(DeploymentError, match="kv_events_config"):
        HFScheduler(
            plan,
            sharing=Sharing(
                load_settings(
                    model="demo",
                    kv_events_config=json.dumps({"enable_kv_cache_events": True, "endpoint": "nowhere://x"}),
                ).kv_events_config
            ),
        )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"port": 1}', "port is none of"),
        ('{"hwm": "many"}', "hwm: 'many' is not of type int"),
        ('{"buffer_steps": 0}', "buffer_steps: 0 is below 1"),
        ('{"publisher": "kafka"}', "neither zmq nor null"),
    ],
)
def test_invalid_kv_events_config_is_rejected(value: str, said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        load_settings(model="demo", kv_events_config=value)


@pytest.mark.parametrize("field", ["kv_events_config", "shared_system_prompt"])
def test_fake_backend_rejects_kv_events_and_shared_system_prompts(field: str) -> None:
    value = {"kv_events_config": '{"enable_kv_cache_events": true}', "shared_system_prompt": "a.txt"}[field]
    settings = load_settings(model="demo", backend="fake", **{field: value})
    with pytest.raises(DeploymentError, match=field):
        make_engine(settings, demo_plan())


def test_retry_after_is_the_reserved_tokens_divided_by_the_rate_of_freed_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(accounts_module.time, "monotonic", lambda: now[0])
    accounts = Accounts()

    def submit(tokens: int) -> accounts_module.Ticket:
        ticket = accounts.receive()
        ticket.submission = Submission(((1,) * (tokens - 10),), SamplingParams(max_tokens=10))
        ticket.submitted()
        return ticket

    assert accounts.retry_after() == 1.0
    tickets = [submit(100) for _ in range(6)]
    assert accounts.retry_after() == 1.0  # nothing has ended yet
    for ticket in tickets[:3]:
        now[0] += 2.0
        ticket.finish("stop")
    assert accounts.retry_after() == pytest.approx(300 / (200 / 4))
    submit(2000)
    assert accounts.retry_after() == pytest.approx(2300 / (200 / 4))
    submit(20_000)
    assert accounts.retry_after() == 60.0


def test_served_model_publishes_kv_events_and_shares_system_prompt(tmp_path: Path) -> None:
    endpoint, system = f"ipc://{tmp_path}/events", tmp_path / "system.txt"
    system.write_text(SYSTEM)
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv"})
    options = ("--max-model-len", "384", "--kv-cache-memory-bytes", "24MiB", "--kv-events-config", events)
    seen: dict[type, list[vllm_events.KVCacheEvent]] = {}
    with (
        serving("demo", *options, "--shared-system-prompt", str(system)) as url,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client,
    ):
        subscriber.connect(endpoint)
        subscriber.subscribe("kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 500)
        cached = [cached_tokens(client, SYSTEM, salt) for salt in ("one tenant", "another")]
        assert cached[0] == 0 < cached[1]
        # More prompts than the pool holds; the first may come before the subscription does.
        for number in range(100):
            prompt = [number + 1] * 321
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()
            for event in received(subscriber):
                seen.setdefault(type(event), []).append(event)
                if isinstance(event, vllm_events.BlockStored) and event.token_ids == prompt[:320]:
                    break  # all of this one has come
            else:
                continue
            if vllm_events.BlockRemoved in seen:
                break
    stored, removed = seen[vllm_events.BlockStored][-1], seen[vllm_events.BlockRemoved][-1]
    assert isinstance(stored, vllm_events.BlockStored)
    assert isinstance(removed, vllm_events.BlockRemoved)
    assert stored.token_ids == prompt[:320]
    assert len(stored.block_hashes) * stored.block_size == len(stored.token_ids) == 320
    assert removed.block_hashes


def received(subscriber: zmq.Socket[bytes]) -> Iterator[vllm_events.KVCacheEvent]:
    """Yield the received events, decoded by vLLM's own classes."""
    while True:
        try:
            _, _, payload = subscriber.recv_multipart()
        except zmq.Again:
            return
        yield from msgspec.msgpack.decode(payload, type=vllm_events.KVEventBatch).events
