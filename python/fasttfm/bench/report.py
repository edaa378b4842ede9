"""The outputs of a benchmark run: a table to read, a CSV to keep, and a chart for each op."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from fasttfm.bench.measure import DIRECTIONS, Row

COLUMNS = tuple(field.name for field in fields(Row) if field.metadata.get("csv", True))

# ---- table -----------------------------------------------------------------------------------------------------------

_TABLE = (
    ("case", lambda row: row.case),
    ("dtype", lambda row: row.dtype),
    ("direction", lambda row: row.direction),
    ("contender", lambda row: row.contender),
    ("backend", lambda row: row.backend),
    ("ms", lambda row: _number(row.ms_p50)),
    ("p20-p80", lambda row: f"{_number(row.ms_p20)}-{_number(row.ms_p80)}"),
    ("gpu_ms", lambda row: _number(row.gpu_ms)),
    ("rate", lambda row: _rate(row.rate, row.rate_unit)),
    ("of limit", lambda row: f"{row.fraction:.0%}"),
    ("vs best peer", lambda row: _times(row.ratio)),
    ("on device", lambda row: _times(row.gpu_ratio)),
    ("peak MiB", lambda row: "" if row.peak_mib is None else f"{row.peak_mib:.0f}"),
)
_REPEATED = 3  # leading columns that are blank if they repeat the line above


def table(rows: Sequence[Row]) -> str:
    """One block for each op: ours and every peer that ran, then footnotes with those that did not run and why."""
    blocks = [_op_block(op, list(group)) for op, group in groupby(rows, lambda row: row.op)]
    return "\n\n".join([*blocks, "\n".join(_footnotes(rows))])


def _op_block(op: str, rows: list[Row]) -> str:
    first = rows[0]
    title = (
        f"{op} on {first.device} (copy {_rate(first.copy_tb_per_s, 'TB/s')}, "
        f"GEMM {_rate(first.gemm_tflop_per_s, 'TFLOP/s')}; "
        f"torch {first.torch_version}, triton {first.triton_version or 'none'}, fasttfm {first.fasttfm_version})"
    )
    lines = [[cell(row) for _, cell in _TABLE] for row in rows if row.ms_p50 is not None]
    if not lines:
        return f"{title}\nnothing was measured"
    shown = [column for column in range(len(_TABLE)) if any(line[column] for line in lines)]
    above: list[str] = []
    body = []
    for line in lines:
        repeated = line[:_REPEATED] == above[:_REPEATED]
        body.append([" " if repeated and column < _REPEATED else line[column] for column in shown])
        above = line
    header = [_TABLE[column][0] for column in shown]
    widths = [max(len(line[index]) for line in [header, *body]) for index in range(len(shown))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *body]]
    return "\n".join([title, *(line.rstrip() for line in text)])


def _number(value: float | None) -> str:
    """Four significant digits, plain."""
    return "" if value is None else f"{value:.{max(0, 3 - _exponent(value))}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _rate(value: float | None, unit: str) -> str:
    """``unit`` starts with T for 10**12; slower devices are shown in G."""
    if value is None:
        return ""
    return f"{value:.3g} {unit}" if value >= 0.5 else f"{1000 * value:.3g} G{unit[1:]}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _footnotes(rows: Sequence[Row]) -> list[str]:
    missing: dict[str, list[str]] = {}  # by reason
    for op, contender, note in dict.fromkeys((row.op, row.contender, row.note) for row in rows if row.note):
        missing.setdefault(note, []).append(f"{op}: {contender}")
    compiled = {(row.op, row.case, row.dtype) for row in rows if "compile" in row.contender and row.ms_p50 is not None}
    notes = [
        "of limit: least time for the bytes at the copy rate or the flops at the GEMM rate, over gpu_ms (or ms)",
        "vs best peer: its ms over ours, above 1 we are faster; on device: the same by gpu_ms, without host overhead",
        *(f"not measured, or in part ({note}): {', '.join(cases)}" for note, cases in missing.items()),
    ]
    if compiled:
        notes.append(f"torch.compile compiled {len(compiled)} shapes; compilation is not in the times")
    return notes


# ---- CSV -------------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows, and keeps the file's rows of ops that are not in ``rows``."""
    new_ops = {row.op for row in rows}
    kept = [line for line in _read_csv(path) if line["op"] not in new_ops]
    lines = kept + [{column: _cell(getattr(row, column)) for column in COLUMNS} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda line: line["op"]))


def _read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- charts ----------------------------------------------------------------------------------------------------------

_OUR_COLOR = "#1b6ca8"
_PEER_COLORS = ("#b8b8b8", "#e0a458", "#8fb98a", "#c98bb9", "#9d8cc4", "#d0756b")


def write_chart(path: Path, rows: Sequence[Row]) -> None:
    """Bars of one op: the fraction of the device's limit, with a panel per direction and a group per case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.fraction is not None]
    directions = [direction for direction in DIRECTIONS if any(row.direction == direction for row in measured)]
    if not directions:
        raise ValueError(f"chart: rows: expected at least one measured row, got none of {len(rows)}")
    contenders = list(dict.fromkeys(row.contender for row in measured))
    groups = list(dict.fromkeys((row.case, row.dtype) for row in measured))
    width = max(8.0, 1.5 + 0.62 * len(groups) * (len(contenders) + 0.6))
    figure = Figure(figsize=(width, 1.2 + 2.7 * len(directions)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{measured[0].op} on {measured[0].device}: share of the device's limit", fontsize=14)
    panels = figure.subplots(len(directions), 1, squeeze=False)[:, 0]
    for panel, direction in zip(panels, directions, strict=True):
        _draw_panel(panel, [row for row in measured if row.direction == direction], contenders, groups)
        panel.set_title(direction, loc="left", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = max(1, min(len(labels), int(width / 2.2)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=11, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(panel: Any, rows: Iterable[Row], contenders: list[str], groups: list[tuple[str, str]]) -> None:
    rows = list(rows)
    bar = 0.84 / len(contenders)
    peers = [name for name in contenders if not name.startswith("fasttfm")]
    for position, name in enumerate(contenders):
        contender_rows = [row for row in rows if row.contender == name]
        centers = [
            groups.index((row.case, row.dtype)) + (position - (len(contenders) - 1) / 2) * bar for row in contender_rows
        ]
        heights = [100 * (row.fraction or 0.0) for row in contender_rows]
        ours = name not in peers
        color = _OUR_COLOR if ours else _PEER_COLORS[peers.index(name) % len(_PEER_COLORS)]
        drawn = panel.bar(centers, heights, width=0.94 * bar, color=color, label=name)
        if ours:
            panel.bar_label(
                drawn, labels=[f"{height:.0f}%" for height in heights], padding=2, fontsize=11, weight="bold"
            )
    highest = 100 * max(row.fraction or 0.0 for row in rows)
    if highest > 50:  # otherwise a line at the limit would make the bars too short to compare
        panel.axhline(100, color="#444444", linewidth=1, linestyle="--")
    panel.set_ylim(0, 1.18 * (max(100.0, highest) if highest > 50 else highest))
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_xticks(range(len(groups)), [f"{case}\n{dtype}" for case, dtype in groups], fontsize=10)
    panel.set_ylabel("% of the limit", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


_CURVES_A_LINE = 3


def write_curves(path: Path, rows: Sequence[Row], curves: Mapping[str, Mapping[int, str]]) -> None:
    """Lines of one op: each contender's TFLOP/s over a size, forward above backward. ``curves`` maps sizes to cases by
    the title of a panel; a curve needs two sizes that were measured. Cases of no curve are not drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directions = [direction for direction in DIRECTIONS if direction != "forward+backward"]
    measured = [row for row in rows if row.ms_p50 is not None and row.direction in directions]
    directions = [direction for direction in directions if any(row.direction == direction for row in measured)]
    sizes_measured = {title: {row.case for row in measured} & set(sizes.values()) for title, sizes in curves.items()}
    drawn = [(title, sizes) for title, sizes in curves.items() if len(sizes_measured[title]) > 1]
    if not drawn:
        raise ValueError(f"chart: rows: expected two measured sizes of a curve, got none in {len(rows)} rows")
    peers = list(dict.fromkeys(row.contender for row in measured if not row.ours))
    columns = min(len(drawn), _CURVES_A_LINE)
    lines = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    figure = Figure(figsize=(1.5 + 3.2 * columns, 1.2 + 2.4 * len(directions) * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{measured[0].op} on {measured[0].device}: TFLOP/s", fontsize=14)
    panels = figure.subplots(len(directions) * len(lines), columns, squeeze=False, sharey=True)
    handles: dict[str, Any] = {}
    for number, line in enumerate(panels):
        direction = directions[number % len(directions)]
        line[0].set_ylabel(f"{direction}, TFLOP/s", fontsize=10)
        titled = lines[number // len(directions)]
        for panel in line[len(titled) :]:
            panel.set_axis_off()
        for panel, (title, sizes) in zip(line, titled, strict=False):
            chosen = [row for row in measured if row.direction == direction and row.case in sizes.values()]
            handles |= _draw_lines(panel, chosen, sizes, peers)
            if direction == directions[0]:
                panel.set_title(title, loc="left", fontsize=11)
    panels[0][0].set_ylim(bottom=0)  # at the end, because it disables the autoscaling of the shared axis
    names = sorted(handles, key=lambda name: (name in peers, name))
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=5, fontsize=11, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_lines(panel: Any, rows: Sequence[Row], sizes: Mapping[int, str], peers: list[str]) -> dict[str, Any]:
    """Draws a panel, and returns the line of each contender."""
    handles = {}
    for name in dict.fromkeys(row.contender for row in rows):
        milliseconds = {
            row.case: (row.flops, row.ms_p50 if row.gpu_ms is None else row.gpu_ms)
            for row in rows
            if row.contender == name
        }
        points = [(size, milliseconds[case]) for size, case in sizes.items() if case in milliseconds]
        rates = [flops / (time or 1.0) * 1e-9 for _, (flops, time) in points]
        style = {"color": _OUR_COLOR, "linewidth": 2.4, "zorder": 3}
        if name in peers:
            style = {"color": _PEER_COLORS[peers.index(name) % len(_PEER_COLORS)], "linewidth": 1.6}
        (handles[name],) = panel.plot([size for size, _ in points], rates, marker="o", markersize=4, **style)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(sizes), [str(size) for size in sizes], fontsize=9)
    panel.minorticks_off()
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    return handles
