"""Tables and plots of what ``bench.py decode`` measured."""

from __future__ import annotations

import csv
import pathlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

INSTALL = "pip install 'replayssm_cupy[bench]'"
Row = Mapping[str, Any]


def columns(rows: Sequence[Row]) -> dict[str, str]:
    """Headings and the fields under them; peers are the fields that end in `_us` and are new."""
    own = {
        "shape": "shape",
        "state": "state",
        "T": "tokens",
        "batch": "batch",
        "replay us": "replay_us",
        "plain us": "plain_us",
        "floor us": "floor_us",
        "flush-first us": "flush_first_us",
        "floor / replay": "percent",
        "flush-first / replay": "flush_first_percent",
    }
    peers = [name for name in rows[0] if name.endswith("_us") and name not in own.values()]
    return own | {f"{name.removesuffix('_us')} us": name for name in peers}


def header(heads: Mapping[str, str]) -> str:
    return f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}"


def line(row: Row, heads: Mapping[str, str]) -> str:
    return f"| {' | '.join(_cell(row[field], field) for field in heads.values())} |"


def _cell(value: Any, field: str) -> str:
    if value in (None, ""):
        return "-"
    if field.endswith("percent"):
        return f"{float(value):.0f} %"
    return f"{float(value):.1f}" if field.endswith("_us") else str(value)


def markdown(rows: Sequence[Row], machine: Mapping[str, str], notes: Sequence[str]) -> str:
    heads = columns(rows)
    table = [header(heads), *(line(row, heads) for row in rows)]
    what = ", ".join(f"{name} {value}" for name, value in machine.items())
    return "\n\n".join([what, *notes, "\n".join(table)]) + "\n"


def write_csv(path: str, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: str) -> list[Row]:
    """The rows of a file of :func:`write_csv`; ValueError if it is none."""
    with open(path, newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    needed = {"shape", "state", "tokens", "batch", "percent"}
    if not rows or not needed <= rows[0].keys():
        got = ", ".join(rows[0]) if rows else "no rows"
        raise ValueError(f"{path}: expected columns {', '.join(sorted(needed))}, got {got}")
    return rows


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(batch, per cent of the floor) by shape, state format and T, in the order of the batches.

    A shape that all rows have is not named.
    """
    several = len({row["shape"] for row in rows}) > 1
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        name = f"{row['state']}, T = {row['tokens']}"
        name = f"{row['shape']}, {name}" if several else name
        found[name].append((int(row["batch"]), float(row["percent"])))
    return {name: sorted(points) for name, points in found.items()}


def plot(rows: Sequence[Row], path: str) -> None:
    """Per cent of the floor over the batch, a line per shape, state format and T, as an image file.

    Raises ImportError in one line without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}): {INSTALL}") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = curves(rows)
    for name, points in lines.items():
        batches, percents = zip(*points, strict=True)
        axes.plot(batches, percents, marker="o", label=name)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(0, 100)
    axes.set_xlabel("batch")
    axes.set_ylabel("floor / time, per cent")
    axes.set_title(f"One decode step, {rows[0].get('gpu', 'unknown GPU')}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(pathlib.Path(path), dpi=150)
