"""Compact sequences for a request's token ids and logit biases, with a few bytes per element.

A tuple of ints takes 36 bytes per id, and a tuple of pairs 116 bytes per bias. A request may have 20,000 ids or
biases, and hundreds of requests may wait, in the API process and in the engine process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator


class TokenIds:
    """An immutable sequence of token ids, with four bytes for each."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = array("i", ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"


class TokenBiases:
    """An immutable sequence of pairs (token id, value added to its logit), with twelve bytes for each."""

    __slots__ = ("_ids", "_values")

    def __init__(self, biases: Iterable[tuple[int, float]]) -> None:
        pairs = list(biases)
        self._ids = TokenIds(token for token, _ in pairs)
        self._values = array("d", (value for _, value in pairs))

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids, self._values, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBiases) and (self._ids, self._values) == (other._ids, other._values)

    def __hash__(self) -> int:
        return hash((self._ids, self._values.tobytes()))

    def __repr__(self) -> str:
        return f"TokenBiases({list(self)})"
