"""Published configs and small headers, damaged at random: the planner plans each or refuses it by name.

    python tests/helpers/mutated_models.py --configs 100000 --headers 500 [--first N] [--seconds 2] [--json]

Reported, with the number of the case, are tracebacks, more than ``--seconds`` of processor time, more than
500 MiB on top of the process's own, and what would act on a terminal (line ends, escape sequences, more than
10,000 characters). ``--one configs:1234`` does one case again, its traceback shown. A case follows from its
number alone. Model types without an adapter, which transformers' code builds, are left out: torch alone takes
more than the 500 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonnage.planner.api import plan_or_advise
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture, family_of
from tonnage.planner.model.fields import parse_config
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.output.terminal import plain_lines
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.planner.training.build import Planner
from tonnage.planner.training.model import model_from
from tonnage.planner.training.setup import TrainingSetup

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
MEMORY = 500 << 20
LONGEST_LINE = 10_000
GIVE_UP_SECONDS = 30  # of processor time: a case that hangs ends here
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 5, 7, 8, 16, 64, 100, 127, 1000, 2000, 2001, 4096, 16_384, 1 << 22, 1 << 24,
    (1 << 22) + 1, 1 << 31, 1 << 63, 10**400, -1, -2, -(10**400),
    0.0, 0.5, 1.0, 1.5, 4.0, -0.5, 1e-320, 1e30, 1.7e308, -1.7e308,
    "", "x", "auto", "none", "full_attention", "float32", "int4", "\x1b[2J\nred", "\u202egnp", "\ud800",
    "9" * 5000,
    [], [[]], [{}], [None], [0], [1, 2], ["full_attention"], [["global"], 2],
    {}, {"a": []}, {"": None}, {"type": []}, {"default": {}},
)  # fmt: skip
FLAGS: tuple[dict[str, Any], ...] = (
    {"device_memory": 1 << 36},
    {"device_memory": 1 << 40, "quantization": "nf4"},
    {"engine": "vllm", "gpu": "h100-80g"},
    {"engine": "vllm", "gpu": "h100-80g", "tensor_parallel_size": 2},
    {"engine": "vllm", "gpu": "h100-80g", "pipeline_parallel_size": 2},
    {"engine": "vllm", "device_memory": 1 << 36},
    {"engine": "vllm", "device_memory": 1 << 30},
    {"engine": "sglang", "gpu": "h100-80g"},
)
WORDS = (
    "num_experts",
    "attention_bias",
    "qk_norm",
    "vision_dim",
    "\x1b[2Jbias",
    "n" * 1000 + "_size",
    "rope_scaling",
)


def bases() -> list[dict[str, Any]]:
    found = (json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json")))
    return [config for config in found if family_of(config.get("model_type")).build is not None]


def places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a config."""
    if parent is not None:
        yield parent, key
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:64]) if isinstance(value, list) else ()
    )
    for name, item in items:
        yield from places(item, value, name)


def mutated_config(number: int, known: list[dict[str, Any]]) -> dict[str, Any]:
    rng = random.Random(f"configs:{number}")
    config = copy.deepcopy(known[number % len(known)])
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        found = [place for place in places(config) if place[1] != "model_type"]
        if not found:
            break
        inside, key = rng.choice(found)
        mutate(rng, config, inside, key, found, known)
    return config


def mutate(
    rng: random.Random, config: dict[str, Any], inside: Any, key: Any, found: list[Any], known: Any
) -> None:
    how = rng.randrange(12)
    value = inside[key]
    if how < 5:
        inside[key] = copy.deepcopy(rng.choice(VALUES))
    elif how == 5:
        del inside[key]
    elif how == 6:
        other, place = rng.choice(found)
        inside[key] = copy.deepcopy(other[place])
    elif how == 7 and isinstance(value, int | float) and abs(value) < 1e300:
        inside[key] = rng.choice(
            (value * 2, value + 1, value - 1, -value, value / 3, float(value), [value], str(value))
        )
    elif how == 8 and isinstance(value, list | str):
        changed = (value * rng.choice((2, 50)), value[:-1], value[1:], value[::-1], [value], value + value[:1])
        inside[key] = rng.choice(changed) if len(value) < 2000 else value[:-1]
    elif how == 9:
        stranger = rng.choice(known)
        name = rng.choice(list(stranger))
        if name != "model_type":
            config[name] = copy.deepcopy(stranger[name])
    elif how == 10:
        config[rng.choice(WORDS)] = copy.deepcopy(rng.choice(VALUES))
    else:
        inside[key] = (
            [copy.deepcopy(value)] * rng.choice((1, 2, 30)) if rng.random() < 0.9 else nested(rng.randrange(40))
        )


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else {"a": 1}


def plan_config(number: int, known: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the text that a user sees for the plan of mutated config ``number``."""
    config = parse_config(json.dumps(mutated_config(number, known)).encode(), "config.json")
    if number % 8 == 7:
        setup = TrainingSetup(sequence_length=512, **({"method": "lora"} if number % 16 == 7 else {}))
        plan = Planner(model_from("m", build_architecture(config))).plan(setup)
        yield from (line.formula for line in plan.lines)
        yield from (*plan.reasons, *plan.notes)
        return
    source = ModelSource("m", "m", config, "folder")
    yield from shown_plan(plan_or_advise(source, deployment_of(FLAGS[number % len(FLAGS)])))


def shown_plan(plan: Any) -> Iterator[str]:
    json.dumps(plan_to_dict(plan))
    yield from plain_lines(plan, True)
    yield from plan.notes


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def plan_header(number: int, folder: Path) -> Iterator[str]:
    rng = random.Random(f"headers:{number}")
    for path in folder.iterdir():
        path.unlink()
    (folder / "config.json").write_text(json.dumps(TINY))
    model = str(folder)
    if number % 3 == 0:
        write_safetensors(rng, folder)
    elif number % 3 == 1:
        write_shards(rng, folder)
    else:
        model = str(write_gguf(rng, folder))
    yield from shown_plan(plan_or_advise(resolve_model(model), deployment_of({"device_memory": 1 << 34})))


def header_of() -> dict[str, Any]:
    """Return the complete safetensors header of the tiny model."""
    header, end = {}, 0
    for spec in build_architecture(TINY).tensors:
        if spec.is_parameter and spec.tied_to is None:
            size = 2 * spec.elements
            header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [end, end + size]}
            end += size
    return header


def packed(header: Any, length: int | None = None) -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", (len(text) if length is None else length) % (1 << 64)) + text


def damaged(rng: random.Random, header: dict[str, Any]) -> bytes:
    """Values of the header changed, or its bytes."""
    for _ in range(rng.randrange(3)):
        found = list(places(header))
        inside, key = rng.choice(found)
        if rng.random() < 0.2 and isinstance(inside, dict):
            inside[rng.choice(("\x1b[31mred\n", "a" * 100_000, "", "\ud800", "__metadata__"))] = inside.pop(key)
        else:
            mutate(rng, header, inside, key, found, [header])
    return flipped(rng, packed(header, rng.choice((None, None, None, 0, 1, 99_999_999, 1 << 40, -1))))


def flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 1, 8, 200))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out[: rng.randrange(len(out))] if rng.random() < 0.1 else out)


def write_padded(path: Path, data: bytes, size: int) -> None:
    path.write_bytes(data)
    os.truncate(path, len(data) + size)


def write_safetensors(rng: random.Random, folder: Path) -> None:
    path, header = folder / "model.safetensors", header_of()
    size = max(entry["data_offsets"][1] for entry in header.values())
    special(rng, path) or write_padded(path, damaged(rng, header), size)


def write_shards(rng: random.Random, folder: Path) -> None:
    header, end = {}, 0
    names = list(whole := header_of())
    index: dict[str, Any] = {"weight_map": {}}
    for shard, part in (("a.safetensors", names[:9]), ("b.safetensors", names[9:])):
        header, end = {}, 0
        for name in part:
            first, last = whole[name]["data_offsets"]
            header[name] = {**whole[name], "data_offsets": [end, end + last - first]}
            end += last - first
            index["weight_map"][name] = shard
        if rng.random() < 0.2 and special(rng, folder / shard):
            continue
        data = damaged(rng, header) if rng.random() < 0.3 else packed(header)
        write_padded(folder / shard, data, end)
    found = list(places(index))
    if rng.random() < 0.5:
        mutate(rng, index, *rng.choice(found), found, [index])
    path = folder / "model.safetensors.index.json"
    special(rng, path) or path.write_bytes(flipped(rng, json.dumps(index).encode()))


def special(rng: random.Random, path: Path) -> bool:
    """Sometimes put something other than a regular file at ``path``; return whether it did."""
    how = rng.randrange(20)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        path.symlink_to("/dev/zero")
    elif how == 2:
        path.symlink_to(path)
    elif how == 3:
        path.symlink_to("/proc/self/mem")
    return how < 4


def write_gguf(rng: random.Random, folder: Path) -> Path:
    """Write a Llama-like GGUF file in the layout of ggml/docs/gguf.md; return its path."""

    def text(value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(data)) + data

    fields: dict[str, Any] = {
        "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16,
    }  # fmt: skip
    if rng.random() < 0.5:
        fields[rng.choice(list(fields))] = rng.choice(
            (0, 1, 3, 1 << 31, [], [4, 4], [4, 2], [[4], [4]], "\x1b[2J", 0.5)
        )
    out = (
        text("general.architecture") + struct.pack("<I", 8) + text(rng.choice(("llama",) * 9 + ("\x1b[2J\n",)))
    )
    for name, value in fields.items():
        out += text(f"llama.{name}") + gguf_value(value, text)
    infos, end = b"", 0
    shapes = {spec.name: spec.shape for spec in build_architecture(TINY).tensors if spec.is_parameter}
    for name, shape in shapes.items():
        infos += text(gguf_name(name)) + struct.pack("<I", len(shape))
        infos += b"".join(struct.pack("<Q", side) for side in reversed(shape)) + struct.pack("<IQ", 0, end)
        size = 4
        for side in shape:
            size *= side
        end += -(-size // 32) * 32
    counts = struct.pack("<QQ", len(shapes), len(fields) + 1)
    if rng.random() < 0.1:
        counts = struct.pack("<QQ", rng.choice((0, 1, 1 << 20, 1 << 63)), rng.choice((0, 9, 1 << 20, 1 << 63)))
    path = folder / "model.gguf"
    special(rng, path) or write_padded(
        path, flipped(rng, b"GGUF" + struct.pack("<I", 3) + counts + out + infos), end + 64
    )
    return path


def gguf_value(value: Any, text: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        kind = 9 if value and isinstance(value[0], list) else 4
        items = b"".join(gguf_value(item, text)[4:] for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    return struct.pack("<II", 4, value)


_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in _GGUF_TOP:
        return f"{_GGUF_TOP[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[inner]}.weight"


class Hang(BaseException):
    pass


def _hang(signum: int, frame: object) -> None:
    raise Hang


def outcome(lines: Iterator[str], seconds: float) -> str | None:
    """Run one case; return its fault, or None if it was planned or rejected with a named error in time."""
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, max(GIVE_UP_SECONDS, seconds))
    try:
        said = list(lines)
    except TonnageError as error:
        said = [str(error)]
    except Hang:
        return f"hangs: {where()}"
    except MemoryError:
        return f"takes more than {MEMORY >> 20} MiB: {where()}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}: {where()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took = time.process_time() - begun
    raw = next((line for line in said if not line.isprintable() or len(line) > LONGEST_LINE), None)
    if raw is not None:
        return f"prints {len(raw)} characters raw: {raw[:100]!r}"
    return f"takes {took:.1f} s" if took > seconds else None


def where() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [frame for frame in frames if Path(frame.filename).parent.parent.name != "helpers"]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(ours[-4:]))


def limit_memory() -> None:
    """From here on the process may take 500 MiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--configs", type=int, default=100_000)
    p.add_argument("--headers", type=int, default=500)
    p.add_argument("--first", type=int, default=0, help="number of the first case")
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--one", metavar="KIND:NUMBER")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    for name in ("torch", "transformers"):  # model types without an adapter are refused
        sys.modules[name] = None  # type: ignore[assignment]
    known = bases()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if args.one:
            kind, _, number = args.one.partition(":")
            case = int(number)
            print(*(plan_config(case, known) if kind == "configs" else plan_header(case, folder)), sep="\n")
            return 0
        signal.signal(signal.SIGPROF, _hang)
        for number in range(len(known)):  # what is imported where it is needed, and as it was published
            with contextlib.suppress(TonnageError):
                source = ModelSource("m", "m", known[number], "folder")
                list(shown_plan(plan_or_advise(source, deployment_of(FLAGS[number % len(FLAGS)]))))
        limit_memory()
        found, begun = [], time.process_time()
        for kind, count in (("configs", args.configs), ("headers", args.headers)):
            for number in range(args.first, args.first + count):
                lines = plan_config(number, known) if kind == "configs" else plan_header(number, folder)
                if wrong := outcome(lines, args.seconds):
                    found.append(f"{kind}:{number}: {wrong}")
                    if not args.json:
                        print(found[-1], flush=True)
    result = {
        "configs": args.configs, "headers": args.headers, "found": found,
        "seconds": round(time.process_time() - begun, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip
    print(json.dumps(result))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
