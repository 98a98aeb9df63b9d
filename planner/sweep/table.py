"""Text table of a sweep, with one line per combination of flag values, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

from tonnage.planner.devices.prices import cost_of
from tonnage.planner.errors import escaped
from tonnage.planner.screen import Screen, aligned
from tonnage.planner.sweep.rows import SweepRow
from tonnage.planner.units import GiB

# (title, alignment, function that formats the cell of a row)
_Column = tuple[str, str, Callable[[SweepRow], str]]


def print_rows(rows: Sequence[SweepRow], lengths: Sequence[tuple[int, int]], file: TextIO) -> None:
    """Print the rows of a sweep as a text table.

    Weights and KV pool are in GiB per GPU. Prices are in USD per hour: for all GPUs of a row, and per sequence
    that certainly runs. If the table is wider than the terminal, the model's name becomes a title above its
    rows. If it is still too wide, columns are left out, and a line below the table names them.

    Args:
        rows: the rows of the sweep.
        lengths: (prompt, output) tokens of requests, which get one column each.
        file: the terminal or file.
    """
    screen = Screen(file)
    columns, same = _folded(_columns(rows, lengths), rows)
    left_out: list[str] = []
    titled = False
    lines = _aligned(columns, rows)
    for name in ("model", *_DISPENSABLE):
        if max(map(len, lines)) <= screen.width:
            break
        kept = [column for column in columns if column[0] != name]
        if len(kept) == len(columns):
            continue
        titled = titled or name == "model"
        left_out += [] if name == "model" else [name]
        columns = kept
        lines = _aligned(columns, rows)
    before = None
    for line, row in zip(lines, [None, *rows], strict=True):
        if titled and row is not None and row.model != before:
            print(f"{escaped(row.model)}:", file=file)
            before = row.model
        if row is None:
            screen.print_line(line, "bold" if file.isatty() else "")
        else:
            print(escaped(line), file=file)
    if same:
        print(f"All rows: {', '.join(same)}", file=file)
    if left_out:
        print(f"Not shown for width: {', '.join(left_out)} (--csv, --json and --html have them)", file=file)


# Columns to leave out on a narrow terminal, in this order: first the columns whose values the remaining columns
# imply.
_DISPENSABLE = ("tokens", "weights", "at least", "pool")
# Column -> a value; the column is omitted if all rows have this value.
_FIXED = {"format": "as is", "KV": "auto"}


def _aligned(columns: Sequence[_Column], rows: Sequence[SweepRow]) -> list[str]:
    table = [[title for title, _, _ in columns], *([text(row) for _, _, text in columns] for row in rows)]
    return aligned(table, [place for place, (_, side, _) in enumerate(columns) if side == "right"])


def _folded(columns: Sequence[_Column], rows: Sequence[SweepRow]) -> tuple[list[_Column], list[str]]:
    """Return (columns of the sweep's table to print, texts on the omitted columns).

    The quantization or KV cache dtype column is omitted if all rows have the checkpoint's own format.
    """
    kept, same = [], []
    for title, side, text in columns:
        if title in _FIXED and all(text(row) == _FIXED[title] for row in rows):
            same.append(f"{title} {_FIXED[title]}")
        else:
            kept.append((title, side, text))
    return kept, same


def _columns(rows: Sequence[SweepRow], lengths: Sequence[tuple[int, int]]) -> list[_Column]:
    def where_it_fits(text: Callable[[SweepRow], str]) -> Callable[[SweepRow], str]:
        return lambda row: text(row) if row.fits else "-"

    columns: list[_Column] = []
    if len({row.model for row in rows}) > 1:
        columns.append(("model", "left", lambda row: row.model))
    columns += [
        ("GPU", "left", device_cell),
        ("format", "left", lambda row: row.quantization),
        ("KV", "left", lambda row: row.kv_cache_dtype),
        ("weights", "right", lambda row: _gib(row.weights_bytes) if row.weights_bytes else "-"),
        ("pool", "right", _pool),
        ("tokens", "right", where_it_fits(lambda row: f"{row.tokens:,}")),
    ]
    for place, (prompt, output) in enumerate(lengths):
        columns.append((f"{prompt}+{output}", "right", where_it_fits(_at_once(place))))
    if not lengths:
        columns.append(
            ("sequences", "right", where_it_fits(lambda row: _of(row.sequences, row.max_concurrency)))
        )
    columns += [
        ("at least", "right", where_it_fits(lambda row: _count(row.least_sequences))),
        ("USD/h", "right", _price),
        ("each", "right", _price_each),
    ]
    return columns


def device_cell(row: SweepRow) -> str:
    """Return the GPU of a sweep row with its count as text, such as `2 x l40s`."""
    return f"{row.gpus} x {row.gpu}" if row.gpus > 1 else row.gpu


def _pool(row: SweepRow) -> str:
    if row.fits:
        return _gib(row.kv_pool_bytes)
    return "refused" if row.refused else "no run" if row.unsupported or row.stops else "no fit"


def _gib(size: int) -> str:
    return f"{size / GiB:,.2f}"


def _price(row: SweepRow) -> str:
    if row.refused:
        return "-"
    return "no price" if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}"


def _price_each(row: SweepRow) -> str:
    return "-" if row.usd_per_sequence is None else f"{row.usd_per_sequence:.4f}"


def _at_once(place: int) -> Callable[[SweepRow], str]:
    """Return a function that formats how many requests a sweep row runs at once.

    The requests have the length with index `place` in the list of requested lengths.
    """
    return lambda row: _of(row.requests[place], row.requests_held[place])


def _of(running: float, held: float) -> str:
    """Format how many sequences run at once; if the KV pool could hold more, as `running of held`."""
    return f"{_count(running)} of {_count(held)}" if held > running else _count(running)


def _count(figure: float) -> str:
    return f"{figure:,.1f}" if figure < 1000 and figure != int(figure) else f"{figure:,.0f}"


def length_lines(rows: Sequence[SweepRow], lengths: Sequence[tuple[int, int]]) -> list[str]:
    """Return lines of text that state the length of the sequences in a sweep's table.

    The length may differ by model.
    """
    own = {row.model: row.max_model_len for row in rows if row.max_model_len}
    if lengths:
        prompt, output = lengths[0]
        first = f'"at least" and "each" count requests of {prompt:,}+{output:,} tokens, the first length'
        return [first] if own and len(lengths) > 1 else []
    if len(set(own.values())) < 2:
        return [f"Sequences have {length:,} tokens" for length in set(own.values())]
    each = ", ".join(f"{model} {length:,}" for model, length in own.items())
    return [
        f"Sequences have each model's own length: {each} tokens; --request or --max-model-len makes them equal"
    ]


def price_lines(rows: Sequence[SweepRow], prices: dict[str, float]) -> list[str]:
    """Return lines of text with the sources of the GPU prices in a table, and the GPUs without a price."""
    sources: dict[str, list[str]] = {}
    for row in rows:
        if not row.total_bytes and row.refused:
            continue  # the row has no GPU, or the model does not run on the row's GPU
        cost = cost_of(row.gpu, row.gpus, prices)
        where = "no price" if cost is None else cost.source
        names = sources.setdefault(where, [])
        if row.gpu not in names:
            names.append(row.gpu)
    none = sources.pop("no price", [])
    lines = [f"  {', '.join(names)}: {where}" for where, names in sources.items()]
    if none:
        lines.append(f"  no price: {', '.join(none)} (--price {none[0]}=USD)")
    return ["Prices of all GPUs of a row for an hour:", *lines] if lines else []
