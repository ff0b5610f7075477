"""Kernels out of notebooks on disk."""

import inspect
import json
import os

import pytest

from shared import cells


def write_week(root, *cell_texts, name="week01_fused_softmax", tag="kernel"):
    notebook = root / name / f"{name[7:] or 'book'}.ipynb"
    notebook.parent.mkdir(exist_ok=True)
    made = [{"cell_type": "markdown", "source": ["# Title"], "metadata": {}}]
    for text in cell_texts:
        metadata = {"tags": [tag]} if tag else {}
        lines = text.splitlines(keepends=True)
        made.append({"cell_type": "code", "source": lines, "metadata": metadata, "outputs": []})
    notebook.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return notebook


def test_load_runs_the_tagged_cells_as_one_module(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    path = write_week(tmp_path, "import math\n", "def area(r):\n    return math.pi * r * r\n")
    assert list(cells.weeks()) == ["week01_fused_softmax"] and cells.find(1) == path
    module = cells.load("week01_fused_softmax")
    assert module is cells.load(1) is cells.load("1")
    assert module.area(1) == pytest.approx(3.14159, abs=1e-4)
    assert inspect.getsource(module.area).startswith("def area(r):")
    path.write_text(path.read_text().replace("r * r", "2 * r"))
    os.utime(path, ns=(1, 1))
    assert cells.load(1).area(1) == pytest.approx(6.28319, abs=1e-4)


def test_load_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    write_week(tmp_path, "x = 1", name="week02", tag=None)
    (tmp_path / "week03_flash_attention").mkdir()
    for week in (7, "week7", "week03_flash_attention", 0, ""):
        with pytest.raises(ValueError, match="week02, week03_flash_attention"):
            cells.load(week)
    with pytest.raises(ValueError, match=r"week02/book\.ipynb has no cell tagged `kernel`"):
        cells.load(2)
