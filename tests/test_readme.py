"""What the README says in figures is what the recordings say, and its address can be written anew."""

import json
import re
import shutil

import nbformat
import pandas as pd
import pytest
from PIL import Image
from tiny import H200, rows_at, write

from shared import cells, notebook, readme
from shared.cells import ROOT
from shared.machine import Machine
from shared.results import OURS

BADGE = "[![Open in Colab](https://colab.research.google.com/x.svg)](https://colab.research.google.com/x)"
TITLE = f"# Week 1 · Tiny\n\n{BADGE}"
CHOSEN = rows_at(4096) + rows_at(8192, rival=0.5)  # 4,096 columns stand for week 1


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of this course, without its helper: README, figure, notebooks and recordings."""
    for path in [ROOT / "README.md", ROOT / readme.FIGURE, *ROOT.glob("week*/*.ipynb"), *ROOT.glob("week*/results/*")]:
        there = tmp_path / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, there)
    for module in (cells, notebook, readme):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def written(folder):
    """The table in a course's README."""
    found = re.search(r"<!-- table -->\n(.*?)\n<!-- /table -->", (folder / "README.md").read_text("utf-8"), re.S)
    assert found, "README.md has lost its markers"
    return found[1]


def carried(folder):
    """The fingerprint that a course's figure carries."""
    with Image.open(folder / readme.FIGURE) as picture:
        return picture.text["Description"]


def slow_down(path):
    """Change the recorded times of this kernel in a CSV."""
    rows = pd.read_csv(path)
    rows.loc[rows["provider"] == OURS, "ms"] *= 1.25
    rows.to_csv(path, index=False)


# the committed README


def test_the_readmes_table_is_what_the_recordings_say():
    assert written(ROOT) == readme.table(), "stale: run python -m shared.notebook readme"


def test_the_readmes_figure_is_what_the_recordings_say():
    assert carried(ROOT) == readme.digest(readme.figure_data()), "stale: run python -m shared.notebook readme"


def test_the_readme_shows_the_figure():
    assert f"]({readme.FIGURE})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figure_is_stale_when_a_time_changes(copy):
    slow_down(next(copy.glob("week09*/results/*.csv")))
    assert carried(copy) != readme.digest(readme.figure_data())


def test_the_row_of_every_week_is_stale_when_its_times_change(copy):
    for path in copy.glob("week*/results/*.csv"):
        slow_down(path)
    before, now = (table.splitlines() for table in (written(copy), readme.table()))
    assert [old == new for old, new in zip(before, now, strict=True)] == [True, True] + [False] * len(cells.weeks())


def test_writing_them_brings_them_up_to_date(copy):
    slow_down(next(copy.glob("week01*/results/*.csv")))
    assert notebook.main(["readme"]) == 0
    assert written(copy) == readme.table()
    assert carried(copy) == readme.digest(readme.figure_data())


# the table


def test_the_table_is_written_between_its_markers(course, recorded):
    write(course, title=TITLE)
    recorded(H200, "speed", CHOSEN)
    page = course.parent / "README.md"
    page.write_text("above\n<!-- table -->\nold\n<!-- /table -->\nbelow\n", encoding="utf-8")
    readme.write(page)
    assert page.read_text(encoding="utf-8") == f"above\n<!-- table -->\n{readme.table()}\n<!-- /table -->\nbelow\n"


def test_a_week_has_its_chosen_workload_and_its_range(course, recorded):
    write(course, title=TITLE)
    recorded(H200, "speed", CHOSEN)
    recorded(H200, "memory", [{"provider": OURS, "peak_mib": 1.5}])
    row = readme.table().splitlines()[2]
    assert row.startswith("| 1. [Tiny](week01_tiny/tiny.ipynb) | How often must a row be read? | ")
    assert "| 8 GB/s, 2.00x the speed of torch (bfloat16, n_cols 4,096; NVIDIA H200) | 0.50x to 2.00x |" in row
    assert row.endswith(f"| {BADGE} |")


def test_every_comparison_counts_for_the_range(course, recorded):
    write(course, title=TITLE)
    recorded(H200, "speed", CHOSEN)
    recorded(H200, "backward", rows_at(64, rival=0.25))
    recorded(H200, "rungs", rows_at(64, rival=0.125))
    assert "| 0.25x to 2.00x |" in readme.table()


ROWS = {  # what is recorded, and how the row reads
    "nothing": ([], "| not recorded | not recorded |"),
    "no rival": (CHOSEN[:1], "| not recorded | not recorded |"),
    "another workload": (rows_at(8192), "| not recorded | 2.00x to 2.00x |"),
    "other sizes": ([row | {"n": row.pop("n_cols")} for row in rows_at(4096)], "| not recorded | 2.00x to 2.00x |"),
}


@pytest.mark.parametrize(("rows", "words"), ROWS.values(), ids=ROWS)
def test_a_week_without_its_workload_has_a_row_too(rows, words, course, recorded):
    write(course, title=TITLE)
    if rows:
        recorded(H200, "speed", rows)
    assert words in readme.table()


def test_a_readme_without_markers_is_an_error(course):
    write(course, title=TITLE)
    page = course.parent / "README.md"
    page.write_text("nothing here\n", encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- table -->"):
        readme.write(page)


# the limit


@pytest.mark.parametrize(
    ("rate", "dtype", "limit"),
    [
        ("tflops", "float32", 67),
        ("tflops", "float16", 989),
        ("tflops", "bfloat16", 989),
        ("gbps", "float32", 4800),
        ("gbps", "float16", 4800),
    ],
)
def test_the_limit_is_of_the_units_that_a_workload_waits_for(rate, dtype, limit, course, recorded):
    recorded(H200, "speed", [row | {"dtype": dtype, rate: row.pop("gbps")} for row in rows_at(4096)])
    (row,) = readme.speeds(course).to_dict("records")
    assert row["share"] == pytest.approx(7.5 / limit)


def test_a_gpu_without_datasheet_has_no_share(course, recorded):
    recorded(Machine("NVIDIA B200", "cuda"), "speed", rows_at(4096))
    assert readme.speeds(course)["share"].isna().all()


# the address


def pages(folder):
    """README and notebooks of a course, by path, as text."""
    found = [folder / "README.md", *sorted(folder.glob("week*/*.ipynb"))]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in found}


def addresses(text):
    """Owner/repository and branch of every badge, and of the find-the-helper cell, in a page's text."""
    badges = re.findall(r"github/([^/\s]+/[^/\s]+)/blob/(\S+?)/week\d\d\w*/\w+\.ipynb\)", text)
    return badges + re.findall(r'REPOSITORY, BRANCH = \\"(.+?)\\", \\"(.+?)\\"', text)


ADDRESSES = [("me/course", "main"), ("A-b.c/d_e.f", "try/week01_x"), ("OWNER/REPO", "main")]


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_address_is_written_everywhere(address, copy):
    assert notebook.main(["stamp", "some/body", "else/week09"]) == 0
    assert notebook.main(["stamp", *address]) == 0
    count = len(cells.weeks())
    for name, text in pages(copy).items():
        assert addresses(text) == [address] * (count if name == "README.md" else 2), name


def test_nothing_else_is_written(copy):
    before = pages(copy)
    readme.stamp("me/course", "draft")
    assert pages(copy) != before
    readme.stamp("OWNER/REPO", "main")
    if {address for text in before.values() for address in addresses(text)} == {("OWNER/REPO", "main")}:
        assert pages(copy) == before
    plain = lambda text: re.sub(r"github/\S+?/blob/\S+?/week|REPOSITORY, BRANCH = .*?#", "", text)
    assert {name: plain(text) for name, text in pages(copy).items()} == {n: plain(text) for n, text in before.items()}


def test_notebooks_stay_valid_and_keep_their_outputs(copy):
    names = [path.relative_to(copy) for path in copy.glob("week*/*.ipynb")]
    readme.stamp("me/course", "draft")
    for name in names:
        now, then = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (copy, ROOT))
        nbformat.validate(nbformat.from_dict(now))
        assert [cell.get("outputs") for cell in now["cells"]] == [cell.get("outputs") for cell in then["cells"]]


def test_it_tells_what_it_changed(copy, capsys):
    notebook.main(["stamp", "me/course"])
    notebook.main(["stamp", "me/course"])
    count = 1 + len(cells.weeks())
    assert capsys.readouterr().out == f"{count} files changed\n0 files changed\n"


NONSENSE = [["name"], ["a/b/c"], ["a b/c"], ["a/"], ["/b"], ["a/b\n"], ["a/b", "ma in"], ["a/b", ""]]


@pytest.mark.parametrize("words", NONSENSE)
def test_nonsense_is_no_address(words, copy, capsys):
    before = pages(copy)
    assert notebook.main(["stamp", *words]) == 2
    assert "an address is OWNER/REPO" in capsys.readouterr().out
    assert pages(copy) == before


@pytest.mark.parametrize("words", [[], ["me/course", "main", "more"]])
def test_no_address_or_too_much_of_it_is_a_usage_error(words, copy, capsys):
    before = pages(copy)
    with pytest.raises(SystemExit) as ended:
        notebook.main(["stamp", *words])
    assert ended.value.code == 2
    assert "stamp needs OWNER/REPO" in capsys.readouterr().err
    assert pages(copy) == before
