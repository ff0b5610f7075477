"""What the README says in figures: its overview, its table of weeks, and the course's address on GitHub.

    python -m shared.notebook readme              draw the figure and write the table, from the recordings
    python -m shared.notebook stamp OWNER/REPO    write the course's address into badges and cells [BRANCH]
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

from shared import plots
from shared.cells import ROOT, cell_texts, find, weeks
from shared.machine import datasheet
from shared.results import OURS, ratios, recorded, recording

NOT_SIZES = {"experiment", "provider", "gpu", "torch", "triton", "date", "gbps", "tflops", "copy_gbps"}
MEASURED = ("ms", "peak", "held", "extra", "logits")  # how the names of other columns that are no sizes begin
COMPARED = ("speed", "backward", "other shapes")  # the experiments that set a finished kernel against its rivals
FIGURE = "overview.png"

# What each week asks, and the workload that stands for it in the table (the range over all of them stands beside it).
QUESTIONS = {
    1: ("How often must a row be read?", {"dtype": "bfloat16", "n_cols": 4096}),
    2: ("How are rows and columns summed in one walk?", {"dtype": "bfloat16", "n_cols": 4096, "direction": "backward"}),
    3: ("Can a table be used without being written down?",
        {"S": 4096, "D": 128, "mask": "causal", "direction": "forward"}),
    4: ("What keeps tensor cores busy, and why did a T4's sleep?", {"dtype": "bfloat16", "M": 8192}),
    5: ("What do weights of four bits save?", {"bits": 4, "N": 128256, "M": 1}),
    6: ("How near to a copy can a kernel come?", {"dtype": "bfloat16", "shape": "Llama 3 8B"}),
    7: ("May a gradient overwrite its input?", {"dtype": "bfloat16", "V": 131072, "direction": "loss and gradient"}),
    8: ("What does it cost not to make the largest tensor?", {"V": 128256}),
    9: ("What must be kept for the way back?", {"T": 8192, "direction": "forward and backward"}),
}  # fmt: skip


def speeds(folder: Path, gpu: str | None = None) -> pd.DataFrame:
    """A row a recorded workload that has a rival: its sizes, ratio to the fastest rival, rate, share of the limit.

    They are ``gpu``'s, or those that are shown when none is chosen. The limit is the datasheet's: memory for rates in
    GB/s; for rates in TFLOPS tensor cores, or FMA in float32.
    """
    found = []
    for experiment in COMPARED:
        rows = recorded(folder, experiment, gpu)
        sizes = [name for name in rows if name not in NOT_SIZES and not name.startswith(MEASURED)]
        sizes.sort(key=lambda name: name != "dtype")
        pairs = ratios(rows, sizes)
        if len(pairs):
            pairs = pairs.merge(rows[rows["provider"] == OURS], on=sizes)
            found.append(pairs.assign(where=[_workload(row, sizes) for row in pairs.to_dict("records")]))
    if not found:
        return pd.DataFrame()
    found = pd.concat(found, ignore_index=True)
    unit, rate = ("GB/s", found["gbps"]) if "gbps" in found else ("TFLOPS", found["tflops"])
    sheet, limit = datasheet(found["gpu"].iloc[0]), float("nan")
    if sheet and unit == "GB/s":
        limit = sheet.memory_gbps
    elif sheet:
        limit = found["dtype"].eq("float32").map({True: sheet.fp32_tflops, False: sheet.fp16_tensor_tflops})
    return found.assign(unit=unit, rate=rate, share=rate / limit)


def _workload(row: dict, sizes: list[str]) -> str:
    """A workload in words: "bfloat16, n_cols 4,096, backward"."""
    known = [name for name in sizes if not pd.isna(row[name])]
    values = [row[name] if isinstance(row[name], str) else f"{name} {row[name]:,}" for name in known]
    return ", ".join(values + [row["experiment"]] * (row["experiment"] != "speed"))


def speed_range(folder: Path, gpu: str | None = None) -> str:
    """The worst and the best ratio of this kernel against the fastest rival, each with its workload."""
    found = speeds(folder, gpu)
    if found.empty:
        return "no speed recorded"
    worst, best = found.loc[found["ratio"].idxmin()], found.loc[found["ratio"].idxmax()]
    return f"{times(worst['ratio'])} ({worst['where']}) to {times(best['ratio'])} ({best['where']})"


def times(ratio: float) -> str:
    """A ratio as "0.998x" or "2.36x": near 1 with the digit that tells a loss from a win."""
    return f"{ratio:.3f}x" if 0.99 < ratio < 1.01 else f"{ratio:.2f}x"


def _title(week: int) -> str:
    """The name of a week, from its notebook's first line: "Fused softmax"."""
    return cell_texts(find(week), "markdown")[0].splitlines()[0].partition(" · ")[2]


def _badge(week: int) -> str:
    """The Colab badge of a week's notebook, as Markdown."""
    return re.search(r"\[!\[Open in Colab\]\(\S+?\)\]\(\S+?\)", cell_texts(find(week), "markdown")[0])[0]


def table() -> str:
    """The README's table of weeks, from the recordings: a Markdown table."""
    rows = ["| week | it asks | one workload | all workloads, against the fastest rival | |", "|---|---|---|---|---|"]
    for folder in weeks().values():
        week = int(folder.name[4:6])
        question, chosen = QUESTIONS[week]
        found = speeds(folder)
        one = every = "not recorded"
        if len(found):
            every = f"{times(found['ratio'].min())} to {times(found['ratio'].max())}"
            found = found[found["experiment"] == "speed"]
            for name, value in chosen.items():
                found = found[found[name] == value] if name in found else found[:0]
            for row in found.to_dict("records"):  # none, where a GPU has not recorded this workload
                speed = f"{row['rate']:,.0f} {row['unit']}, {times(row['ratio'])} the speed of {row['rival']}"
                one = f"{speed} ({row['where']}; {row['gpu']})"
        link = f"[{_title(week)}]({find(week).relative_to(ROOT).as_posix()})"
        rows.append(f"| {week}. {link} | {question} | {one} | {every} | {_badge(week)} |")
    return "\n".join(rows)


def figure_data() -> pd.DataFrame:
    """What the figure shows: week, unit, ratio and share of every recorded workload; ValueError when there is none."""
    found = [speeds(folder).assign(week=int(name[4:6])) for name, folder in weeks().items()]
    found = [rows[["week", "unit", "ratio", "share"]] for rows in found if len(rows)]
    if not found:
        raise ValueError("no week has a recording with a rival: python -m shared.notebook record makes one, on a GPU")
    return pd.concat(found, ignore_index=True)


def digest(data: pd.DataFrame) -> str:
    """A fingerprint of the figure's data, which the picture carries: a test compares it with the recordings."""
    return hashlib.sha256(data.round(6).to_csv(index=False).encode()).hexdigest()[:16]


def draw(path: Path) -> None:
    """The overview: for every week a dot a recorded workload, speed on the left, share of the limit on the right."""
    data = figure_data()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.6), sharey=True, width_ratios=[3, 2])
    look = {"s": 22, "color": plots.COLOURS[0], "alpha": 0.65, "linewidths": 0}
    for week, rows in data.groupby("week"):
        spread = [week + 0.16 * (index % 5 - 2) for index in range(len(rows))]
        for ax, column in ((left, "ratio"), (right, "share")):
            if week % 2:
                ax.axhspan(week - 0.5, week + 0.5, color="0.96", zorder=0)
            ax.scatter(rows[column], spread, **look)
    left.axvline(1, color="0.3", linestyle="--", linewidth=1.2)
    left.annotate("as fast as the fastest rival", (1, 0.3), (5, 0), textcoords="offset points", fontsize=8, color="0.3")
    left.set_xscale("log", base=2)
    left.set_xticks([0.5, 0.75, 1, 1.5, 2, 3])
    left.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
    left.set(title="Speed against the fastest rival (right is faster)", ylim=(9.6, 0.05), xlim=(0.6, 3.6))
    left.set_xlabel("a dot is one recorded workload; its height in the band means nothing")
    units = data.groupby("week")["unit"].first()
    limits = {"GB/s": "memory", "TFLOPS": "tensor cores"}
    left.set_yticks(units.index, [f"{week}. {_title(week)}  " for week in units.index])
    for week, unit in units.items():
        beside = {"va": "center", "fontsize": 8, "color": "0.3", "transform": right.get_yaxis_transform()}
        right.text(1.02, week, limits[unit], **beside)
    right.xaxis.set_major_formatter(PercentFormatter(1))
    right.set(title="Share of the datasheet's limit", xlim=(0, 1))
    plots.caption(figure, pd.concat([recording(folder) for folder in weeks().values()], ignore_index=True))
    figure.savefig(path, dpi=110, metadata={"Description": digest(data), "Software": None})
    plt.close(figure)


def write(readme: Path | None = None) -> None:
    """Put :func:`table` between the two markers in the README, and draw the figure beside it."""
    readme = readme or ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    made = f"<!-- table -->\n{table()}\n<!-- /table -->"
    text, found = re.subn(r"<!-- table -->\n.*?<!-- /table -->", lambda _: made, text, flags=re.S)
    if not found:
        raise ValueError(f"{readme} lacks the lines <!-- table --> and <!-- /table --> between which the table stands")
    draw(readme.parent / FIGURE)  # first: without a recording it raises, and nothing is half done
    readme.write_text(text, encoding="utf-8")


def stamp(repository: str, branch: str = "main") -> list[Path]:
    """Write the course's address on GitHub into every badge and find-the-helper cell; return the changed files."""
    repository = repository.removeprefix("https://github.com/").removesuffix("/").removesuffix(".git")
    name, ref = r"[\w-][\w.-]*(?<!\.git)", r"\w[\w./#+-]*"
    if not re.fullmatch(f"{name}/{name}", repository) or not re.fullmatch(ref, branch) or ".." in repository + branch:
        raise ValueError(f"an address is OWNER/REPO and perhaps a branch, not {repository!r} {branch!r}")
    changed = []
    badge = r"(colab\.research\.google\.com/github/)[^/]+/[^/]+/blob/.+?(?=/week\d\d\w*/[\w.-]+\.ipynb)"
    clone = r"(git clone https://github\.com/)[\w.-]+/[\w.-]+"
    cell = r'(REPOSITORY, BRANCH = \\")[^"\\]+(\\", \\")[^"\\]+'  # in a notebook's JSON, where a quote is \"
    for path in [ROOT / "README.md", *(find(folder) for folder in weeks())]:
        old = path.read_text(encoding="utf-8")
        new = re.sub(badge, rf"\g<1>{repository}/blob/{branch}", old)
        new = re.sub(clone, rf"\g<1>{repository}", new)
        new = re.sub(cell, rf"\g<1>{repository}\g<2>{branch}", new)
        if new != old:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
