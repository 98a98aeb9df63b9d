"""Tests of Tonnage's admission in vLLM's real scheduler and block pool, with made-up model outputs."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import vllm
from vllm.v1.core import single_type_kv_cache_manager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm_steps import BLOCK, World, blocks_conserve, config, full, request, scheduler, sliding

import tonnage.server.engines.vllm as vllm_engine
import tonnage.server.engines.vllm.scheduler.scheduler as scheduler_module
from tonnage.cache.admission import AdmissionMode, is_safe
from tonnage.server.engines.vllm.scheduler import TonnageScheduler
from tonnage.server.engines.vllm.scheduler.options import BadOption, read_eviction, read_policy
from tonnage.server.engines.vllm.scheduler.scheduler import AdmissionMixin
from tonnage.server.engines.vllm.scheduler.versions import names_of
from tonnage.server.engines.vllm.stats_transport import take_stats

NAMES = names_of(vllm.__version__)
assert NAMES is not None
MODES = ("predictive", "guaranteed", "no_evict", "greedy")
HYBRID = [full(), sliding(64), sliding(64)]


def each_request_is_listed_once(made: Any) -> None:
    """Assert that each unfinished request is in one of vLLM's lists."""
    lists = [r.request_id for r in (*made.running, *made.waiting, *getattr(made, NAMES.holders))]
    assert sorted(lists) == sorted(made.requests)


def account_holds(made: Any) -> None:
    """Assert that the account's figures equal vLLM's tables or err on the safe side."""
    if made.admission is None or made.admission.policy.mode is AdmissionMode.GREEDY:
        return
    account = made._account
    assert len(account) == len(made.running)
    assert account._order.tolist() == [account._slots[r.request_id] for r in made.running]
    snapshot = account.snapshot()
    tables = made.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    owners: Counter[int] = Counter()
    for running in made.running:
        owners.update({block.block_id for block in tables[running.request_id]})
    assert snapshot.used >= len(owners)
    for at, running in enumerate(made.running):
        table = tables[running.request_id]
        assert snapshot.held[at] == len(table) <= snapshot.reserved[at]
        assert snapshot.private[at] <= sum(owners[block.block_id] == 1 for block in table)
    if made.admission.policy.mode is AdmissionMode.GUARANTEED and made.running:
        assert is_safe(snapshot) or is_safe(snapshot, account.leaving(snapshot, ()))


def laws(made: Any) -> None:
    blocks_conserve(made)
    each_request_is_listed_once(made)
    account_holds(made)


def world(mode: str | None, blocks: int = 200, *, specs: Any = None, **flags: Any) -> World:
    made = scheduler(TonnageScheduler, config(blocks + 1, mode=mode, **flags), specs)
    return World(made, law=laws)


def conversations(draw: random.Random, number: int, most: int) -> list[tuple[list[int], int]]:
    """Return (prompt, true output length) of each request; some share prefixes."""
    documents = [[draw.randrange(50_000) for _ in range(draw.randrange(20, 200))] for _ in range(4)]
    out = []
    for _ in range(number):
        prompt = list(draw.choice(documents)) if draw.random() < 0.5 else []
        prompt += [draw.randrange(50_000) for _ in range(draw.randrange(1, 150))]
        out.append((prompt, 1 + min(most - 1, int(draw.expovariate(1 / 30)))))
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("specs", [None, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_block_invariants_of_the_vllm_scheduler_hold_in_random_runs(
    mode: str, asynchronous: bool, specs: Any, seed: int
) -> None:
    """Arrivals, aborts, shared prefixes and priorities lose no request and shorten no output."""
    draw = random.Random(f"{mode} {asynchronous} {seed}")
    most = 150
    blocks = draw.choice([60, 90, 130]) * (1 if specs is None else 2)
    w = world(
        mode, blocks, specs=specs, asynchronous=asynchronous, policy=draw.choice(["fcfs", "priority"]),
        batched=draw.choice([64, 100, 512]), sequences=draw.choice([4, 64]), caching=draw.random() < 0.8,
    )  # fmt: skip
    expected, aborted = {}, set()
    for number, (prompt, output) in enumerate(conversations(draw, 40, most)):
        id = f"r{number}"
        w.add(request(id, prompt, most, priority=draw.randrange(3), arrival=number), output)
        expected[id] = output
        for _ in range(draw.choice([0, 0, 1, 5])):
            w.step()
        if draw.random() < 0.1:
            other = draw.choice(sorted(expected))
            if other in w.scheduler.requests:
                w.abort(other)
                aborted.add(other)
    w.run()
    assert set(w.ended) == set(expected) - aborted
    assert all(w.produced[id] == expected[id] for id in w.ended)
    assert w.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks
    assert w.scheduler.fallbacks == 0
    assert w.scheduler.admission is not None
    w.scheduler._account.sync()
    assert not w.scheduler._account._slots
    assert not w.scheduler._account.reserved
    if mode in ("guaranteed", "no_evict"):
        assert w.preemptions == 0


@pytest.mark.parametrize("mode", ["guaranteed", "no_evict"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_speculative_drafts_of_varying_length_cause_no_preemption(
    mode: str, asynchronous: bool, seed: int
) -> None:
    """A request keeps the blocks of a rejected draft; the next draft may be shorter or longer."""
    draw = random.Random(f"drafts {mode} {asynchronous} {seed}")
    most, drafts = 120, draw.choice([1, 3, 7, 20])
    w = world(
        mode, draw.choice([30, 50, 80]), asynchronous=asynchronous, drafts=drafts,
        batched=draw.choice([64, 512]), sequences=draw.choice([4, 64]), caching=draw.random() < 0.8,
    )  # fmt: skip
    w.drafts = draw
    expected = {}
    for number, (prompt, output) in enumerate(conversations(draw, 40, most)):
        w.add(request(f"r{number}", prompt, most), output)
        expected[f"r{number}"] = output
        for _ in range(draw.choice([0, 0, 1, 5])):
            w.step()
    w.run()
    assert w.produced == expected
    assert w.scheduler.fallbacks == 0
    assert w.preemptions == 0


@pytest.mark.parametrize("seed", [4, 33])
def test_block_that_was_shared_then_freed_and_computed_again_counts_as_held_by_one_request(seed: int) -> None:
    """A block that two requests shared, freed, evicted and computed again is not shared any more."""
    draw = random.Random(seed)
    w = world("guaranteed", 14, batched=32, sequences=8, asynchronous=False)
    documents = [[draw.randrange(50_000) for _ in range(100)] for _ in range(3)]
    for number in range(60):
        w.add(request(f"r{number}", [*draw.choice(documents), number], 30), draw.randrange(1, 30))
        w.step()
    w.run()
    assert w.preemptions == w.scheduler.fallbacks == 0


def test_blocks_freed_later_by_a_kv_connector_let_the_next_request_start() -> None:
    """A connector frees blocks this way after it has sent the blocks of an ended request."""
    w = world("guaranteed", 20, asynchronous=False)
    w.law = None  # its account knows no blocks of a connector
    pool = w.scheduler.kv_cache_manager.block_pool
    w.add(request("long", 40, 200), 150)
    w.step()
    sent = pool.get_new_blocks(9)
    w.add(request("next", 80, 48), 20)
    for _ in range(3):
        w.step()
    assert [r.request_id for r in w.scheduler.running] == ["long"]
    pool.free_blocks(sent)
    w.step()
    assert [r.request_id for r in w.scheduler.running] == ["long", "next"]


def crowd(w: World, number: int = 40, prompt: int = 40, most: int = 120, output: int = 60) -> dict[str, int]:
    for at in range(number):
        w.add(request(f"r{at}", prompt, most, arrival=at), output)
    return {f"r{at}": output for at in range(number)}


def test_guaranteed_mode_has_no_preemption_under_a_load_that_preempts_in_vllm() -> None:
    draw = random.Random(0)
    lengths = [1 + min(119, int(draw.expovariate(1 / 30))) for _ in range(150)]
    preemptions = {}
    for mode in (None, "predictive", "guaranteed", "no_evict"):
        cls = AsyncScheduler if mode is None else TonnageScheduler
        w = World(scheduler(cls, config(61, mode=mode)), law=blocks_conserve)
        for at, output in enumerate(lengths):
            w.add(request(f"r{at}", 40, 120, arrival=at), output)
        w.run()
        assert w.produced == {f"r{at}": output for at, output in enumerate(lengths)}
        preemptions[mode] = w.preemptions
    assert preemptions["guaranteed"] == preemptions["no_evict"] == 0
    assert preemptions[None] > 20 > 10 * preemptions["predictive"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_greedy_mode_makes_exactly_the_steps_of_vllms_own_scheduler(asynchronous: bool) -> None:
    taken = []
    for cls in (TonnageScheduler, AsyncScheduler if asynchronous else Scheduler):
        w = World(scheduler(cls, config(61, mode="greedy", asynchronous=asynchronous)))
        crowd(w)
        steps = []
        while w.scheduler.has_unfinished_requests():
            steps.append(w.step().num_scheduled_tokens)
        taken.append((steps, w.preemptions))
    assert taken[0] == taken[1]
    assert taken[0][1] > 0


@pytest.mark.parametrize("mode", ["predictive", "guaranteed", "no_evict"])
@pytest.mark.parametrize("counts", [True, False], ids=["by counts", "by truth"])
def test_scheduler_with_enough_blocks_defers_prefills_in_the_same_steps_as_vllms_own(
    mode: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough blocks, held requests count as waiting when vLLM decides whether to defer prefills."""
    if not counts:  # as in vLLM 0.30
        monkeypatch.delattr(AdmissionMixin, "get_request_counts")
    taken = []
    for cls in (AsyncScheduler, TonnageScheduler):
        made = scheduler(cls, config(2001, mode=None if cls is AsyncScheduler else mode, batched=64))
        w = World(made, interval=8)
        if cls is TonnageScheduler:
            made._names = replace(NAMES, counts=counts)
        expected = crowd(w)
        w.run()
        assert w.produced == expected
        taken.append(w.steps)
    assert taken[0] == taken[1]


@pytest.mark.parametrize("mode", ["predictive", "guaranteed", "no_evict"])
def test_vllm_defers_no_prefill_while_admission_holds_requests_back(mode: str) -> None:
    """vLLM itself defers no prefill while requests wait for blocks."""
    taken = []
    for interval in (1, 8):
        w = World(scheduler(TonnageScheduler, config(61, mode=mode)), interval=interval)
        expected = crowd(w, 100)
        w.run()
        assert w.produced == expected
        taken.append(w.steps)
    assert taken[0] == taken[1]


def test_scheduler_is_a_subclass_of_vllms_async_scheduler_only_with_the_async_flag() -> None:
    assert isinstance(scheduler(TonnageScheduler, config(50)), AsyncScheduler)
    assert not isinstance(scheduler(TonnageScheduler, config(50, asynchronous=False)), AsyncScheduler)


def test_requests_with_the_same_prompt_share_its_blocks() -> None:
    """For n = 8 vLLM makes eight requests, which together need 8 blocks of prompt and not 64."""
    w = world("guaranteed", 30)
    prompt = list(range(128))
    w.add(request("first", prompt, 32), 30)
    w.step()
    for at in range(7):
        w.add(request(f"r{at}", prompt, 32), 30)
    most = 0
    while w.scheduler.has_unfinished_requests():
        w.step()
        most = max(most, len(w.scheduler.running))
    assert w.preemptions == 0
    assert most == 8
    assert set(w.produced.values()) == {30}


def test_requests_of_equal_priority_start_in_arrival_order() -> None:
    w = world("predictive", 60, sequences=8)
    crowd(w)
    started: list[str] = []
    while w.scheduler.has_unfinished_requests():
        started += [new.req_id for new in w.step().scheduled_new_reqs]
    assert started == [f"r{at}" for at in range(40)]


def test_request_of_higher_priority_starts_first() -> None:
    w = world("predictive", 60, policy="priority", sequences=4)
    for at in range(12):
        w.add(request(f"r{at}", 40, 60, priority=-at, arrival=at), 30)
    started: list[str] = []
    while w.scheduler.has_unfinished_requests():
        started += [new.req_id for new in w.step().scheduled_new_reqs]
    assert started == [f"r{at}" for at in reversed(range(12))]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(3))
def test_request_waiting_for_a_lora_slot_blocks_no_other_request(policy: str, seed: int) -> None:
    """vLLM skips such requests, and they are admitted like all others once there is a slot."""
    draw = random.Random(seed)
    w = world("guaranteed", 30, loras=2, policy=policy)
    expected = {}
    for at in range(40):
        priority, adapter = draw.randrange(2), draw.randrange(1, 4)
        made = request(f"r{at}", draw.randrange(1, 100), 60, priority=priority, arrival=at, adapter=adapter)
        expected[f"r{at}"] = output = draw.randrange(1, 60)
        w.add(made, output)
        if draw.random() < 0.4:
            w.step()
    w.run()
    assert w.produced == expected
    assert w.preemptions == w.scheduler.fallbacks == 0


def test_request_waiting_for_a_grammar_blocks_no_other_request() -> None:
    """Admission decides on it once its grammar is ready, and vLLM answers a grammar that failed."""
    w = world("guaranteed", 30)
    futures: dict[str, Future[Any]] = {name: Future() for name in ("bad", "slow")}
    for name, future in futures.items():
        made = request(name, 40, 50, regex="a+")
        made.structured_output_request.grammar = future
        w.add(made, 20)
    expected = crowd(w, 10, 40, 80, 30)
    w.step()
    assert len(w.scheduler.running) > 1
    futures["bad"].set_exception(ValueError("no such grammar"))
    while len(w.scheduler.requests) > 1:
        w.step()
    assert w.produced == {**expected, "bad": 0}
    assert w.ended["bad"].finish_reason is FinishReason.ERROR
    assert list(w.scheduler.requests) == ["slow"]
    w.abort("slow")
    w.run()
    assert w.preemptions == w.scheduler.fallbacks == 0


# -- requests that never fit ---------


@pytest.mark.parametrize("mode", MODES)
def test_request_that_never_fits_is_rejected_and_blocks_no_other_request(mode: str) -> None:
    w = world(mode, 20)
    w.add(request("before", 40, 50), 20)
    w.add(request("never", 21 * BLOCK, 50), 5)
    w.add(request("behind", 40, 50), 20)
    w.step()
    w.step()
    answer = w.ended["never"]
    assert answer.finish_reason is FinishReason.ERROR
    assert "336 prompt tokens, max_tokens 50" in str(answer.stop_reason)
    assert "the pool has 20" in str(answer.stop_reason)
    w.run()
    assert {id: w.produced[id] for id in ("before", "behind")} == {"before": 20, "behind": 20}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_guaranteed_mode_rejects_a_request_whose_max_tokens_exceed_the_pool(asynchronous: bool) -> None:
    """Guaranteed mode rejects the request at once. The other modes run it until its output fills the pool."""
    longest = 20 * BLOCK - 40 + 1
    for mode, produced in (("guaranteed", 0), ("predictive", longest), ("greedy", longest)):
        w = world(mode, 20, length=2048, asynchronous=asynchronous)
        w.add(request("long", 40, 1000), 1000)
        w.add(request("other", 40, 50), 20)
        w.run()
        reason = w.ended["long"].finish_reason
        assert reason is (FinishReason.LENGTH if produced else FinishReason.ERROR)
        assert w.produced["long"] == produced
        assert w.produced["other"] == 20
        assert "the pool has 20" in str(w.ended["long"].stop_reason)


def test_request_that_never_fits_can_be_aborted_before_its_rejection_is_sent() -> None:
    w = world("predictive", 20)
    w.add(request("never", 21 * BLOCK, 50), 5)
    w.abort("never")
    w.add(request("other", 40, 50), 20)
    w.run()
    assert set(w.ended) == {"other"}


# -- exceptions ---------


@pytest.mark.parametrize(
    "where",
    [
        *("admission.plan", "admission.never", "admission.forecast.ended", "admission.took"),
        *("_account.sync", "_account.leave", "_account.pool", "_candidates", "_sort_out", "_take", "_put_back"),
    ],
)
def test_exception_in_tonnages_scheduler_fails_no_request(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    w = world("predictive", 60)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake of ours")

    expected = crowd(w)
    w.step()
    path, _, name = where.rpartition(".")
    target = attrgetter(path)(w.scheduler) if path else w.scheduler
    w.scheduler._names = replace(NAMES, mixed=True)  # `_sort_out` is asked
    monkeypatch.setattr(target, name, broken)
    w.add(request("late", 40, 50), 20)
    w.run()
    assert w.produced == {**expected, "late": 20}
    assert w.scheduler.fallbacks == 1
    assert caplog.text.count("from now on vLLM schedules on its own") == 1
    told = take_stats(w.scheduler.make_stats().waiting_lora_adapters)
    assert told is not None
    assert (told.mode, told.failures) == ("greedy", 1)


def test_requests_that_never_fit_are_rejected_even_after_the_fallback_to_vllms_admission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = world("guaranteed", 20)
    w.law = blocks_conserve
    monkeypatch.setattr(w.scheduler._account, "sync", None)
    w.add(request("before", 40, 50), 20)
    w.step()
    assert w.scheduler.admission is None
    w.add(request("never", 21 * BLOCK, 50), 5)
    w.add(request("long", 40, 1000), 1000)
    w.add(request("behind", 40, 50), 20)
    w.run()
    assert w.ended["never"].finish_reason is FinishReason.ERROR
    assert w.ended["long"].finish_reason is FinishReason.LENGTH
    assert w.produced == {"before": 20, "never": 0, "long": 20 * BLOCK - 40 + 1, "behind": 20}


@pytest.mark.parametrize("failing", ["EngineCoreOutput", "finish_requests", "take_events"])
def test_exception_while_rejecting_a_request_loses_no_output(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world("predictive", 20)
    made = {f"never{at}": request(f"never{at}", 21 * BLOCK, 50) for at in range(3)}
    for each in made.values():
        w.add(each, 5)
    w.add(request("behind", 40, 50), 20)
    target, failing_call = {
        "EngineCoreOutput": (scheduler_module, 2), "finish_requests": (w.scheduler, 2),
        "take_events": (made["never1"], 1),
    }[failing]  # fmt: skip
    plain, calls = getattr(target, failing), 0

    def once(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise RuntimeError("a mistake of ours")
        return plain(*args, **named)

    monkeypatch.setattr(target, failing, once)
    w.run()
    assert set(w.ended) == {*made, "behind"}
    assert w.scheduler.fallbacks == 1


def test_exception_while_counting_evictions_affects_no_request(caplog: pytest.LogCaptureFixture) -> None:
    w = world("predictive", 60)
    expected = crowd(w)
    w.step()
    w.scheduler._report._evictions.counts = None
    w.run()
    assert w.scheduler.reset_prefix_cache()
    assert w.produced == expected
    assert caplog.text.count("Tonnage failed to count evicted blocks") == 1


@pytest.mark.parametrize("where", ["added", "stepped", "left"])
def test_exception_in_scheduler_statistics_does_not_stop_requests(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world("predictive", 60)
    expected = crowd(w)
    w.step()
    monkeypatch.setattr(w.scheduler._report, where, None)
    w.add(request("late", 40, 50), 20)
    w.run()
    assert w.produced == {**expected, "late": 20}
    assert w.scheduler.admission is not None


def test_exception_raised_by_vllms_scheduler_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world("predictive", 60)
    expected = crowd(w)
    w.step()
    order = [r.request_id for r in w.scheduler.waiting]
    with monkeypatch.context() as patch:
        patch.setattr(w.scheduler.kv_cache_manager, "new_step_starts", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            w.scheduler.schedule()
    assert [r.request_id for r in w.scheduler.waiting] == order
    w.run()
    assert w.produced == expected
    assert w.scheduler.fallbacks == 0


def test_requests_that_vllm_itself_preempts_are_admitted_again() -> None:
    """After a weight update vLLM preempts all running requests, and they are admitted again."""
    w = world("guaranteed", 60, asynchronous=False)
    expected = crowd(w)
    for _ in range(5):
        w.step()
    assert w.scheduler.reset_prefix_cache(reset_running_requests=True)
    w.run()
    assert w.produced == expected
    assert w.scheduler.fallbacks == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_vllm_of_an_unknown_version_runs_its_own_scheduler(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds even for a version that lacks names which our scheduler imports."""
    package = vllm_engine.__name__
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    monkeypatch.delattr(single_type_kv_cache_manager, "SinkFullAttentionManager")
    monkeypatch.setattr(vllm_engine, "scheduler", vllm_engine.scheduler)  # put back as it is
    for name in [name for name in sys.modules if name.startswith(f"{package}.scheduler")]:
        monkeypatch.delitem(sys.modules, name)
    unknown = importlib.import_module(f"{package}.scheduler").TonnageScheduler
    made = config(61, mode="predictive", asynchronous=asynchronous, eviction="learned")
    w = World(scheduler(unknown, made))
    assert type(w.scheduler) is (AsyncScheduler if asynchronous else Scheduler)
    expected = crowd(w)
    w.run()
    assert w.produced == expected
    assert w.preemptions > 0
    assert "this is 0.99.1" in caplog.text
    with pytest.raises(ValueError, match="unknown modus"):
        scheduler(unknown, config(50, modus="greedy"))


# -- options ---------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"modus": "greedy"}, "unknown modus"),
        ({"admission_mode": "fast"}, "admission_mode"),
        ({"watermark": 2}, "watermark"),
        ({"length_quantile": "half"}, "length_quantile"),
        ({"length_quantile": True}, "length_quantile"),
        ({"eviction": "fifo"}, "'fifo' is none of lru, learned"),
    ],
)
def test_invalid_scheduler_option_is_rejected_at_start(given: dict[str, Any], named: str) -> None:
    with pytest.raises(BadOption, match=named):
        scheduler(TonnageScheduler, config(50, **given))


def test_scheduler_options_are_read_from_the_environment() -> None:
    environment = {"TONNAGE_ADMISSION_MODE": "guaranteed", "TONNAGE_WATERMARK": "0.1"}
    policy = read_policy({}, environment)
    assert (policy.mode, policy.reserve) == (AdmissionMode.GUARANTEED, 0.1)
    assert read_policy({"tonnage": {"admission_mode": "greedy"}}, environment).mode is AdmissionMode.GREEDY
    assert read_policy({}, {}).mode is AdmissionMode.AUTO
    for tuned in ({"watermark": 0.01}, {"length_quantile": 0.5}):  # as before auto was the default
        assert read_policy({"tonnage": tuned}, {}).mode is AdmissionMode.PREDICTIVE
    with pytest.raises(BadOption, match="TONNAGE_WATERMARK"):
        read_policy({}, {"TONNAGE_WATERMARK": "much"})
    with pytest.raises(BadOption, match=r"TONNAGE_ADMISION_MODE .*did you mean TONNAGE_ADMISSION_MODE\?"):
        read_policy({}, {"TONNAGE_ADMISION_MODE": "greedy"})
    with pytest.raises(BadOption, match=r"did you mean eviction\?"):
        read_policy({"tonnage": {"evictions": "lru"}}, {})
    assert read_policy({}, {"TONNAGE_PORT": "8000", "TONNAGE_MODEL": "x"}).mode is AdmissionMode.AUTO
    with pytest.raises(BadOption, match="an object"):
        read_policy({"tonnage": "guaranteed"}, {})
    assert read_eviction({}, {"TONNAGE_EVICTION": "learned"}) == "learned"
    assert read_eviction({"tonnage": {"eviction": "lru"}}, {"TONNAGE_EVICTION": "learned"}) == "lru"
    assert read_eviction({}, {}) == "lru"
    with pytest.raises(BadOption, match="TONNAGE_EVICTION"):
        read_eviction({}, {"TONNAGE_EVICTION": "clock"})
