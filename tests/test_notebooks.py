"""What every week's committed notebook must have; nbval runs their cells."""

import re
from pathlib import Path

import nbformat
import pytest
from triton.runtime import KernelInterface

from shared import notebook
from shared.cells import ROOT, load

HEADINGS = [
    "The idea",
    "What should it cost?",
    "What PyTorch does",
    "The kernel",
    "Is it right?",
    "How fast?",
    "How much memory?",
    "What did the compiler make of it?",
    "Takeaway",
    "Your turn",
]
PATHS = notebook.notebooks()
every_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def cells(path, kind="code"):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind and cell.source]


def prose(path):
    """The Markdown of a notebook or of the README, without its blocks of code."""
    texts = [path.read_text(encoding="utf-8")] if path.suffix == ".md" else [c.source for c in cells(path, "markdown")]
    return re.sub(r"```.*?```", "", "\n".join(texts), flags=re.S)


def outputs(path):
    return [output for cell in cells(path) for output in cell.outputs]


def printed(path):
    """All text in the outputs, pictures left out."""
    for output in outputs(path):
        yield output.get("text", "")
        yield from (text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


@every_notebook
def test_it_is_valid_and_small(path):
    read = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(read)
    assert read.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < 1_500_000


@every_notebook
def test_it_has_the_ten_sections_in_order(path):
    assert re.findall(r"^## (.+?)\s*$", prose(path), re.M) == HEADINGS


@every_notebook
def test_it_opens_with_title_links_helper_and_setup(path):
    first, helper, setup = nbformat.read(path, as_version=4).cells[:3]
    week = int(path.parent.name[4:6])
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# Week {week} · ")
    assert re.search(rf"https://colab\.research\.google\.com/github/\S+/{path.parent.name}/{path.name}", first.source)
    at = PATHS.index(path)
    for other in PATHS[max(at - 1, 0) : at] + PATHS[at + 1 : at + 2]:  # the week before and the week after
        assert f"](../{other.relative_to(ROOT).as_posix()})" in first.source
    assert f'WEEK = "{path.parent.name}"' in helper.source
    assert "setup()" in setup.source


@pytest.mark.parametrize("path", [*PATHS, ROOT / "README.md"], ids=lambda path: path.stem)
def test_its_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"`[^`]*`", "", prose(path)))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@every_notebook
def test_its_takeaway_begins_with_two_or_three_sentences_to_repeat(path):
    quote = re.search(r"^## Takeaway\n\n> (.+)\n\n", prose(path), re.M)[1]
    assert 2 <= len(re.findall(r"[.:?!](?= |$)", quote)) <= 4, quote
    assert len(quote.split()) <= 70


@every_notebook
def test_it_has_been_executed_and_shows_its_plots(path):
    assert [cell.id for cell in cells(path) if not cell.execution_count] == []
    assert [output.ename for output in outputs(path) if output.output_type == "error"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs(path))


@every_notebook
def test_it_tells_no_machine_by_path_or_time(path):
    assert [cell.id for cell in cells(path) + cells(path, "markdown") if "execution" in cell.metadata] == []
    sources = [cell.source for cell in cells(path) + cells(path, "markdown")]
    folders = [str(folder) for folder in (ROOT.parent, Path.home()) if len(folder.parts) > 1]
    own = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, folders))})\b")
    assert [found for text in [*sources, *printed(path)] for found in own.findall(text)] == []
    absolute = re.compile(r"(?<![\w.:/<])/(?:[\w.-]+/)+|\b[A-Z]:\\")  # /home/me/, but neither GB/s nor https://
    assert [found for text in printed(path) for found in absolute.findall(text)] == []


@every_notebook
def test_its_cells_are_short(path):
    assert [cell.id for cell in cells(path) if len(cell.source.splitlines()) > 60] == []


@every_notebook
def test_its_kernel_cells_import_what_they_need(path):
    assert any(isinstance(value, KernelInterface) for value in vars(load(path.parent.name)).values())


def test_every_week_is_there_once():
    assert [path.parent.name for path in PATHS] == sorted({path.parent.name for path in PATHS})
    assert PATHS
