"""One plotting style for the course, and the few figures that every week draws.

White background (legible in JupyterLab's dark theme too), Okabe and Ito's colours for colour-blind readers with
a marker each, sizes on a log2 axis, the unit and "higher is better" in the title, GPU and date in every figure.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from shared.machine import DATASHEETS
from shared.results import OURS, source

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]

plt.rcParams.update(
    {
        "figure.dpi": 110,
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "axes.facecolor": "white",
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "grid.alpha": 0.25,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
)


def styles(providers) -> dict[str, dict]:
    """A colour and a marker for each provider; this kernel is always the blue circle, and the thickest line."""
    others = [name for name in dict.fromkeys(providers) if name != OURS]
    look = {OURS: {"color": COLOURS[0], "marker": MARKERS[0], "linewidth": 2.6, "zorder": 3}}
    for index, name in enumerate(others, start=1):
        look[name] = {"color": COLOURS[index % 7], "marker": MARKERS[(index + index // 7) % 7]}
    return look


def caption(figure, rows: pd.DataFrame | None, bands: bool = False) -> None:
    """Write under the figure where its numbers come from."""
    if rows is not None:
        band = "; bands: 20th to 80th percentile" if bands else ""
        figure.supxlabel(source(rows) + band, fontsize=8, color="0.35", x=0.99, ha="right")


def lines(
    rows: pd.DataFrame, x: str, y: str, panel: str, *, titles: dict, xlabel: str, limits: dict | None = None
) -> None:
    """A panel for each value of the column ``panel``, a line a provider over ``x`` (log2), ``y`` upwards.

    ``titles`` maps a panel's value to its title (say the unit and which way is better), ``limits`` a label to a
    height, drawn as dashed lines. With no rows it says so and draws nothing.
    """
    if rows.empty:
        print("Nothing to plot without a recording.")
        return
    look = styles(rows["provider"])
    figure, axes = plt.subplots(1, len(titles), figsize=(5.4 * len(titles), 4.1), sharey=True, squeeze=False)
    for ax, (value, title) in zip(axes[0], titles.items(), strict=True):
        part = rows[rows[panel] == value]
        for provider, line in part.groupby("provider", sort=False):
            line = line.sort_values(x)
            ax.plot(line[x], line[y], label=provider, **look[provider])
            if {"ms_p20", "ms_p80"} <= set(line):
                work = line[y] * line["ms"]  # a rate times its time: what the spread of times means for the rate
                ax.fill_between(
                    line[x], work / line["ms_p80"], work / line["ms_p20"], color=look[provider]["color"], alpha=0.15
                )
        for index, (label, height) in enumerate((limits or {}).items()):
            ax.axhline(height, color="0.3", linestyle=["--", ":"][index % 2], linewidth=1.2)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            ax.annotate(label, (1, height), (0, 3), **place, fontsize=8, color="0.3")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(part[x].unique()), minor=False)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        plt.setp(ax.get_xticklabels(), rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        ax.set(title=title, xlabel=xlabel, ylim=(0, None))
    axes[0][0].set_ylabel(y.replace("gbps", "GB/s").replace("tflops", "TFLOPS"))
    drawn = {line.get_label(): line for ax in axes[0] for line in ax.get_lines() if line.get_label() in look}
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper left", ncols=5)
    caption(figure, rows, bands="ms_p20" in rows)


def bars(table: pd.DataFrame, *, title: str, xlabel: str, rows: pd.DataFrame | None = None) -> None:
    """Horizontal bars, a group a row of ``table`` and a bar a column, each labelled with its value."""
    height, largest = 0.8 / len(table.columns), table.max().max()
    digits = 2 if largest >= 10 else 3
    figure, ax = plt.subplots(figsize=(7.5, 0.8 + 0.42 * table.size))
    for index, column in enumerate(table):
        where = np.arange(len(table)) + index * height
        drawn = ax.barh(where, table[column], height * 0.9, color=COLOURS[index], label=column)
        labels = [f"{value:,.0f}" if largest >= 100 else f"{round(value, digits):g}" for value in table[column]]
        ax.bar_label(drawn, labels, padding=3, fontsize=9)
    ax.set_yticks(np.arange(len(table)) + 0.4 - height / 2, table.index)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.grid(axis="y", visible=False)
    ax.set(title=title, xlabel=xlabel)
    if len(table.columns) > 1:
        figure.legend(loc="outside upper right", ncols=4)
    caption(figure, rows)


def roofline(points: pd.DataFrame, roofs: dict[str, tuple[float, float]], *, title: str, rows: pd.DataFrame) -> None:
    """Arithmetic rate over arithmetic intensity, both logarithmic.

    ``points``: columns ``label``, ``intensity`` (FLOP a byte), ``tflops``. ``roofs``: label -> (GB/s, TFLOPS).
    Source: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52 (2009).
    """
    figure, ax = plt.subplots(figsize=(7.5, 4.8))
    intensity = np.geomspace(0.1, 10_000, 400)
    for index, (label, (gbps, peak)) in enumerate(roofs.items()):
        ax.plot(
            intensity,
            np.minimum(intensity * gbps / 1000, peak),
            color="0.25",
            linestyle=["-", "--", ":", "-."][index % 4],
        )
        ax.annotate(
            f"{label}: {peak:,.3g} TFLOPS",
            (intensity[-1], peak),
            (-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    for index, point in points.reset_index(drop=True).iterrows():
        ax.plot(
            point["intensity"],
            point["tflops"],
            MARKERS[index % 7],
            color=COLOURS[index % 7],
            markersize=8,
            label=point["label"],
        )
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="TFLOPS", title=title)
    if len(points):
        ax.legend(loc="lower right")
    caption(figure, rows)


def datasheet_roofs(*names: str, tensor_cores: bool = True) -> dict[str, tuple[float, float]]:
    """Roofs from the datasheets: name -> (GB/s, TFLOPS of fp16 tensor cores, or of plain fp32)."""
    sheets = [DATASHEETS[name] for name in names]
    return {s.name: (s.memory_gbps, s.fp16_tensor_tflops if tensor_cores else s.fp32_tflops) for s in sheets}


def passes(columns: dict[str, list[tuple[str, float, float]]], *, unit: str) -> None:
    """How data moves: for each program a stack of steps, with an arrow from memory (read) and one back (write).

    ``columns``: program -> steps ``(operator, read, written)`` in ``unit``; an arrow is as thick as its amount.
    """
    deepest = max(len(steps) for steps in columns.values())
    _, axes = plt.subplots(1, len(columns), figsize=(5.2 * len(columns), max(3.6, 0.55 * deepest)), squeeze=False)
    most = max(max(step[1:]) for steps in columns.values() for step in steps)
    for ax, (name, steps) in zip(axes[0], columns.items(), strict=True):
        ax.axis("off")
        ax.set(xlim=(0, 10), ylim=(-deepest, 1))
        total = sum(read + written for _, read, written in steps)
        ax.set_title(f"{name}\n{total:,g} {unit}")
        memory = plt.Rectangle((0, -deepest + 0.1), 1.6, deepest + 0.1, color="#56B4E9", alpha=0.35)
        ax.add_patch(memory)
        ax.text(0.8, (1 - deepest) / 2, "GPU memory", rotation=90, ha="center", va="center")
        for row, (operator, read, written) in enumerate(steps):
            ax.text(
                7.4,
                -row - 0.3,
                operator,
                ha="center",
                va="center",
                bbox={"boxstyle": "round", "fc": "white", "ec": "0.4"},
            )
            shift = 0.14 if read and written else 0  # a lone arrow points at the middle of its operator
            for word, amount, height, (start, end) in (
                ("read", read, shift, (1.7, 6.2)),
                ("write", written, -shift, (6.2, 1.7)),
            ):
                if amount:
                    y, colour = height - row - 0.3, COLOURS[word == "write"]
                    style = {"arrowstyle": "-|>", "linewidth": 0.8 + 4 * amount / most, "color": colour}
                    ax.annotate("", (end, y), (start, y), arrowprops=style)
                    ax.text(
                        4,
                        y + (0.2 if height >= 0 else -0.2),
                        f"{word} {amount:,g}",
                        ha="center",
                        va="center",
                        fontsize=8,
                    )
