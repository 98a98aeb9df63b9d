"""VLLMEngine: vLLM's AsyncLLM under the Plan's pool and tonnage's admission. Written against vLLM 0.32.

vLLM keeps its own blocks and its own scheduler; the plan fixes its pool (``kv_cache_memory_bytes``), the
ledger hands on no more than that pool can hold to the end, and its real block count is held against the plan.
Nothing of vLLM is imported before ``start``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from tonnage.cache.admission import AdmissionRequest
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines import stillness
from tonnage.server.engines.base import Capabilities, Engine
from tonnage.server.engines.capacity import Capacity, limits_of
from tonnage.server.engines.chunk import Chunk, FinishReason, TokenLogprobs
from tonnage.server.engines.errors import EngineDead, QueueFull, Refused
from tonnage.server.engines.imports import no_collections
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.stats import EngineStats, MeasuredMemory, PoolStats
from tonnage.server.engines.vllm import processes
from tonnage.server.engines.vllm.ledger import ReservationLedger
from tonnage.server.engines.vllm.params import (
    HONOURED,
    pooling_params,
    prompt_logprobs,
    sampling_params,
    token_logprobs,
)
from tonnage.server.engines.vllm.passed import COMPLETE, Passed
from tonnage.server.engines.vllm.trying import Trying
from tonnage.server.text.gguf_tokenizer import model_files

log = logging.getLogger("tonnage.server")

# What the user has set wins.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for the plan and for --json
    "VLLM_NO_USAGE_STATS": "1",  # vLLM would report each start to its authors
    # vLLM on a CPU leaves one core to its scheduler (utils/ompmultiprocessing.py, 0.32), which on two cores
    # halves the compute. Here every core computes.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # A day: --engine-ready-timeout is the limit, and vLLM's 600 s would undercut a longer one.
    "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
}


class VLLMEngine(Engine):
    """A vLLM engine in child processes of its own; see :class:`tonnage.server.engines.base.Engine`.

    ``enforce_eager`` (default: on a CPU) runs without torch.compile and CUDA graphs: a compiled CPU start
    takes minutes. ``loras``: name of each LoRA adapter -> its folder; loaded before the engine is ready.
    ``embeds``: vLLM's pooling runner, which gives a vector for each prompt. ``quantization``: what vLLM makes
    of the weights while it loads them, by its own name (default: nothing).
    """

    def __init__(
        self,
        plan: Plan,
        *,
        enforce_eager: bool | None = None,
        loras: Mapping[str, str] | None = None,
        embeds: bool = False,
        quantization: str | None = None,
    ) -> None:
        honoured = HONOURED if find_spec("llguidance") else HONOURED - {"grammar"}
        self._capabilities = Capabilities(honoured, embeds=embeds, own_metrics=True)
        self._embeds = embeds
        self._plan = plan
        self._quantization = quantization
        self._on_cpu = plan.deployment.device == "cpu"
        self._eager = plan.deployment.enforce_eager or self._on_cpu
        if enforce_eager is not None:
            self._eager = enforce_eager
        self._lora_paths = dict(loras or {})
        self._loras: dict[str, Any] = {}  # vLLM's LoRARequest of each
        self._limits = limits_of(plan)
        self._ledger = ReservationLedger(self._limits)
        self._llm: Any = None
        self._loader = ThreadPoolExecutor(1, "vllm-loader")
        self._loading: Future[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._trying: Trying | None = None
        self._heard = 0  # messages of the engine core
        self._ready = False
        self._stopping = False
        self._draining = False
        self._dead: TonnageError | None = None
        self._sampler = PeakSampler()
        self._weights: int | None = None
        self._kv_pool: int | None = None
        self._lora: int | None = None  # bytes of the adapters' slots
        self._framework: int | None = None
        self._num_blocks = plan.kv_cache.num_blocks
        self._usage = 0.0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_hit_tokens = 0
        self._shared_hit_tokens = 0

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def own_metrics(self) -> bytes:
        """vLLM's metrics under its own names (they do not pass promtool: a colon is for recording rules)."""
        from prometheus_client import REGISTRY, generate_latest  # vLLM's; this server writes its own pages

        return generate_latest(REGISTRY)

    async def start(self) -> None:
        arguments = engine_arguments(self._plan, enforce_eager=self._eager, quantization=self._quantization)
        arguments["runner"] = "pooling" if self._embeds else "generate"
        if "grammar" in self._capabilities.honours and not self._embeds:
            arguments["scheduler_cls"] = "tonnage.server.engines.vllm.grammars.BoundedScheduler"
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._sampler.start()
        self._loading = self._loader.submit(self._load, arguments)
        self._watch = asyncio.create_task(self._watch_stillness(), name="vllm watch")
        try:
            self._llm = await asyncio.wrap_future(self._loading)
            # The handshake of vLLM's engine core writes the number it allocated into the config of the client
            # (v1/engine/core_client.py, 0.32); its null block is among them, as in the plan.
            self._num_blocks = int(self._llm.vllm_config.cache_config.num_gpu_blocks)
            if "scheduler_cls" in arguments:
                self._trying = Trying(model_files(self._plan.model.path))
                # It would compile each grammar once more, in this loop (sampling_params.py, 0.32).
                self._llm.input_processor.structured_outputs_config = None
                await self._llm.collective_rpc("tonnage_import_masks")
            if self._on_cpu:
                await self._llm.collective_rpc("tonnage_on_cpu")
            await self._llm.collective_rpc("tonnage_die_with", args=(os.getpid(), self._on_cpu))
            await self._load_adapters()
            held = await self._llm.collective_rpc("tonnage_memory")
            if self._plan.deployment.enable_lora:
                self._lora = sum(await self._llm.collective_rpc("tonnage_lora_memory"))
        except TonnageError:
            raise
        except Exception as error:
            if self._dead is not None:
                raise self._dead from None
            raise DeploymentError(
                f"vLLM did not start: {_last_line(error)}", hint="its own messages are above"
            ) from error
        weights = [rank_weights for rank_weights, _ in held]
        self._weights = None if None in weights else sum(weights)
        self._kv_pool = sum(pool for _, pool in held)
        process = self._sampler.sample()
        if self._weights is not None:
            self._framework = process - self._weights - self._kv_pool - (self._lora or 0)
        self._ledger = ReservationLedger(replace(self._limits, usable_blocks=self._num_blocks - 1))
        self._ready = True

    async def _load_adapters(self) -> None:
        """Each is read and put into a slot once: what does not suit the model is refused now."""
        from vllm.lora.request import LoRARequest  # vLLM is there once it has started

        for number, (name, path) in enumerate(self._lora_paths.items(), 1):
            self._loras[name] = LoRARequest(name, number, path)
            try:
                await self._llm.add_lora(self._loras[name])
            except Exception as error:
                raise DeploymentError(
                    f"vLLM does not take the adapter {name}: {_last_line(error)}", field="lora_modules"
                ) from error

    def _load(self, arguments: dict[str, Any]) -> Any:
        """Blocks for half a minute and more; in a thread, so that /health answers meanwhile."""
        try:
            with no_collections():
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.renderers import hf as renderers
                from vllm.v1.engine.async_llm import AsyncLLM
                from vllm.v1.metrics.loggers import StatLoggerBase
                from zmq.utils.garbage import gc as collector
        except ImportError as error:
            raise DeploymentError(
                f"vLLM cannot be imported: {error}",
                field="backend",
                hint="pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU",
            ) from None
        engine = self

        class Usage(StatLoggerBase):
            """vLLM's hook for what its scheduler says after each step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                engine._heard += 1
                if scheduler_stats is not None:
                    engine._usage = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    engine._preemptions += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None: ...

        # vLLM copies its tokenizer for threads that render prompts (120 MiB each with a vocabulary of 262,144).
        # Here prompts are tokens, and only the event loop asks it.
        vars(renderers)["maybe_make_thread_pool"] = lambda tokenizer, copies=1: tokenizer
        before = os.environ.copy()
        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Usage])
        finally:
            # vLLM prepares its children's environment (LD_PRELOAD, thread counts) in ours.
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
        if not collector.is_alive():
            # pyzmq's thread for what it sends without a copy begins with the first message of 64 KiB: now, so
            # that no request opens its seven files.
            collector.start()
        if self._stopping:
            self._end(llm)
        return llm

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self._refuse()
        prompt, output = len(request.prompt_token_ids), request.params.max_tokens
        if self._embeds:  # nothing follows the prompt: its last token stands for the one that is asked for
            prompt, output = max(1, prompt - 1), 1
        wish = AdmissionRequest(prompt, output, request.n)
        arrived = time.monotonic()
        passed: Passed | None = None
        if self._trying is not None:
            passed = await self._trying.passed(request)
            self._refuse()  # that may have taken a while
        await self._ledger.enter(request.request_id, wish, request.priority)
        queued = time.monotonic() - arrived
        try:
            if self._dead is not None:
                raise self._dead
            self._prompt_tokens += len(request.prompt_token_ids)
            async with contextlib.aclosing(self._chunks(request, passed, queued)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            # vLLM reads aborts and new requests from one queue in order: whoever is let in now comes after
            # the blocks were freed.
            self._ledger.leave(request.request_id)

    def _submit(self, request: GenerationRequest, passed: Passed | None) -> AsyncGenerator[Any, None]:
        from vllm.inputs.engine import tokens_input  # vLLM is there once it has started

        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        lora = self._loras[request.lora] if request.lora else None
        submit = self._llm.encode if self._embeds else self._llm.generate
        params = pooling_params(request) if self._embeds else sampling_params(request, passed)
        outputs: AsyncGenerator[Any, None] = submit(prompt, params, request.request_id, lora_request=lora)
        return outputs

    def _vector(self, request: GenerationRequest, output: Any, queued: float) -> Chunk:
        if output.error is not None:
            raise EngineDead(f"vLLM failed on this request: {output.error.message[:300]}")
        cached = output.num_cached_tokens or 0
        self._prefix_hit_tokens += cached
        self._shared_hit_tokens += 0 if request.cache_salt else cached
        return Chunk(
            request.request_id,
            0,
            (),
            "length",
            cached,
            embedding=tuple(output.outputs.data.tolist()),
            queued_seconds=queued,
        )

    async def _chunks(
        self, request: GenerationRequest, passed: Passed | None, queued: float
    ) -> AsyncGenerator[Chunk, None]:
        from vllm.exceptions import VLLMClientError  # vLLM is there once it has started
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = request.params
        stops = set(params.stop_token_ids)
        # Greedy sequences of one prompt are all the same: one is computed and told n times.
        copies = request.n if params.temperature == 0 else 1
        cached: int | None = None
        try:
            # Closing vLLM's generator aborts the request, and vLLM frees its blocks.
            async with contextlib.aclosing(self._submit(request, passed)) as outputs:
                async for output in outputs:
                    if self._embeds:
                        yield self._vector(request, output, queued)
                        continue
                    prompt: tuple[TokenLogprobs | None, ...] = ()
                    if cached is None:
                        cached = output.num_cached_tokens or 0
                        self._prefix_hit_tokens += cached
                        self._shared_hit_tokens += 0 if request.cache_salt else cached
                        prompt = prompt_logprobs(
                            request.prompt_token_ids, output.prompt_logprobs, params.prompt_logprobs
                        )
                    for sequence in output.outputs:
                        tokens = tuple(sequence.token_ids)
                        self._generation_tokens += len(tokens)
                        finish, wrong = _finish(sequence)
                        if wrong is not None:
                            tokens = ()
                        if sequence.finish_reason == "stop" and tokens and tokens[-1] in stops:
                            tokens = tokens[:-1]
                        if not tokens and not finish and not prompt:
                            continue
                        for copy in range(copies):
                            yield Chunk(
                                request.request_id,
                                sequence.index + copy,
                                tokens,
                                finish,
                                cached,
                                logprobs=token_logprobs(tokens, sequence.logprobs, params.logprobs),
                                prompt_logprobs=prompt,
                                queued_seconds=queued,
                                error=wrong,
                                refused=wrong is not None and passed is not None,
                            )
        except EngineDeadError as error:
            self._die(error)
            assert self._dead is not None
            raise self._dead from None
        except (VLLMClientError, ValueError) as error:  # its input processor raises plain ValueErrors too
            raise Refused(f"vLLM refuses this request: {_first_line(error)}") from None
        except EngineGenerateError as error:
            raise EngineDead(f"vLLM failed on this request: {_last_line(error)}") from error

    def _refuse(self) -> None:
        if self._ready and self._dead is None and self._llm.errored:
            self._die(self._llm.dead_error)
        if self._dead is not None:
            raise self._dead
        if self._draining or not self._ready:
            raise QueueFull("the server is draining" if self._draining else "the engine is not ready")

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, EngineDead):
            error = EngineDead(f"vLLM's engine ended: {_last_line(error)}", hint="see its output")
        self._dead = self._dead or error  # the first says why
        self._ledger.fail(self._dead)

    async def _watch_stillness(self) -> None:
        """End vLLM's processes when they have work and do nothing; whoever waits for them is told."""
        cores, seconds = await processes.hang(lambda: self._heard, self._still_limit)
        did = "answered nothing" if self._ready else "loaded nothing"
        error = EngineDead(
            f"vLLM's processes {did} and used no processor time for {seconds:g} s: they were stopped or hang, "
            "and were killed",
            hint="see their output and the kernel's log",
        )
        log.error("%s", error)
        self._die(error)
        processes.kill(cores)

    def _still_limit(self) -> int | None:
        """Looks without a movement that are too many now; None: there is nothing to do."""
        if not self._ready:
            return stillness.STILL_LOOKS_LOADING
        return stillness.STILL_LOOKS if self._llm.output_processor.has_unfinished_requests() else None

    async def abort(self, request_id: str, index: int | None = None) -> None:
        if self._ready and index is None:  # vLLM ends one of several sequences only by itself
            await self._llm.abort(request_id)

    def stats(self) -> EngineStats:
        usable = self._num_blocks - 1
        # vLLM tells a ratio of the usable blocks after each step. What is cached and unreferenced is free
        # there, so it is not known apart; with nothing running nothing is used, whatever the last step said.
        used = min(usable, round(self._usage * usable)) if self._ledger.running else 0
        return EngineStats(
            ready=self._ready and self._dead is None and not self._llm.errored,
            running=self._ledger.running,
            waiting=self._ledger.waiting,
            pool=PoolStats(self._num_blocks, usable, used, 0, usable - used, self._ledger.reserved),
            memory=MeasuredMemory(
                weights=self._weights,
                kv_pool=self._kv_pool,
                framework=self._framework,
                lora=self._lora,
                process=self._sampler.current or None,
                process_peak=self._sampler.peak or None,
            ),
            admissions=self._ledger.counts,
            refused_blocks=self._ledger.refused_blocks,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            shared_hit_tokens=self._shared_hit_tokens,
        )

    def capacity(self) -> Capacity:
        if not self._ready:
            raise QueueFull("the engine is not ready")
        config = self._llm.vllm_config
        rank = self._plan.rank
        measured = replace(
            rank,
            weights_bytes=rank.weights_bytes if self._weights is None else self._weights,
            kv_pool_bytes=rank.kv_pool_bytes if self._kv_pool is None else self._kv_pool,
            lora_bytes=rank.lora_bytes if self._lora is None else self._lora,
        )
        cache = replace(self._plan.kv_cache, num_blocks=self._num_blocks, usable_blocks=self._num_blocks - 1)
        return Capacity(
            num_blocks=self._num_blocks,
            block_size=int(config.cache_config.block_size),
            max_model_len=int(config.model_config.max_model_len),
            plan=replace(self._plan, revision=1, ranks=(measured,), kv_cache=cache),
        )

    async def drain(self, seconds: float) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ledger.idle.wait(), seconds)

    async def stop(self) -> None:
        self._stopping = self._draining = True
        self._ready = False
        self._sampler.stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._trying is not None:
            self._trying.close()
        if self._loading is not None and not self._loading.done():
            await processes.interrupt_loading(self._loading)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if self._dead is not None:  # nobody else tells them once the handler is cancelled
                from vllm.v1.engine.exceptions import EngineDeadError  # vLLM is there once it has started

                llm.output_processor.propagate_error(EngineDeadError())
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it reports the end of its engine as a crash
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._loader, self._end, llm)
            await loop.run_in_executor(self._loader, processes.close_files, llm)
        self._loader.shutdown(wait=False)

    def _end(self, llm: Any) -> None:
        processes.shut_down(llm, at_once=self._on_cpu)


def _finish(sequence: Any) -> tuple[FinishReason | None, str | None]:
    """Why vLLM's CompletionOutput ended, if it did, and what is wrong with it."""
    finish, said = sequence.finish_reason, sequence.stop_reason
    if finish != "error":
        return finish, None
    if said == COMPLETE:
        return "stop", None
    return finish, said if isinstance(said, str) else "vLLM ended it with an error"  # .grammars'


def engine_arguments(plan: Plan, *, enforce_eager: bool, quantization: str | None = None) -> dict[str, Any]:
    """The keywords of AsyncEngineArgs that make vLLM allocate what the plan says.

    Raises DeploymentError for what would silently change the plan.
    """
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise DeploymentError(
            "is set and would override the planned KV pool",  # platforms/cpu.py, vLLM 0.32
            field="VLLM_CPU_KVCACHE_SPACE",
            hint="unset it and use --kv-cache-memory-bytes",
        )
    deployment = plan.deployment
    return {
        "model": plan.model.path,
        "dtype": deployment.dtype,
        "quantization": quantization,
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "block_size": deployment.block_size,
        # vLLM has no name for a cache in float32: auto is the model's own dtype.
        "kv_cache_dtype": "auto"
        if deployment.kv_cache_dtype == deployment.dtype
        else deployment.kv_cache_dtype,
        # 0 would mean: as much as is free. An encoder's pool has no use for the byte.
        "kv_cache_memory_bytes": max(1, plan.rank.kv_pool_bytes),
        "gpu_memory_utilization": deployment.gpu_memory_utilization,
        "enable_prefix_caching": deployment.enable_prefix_caching,
        "enforce_eager": enforce_eager,
        "tensor_parallel_size": deployment.tensor_parallel_size,
        "pipeline_parallel_size": deployment.pipeline_parallel_size,
        "data_parallel_size": deployment.data_parallel_size,
        "enable_expert_parallel": deployment.enable_expert_parallel,
        "enable_lora": deployment.enable_lora,
        "max_loras": deployment.max_loras,
        "max_lora_rank": deployment.max_lora_rank,
        "trust_remote_code": False,
        # Text lives in the API process, but without it vLLM has no thread for grammars.
        "skip_tokenizer_init": False,
        "generation_config": "vllm",  # no defaults from the model's file: the request says all
        "disable_log_stats": True,  # no log lines; our own stat logger still gets the numbers
        "enable_log_requests": False,
        "worker_extension_cls": "tonnage.server.engines.vllm.worker.WorkerExtension",
    }


def _first_line(error: BaseException) -> str:
    """What a validation error says; the lines below point into the input."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
