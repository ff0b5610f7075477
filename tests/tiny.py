"""A course of one tiny week, recordings in it, and GPUs that are not there."""

import contextlib
import io

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from shared import cells, machine, notebook, readme, results, timing
from shared.machine import Machine
from shared.results import OURS, measure_or_recall

NO_GPU = Machine("no GPU", "cpu")
H200 = Machine("NVIDIA H200", "cuda", 90, 150 * 10**9, 60 * 10**6)
T4 = Machine("Tesla T4", "cuda", 75, 16 * 10**9, 4 * 10**6)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of one week, "week01_tiny", whose folder is the working directory."""
    week = tmp_path / "week01_tiny"
    week.mkdir()
    for module in (cells, notebook, readme):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(week)
    return week


@pytest.fixture
def on(monkeypatch):
    """``on(H200)``: the modules take this machine to be that one."""

    def pretend(other):
        for module in (machine, results, timing, notebook):
            monkeypatch.setattr(module, "machine", lambda: other)

    return pretend


@pytest.fixture
def recorded(course, on):
    """``recorded(machine, experiment, rows)`` in the course, and then no GPU again."""

    def record(here, experiment, rows):
        on(here)
        measure_or_recall(experiment, lambda: rows)
        on(NO_GPU)

    on(NO_GPU)
    return record


def rows_at(*sizes, rival=2.0):
    """Rows as :func:`timing.compare` returns them: this kernel takes 1 ms, its best rival ``rival`` ms."""
    times = {OURS: 1.0, "slow": 9.0, "torch": rival, "unfused (eager)": 0.1}
    found = []
    for n in sizes:
        for name, ms in times.items():
            row = {"provider": name, "dtype": "bfloat16", "n_cols": n, "ms": ms, "ms_p20": ms, "ms_p80": ms}
            found.append(row | {"gbps": 7.5})
    return found


def write(week, *sources, executed="", title="# Tiny"):
    """A notebook of these code cells in the week's folder; ``executed``: what each of them printed."""
    made = [nbformat.v4.new_markdown_cell(title), *map(nbformat.v4.new_code_cell, sources)]
    for count, cell in enumerate(made[1:], 1):
        if executed:
            cell.update(execution_count=count, outputs=[nbformat.v4.new_output("stream", text=executed)])
    path = week / "tiny.ipynb"
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "author": "me"}
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=metadata), path)
    return path


class InProcess:
    """In the place of Jupyter: runs a notebook's code here, so that it takes no time and sees what fixtures pretend."""

    def __init__(self, notebook, *, resources, on_cell_start, **options):
        self.cells, self.folder, self.starts = notebook.cells, resources["metadata"]["path"], on_cell_start

    def run(self):
        names = {}
        with contextlib.chdir(self.folder):
            for index, cell in enumerate(self.cells):
                self.starts(cell=cell, cell_index=index)
                if cell.cell_type == "code":
                    self.execute(cell, names)

    def execute(self, cell, names):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                exec(cell.source, names)
            except Exception as error:
                raise CellExecutionError("", type(error).__name__, str(error)) from error
        cell.outputs = [nbformat.v4.new_output("stream", text=said.getvalue())]


@pytest.fixture
def in_process(monkeypatch):
    """``notebook.run`` and ``record`` run notebooks in this process."""
    monkeypatch.setattr(notebook, "_Client", InProcess)
