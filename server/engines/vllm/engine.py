"""The `Engine` that runs vLLM's AsyncLLM with the plan's KV pool and Tonnage's admission.

Written against vLLM 0.32. vLLM manages its own blocks. The plan fixes the size of its pool
(`kv_cache_memory_bytes`), and the real number of blocks is compared with the plan. Admission runs inside vLLM's
engine core (`tonnage.server.engines.vllm.scheduler`), with the free blocks of each step. The API process
rejects requests that can never fit and gives all others a position in the queue. vLLM is not imported before
`start`.
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
from multiprocessing import resource_tracker
from typing import Any

from tonnage.cache.admission import Policy
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines import watchdog
from tonnage.server.engines.base import Capabilities, Engine
from tonnage.server.engines.capacity import Capacity, limits_of
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, QueueFull, Refused
from tonnage.server.engines.in_flight import RequestsInFlight
from tonnage.server.engines.process_memory import PeakSampler
from tonnage.server.engines.request import ALL_PARAMS, GenerationRequest, PoolingTask
from tonnage.server.engines.sharing import Sharing, whole_blocks
from tonnage.server.engines.signals import interrupt_held
from tonnage.server.engines.stats import EngineStats, MeasuredMemory
from tonnage.server.engines.vllm import processes
from tonnage.server.engines.vllm.arguments import ENVIRONMENT, engine_arguments, scheduling_arguments
from tonnage.server.engines.vllm.checked_grammar import CheckedGrammar
from tonnage.server.engines.vllm.core_stats import EngineCores
from tonnage.server.engines.vllm.grammar_checks import GrammarChecks
from tonnage.server.engines.vllm.loading import load
from tonnage.server.engines.vllm.outputs import OutputConverter
from tonnage.server.engines.vllm.params import pooling_params, sampling_params
from tonnage.server.engines.vllm.queue_position import QueuePositions
from tonnage.server.text.gguf_tokenizer import model_files

log = logging.getLogger("tonnage.server")


class VLLMEngine(Engine):
    """A vLLM engine in child processes (protocol: `tonnage.server.engines.base.Engine`).

    Args:
        plan: the plan that fixes the model, the flags and the pool.
        policy: the admission policy.
        sharing: prefixes whose KV blocks requests with different cache salts share.
        loras: folder of each LoRA adapter by name. All are loaded before the engine is ready.
        pools: pooling task, such as embeddings, that vLLM runs on each prompt; None to generate text.
        quantization: vLLM's name of the method that quantizes the weights while loading. None means no method.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        policy: Policy | None = None,
        sharing: Sharing | None = None,
        loras: Mapping[str, str] | None = None,
        pools: PoolingTask | None = None,
        quantization: str | None = None,
    ) -> None:
        honoured = ALL_PARAMS if find_spec("llguidance") else ALL_PARAMS - {"grammar"}
        self._capabilities = Capabilities(honoured, pools=pools, own_metrics=True)
        self._pools = pools
        self._plan = plan
        self._quantization = quantization
        self._on_cpu = plan.deployment.device == "cpu"
        # On a CPU, torch.compile is not used, because it would extend the start by minutes.
        self._eager = plan.deployment.enforce_eager or self._on_cpu
        self._lora_paths = dict(loras or {})
        self._loras: dict[str, Any] = {}  # vLLM's LoRARequest of each adapter, by name
        self._policy, self._sharing = policy or Policy(), sharing or Sharing()
        self._positions = QueuePositions(limits_of(plan))
        self._cores = EngineCores(
            plan.kv_cache.num_blocks,
            str(self._policy.mode),
            caching=bool(plan.deployment.enable_prefix_caching),
        )
        self._in_flight = RequestsInFlight()
        self._llm: Any = None
        self._loader = ThreadPoolExecutor(1, "vllm-loader")
        self._loading: Future[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._checks: GrammarChecks | None = None
        self._ready = False
        self._stopping = False
        self._dead: TonnageError | None = None
        self._sampler = PeakSampler()
        self._weights: int | None = None
        self._kv_pool: int | None = None
        self._lora: int | None = None  # measured bytes of the LoRA adapters' slots; None before the measurement
        self._framework: int | None = None
        self._num_blocks = plan.kv_cache.num_blocks
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_hit_tokens = 0
        self._shared_hit_tokens = 0

    @property
    def plan(self) -> Plan:
        """Return the memory plan that vLLM runs with."""
        return self._plan

    @property
    def capabilities(self) -> Capabilities:
        """Return the request features that this engine supports."""
        return self._capabilities

    def own_metrics(self) -> bytes:
        """Return vLLM's own Prometheus metrics, with vLLM's metric names.

        The names contain colons. promtool reports colons, because they are reserved for recording rules.
        """
        # prometheus_client is a dependency of vLLM, and its registry holds vLLM's metrics.
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY)

    async def start(self) -> None:
        """Start vLLM, load the LoRA adapters and measure the memory that the model takes.

        Raises:
            DeploymentError: vLLM did not start.
            EngineDead: vLLM's processes hung during the load and were killed.
        """
        arguments = engine_arguments(self._plan, enforce_eager=self._eager, quantization=self._quantization)
        arguments["runner"] = "pooling" if self._pools else "generate"
        grammars = "grammar" in self._capabilities.honours and not self._pools
        arguments |= scheduling_arguments(self._plan, self._policy, self._sharing, grammars=grammars)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._sampler.start()
        self._loading = self._loader.submit(self._load, arguments)
        self._watch = asyncio.create_task(self._watch_progress(), name="vllm watch")
        try:
            self._llm = await asyncio.wrap_future(self._loading)
            # KV blocks of all engine cores. As in the plan, one null block per engine core is included.
            self._num_blocks = int(self._llm.vllm_config.cache_config.num_gpu_blocks)
            if self._pools is not None:
                await self._check_pooling()
            if grammars:
                self._checks = GrammarChecks(model_files(self._plan.model.path))
                # With a structured_outputs_config, vLLM would compile each grammar a second time in this event
                # loop (sampling_params.py, 0.32).
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
        # A request runs on a single engine core, so it can use only that core's blocks.
        usable = self._num_blocks // self._plan.deployment.data_parallel_size - 1
        self._positions.limits = replace(self._positions.limits, usable_blocks=usable)
        self._ready = True

    async def _check_pooling(self) -> None:
        """Raise DeploymentError if vLLM's pooling task for the model is not the expected task."""
        task = self._llm.model_config.get_pooling_task(await self._llm.get_supported_tasks())
        if task != self._pools:
            name = self._plan.model.architecture
            raise DeploymentError(
                f"vLLM's pooling task of {name} is {task!r}; {self._pools!r} was expected",
                field="model",
                hint="serve this model with 'vllm serve'",
            )

    async def _load_adapters(self) -> None:
        """Load each configured LoRA adapter into a slot once, so that an invalid adapter fails the start."""
        from vllm.lora.request import LoRARequest  # imported here, because only `start` may import vLLM

        for number, (name, path) in enumerate(self._lora_paths.items(), 1):
            self._loras[name] = LoRARequest(name, number, path)
            try:
                await self._llm.add_lora(self._loras[name])
            except Exception as error:
                raise DeploymentError(
                    f"vLLM rejects the adapter {name}: {_last_line(error)}", field="lora_modules"
                ) from error

    def _load(self, arguments: dict[str, Any]) -> Any:
        """Create the AsyncLLM; this takes 30 s or more, so call it in a thread to keep the event loop free."""
        # Start multiprocessing's resource tracker now. Starting it later would unblock SIGINT (Python 3.11).
        resource_tracker.ensure_running()
        with interrupt_held():
            llm = load(arguments, self._cores, lambda: not self._stopping)
        if self._stopping:
            self._end(llm)
        return llm

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Submit a request to vLLM and yield its chunks.

        Raises:
            NeverFits: even an empty pool cannot hold the request.
            QueueFull: the server is draining or the engine is not ready.
            Refused: vLLM rejects the request.
            EngineDead: vLLM failed.
        """
        self._refuse()
        arrived = time.monotonic()
        self._positions.check(request, pools=self._pools is not None)
        position = self._positions.position(request.priority)
        with self._in_flight.request():
            checked: CheckedGrammar | None = None
            if self._checks is not None:
                checked = await self._checks.check(request)
                self._refuse()  # the engine may have stopped while the grammar was checked
            self._prompt_tokens += len(request.prompt_token_ids)
            converter = OutputConverter(request, checked, time.monotonic() - arrived)
            async with contextlib.aclosing(self._chunks(request, checked, position, converter)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _submit(
        self, request: GenerationRequest, checked: CheckedGrammar | None, position: int
    ) -> AsyncGenerator[Any, None]:
        from vllm.inputs.engine import tokens_input  # imported here, because only `start` may import vLLM

        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        lora = self._loras[request.lora] if request.lora else None
        submit = self._llm.encode if self._pools else self._llm.generate
        params = pooling_params(request, self._pools) if self._pools else sampling_params(request, checked)
        outputs: AsyncGenerator[Any, None] = submit(
            prompt, params, request.request_id, lora_request=lora, priority=position
        )
        return outputs

    async def _chunks(
        self,
        request: GenerationRequest,
        checked: CheckedGrammar | None,
        position: int,
        converter: OutputConverter,
    ) -> AsyncGenerator[Chunk, None]:
        from vllm.exceptions import VLLMClientError  # imported here, because only `start` may import vLLM
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._pools:
            self._cores.queued[request.request_id] = None
        try:
            # Closing vLLM's generator aborts the request, and vLLM frees its blocks.
            async with contextlib.aclosing(self._submit(request, checked, position)) as outputs:
                async for output in outputs:
                    first = converter.cached is None
                    if self._pools:
                        chunks = [converter.pooled(output, self._cores.queued[request.request_id])]
                    else:
                        chunks = [*converter.chunks(output)]
                        self._generation_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
                    if first:
                        self._count_hit(request, converter.cached or 0)
                    for chunk in chunks:
                        yield chunk
        except EngineDeadError as error:
            self._die(error)
            assert self._dead is not None
            raise self._dead from None
        # For an invalid request, vLLM's input processor raises plain ValueErrors as well as VLLMClientError.
        except (VLLMClientError, ValueError) as error:
            raise Refused(f"vLLM rejects this request: {_first_line(error)}") from None
        except EngineGenerateError as error:
            raise EngineDead(f"vLLM failed on this request: {_last_line(error)}") from error
        finally:
            self._cores.queued.pop(request.request_id, None)

    def _count_hit(self, request: GenerationRequest, cached: int) -> None:
        self._prefix_hit_tokens += cached
        if request.cache_salt:
            size = self._plan.kv_cache.layout.block_size
            shared = whole_blocks(request.prompt_token_ids, self._sharing.prefixes, size)
            cached = min(cached, shared * size)
        self._shared_hit_tokens += cached

    def _refuse(self) -> None:
        if self._ready and self._dead is None and self._llm.errored:
            self._die(self._llm.dead_error)
        if self._dead is not None:
            raise self._dead
        self._in_flight.check(self._ready)

    def _die(self, error: BaseException) -> None:
        if not isinstance(error, EngineDead):
            error = EngineDead(f"vLLM's engine ended: {_last_line(error)}", hint="see its output")
        self._dead = self._dead or error  # keep the first error, because it is the cause of later ones

    async def _watch_progress(self) -> None:
        """Kill vLLM's processes if they hang, and fail the requests in flight.

        The processes hang if they have work but use no processor time and send no message.
        """
        cores, seconds = await processes.wait_for_hang(lambda: self._cores.messages, self._check_limit)
        did = "answered nothing" if self._ready else "loaded nothing"
        error = EngineDead(
            f"vLLM's processes {did} and used no processor time for {seconds:g} s: they were stopped or hung, "
            "and have been killed",
            hint="see their output and the kernel's log",
        )
        log.error("%s", error)
        self._die(error)
        processes.kill(cores)

    def _check_limit(self) -> int | None:
        """Return how many consecutive checks may find no activity before vLLM's processes count as hung.

        Returns None while vLLM is idle.
        """
        if not self._ready:
            return watchdog.HANG_CHECKS_LOADING
        return watchdog.HANG_CHECKS if self._llm.output_processor.has_unfinished_requests() else None

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request in vLLM; with `index`, nothing is aborted.

        vLLM cannot abort one sequence of several.
        """
        if self._ready and index is None:  # vLLM cannot abort one of several sequences
            await self._llm.abort(request_id)

    @property
    def ready(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._ready and self._dead is None and not self._llm.errored

    def stats(self) -> EngineStats:
        """Return the current statistics of all engine cores of vLLM together."""
        memory = MeasuredMemory(
            weights=self._weights,
            kv_pool=self._kv_pool,
            framework=self._framework,
            lora=self._lora,
            process=self._sampler.current or None,
            process_peak=self._sampler.peak or None,
        )
        return replace(
            self._positions.rejections.added_to(self._cores.stats(memory, idle=not self._in_flight.count)),
            ready=self.ready,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            shared_hit_tokens=self._shared_hit_tokens,
        )

    def capacity(self) -> Capacity:
        """Return the number of KV blocks, the maximum length and the measured memory of the running engine.

        Raises:
            QueueFull: the engine has not started yet.
        """
        if not self._ready:
            raise QueueFull("the engine is not ready", hint="wait until /ready returns 200")
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
        """Stop admitting requests, and wait at most `seconds` for the unfinished ones."""
        await self._in_flight.drain(seconds)

    async def stop(self) -> None:
        """Stop vLLM's processes and close their files; this also works while vLLM is loading."""
        self._stopping = self._in_flight.draining = True
        self._ready = False
        self._sampler.stop()
        if self._watch is not None:
            self._watch.cancel()
        if self._checks is not None:
            self._checks.close()
        if self._loading is not None and not self._loading.done():
            await processes.interrupt_loading(self._loading)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # Fail waiting requests now, because cancelling the output handler gives them no error.
            if self._dead is not None:
                # Imported here, because only `start` may import vLLM.
                from vllm.v1.engine.exceptions import EngineDeadError

                llm.output_processor.propagate_error(EngineDeadError())
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # without this, vLLM logs the end of its engine as a crash
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._loader, self._end, llm)
            await loop.run_in_executor(self._loader, processes.close_files, llm)
        self._loader.shutdown(wait=False)

    def _end(self, llm: Any) -> None:
        processes.shut_down(llm, at_once=self._on_cpu)


def _first_line(error: BaseException) -> str:
    """Return the first line of a validation error; its other lines only quote the invalid input."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
