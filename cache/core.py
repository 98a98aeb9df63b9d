"""The handle through which compiled loops see the `State`: nested structs instead of nested tuples."""

from __future__ import annotations

from typing import Any, cast

from tonnage.cache.compiled import INTERPRETED, Proxy, StructType, compiled, define
from tonnage.cache.state import Index, Pool, Requests, Rows, State


class PoolType(StructType):
    """Type of `Pool` in compiled code; the next four likewise."""


class IndexType(StructType):
    pass


class RowsType(StructType):
    pass


class RequestsType(StructType):
    pass


class StateType(StructType):
    pass


class PoolProxy(Proxy):
    """Builds a `PoolType`; the next four likewise."""


class IndexProxy(Proxy):
    pass


class RowsProxy(Proxy):
    pass


class RequestsProxy(Proxy):
    pass


class StateProxy(Proxy):
    pass


define(PoolProxy, PoolType, Pool._fields)
define(IndexProxy, IndexType, Index._fields)
define(RowsProxy, RowsType, Rows._fields)
define(RequestsProxy, RequestsType, Requests._fields)
define(StateProxy, StateType, State._fields)


# One maker each: compiled with the cache, unlike the proxies' own constructors.
@compiled
def _pool(*fields: Any) -> Any:
    return PoolProxy(*fields)


@compiled
def _index(*fields: Any) -> Any:
    return IndexProxy(*fields)


@compiled
def _rows(*fields: Any) -> Any:
    return RowsProxy(*fields)


@compiled
def _requests(*fields: Any) -> Any:
    return RequestsProxy(*fields)


@compiled
def _state(*fields: Any) -> Any:
    return StateProxy(*fields)


def handle(state: State) -> State:
    """What compiled functions take for ``state``: the same arrays. Uncompiled they take the state itself."""
    if INTERPRETED:
        return state
    pool, index, rows, requests = state.pool, state.index, state.rows, state.requests
    return cast(
        State,
        _state(
            _pool(*pool), _index(*index), _rows(*rows), _requests(*requests), state.windows, state.constants
        ),
    )
