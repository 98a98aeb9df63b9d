"""The HF engine's process: a loop that receives requests, computes steps, sends chunks and statistics.

``__main__.py`` starts it, and the first message on its socket is ``Load``. This process imports torch; the API
process, its parent, does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import cast

import numba
import torch

from tonnage.cache.admission import Policy
from tonnage.cache.errors import InvariantViolation
from tonnage.planner.errors import TonnageError
from tonnage.planner.plans import Plan
from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.errors import EngineDead, Refused
from tonnage.server.engines.grammars import masks
from tonnage.server.engines.grammars.masks import GrammarMatcher
from tonnage.server.engines.grammars.structural_tags import TagMatcher
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.compile import Preparation
from tonnage.server.engines.hf.grammars import GrammarCompiler
from tonnage.server.engines.hf.headroom import is_out_of_memory, out_of_memory
from tonnage.server.engines.hf.kv_tier import tier_of
from tonnage.server.engines.hf.messages import Abort, Load, Ready, StepOutput, Stop
from tonnage.server.engines.hf.sampling.adjust import adjust, logprobs, needs_adjusting
from tonnage.server.engines.hf.sampling.draw import is_greedy, most_likely, sample
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.hf.sequence import Draw, HFSequence, draws_of
from tonnage.server.engines.imports import no_collections
from tonnage.server.engines.niceness import stand_back
from tonnage.server.engines.request import GenerationRequest
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.stats import EngineStats
from tonnage.server.text.gguf_tokenizer import model_files
from tonnage.server.text.grammar import NO_TOKEN

# Upper bound of the messages received before each step, so that a flood of requests does not stop the running
# ones. A request takes some 0.3 ms to queue, and a step of the demo model 10 ms or more.
_MESSAGES_PER_STEP = 64


def main(descriptor: int, threads: int) -> None:
    """Load the model and serve requests until a Stop message arrives or the parent process has ended.

    Args:
        descriptor: file descriptor of the socket to the parent process.
        threads: number of compute threads.
    """
    connection = Connection(descriptor)
    load: Load = connection.recv()
    if load.plan.deployment.device == "cpu":
        stand_back()
    try:
        engine = EngineLoop(load.plan, connection, threads, load.policy, load.sharing)
    except TonnageError as error:
        connection.send(error)
        return
    except Exception as error:
        if is_out_of_memory(error):
            connection.send(out_of_memory(load.plan, error))
            return
        traceback.print_exc()
        connection.send(TonnageError(f"the engine failed to start: {type(error).__name__}: {error}"))
        return
    connection.send(engine.ready())
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            engine.run()
            if engine.tier is not None:
                engine.tier.close()
        except InvariantViolation as error:  # end the process, because the block manager's state is wrong
            traceback.print_exc()
            connection.send(EngineDead(f"an engine invariant does not hold: {error}", hint="report this error"))


def set_threads(count: int) -> None:
    """Set the compute threads of torch and of the numba kernels to the same number."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


class EngineLoop:
    """The main loop of the engine process, which runs scheduler, model runner and sampler."""

    def __init__(
        self,
        plan: Plan,
        connection: Connection,
        threads: int,
        policy: Policy | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        bfloat16_on_cpu = plan.deployment.device == "cpu" and plan.deployment.dtype == "bfloat16"
        preparation = Preparation(plan.kv_cache.layout, policy, kernels=bfloat16_on_cpu)
        with no_collections():
            import transformers  # imported here, so that a broken installation is reported as a failed load

            transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

            # Imported here, because these modules import transformers, too.
            from tonnage.server.engines.hf.model.loading import storage_bytes
            from tonnage.server.engines.hf.model.profile import device_bytes, profile
            from tonnage.server.engines.hf.model.runner import ModelRunner
            from tonnage.server.engines.hf.model.selfcheck import checked_attention
        # Exclude the imported objects from garbage collection, because they are permanent. A collection that
        # visits them takes 0.25 s, and all such collections would take 0.9 of the 8.5 s of processor time until
        # the engine is ready.
        gc.freeze()
        set_threads(threads)

        self.plan = plan
        self.connection = connection
        preparation.load()
        self.runner = ModelRunner(plan)
        self.grammars = GrammarCompiler(model_files(plan.model.path), self.runner.vocab_size)
        # Requests whose grammar is being compiled, each with its arrival time in seconds, by request id.
        self._compiling: dict[str, tuple[GenerationRequest, float]] = {}
        self.tier = tier_of(plan, self.runner.pool)
        self.scheduler = HFScheduler(plan, self.grammars.matcher, policy, sharing, self.tier)
        self.self_check_error = checked_attention(self.runner)
        self.activation_bytes = profile(self.runner)
        self.device_bytes = device_bytes(self.runner.device)
        self.warm_weights_bytes = storage_bytes(self.runner.model)

    def ready(self) -> Ready:
        """Return the Ready message to the API process, with the bytes of memory measured during the load."""
        return Ready(
            num_blocks=self.runner.pool.tensor.shape[0],
            weights_bytes=self.runner.weights_bytes,
            warm_weights_bytes=self.warm_weights_bytes,
            kv_pool_bytes=self.runner.pool.nbytes,
            activation_bytes=self.activation_bytes,
            self_check_error=self.self_check_error,
            stats=self.scheduler.stats(),
            device_bytes=self.device_bytes,
            kv_tier_bytes=0 if self.tier is None else self.tier.nbytes,
        )

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or runs, no grammar is being compiled, and no block is read from disk."""
        return self.scheduler.idle and not self._compiling and not self.scheduler.fetching

    def run(self) -> None:
        """Receive messages of the API process and compute steps until a Stop message arrives."""
        wakes: list[Connection | int] = [self.connection, self.grammars.fileno()]
        if self.tier is not None:
            wakes.append(self.tier.fileno())
        while True:
            chunks: list[Chunk] = []
            if self.scheduler.idle:
                # If a disk hangs, a read from it never ends. So the loop wakes up every second, and a request
                # that has waited too long for its blocks computes them instead.
                wait(wakes, 1.0 if self.scheduler.fetching else None)
            for _ in range(_MESSAGES_PER_STEP):
                if not self.connection.poll():
                    break
                message = self.connection.recv()
                if isinstance(message, Stop):
                    return
                if isinstance(message, GenerationRequest):
                    chunks += self.add(message)
                elif isinstance(message, Abort):
                    chunks += self.abort(message)
            chunks += self.step()
            self.connection.send(StepOutput(tuple(chunks), self._stats()))

    def _stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if not self._compiling:
            return stats
        return dataclasses.replace(stats, waiting=stats.waiting + len(self._compiling))

    def step(self) -> list[Chunk]:
        """Compute one step and return its chunks; a failed forward ends the step's requests, not the engine."""
        chunks = self._begin_compiled()
        batch, picked, rejected = self.scheduler.schedule()
        chunks += rejected
        if batch is None:
            return chunks
        try:
            if any(sequence.scores for sequence in picked):
                logits = self._score_prompts(batch, picked)
            else:
                logits = self.runner.forward(batch)
        except (RuntimeError, ValueError, IndexError) as error:
            traceback.print_exc()
            return chunks + self.scheduler.fail(picked, f"{type(error).__name__} in the model's forward")
        draws = draws_of(picked)
        if draws:
            tokens, finite = most_likely(logits)
            for draw in draws:
                draw.token = tokens[draw.row]
            if not all(finite):
                # Fail these sequences before the step's blocks are published in the prefix index. Otherwise
                # another request could share blocks that contain NaN.
                broken = [draw.sequence for draw in draws if not finite[draw.row]]
                self._clear(batch, picked, broken)
                chunks += self.scheduler.fail(broken, "the model produced NaN or infinite logits")
                picked = [sequence for sequence in picked if sequence.id in self.scheduler.running]
                draws = [draw for draw in draws if finite[draw.row]]
        self.scheduler.publish(picked)
        draws = self.scheduler.fork(draws)
        if not all(_takes_likeliest(draw.sequence) for draw in draws):
            draws, failed = self._draw(logits, draws)
            chunks += failed
        return chunks + self.scheduler.finish(draws)

    def _draw(self, logits: torch.Tensor, draws: list[Draw]) -> tuple[list[Draw], list[Chunk]]:
        """Draw the next token of each sequence in ``draws`` from its row of ``logits``.

        Grammars, penalties and biases of the sequence adjust the row first. The draws also get log
        probabilities if their requests ask for them.

        Args:
            logits: [rows, vocabulary].
            draws: the sequences that get a token, each with its row number.

        Returns:
            The draws that have a token, and error chunks of sequences whose grammar or biases exclude every
                token.
        """
        draws, chunks = self._fill_masks(draws)
        logits = _rows(logits, draws).float()
        for row, draw in enumerate(draws):
            draw.row = row
        adjusted = adjust(logits, [draw.sequence for draw in draws])
        if adjusted is not logits and not all(possible := adjusted.amax(dim=-1).isfinite().tolist()):
            stuck = [draw.sequence for draw in draws if not possible[draw.row]]
            chunks += self.scheduler.fail(stuck, NO_TOKEN, refused=True)
            draws = [draw for draw in draws if possible[draw.row]]
        if not draws:
            return draws, chunks
        sequences = [draw.sequence for draw in draws]
        tokens = sample(_rows(adjusted, draws), [s.params for s in sequences], [s.random for s in sequences])
        for draw, token in zip(draws, tokens, strict=True):
            draw.token = token
            if (best := draw.sequence.params.logprobs) is not None:
                (draw.logprobs,) = logprobs(logits[draw.row : draw.row + 1], [token], [best])
        return draws, chunks

    def add(self, request: GenerationRequest) -> list[Chunk]:
        """Queue a request, or start compiling its grammar; return error chunks if the request is invalid."""
        arrival = time.monotonic()
        if request.params.grammar is None:
            return self._queue(request, arrival)
        self._compiling[request.request_id] = request, arrival
        self.grammars.ask(request)
        return []

    def abort(self, message: Abort) -> list[Chunk]:
        """Abort a request, also while its grammar is compiled; return one chunk per aborted sequence."""
        if message.index is None and (found := self._compiling.pop(message.request_id, None)) is not None:
            self.grammars.cancel(message.request_id)
            return [Chunk(message.request_id, index, (), "abort") for index in range(found[0].n)]
        return self.scheduler.abort(message.request_id, message.index)

    def _queue(self, request: GenerationRequest, arrival: float) -> list[Chunk]:
        try:
            self.scheduler.add(request, arrival)
        except Exception as error:  # An error of one request must not end the engine.
            if not isinstance(error, TonnageError):
                traceback.print_exc()
                error = TonnageError(f"the engine cannot queue this request: {type(error).__name__}")
            return _errors(request, error)
        return []

    def _begin_compiled(self) -> list[Chunk]:
        """Queue the requests whose grammar has been compiled; return error chunks for invalid grammars."""
        chunks: list[Chunk] = []
        for outcome in self.grammars.outcomes():
            request, arrival = self._compiling.pop(outcome.request_id, (None, 0.0))
            if request is None:  # The request was aborted while its grammar was being compiled.
                continue
            chunks += _errors(request, outcome.error) if outcome.error else self._queue(request, arrival)
        return chunks

    def _fill_masks(self, draws: list[Draw]) -> tuple[list[Draw], list[Chunk]]:
        """Compute the grammar mask of the next token for each sequence in ``draws`` with a grammar.

        Returns:
            The draws without those of failed sequences, and error chunks of the failed sequences. A sequence
                fails if its mask takes more time than a step permits.
        """
        matched = [draw for draw in draws if isinstance(draw.sequence.matcher, GrammarMatcher | TagMatcher)]
        matchers = [(draw.sequence.tenant, cast("GrammarMatcher", draw.sequence.matcher)) for draw in matched]
        errors = masks.fill(matchers) if matchers else {}
        chunks: list[Chunk] = []
        for at, error in errors.items():
            chunks += self.scheduler.fail([matched[at].sequence], error, refused=True)
        failed = {matched[at] for at in errors}
        return [draw for draw in draws if draw not in failed], chunks

    def _clear(self, batch: Batch, picked: list[HFSequence], broken: list[HFSequence]) -> None:
        """Write zeros to the KV slots that the sequences in ``broken`` wrote in this step.

        These slots may hold NaN. A kernel may multiply masked values by 0, and 0 times NaN is NaN. So NaN left
        in a freed block would spoil the next sequence that gets the block.
        """
        lost = {sequence.id for sequence in broken}
        for at, sequence in enumerate(picked):
            if sequence.id in lost:
                rows = slice(int(batch.query_start[at]), int(batch.query_start[at + 1]))
                for slots in batch.slots:
                    self.runner.pool.clear(slots[rows])

    def _score_prompts(self, batch: Batch, picked: list[HFSequence]) -> torch.Tensor:
        """Run the model's forward, and record log probabilities of prompt tokens where requested.

        Returns:
            The rows of logits to draw tokens from, [sequences that sample, vocabulary].
        """
        # Each row of the step's logits as (sequence, position, whether a token is drawn from the row).
        rows = [(s, at, s.samples and at == s.computed + s.chunk - 1) for s in picked for at in s.logits_at]
        drawn, start = [], 0
        for logits in self.runner.forward_in_parts(batch):
            for row, (sequence, at, draws) in zip(logits, rows[start : start + len(logits)], strict=True):
                # The row at position ``at`` has the logits of the token at ``at + 1``. So the row at the last
                # prompt token is for the first output token, not for a prompt token.
                if sequence.scores and at + 1 < sequence.prompt:
                    best = sequence.params.prompt_logprobs or 0
                    sequence.prompt_logprobs += logprobs(row[None], [sequence.tokens[at + 1]], [best])
                if draws:
                    drawn.append(row.clone())
            start += len(logits)
        return torch.stack(drawn) if drawn else logits[:0]


def _takes_likeliest(sequence: HFSequence) -> bool:
    """Return whether a sequence's next token is the argmax of its logits: greedy, no logprobs or adjustment."""
    params = sequence.params
    return is_greedy(params) and params.logprobs is None and not needs_adjusting(sequence)


def _rows(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Return the rows of ``logits`` that ``draws`` name, in order; without a copy if these are all rows."""
    rows = [draw.row for draw in draws]
    return logits if rows == list(range(len(logits))) else logits[rows]


def _errors(request: GenerationRequest, error: TonnageError) -> list[Chunk]:
    """Return one error chunk per sequence of a request, marked as refused if the request caused the error."""
    at_fault = isinstance(error, Refused)
    return [
        Chunk(request.request_id, index, (), "error", error=str(error), refused=at_fault)
        for index in range(request.n)
    ]
