"""The table of attacks. ``point`` groups them by the mechanism they aim at."""

from __future__ import annotations

from dataclasses import dataclass

from abuse import attacks
from abuse.attacks import Attack, at_once, bodies, disconnecting, flood, listed, matching, nested, text
from abuse.raw_http import CHAT, COMPLETIONS, RESPONSES
from abuse.server_process import ENGINES

REAL = ("hf", "vllm")  # engines that have a model


@dataclass(frozen=True, slots=True)
class Case:
    """One attack or baseline.

    Attributes:
        name: Its name on the command line.
        point: Group number.
        what: Description.
        run: Coroutine of the attack.
        engines: Engines that it applies to.
        seconds: Time limit, after which the attack is cancelled.
        by_client: Whether a client causes it. A stream that pauses then counts against the server; a stopped
            engine process cannot generate tokens.
        tls: Whether the server serves over TLS.
    """

    name: str
    point: int
    what: str
    run: Attack
    engines: tuple[str, ...] = ENGINES
    seconds: float = 60.0
    by_client: bool = True
    tls: bool = False


ANY = {"type": "object"}
ENUM = {"enum": [f"value {at}" for at in range(50_000)]}
PROPERTIES = {"type": "object", "properties": {f"name{at}": {"type": "string"} for at in range(3000)}}
OPTIONAL, NESTED = "a?" * 2000 + "a" * 2000, "(((a{1,50}){1,50}){1,50}){1,50}"
LONG = "root ::= " + " | ".join(f'"{at:06d}{"ab" * 4} "' for at in range(4500))

MISTAKES = (
    (CHAT, listed("messages", "{}", 2_000_000)),
    (RESPONSES, listed("input", "{}", 2_000_000)),
    (COMPLETIONS, listed("prompt", "{}", 2_000_000)),
    ("/tokenize", listed("messages", "{}", 2_000_000)),
    ("/detokenize", listed("tokens", '"a"', 1_500_000)),
)
LETTERS = listed("prompt", '"a"', 2_000_000)
PROMPTS = listed("prompt", '"' + "lorem ipsu" * 1600 + '"', 512)

LONG_STOPS = {"prompt": "a", "max_tokens": 7000, "stop": ["a" * 600_000 + end for end in "bcde"]}
MOST_STOPS = {"prompt": "a", "max_tokens": 700, "stop": ["a" * 1023 + end for end in "bcde"]}
HELLO = {"role": "user", "content": "Once"}
LOGPROBS = {"messages": [HELLO], "max_tokens": 900, "n": 8, "logprobs": True, "top_logprobs": 20}
CALL = {"name": "f", "arguments": '{"a":[' + "{}," * 2_600_000 + "{}]}"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
}
UNREAD = {"messages": [HELLO | {"parsed": ["x" * 1000] * 7000}], "max_tokens": 300}
TOOLS = {"messages": [HELLO], "tools": [nested(180, 700)], "max_tokens": 4}

FIRST = flood(64, 10, {"prompt": "Once", "max_tokens": 64, "priority": -1000})
MANY = flood(32, 15, {"prompt": ["Once"] * 16, "max_tokens": 100})


def _grammar(name: str, what: str, kind: str, value: object, **more: object) -> Case:
    return Case(name, 2, what, bodies((COMPLETIONS, matching(kind, value, **more))), REAL, 120)


def baselines(seconds: float) -> tuple[Case, Case]:
    """Return the two baselines that show the machine's noise: no other client, and well-behaved clients."""
    neighbours = flood(8, seconds, {"prompt": "Once", "max_tokens": 32})
    return (
        Case("alone", 0, "no other client", lambda server: attacks.idle(seconds)),
        Case("neighbours", 0, "eight clients, one short request after another each", neighbours),
    )


CASES = (
    _grammar("first_grammar", "the first grammar of a server's life", "json", ANY, max_tokens=8),
    Case("mistakes", 1, "lists of up to 2 million wrong items, five endpoints", bodies(*MISTAKES)),
    Case("letters", 1, "2 million prompts of one character", bodies((COMPLETIONS, LETTERS))),
    Case("prompts", 1, "512 prompts of 16,000 characters", bodies((COMPLETIONS, PROMPTS))),
    Case("long_prompt", 1, "one prompt of 8 MB", bodies((COMPLETIONS, text(8_000_000)))),
    Case(
        "tokenize", 1, "/tokenize of 8 MB, with the text of each token",
        bodies(("/tokenize", text(8_000_000, return_token_strs=True))),
    ),
    Case(
        "detokenize", 1, "/detokenize of a million tokens",
        bodies(("/detokenize", listed("tokens", "1234", 2**20))),
    ),
    Case(
        "counts", 1, "64 clients that count the tokens of 60 KB",
        flood(64, 10, {"prompt": "lorem ipsu" * 6000}, "/tokenize"),
    ),
    Case("uploads", 1, "32 bodies of 8 MB at once, without their last byte", attacks.uploads),
    Case(
        "regex_hang_up", 2, "a regex of 6 KB whose client disconnects after a second",
        disconnecting(matching("regex", OPTIONAL), 1.0), REAL,
    ),
    _grammar("enum", "an enum of 50,000 strings", "json", ENUM),
    _grammar("properties", "an object of 3,000 properties", "json", PROPERTIES),
    _grammar("nested", "nested repetitions, n = 16", "regex", NESTED, n=16, temperature=1.0),
    _grammar("long_grammar", "a grammar of 100 KB", "grammar", LONG),
    Case(
        "stops", 1, "stop strings of 600,000 characters, then the longest that are accepted",
        bodies((COMPLETIONS, lambda: LONG_STOPS), (COMPLETIONS, lambda: MOST_STOPS)),
    ),
    Case("nested_tools", 1, "tools of depth 180, four times at once", at_once(4, CHAT, lambda: TOOLS)),
    Case(
        "arguments", 1, "2.6 million objects in the arguments of a tool call, three times at once",
        at_once(3, CHAT, lambda: {"messages": [HELLO, CALLED]}),
    ),
    Case(
        "unread", 3, "40 waiting requests with 7 MB that nothing reads", at_once(40, CHAT, lambda: UNREAD),
        seconds=120,
    ),
    Case(
        "logprobs", 3, "20 log probabilities a token, not streamed, eight answers of 900 tokens",
        bodies((CHAT, lambda: LOGPROBS)), REAL, 180,
    ),
    Case("resets", 4, "5,000 connections that are reset after a request of 1.2 KB", attacks.resets),
    Case(
        "pages", 4, "64 clients that read /openapi.json and /memory",
        attacks.pages(64, 10, "/openapi.json", "/memory"),
    ),
    Case("unread_files", 4, "1,900 clients that do not read a script of /docs", attacks.unread_files),
    Case(
        "long_prompts", 8, "16 clients that send prompts of 6,000 tokens",
        flood(16, 15, {"prompt": "a " * 6000, "max_tokens": 4}), REAL,
    ),
    Case(
        "whole_pool", 8, "32 clients whose requests fill the pool",
        flood(32, 15, {"prompt": "a " * 1500, "max_tokens": 600, "ignore_eos": True}), REAL,
    ),
    Case("deaf", 3, "eight streams of 16 sequences that are never read", attacks.deaf, seconds=180),
    Case("slow_heads", 4, "300 keep-alive connections, one byte of a head per second", attacks.slow_heads),
    Case("trailers", 4, "100 MB of trailers after a chunked body, twice", attacks.trailers),
    Case(
        "chunks", 4, "32 clients that send bodies of 30 KB in chunks of one byte",
        attacks.chunks(32, 10, 30_000),
    ),
    Case("fields", 4, "48 clients that send heads of 7,000 fields", attacks.fields(48, 8, 7000)),
    Case("pipeline", 4, "48 clients that send 16 requests at once and reset", attacks.pipeline(48, 8, 16)),
    Case("connections", 4, "4,000 connections with nothing or part of a head sent", attacks.connections),
    Case(
        "handshakes", 4, "1,100 TLS connections without a handshake, to a server with 1,024 files",
        attacks.handshakes, tls=True,
    ),
    Case("priority", 8, "64 clients that request priority -1000", FIRST),
    Case("queue", 8, "32 clients that request 16 sequences each", MANY),
    Case("engine_stopped", 5, "SIGSTOP of the engine", attacks.engine_stopped, REAL, 300, by_client=False),
    Case("load_stopped", 5, "SIGSTOP of a loading engine", attacks.load_stopped, REAL, 480, by_client=False),
)  # fmt: skip
