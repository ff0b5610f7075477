"""Load a week's kernels; run notebooks without a browser; record them on a GPU; keep the README up to date.

    python -m shared.notebook run [WEEK …]       execute (all weeks when none is named); the notebook stays as it is
    python -m shared.notebook record [WEEK …]    on a GPU: execute, and save times in results/<gpu>.csv
    python -m shared.notebook readme             the README's figure and table, from the recordings
    python -m shared.notebook stamp OWNER/REPO [BRANCH]   the course's address on GitHub, in badges and cells

A WEEK is a number or a folder name. A recording that was interrupted goes on where it stopped when the command is given
again; --fresh starts anew. `record` saves the executed notebook too, unless its plots are another GPU's: then only with
--replace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from shared import readme
from shared.cells import ROOT, find, load, weeks
from shared.journal import VARIABLE, Journal
from shared.machine import machine, versions
from shared.progress import SIGN

__all__ = ["load", "notebooks", "record", "run"]


def notebooks() -> list[Path]:
    """The weeks' notebooks, in order."""
    return [path for folder in weeks().values() for path in sorted(folder.glob("*.ipynb"))]


def _text(cell) -> str:
    """Everything that a cell printed or returned as text."""
    return "\n".join(
        out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])
    )


class _Client(NotebookClient):
    """One that Ctrl-C ends at once, with KeyboardInterrupt: nbclient's own stops as if the notebook had failed.

    What :mod:`shared.progress` says goes to the terminal at once, and is no part of the notebook.
    """

    interrupted = False

    async def async_start_new_kernel(self, **options):
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt():
            self.interrupted, self.shutdown_kernel = True, "immediate"
            task.cancel()

        with contextlib.suppress(RuntimeError, ValueError):  # where there are no signals, or in a second thread
            loop.add_signal_handler(signal.SIGINT, interrupt)
        await super().async_start_new_kernel(**options)

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream":
            lines = msg["content"]["text"].splitlines(keepends=True)
            print("".join(line for line in lines if line.startswith(SIGN)), end="", flush=True)
            msg["content"]["text"] = "".join(line for line in lines if not line.startswith(SIGN))
            if not msg["content"]["text"]:
                return None
        return super().process_message(msg, cell, cell_index)

    def run(self) -> None:
        try:
            self.execute()
        except (Exception, asyncio.CancelledError):
            if self.interrupted:
                raise KeyboardInterrupt from None
            raise


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

    client = _Client(
        notebook, timeout=600, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(path.parent)}}, on_cell_start=progress,
        extra_arguments=["--IPKernelApp.log_level=40"],  # its remark on unencrypted ports is for shared machines
    )  # fmt: skip
    try:
        client.run()
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
    kept = [line.split(",")[0] for line in said if re.match(r"(Recorded|Recalled) [^,]*'", line)]
    verb = kept[0].split()[0].lower() if kept else "recorded"
    names = ", ".join(re.findall(r"'([^']+)'", " ".join(kept))) or "nothing"
    passed = f"{len(checks)} check{'s' if len(checks) != 1 else ''} passed"
    ratios = readme.speed_range(path.parent, machine().slug if machine().has_gpu else None)
    return f"{passed} · against the fastest rival: {ratios} · {verb}: {names} · {time.time() - started:.0f} s"


def shown_gpu(path: Path) -> str | None:
    """The GPU whose outputs a notebook on disk shows, from what `setup()` printed there; None when there is none."""
    cells = nbformat.read(path, as_version=4).cells
    found = [re.match(r"(.+?) · torch \S+ · triton", _text(cell)) for cell in cells if cell.cell_type == "code"]
    names = [match[1] for match in found if match and match[1] != "no GPU"]
    return names[0] if names else None


def record(paths: list[Path], *, fresh: bool = False, replace: bool = False) -> list[str]:
    """Execute notebooks on this GPU and save what they measure; return what failed, a line a notebook."""
    journal = Journal(ROOT / f"recording-{machine().slug}.unfinished")
    made_by = {name: value for name, value in versions().items() if name != "date"}
    journal.begin({"gpu": machine().name, **made_by, "weeks": [path.parent.name for path in paths]}, fresh=fresh)
    os.environ[VARIABLE] = str(journal.path)

    def one(path: Path) -> str:
        week = path.parent.name
        kept = journal.open_week(path)
        if week in journal.data["done"]:
            return "recorded before the interruption (--fresh records it anew)"
        if kept:
            print(f"  {path.stem}  goes on after the interruption; recorded already: {', '.join(kept)}")
        other = shown_gpu(path)
        save = replace or other in (None, machine().name)
        verdict = run(path, save=save)
        journal.finish(week)
        return verdict if save else f"{verdict} · the notebook still shows {other} (--replace saves this GPU's)"

    try:
        failures = _each(paths, one)
    finally:
        del os.environ[VARIABLE]  # a notebook that is run later measures
    if not failures:
        journal.path.unlink()
    return failures


def _each(paths: list[Path], action) -> list[str]:
    """Do ``action`` to each notebook and print what it says; return what failed."""
    failures = []
    for path in paths:
        print(f"{path.parent.name}", flush=True)
        try:
            print(f"{path.parent.name}: {action(path)}", flush=True)
        except RuntimeError as error:
            failures.append(str(error))
            print(f"{path.parent.name}: FAILED in {error}", flush=True)
    print(f"{len(paths) - len(failures)} of {len(paths)} notebooks ran through")
    return failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shared.notebook", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "record", "readme", "stamp"])
    parser.add_argument("words", nargs="*", metavar="WEEK", help="a number or a folder name; all when none is named")
    parser.add_argument("--fresh", action="store_true", help="record: start anew after an interruption")
    parser.add_argument("--replace", action="store_true", help="record: save notebooks that show another GPU, too")
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.command == "record" and not machine().has_gpu:
        print("record needs a GPU that PyTorch can use: it saves measured times, and without one none can be measured.")
        return 1
    try:
        if chosen.command == "stamp":
            if len(chosen.words) not in (1, 2):
                parser.error("stamp needs OWNER/REPO and perhaps a BRANCH")
            changed = readme.stamp(*chosen.words)
            print(f"{len(changed)} files changed")
            return 0
        if chosen.command == "readme":
            readme.write()
            print(f"README.md and {readme.FIGURE} are up to date")
            return 0
        paths = list(dict.fromkeys(find(week) for week in chosen.words)) or notebooks()
    except ValueError as error:
        print(error)
        return 2
    try:
        if chosen.command == "record":
            failures = record(paths, fresh=chosen.fresh, replace=chosen.replace)
        else:
            failures = _each(paths, run)
    except KeyboardInterrupt:
        print("Interrupted." + " The same command goes on from here." * (chosen.command == "record"))
        return 130
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
