"""Load a week's kernels; run notebooks without a browser; record them on a GPU; write the README's table.

    python -m shared.notebook run [WEEK …]      execute (all weeks when none is named); the notebook stays as it is
    python -m shared.notebook record [WEEK …]   on a GPU: execute, save the notebooks and results/<gpu>.csv
    python -m shared.notebook table             write the table of results into README.md

A WEEK is a number or a folder name.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from shared.cells import ROOT, find, load, weeks
from shared.machine import machine
from shared.results import ratios, recording

__all__ = ["load", "run", "table"]
NOT_SIZES = {"experiment", "provider", "gpu", "torch", "triton", "date", "gbps", "tflops", "copy_gbps"}
MEASURED = ("ms", "peak", "held", "extra", "logits")  # how the names of other columns that are no sizes begin


def notebooks() -> list[Path]:
    """The weeks' notebooks, in order."""
    return [path for folder in weeks().values() for path in sorted(folder.glob("*.ipynb"))]


def _text(cell) -> str:
    """Everything that a cell printed or returned as text."""
    return "\n".join(
        out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])
    )


def _speed(folder: Path) -> str:
    """The best and the worst ratio of this kernel against the fastest rival, from the recorded ``speed`` rows."""
    rows = recording(folder)
    rows = rows[rows["experiment"] == "speed"].dropna(axis="columns", how="all")
    if rows.empty:
        return "no speed recorded"
    sizes = [name for name in rows if name not in NOT_SIZES and not name.startswith(MEASURED)]
    sizes.sort(key=lambda name: name != "dtype")
    found = ratios(rows, sizes)
    if found.empty:
        return "no rival recorded"
    best, worst = found.loc[found["ratio"].idxmax()], found.loc[found["ratio"].idxmin()]
    label = lambda name, value: value if isinstance(value, str) else f"{name} {value:,}"
    where = lambda row: ", ".join(label(name, row[name]) for name in sizes)
    return f"{worst['ratio']:.3g}x ({where(worst)}) to {best['ratio']:.3g}x ({where(best)})"


def run(path: Path, *, save: bool = False) -> str:
    """Execute one notebook in its folder with a line of progress a cell; return its line of verdict.

    Raises RuntimeError naming notebook, cell and error when a cell fails. With ``save`` the executed notebook
    replaces the file, without timestamps.
    """
    notebook = nbformat.read(path, as_version=4)
    count, started, at = len(notebook.cells), time.time(), [0]

    def progress(cell, cell_index):
        at[0] = cell_index + 1
        if cell.cell_type == "code":
            print(
                f"  {path.stem}  {time.time() - started:5.1f} s  cell {cell_index + 1} of {count}: {cell.id}",
                flush=True,
            )

    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(path.parent)}}, on_cell_start=progress,
        extra_arguments=["--IPKernelApp.log_level=40"],  # its remark on unencrypted ports is for shared machines
    )  # fmt: skip
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        kind, said = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        said = re.sub(r"\x1b\[[0-9;]*m", "", said).strip().partition("\n")[0]
        raise RuntimeError(f"{path.name}, cell {at[0]}: {kind}: {said}") from error
    if save:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
        unfinished = path.with_suffix(".tmp")
        nbformat.write(notebook, unfinished)
        unfinished.replace(path)
    said = [line for cell in notebook.cells for line in _text(cell).splitlines()]
    checks = [line for line in said if line.startswith("Right:")]
    kept = [line.split(",")[0] for line in said if line.startswith(("Recorded ", "Recalled "))]
    kept = [line for line in kept if "so far" not in line]
    verb = kept[0].split()[0].lower() if kept else "recorded"
    names = ", ".join(re.findall(r"'([^']+)'", " ".join(kept))) or "nothing"
    passed = f"{len(checks)} check{'s' if len(checks) != 1 else ''} passed"
    speed = f"against the fastest rival: {_speed(path.parent)}"
    return f"{passed} · {speed} · {verb}: {names} · {time.time() - started:.0f} s"


def table() -> str:
    """The README's table of weeks, from the recordings: a Markdown table."""
    rows = ["| week | kernel | against the fastest rival | recorded on |", "|---|---|---|---|"]
    for path in notebooks():
        recorded = recording(path.parent)
        where = f"{recorded['gpu'].iloc[0]}, {recorded['date'].max()}" if len(recorded) else "not yet"
        link = f"[{path.stem.replace('_', ' ')}]({path.relative_to(ROOT).as_posix()})"
        rows.append(f"| {int(path.parent.name[4:6])} | {link} | {_speed(path.parent)} | {where} |")
    return "\n".join(rows)


def write_table(readme: Path = ROOT / "README.md") -> None:
    """Put :func:`table` between the two markers in the README."""
    text = readme.read_text(encoding="utf-8")
    text, found = re.subn(
        r"(<!-- table -->\n).*?(\n<!-- /table -->)", lambda m: m[1] + table() + m[2], text, flags=re.S
    )
    if not found:
        raise ValueError(f"{readme} lacks the lines <!-- table --> and <!-- /table --> between which the table stands")
    readme.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared.notebook", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "record", "table"])
    parser.add_argument("weeks", nargs="*", metavar="WEEK", help="a number or a folder name; all when none is named")
    chosen = parser.parse_args(arguments)
    if chosen.command == "table":
        write_table()
        print("README.md: the table of weeks is up to date")
        return 0
    if chosen.command == "record" and not machine().has_gpu:
        print("record needs a GPU that PyTorch can use: it saves measured times, and without one none can be measured.")
        return 1
    try:
        paths = [find(week) for week in chosen.weeks] or notebooks()
    except ValueError as error:
        print(error)
        return 2
    failures = []
    for path in paths:
        print(f"{path.parent.name}", flush=True)
        try:
            print(f"{path.parent.name}: {run(path, save=chosen.command == 'record')}", flush=True)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"{path.parent.name}: FAILED in {error}", flush=True)
    print(f"{len(paths) - len(failures)} of {len(paths)} notebooks ran through")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
