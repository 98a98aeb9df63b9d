"""planner/records.py against the standard library's dataclasses, and what others see of our records."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import pkgutil
from pathlib import Path

import pytest

import tonnage.planner
from tonnage.planner import records
from tonnage.planner.deployment import Deployment
from tonnage.planner.plans import RankPlan

# the same class in both spellings
SOURCE = """
@dataclass(frozen=True, slots=True)
class Frozen:
    first: int
    second: str = "x"
    third: tuple[int, ...] = ()
    table: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        if self.first < 0:
            raise ValueError("negative")

@dataclass(slots=True)
class Changing:
    seen: list[int] = field(default_factory=list)
    count: int = 0

@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    value: int

@dataclass(frozen=True)
class Open:
    value: int
    told: int = field(default=4, metadata={"unit": "bytes"})

@dataclass(frozen=True, slots=True)
class Told:
    plain: int = field(default=3)
    told: int | None = field(default=None, metadata={"unit": "bytes"})
"""


def define(module: object) -> dict:
    scope = {"dataclass": module.dataclass, "field": module.field, "__name__": __name__}
    exec(SOURCE, scope)
    return scope


OURS, STANDARD = define(records), define(dataclasses)


def planner_records() -> list[type]:
    found = set()
    for module in pkgutil.walk_packages(tonnage.planner.__path__, "tonnage.planner."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and hasattr(value, "_record_defaults"):
                found.add(value)
    return sorted(found, key=lambda cls: cls.__qualname__)


def behaviour(scope: dict) -> list[object]:
    frozen, changing, identity = scope["Frozen"], scope["Changing"], scope["Identity"]
    one, same, other = frozen(1, third=(2,)), frozen(1, "x", (2,)), frozen(2)
    seen = [
        repr(one), one == same, one == other, one != (1,), dataclasses.asdict(one),
        dataclasses.is_dataclass(frozen), dataclasses.astuple(dataclasses.replace(one, second="y")),
        frozen.__slots__, frozen.__match_args__, [(f.name, f.type) for f in dataclasses.fields(frozen)],
        hasattr(one, "__dict__"), copy.copy(one) == one, one.table is not same.table, repr(changing()),
        changing([1]) == changing([1]), changing.__hash__, identity(1) == identity(1),
        len({identity(1), identity(1)}), hasattr(scope["Open"](1), "__dict__"),
        repr(scope["Told"]()), repr(scope["Open"](1)), scope["Open"].told,
        [(f.name, f.default, dict(f.metadata)) for f in dataclasses.fields(scope["Told"])],
    ]  # fmt: skip
    for wrong in (
        lambda: frozen(),
        lambda: frozen(1, 2, 3, 4, 5),
        lambda: frozen(1, nothing=2),
        lambda: frozen(-1),
        lambda: dataclasses.replace(one, first=-1),
        lambda: setattr(one, "first", 3),
        lambda: delattr(one, "first"),
        lambda: setattr(scope["Open"](1), "new", 1),
        lambda: hash(changing()),
        lambda: hash(frozen(1)),  # a dict inside
        lambda: setattr(changing(), "new", 1),
    ):
        with pytest.raises(Exception) as caught:
            wrong()
        seen.append(caught.type)
    return seen


def test_records_behave_as_the_standard_librarys_dataclasses() -> None:
    assert behaviour(OURS) == behaviour(STANDARD)


def test_many_instances_are_made_as_the_first_ones() -> None:
    """``__init__`` is compiled once it pays."""
    scope = define(records)
    early = behaviour(scope)
    for _ in range(records._EARLY):
        for name in ("Frozen", "Changing", "Identity", "Open", "Told"):
            scope[name](*(1 for field in scope[name].__match_args__[:1] if name != "Changing"))
    assert "_record_defaults" not in scope["Frozen"].__init__.__code__.co_names
    assert behaviour(scope) == early


@pytest.mark.parametrize("wrong", [{"told": 1, "nothing": 2}, {"nothing": 2}, {}])
def test_a_first_instance_names_what_is_wrong(wrong: dict[str, int]) -> None:
    said = []
    for scope in (define(records), STANDARD):
        with pytest.raises(TypeError) as caught:
            scope["Open"](**wrong)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_the_planners_records_are_dataclasses_for_everybody_else() -> None:
    found = planner_records()
    sources = Path(tonnage.planner.__path__[0]).rglob("*.py")
    assert len(found) == sum(text.read_text().count("\n@dataclass(") for text in sources)
    for cls in found:
        assert dataclasses.is_dataclass(cls)
        assert [f.name for f in dataclasses.fields(cls)] == list(cls.__annotations__)
    flags = Deployment(engine="vllm", max_model_len=4096)
    assert dataclasses.replace(flags, max_model_len=1) == records.replace(flags, max_model_len=1)
    assert dataclasses.asdict(flags) == records.asdict(flags)
    rank = RankPlan(1, 2, 3, 4, 5, total_bytes=20)
    assert pickle.loads(pickle.dumps(rank)) == rank
    assert len({rank, dataclasses.replace(rank)}) == 1


@pytest.mark.parametrize("body", ["total: ClassVar[int] = 1", "total: InitVar[int]"])
def test_what_is_left_out_is_refused(body: str) -> None:
    with pytest.raises(TypeError, match="Record: "):
        exec(
            f"from __future__ import annotations\n@dataclass(frozen=True)\nclass Record:\n    {body}\n",
            {"dataclass": records.dataclass, "__name__": __name__},
        )
    with pytest.raises(TypeError, match="Child: base classes"):
        records.dataclass(frozen=True)(type("Child", (RankPlan,), {}))
