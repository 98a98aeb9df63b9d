"""Fair shares of several API keys inside vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_steps import World, blocks_conserve, config, request, scheduler

from tonnage.cache.admission import AdmissionMode
from tonnage.server.engines.vllm.scheduler import TonnageScheduler
from tonnage.server.engines.vllm.scheduler.key_shares import shortest_first, wish_of
from tonnage.server.engines.vllm.scheduler.options import BadOption, read_policy

MODES = [str(mode) for mode in AdmissionMode]


def world(
    mode: str, *, keys: int = 2, blocks: int = 641, batched: int = 256, asynchronous: bool = True
) -> World:
    made = config(
        blocks,
        mode=mode,
        length=2048,
        sequences=32,
        batched=batched,
        caching=False,
        asynchronous=asynchronous,
        keys=keys,
    )
    return World(scheduler(TonnageScheduler, made), law=blocks_conserve)


def running(found: World) -> Counter[str]:
    return Counter(wish_of(each).tenant for each in found.scheduler.running)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_short_request_in_vllm_starts_at_once_although_another_api_key_has_filled_the_queue(
    mode: str, asynchronous: bool
) -> None:
    found = world(mode, asynchronous=asynchronous)
    for at in range(200):
        found.add(request(f"many-{at}", 4, 100, arrival=at, key="many"), 100)
    for _ in range(10):
        found.step()
    assert running(found) == {"many": 31}
    for at in range(20):
        found.add(request(f"few-{at}", 4, 1, arrival=1000 + at, key="few"), 1)
        assert f"few-{at}" in found.step().num_scheduled_tokens
        found.step()
    assert found.preemptions == 0
    assert found.scheduler.fallbacks == 0


@pytest.mark.parametrize("mode", MODES)
def test_short_prompt_in_vllm_waits_only_one_step_for_the_long_prompt_of_another_api_key(mode: str) -> None:
    found = world(mode)
    for at in range(3):
        found.add(request(f"long-{at}", 2000, 10, arrival=at, key="long"), 10)
    found.step()
    found.add(request("short", 100, 1, arrival=9, key="short"), 1)
    assert any("short" in found.step().num_scheduled_tokens for _ in range(2))
    while found.scheduler.requests:
        found.step()
    assert set(found.ended) == {"long-0", "long-1", "long-2", "short"}
    assert found.scheduler.fallbacks == 0


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("keys", "token_seconds", "longest"), [(2, 1e-3, 260), (2, 1e-5, 2048), (1, 1e-3, 2048)]
)
@pytest.mark.parametrize("mode", MODES)
def test_vllm_steps_are_shortened_while_slow_prompts_delay_the_stream_of_another_api_key(
    mode: str, keys: int, token_seconds: float, longest: int, asynchronous: bool
) -> None:
    found = world(mode, keys=keys, blocks=2_000, batched=2048, asynchronous=asynchronous)
    now, back = 0.0, found.scheduler.update_from_output

    def computed(output: Any, *args: Any) -> Any:
        nonlocal now
        now += 0.017 + output.total_num_scheduled_tokens * token_seconds
        return back(output, *args)

    found.scheduler.clock, found.scheduler.update_from_output = lambda: now, computed
    found.add(request("stream", 10, 400, key="one"), 400)
    for _ in range(4):
        found.step()
    for at in range(8):
        found.add(request(f"long-{at}", 2000, 4, arrival=at, key="two"), 4)
    steps = []
    while len(found.ended) < 8:
        steps.append(found.step().total_num_scheduled_tokens)
    assert longest / 2 < max(steps[4:]) <= longest
    assert found.scheduler.fallbacks == 0
    assert found.scheduler.max_num_scheduled_tokens == 2048


@pytest.mark.parametrize("mode", ["guaranteed", "auto"])
def test_every_request_of_three_api_keys_finishes_in_vllm(mode: str) -> None:
    found = world(mode, keys=3, blocks=200)
    for at in range(90):
        output = 1 + 13 * at % 90
        found.add(
            request(f"{at}", 1 + 37 * at % 700, 90, arrival=at, key=f"key-{at % 3}", weight=1 + at % 3), output
        )
    for _ in range(20_000):
        if not found.scheduler.requests:
            break
        found.step()
    assert len(found.ended) == 90
    assert found.scheduler.fallbacks == 0
    if mode == "guaranteed":
        assert found.preemptions == 0


def test_requests_without_an_api_key_count_as_one_key_of_weight_1() -> None:
    assert (wish_of(request("a", 4, 4)).tenant, wish_of(request("a", 4, 4)).weight) == ("", 1.0)
    named = wish_of(request("b", 4, 4, key="team", weight=2.5))
    assert (named.tenant, named.weight) == ("team", 2.5)
    wrong = SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={"tonnage_key": 3, "tonnage_weight": "x"})
    )
    assert (wish_of(wrong).tenant, wish_of(wrong).weight) == ("", 1.0)
    assert wish_of(SimpleNamespace(sampling_params=None)).tenant == ""  # a request for an embedding


def test_fair_sharing_delays_no_prompt_for_a_shorter_one_of_the_same_api_key() -> None:
    one, two = request("one", 900, 4, key="a"), request("two", 9, 4, key="a")
    three = request("three", 9, 4, key="b")
    assert shortest_first([two], [one]) == ([two], [])
    assert shortest_first([two, three], [one]) == ([three], [one])


@pytest.mark.parametrize("keys", [0, 1.5, "two"])
def test_invalid_number_of_api_keys_is_rejected(keys: object) -> None:
    with pytest.raises(BadOption, match="keys"):
        read_policy({"tonnage": {"keys": keys}}, {})
    assert read_policy({"tonnage": {"keys": 3}}, {}).keys == 3


@pytest.mark.parametrize("mode", MODES)
def test_fair_sharing_adds_few_steps_if_only_one_api_key_is_active(mode: str) -> None:
    """Blocks are short, so that admission decides on one request after each departure."""
    steps = {}
    for keys in (1, 2):
        found = world(mode, keys=keys, blocks=101)
        for at in range(80):
            found.add(request(f"{at}", 20 + at % 60, 90, arrival=at, key="alone"), 20 + 7 * at % 70)
        while found.scheduler.requests:
            found.step()
        assert len(found.ended) == 80
        steps[keys] = found.steps
    assert steps[2] <= 1.06 * steps[1]
