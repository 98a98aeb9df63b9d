"""Functions that ``tonnage serve`` and ``tonnage verify`` share: settings, plan, and creation of the engine."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.bars import SHADES, redraws, shades
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.host import host_memory
from tonnage.planner.engines.vllm.serve_line import loaded_as
from tonnage.planner.errors import DeploymentError, DoesNotFit, ModelNotFound
from tonnage.planner.headers.hub import modelscope
from tonnage.planner.headers.names import hub_model, revision_of
from tonnage.planner.model.architecture import CLASSIFIERS
from tonnage.planner.output.terminal import print_plan
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.terms import quantization_notes
from tonnage.planner.plans import Plan
from tonnage.planner.quantization.names import WHILE_LOADING
from tonnage.planner.quantization.read import read_quantization
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.base import Engine
from tonnage.server.engines.capacity import held_to
from tonnage.server.engines.choice import choose_backend
from tonnage.server.engines.hf.model.formats import MADE_BY_FLAG, require_loadable
from tonnage.server.engines.hf.model.support import require_supported
from tonnage.server.engines.lora import lora_modules
from tonnage.server.engines.request import PoolingTask
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.vllm.engine import VLLMEngine
from tonnage.server.extras import require, require_serving
from tonnage.server.security.keys import load_keys
from tonnage.server.settings import Settings, load_settings
from tonnage.server.text.gguf_tokenizer import model_files
from tonnage.server.text.shared_prefix import shared_prefix


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Load the settings from flags, environment and file, and remove API keys from the environment.

    An engine process may run code from a model's repository. It would inherit the keys, which it does not need.

    Raises:
        DeploymentError: a setting is invalid.
    """
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    settings = load_settings(arguments.config, **given)
    # pydantic ignores the case of variable names, so every spelling is removed
    for name in [name for name in os.environ if name.upper() == "TONNAGE_API_KEY"]:
        del os.environ[name]
    return settings


def select_backend(settings: Settings, file: TextIO) -> tuple[Settings, ModelSource]:
    """Return the settings, with the backend `auto` replaced by the selected one, and the model's source.

    The selected backend is printed to `file`.

    Raises:
        ExtraMissing: the engine, or a package that a setting needs, is not installed.
    """
    require_serving(settings.backend)
    if settings.kv_events_config is not None:
        require("events", "--kv-events-config")
    if settings.otlp_traces_endpoint is not None:
        require("otel", "--otlp-traces-endpoint")
    quantization = settings.deployment().quantization
    source = resolve_model(settings.model)
    choice = choose_backend(source) if settings.backend == "auto" else None
    backend = settings.backend if choice is None else choice.backend
    if backend == "hf" and quantization in MADE_BY_FLAG:
        require("bnb", f"--quantization {quantization}")
    if choice is not None:
        print(f"backend {choice.backend}: {choice.reason}", file=file, flush=True)
    return settings.model_copy(update={"backend": backend}), source


def plan_for_loading(settings: Settings, source: ModelSource, file: TextIO) -> Plan:
    """Make the plan for the model to load, print it to `file`, and return it.

    If the demo model is missing, it is downloaded or converted first.

    Args:
        settings: the settings of the server.
        source: the files or headers of the model that the settings name.
        file: where the plan is printed.

    Raises:
        DoesNotFit: the plan does not fit into the device's memory; nothing has been loaded.
        DeploymentError: the plan needs more memory than the machine or its container has, or the hf engine
            cannot load the model.
        ModelNotFound: a hub model is not on this machine; in this case no plan is printed.
    """
    deployment = settings.deployment()
    if settings.backend != "fake":
        _check_host(deployment)
    plan = plan_source(source, deployment)
    if plan.fits and source.kind == "demo":
        ensure_demo()
        source = resolve_model(settings.model)
        plan = plan_source(source, deployment)
    if source.kind == "hub":
        _require_here(source)
    if settings.backend == "hf":
        require_supported(source.config["model_type"])
        require_loadable(plan, source.config)
    plan = held_to(plan, source, deployment)
    print_plan(plan, False, file)
    file.flush()
    if not plan.fits:
        raise DoesNotFit("; ".join(plan.reasons), field="model")
    return plan


def _require_here(source: ModelSource) -> None:
    """Raise ModelNotFound for a hub model that is not on this machine.

    A plan needs only the headers of the model's files, which the hub serves, but loading needs the files
    themselves.
    """
    if Path(source.path).exists():
        return
    named = hub_model(source.id)
    assert named is not None, source.id
    bring = f"hf download {named.repo}" + (f" --revision {named.revision}" if named.revision != "main" else "")
    if modelscope():
        bring = f"modelscope download --model {named.repo} --revision {revision_of(named)}"
    raise ModelNotFound(f"{source.id} is not on this machine", field="model", hint=f"{bring} brings it")


def _check_host(deployment: Deployment) -> None:
    """Raise DeploymentError when a plan for a CPU has a larger memory budget than this machine or container."""
    if deployment.device != "cpu" or deployment.device_memory is None:
        return
    here = host_memory()
    if deployment.device_memory > here:
        raise DeploymentError(
            f"{deployment.device_memory} bytes are more than this machine, or its container, has ({here})",
            field="device_memory",
            hint="leave device_memory out to use the container's limit",
        )


def make_engine(settings: Settings, plan: Plan) -> Engine:
    """Return an unstarted engine of the backend (hf, vllm, fake) that the settings name.

    Raises:
        DeploymentError: the engine does not support a configured feature.
    """
    asked = settings.deployment()
    policy = Policy(
        AdmissionMode(settings.admission_mode), watermark=settings.watermark, target_itl=settings.target_itl,
        keys=max(1, len(load_keys(settings.api_key, settings.api_key_file))),
    )  # fmt: skip
    if settings.lora_modules and not asked.enable_lora:
        raise DeploymentError(
            "LoRA adapters need slots in the plan", field="lora_modules", hint="add --enable-lora"
        )
    if settings.backend != "vllm" and asked.enable_lora:
        raise DeploymentError(
            f"the {settings.backend} backend does not support LoRA adapters",
            field="enable_lora",
            hint="use --backend vllm",
        )
    if settings.backend != "hf" and asked.kv_offloading_bytes:
        raise DeploymentError(
            f"tonnage serve has no KV tier with the {settings.backend} backend", field="kv_offloading_bytes",
            hint="vllm serve has its own (docs/disk_tier.md)" if settings.backend == "vllm" else None,
        )  # fmt: skip
    classifies = plan.model.architecture.endswith(CLASSIFIERS)
    if asked.runner == "generate" and (classifies or not plan.kv_cache.layout.groups):
        kind = "a classifier" if classifies else "an encoder"
        raise DeploymentError(
            f"{plan.model.architecture} is {kind}: it generates no text", field="runner",
            hint=f"leave --runner out, or use --runner pooling for {'labels' if classifies else 'embeddings'}",
        )  # fmt: skip
    pools = _pooling_task(plan, asked.runner)
    if settings.backend != "vllm" and pools:
        kind = "embeddings" if pools == "embed" else "classifiers"
        raise DeploymentError(
            f"the {settings.backend} backend does not support {kind}",
            field="runner",
            hint="use --backend vllm" + ("" if classifies else ", or --runner generate for text"),
        )
    for field in ("kv_events_config", "shared_system_prompt"):
        if not getattr(settings, field):
            continue
        if settings.backend == "fake":
            raise DeploymentError(
                "the fake backend does not support this option", field=field, hint="use --backend hf"
            )
        if not plan.kv_cache.layout.groups:
            raise DeploymentError(
                f"{plan.model.architecture} is an encoder and keeps no KV blocks; leave this option out",
                field=field,
            )
    if settings.backend == "vllm":
        loras = lora_modules(settings.lora_modules, settings.model_name, asked.max_lora_rank)
        paths = {module.name: str(module.path) for module in loras}
        quantization = _made_by_vllm(settings.model, asked.quantization)
        return VLLMEngine(
            plan, policy=policy, sharing=_sharing(settings, plan), loras=paths, pools=pools,
            quantization=quantization,
        )  # fmt: skip
    if settings.backend == "fake":
        # imported here, because it imports numba and the block manager
        from tonnage.server.engines.fake import FakeEngine

        return FakeEngine(plan, policy=policy)
    # imported here, because numba takes 0.2 s, which --help does not need
    from tonnage.server.engines.hf.engine import HFEngine

    return HFEngine(plan, policy=policy, sharing=_sharing(settings, plan))


def _made_by_vllm(model: str, asked: str | None) -> str | None:
    """Return vLLM's name of the quantization that it must apply while loading the model.

    Returns None when the checkpoint is already quantized, or when `asked`, the setting `quantization`, is None.

    Raises:
        DeploymentError: vLLM cannot apply the quantization, so the plan would not match the loaded model.
    """
    config = resolve_model(model).config
    if asked is None or read_quantization(config, None).scheme != "none":
        return None
    if asked in WHILE_LOADING:  # the keys of WHILE_LOADING are vLLM's own names of quantizations
        return asked
    for why in quantization_notes(config, asked, "vllm"):
        raise DeploymentError(why, field="quantization")
    return loaded_as(asked)


def _pooling_task(plan: Plan, runner: str) -> PoolingTask | None:
    """Return the pooling task that vLLM's runner gives the model, or None for a model that generates text.

    A classifier returns the values of its labels. Another model returns embeddings if it is an encoder, if it
    was saved by sentence-transformers (modules.json), or if ``runner`` is ``pooling``.
    """
    name = plan.model.architecture
    if name.endswith(CLASSIFIERS):
        return "token_classify" if name.endswith("ForTokenClassification") else "classify"
    is_embedder = not plan.kv_cache.layout.groups or (Path(plan.model.path) / "modules.json").is_file()
    return "embed" if runner == "pooling" or (runner == "auto" and is_embedder) else None


def _sharing(settings: Settings, plan: Plan) -> Sharing:
    if not settings.shared_system_prompt:
        return Sharing(settings.kv_events_config)
    folder, size = model_files(plan.model.path), plan.kv_cache.layout.block_size
    prefixes = tuple(
        shared_prefix(Path(file), folder, size, settings.chat_template)
        for file in settings.shared_system_prompt
    )
    return Sharing(settings.kv_events_config, prefixes)


class ProgressDisplay:
    """A progress display on stderr: a spinner on a terminal, else a line after 2, 10, 30, ... seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since = time.monotonic()
        self._next = 2.0
        self._status: Any = None
        if redraws(sys.stderr):
            from rich.console import Console  # imported here, because only output on a terminal needs rich

            spinner = "dots" if shades(sys.stderr) == SHADES else "line"
            self._status = Console(stderr=True).status(what, spinner=spinner)

    def __enter__(self) -> Callable[[], None]:
        if self._status is not None:
            self._status.start()
        return self.tick

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tick(self) -> None:
        """Update the display; the caller does this several times per second."""
        seconds = time.monotonic() - self._since
        if self._status is not None:
            self._status.update(f"{self._what} ({seconds:.0f} s)")
        elif seconds >= self._next:
            print(f"{self._what} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            self._next = {2.0: 10.0, 10.0: 30.0}.get(self._next, self._next + 30.0)
