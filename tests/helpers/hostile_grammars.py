"""Grammars that stood still everything for seconds to minutes, or ended the process that compiled them."""

from __future__ import annotations

import json

from tonnage.server.text.grammar import Grammar

# Takes its converter more than a second: what it knows of 5,000 rules, it asks of each of them again.
CHAIN = "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(5000)) + '\nr5000 ::= "{}"\n'


def schema(**said: object) -> Grammar:
    return Grammar("json_schema", json.dumps(said))


def references(depth: int) -> Grammar:
    """Definitions of which each holds the next twice."""
    defs: dict[str, object] = {
        f"d{at}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in ("a", "b")},
        }
        for at in range(depth)
    }
    return schema(**{"$ref": "#/$defs/d0", "$defs": defs | {f"d{depth}": {}}})


HOSTILE = {
    "optional letters": Grammar("regex", "a?" * 2000 + "a" * 2000),
    "repetitions": Grammar("regex", "(((.{1,50}){1,50}){1,50}){1,50}"),
    "enum": schema(enum=[f"value number {at} of the enum" for at in range(3000)]),
    "properties": schema(type="object", properties={f"p{at}": {"type": "string"} for at in range(3000)}),
    "references": references(2000),
    "alternatives": Grammar("grammar", "root ::= " + " | ".join(f'"{at:06d} "' for at in range(4500))),
    "empty parts": Grammar("grammar", "root ::= " + "a? " * 8000 + '\na ::= "x" root'),
    "rules": Grammar("grammar", CHAIN.format("a")),
}
