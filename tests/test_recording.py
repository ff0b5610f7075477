"""`record`: an interrupted recording goes on, and nobody else's recording or notebook is touched."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import nbformat
import pytest
from tiny import H200, NO_GPU, rows_at, write

from shared import notebook
from shared.journal import VARIABLE, Journal
from shared.machine import Machine, versions

A100 = Machine("NVIDIA A100-SXM4-80GB", "cuda", 80, 80 * 10**9, 40 * 10**6)
LESSON = [  # it writes down what it measures, and stops on the way when there is a file of that name
    "from pathlib import Path\nfrom shared.machine import setup\nfrom shared.results import measure_or_recall\nsetup()",
    """
def measure(experiment):
    with open("measured", "a") as file:
        print(experiment, file=file)
    return [{"provider": "this kernel", "n": 2**31 + 1, "ms": 0.5 + len(Path("measured").read_text())}]
""",
    'measure_or_recall("speed", lambda: measure("speed"))',
    'assert not Path("broken").exists()\nif Path("stopped").exists():\n    raise KeyboardInterrupt',
    'measure_or_recall("backward", lambda: measure("backward"))',
]


@pytest.fixture
def lesson(course, on, in_process):
    """The folder of a course's only week, whose notebook measures "speed" and then "backward", on an H200."""
    write(course, *LESSON)
    on(H200)
    return course


@pytest.fixture
def interrupted(lesson):
    """The folder of such a week after a recording that was interrupted between the two."""
    record(lesson, stopped=True)
    return lesson


def record(week, *words, stopped=False):
    """Give the command, interrupted in this week or not; return its exit status."""
    if stopped:
        (week / "stopped").touch()
    status = notebook.main(["record", *words])
    (week / "stopped").unlink(missing_ok=True)
    return status


def another(course):
    """The folder of a second week with the same lesson."""
    week = course.parent / "week02_tiny"
    week.mkdir()
    write(week, *LESSON)
    return week


def measured(week):
    """What a week's notebook has measured so far, in order."""
    return (week / "measured").read_text().split() if (week / "measured").exists() else []


def rows(week, experiment, gpu="nvidia-h200"):
    """The lines of an experiment in a GPU's CSV."""
    lines = (week / f"results/{gpu}.csv").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(experiment)]


def journals(week):
    return sorted(path.name for path in week.parent.glob("recording-*"))


# an interrupted recording goes on


def test_an_interruption_keeps_what_was_recorded(interrupted):
    assert len(rows(interrupted, "speed")) == 1
    assert journals(interrupted) == ["recording-nvidia-h200.unfinished"]


def test_what_was_recorded_is_not_measured_again(interrupted):
    assert record(interrupted) == 0
    assert measured(interrupted) == ["speed", "backward"]


def test_the_rows_of_before_are_kept(interrupted):
    before = rows(interrupted, "speed")
    record(interrupted)
    assert rows(interrupted, "speed") == before
    assert len(rows(interrupted, "backward")) == 1


def test_it_says_what_was_recorded_before(interrupted, capsys):
    record(interrupted)
    said = capsys.readouterr().out
    assert "tiny  goes on after the interruption; recorded already: speed\n" in said
    assert "recorded: speed, backward" in said


def test_the_notebook_shows_the_rows_of_before(interrupted):
    record(interrupted)
    shown = nbformat.read(interrupted / "tiny.ipynb", as_version=4).cells[3].outputs[0].text
    assert shown == "Recorded 1 rows of 'speed' before the interruption, in results/nvidia-h200.csv\n"


def test_a_success_takes_the_journal_away(lesson):
    assert record(lesson) == 0
    assert journals(lesson) == []


def test_a_resumed_success_takes_the_journal_away(interrupted):
    record(interrupted)
    assert journals(interrupted) == []


def test_after_a_success_all_is_measured_again(lesson):
    record(lesson)
    record(lesson)
    assert measured(lesson) == ["speed", "backward"] * 2


def test_a_failure_leaves_the_journal(lesson, capsys):
    (lesson / "broken").touch()
    assert record(lesson) == 1
    assert "FAILED in tiny.ipynb, cell 5: AssertionError" in capsys.readouterr().out
    assert journals(lesson) == ["recording-nvidia-h200.unfinished"]


def test_after_a_failure_it_goes_on(lesson):
    (lesson / "broken").touch()
    record(lesson)
    (lesson / "broken").unlink()
    assert record(lesson) == 0
    assert measured(lesson) == ["speed", "backward"]


def test_a_failed_week_keeps_its_experiments_when_the_next_one_runs(lesson):
    another(lesson)
    (lesson / "broken").touch()
    record(lesson)
    (lesson / "broken").unlink()
    assert record(lesson) == 0
    assert measured(lesson) == ["speed", "backward"]


def test_finished_weeks_are_left_out(lesson, capsys):
    second = another(lesson)
    record(second, stopped=True)
    assert record(second) == 0
    assert measured(lesson) == ["speed", "backward"]
    assert measured(second) == ["speed", "backward"]
    assert "week01_tiny: recorded before the interruption (--fresh" in capsys.readouterr().out


def test_several_interruptions_are_one(interrupted):
    record(interrupted, stopped=True)
    record(interrupted, stopped=True)
    assert record(interrupted) == 0
    assert measured(interrupted) == ["speed", "backward"]


def test_other_prose_is_the_same_recording(interrupted):
    write(interrupted, *LESSON, title="# Another title", executed="other outputs")
    record(interrupted)
    assert measured(interrupted) == ["speed", "backward"]


def test_a_week_by_name_or_number_is_the_same_recording(lesson):
    record(lesson, "1", stopped=True)
    assert record(lesson, "week01_tiny") == 0
    assert measured(lesson) == ["speed", "backward"]


@pytest.mark.parametrize("name", ["1", "01", "week01_tiny", "week01_tiny/"])
def test_a_week_goes_by_number_or_name(name, lesson):
    assert record(lesson, name) == 0
    assert measured(lesson) == ["speed", "backward"]


def test_a_week_asked_for_twice_is_recorded_once(lesson, capsys):
    assert record(lesson, "1", "1", "week01_tiny") == 0
    assert measured(lesson) == ["speed", "backward"]
    assert "1 of 1 notebooks ran through" in capsys.readouterr().out


# what starts anew


def code_changes(week, monkeypatch):
    write(week, *LESSON, "x = 1")


def versions_change(week, monkeypatch):
    monkeypatch.setattr(notebook, "versions", lambda: versions() | {"triton": "99.0"})


def more_weeks(week, monkeypatch):
    another(week)


@pytest.mark.parametrize("change", [code_changes, versions_change, more_weeks])
def test_another_recording_starts_anew(change, interrupted, monkeypatch):
    change(interrupted, monkeypatch)
    assert record(interrupted) == 0
    assert measured(interrupted) == ["speed", "speed", "backward"]


def test_another_day_is_the_same_recording(interrupted, monkeypatch):
    monkeypatch.setattr(notebook, "versions", lambda: versions() | {"date": "2001-01-01"})
    record(interrupted)
    assert measured(interrupted) == ["speed", "backward"]


def test_fresh_starts_anew(interrupted):
    assert record(interrupted, "--fresh") == 0
    assert measured(interrupted) == ["speed", "speed", "backward"]


def test_a_finished_week_whose_code_changes_starts_anew(lesson):
    second = another(lesson)
    record(second, stopped=True)
    write(lesson, *LESSON, "x = 1")
    assert record(second) == 0
    assert measured(lesson) == ["speed", "backward"] * 2
    assert measured(second) == ["speed", "backward"]


@pytest.mark.parametrize("text", ["", '{"about": {"gpu": "NVI', "[]", "\0\0\0", "\udcff"])
def test_a_damaged_journal_starts_anew(text, interrupted):
    (journal,) = interrupted.parent.glob("recording-*")
    journal.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert record(interrupted) == 0
    assert measured(interrupted) == ["speed", "speed", "backward"]
    assert journals(interrupted) == []


def test_rows_that_are_gone_are_measured_again(interrupted):
    (interrupted / "results/nvidia-h200.csv").unlink()
    record(interrupted)
    assert measured(interrupted) == ["speed", "speed", "backward"]


def test_an_interrupted_write_leaves_the_old_journal(tmp_path, monkeypatch):
    def half(data, **options):
        raise KeyboardInterrupt

    Journal(tmp_path / "recording.unfinished").begin({"gpu": "a"})
    monkeypatch.setattr(json, "dumps", half)
    with pytest.raises(KeyboardInterrupt):
        Journal(tmp_path / "recording.unfinished").begin({"gpu": "b"})
    assert Journal(tmp_path / "recording.unfinished").data["about"] == {"gpu": "a"}


# without `record`


def test_without_record_a_notebook_measures(interrupted):
    assert notebook.main(["run"]) == 0
    assert measured(interrupted) == ["speed", "speed", "backward"]


@pytest.mark.parametrize("stopped", [True, False])
def test_nobody_is_told_of_a_recording_that_has_ended(stopped, lesson):
    record(lesson, stopped=stopped)
    assert VARIABLE not in os.environ


def test_without_a_gpu_a_notebook_recalls_whatever_the_journal_says(interrupted, on, capsys):
    on(NO_GPU)
    assert notebook.main(["run"]) == 0
    assert measured(interrupted) == ["speed"]
    assert "recalled: speed" in capsys.readouterr().out


# several GPUs


def test_a_gpu_writes_its_own_file_alone(lesson, on):
    record(lesson)
    before = (lesson / "results/nvidia-h200.csv").read_bytes()
    on(A100)
    record(lesson)
    assert (lesson / "results/nvidia-h200.csv").read_bytes() == before
    assert len(rows(lesson, "backward", "nvidia-a100-sxm4-80gb")) == 1


def test_two_gpus_have_a_journal_each(interrupted, on):
    on(A100)
    record(interrupted, stopped=True)
    assert journals(interrupted) == ["recording-nvidia-a100-sxm4-80gb.unfinished", "recording-nvidia-h200.unfinished"]
    assert measured(interrupted) == ["speed", "speed"]


def test_a_gpu_goes_on_after_another_has_finished(interrupted, on):
    on(A100)
    assert record(interrupted) == 0
    on(H200)
    assert record(interrupted) == 0
    assert measured(interrupted) == ["speed", "speed", "backward", "backward"]


def test_the_verdict_is_of_this_gpus_times(course, on, in_process, recorded, capsys):
    recorded(H200, "speed", rows_at(4096, rival=3.0))
    write(course, f"from shared.results import measure_or_recall\nmeasure_or_recall('speed', lambda: {rows_at(4096)})")
    on(A100)
    record(course)
    assert re.search(r"against the fastest rival: 2.00x \(.*\) to 2.00x ", capsys.readouterr().out)


# whose notebook is saved

HEADS = {gpu: f"{gpu} · torch 2.0.0 · triton 3.0.0 · 2026-01-01\n" for gpu in ("no GPU", H200.name, A100.name)}


@pytest.mark.parametrize(
    ("shown", "options", "saved"),
    [
        ("", [], True),
        (HEADS["no GPU"], [], True),
        (HEADS[H200.name], [], True),
        (HEADS[A100.name], [], False),
        (HEADS[A100.name], ["--replace"], True),
    ],
    ids=["no outputs", "no GPU's", "this GPU's", "another GPU's", "another GPU's, --replace"],
)
def test_a_notebook_is_saved_unless_it_shows_another_gpu(shown, options, saved, lesson, capsys):
    path = write(lesson, *LESSON, executed=shown)
    before = path.read_bytes()
    assert record(lesson, *options) == 0
    assert (path.read_bytes() != before) == saved
    kept = "the notebook still shows NVIDIA A100-SXM4-80GB (--replace saves this GPU's)"
    assert (kept in capsys.readouterr().out) == (not saved)
    assert len(rows(lesson, "backward")) == 1


def test_a_saved_notebook_shows_this_gpu(lesson):
    record(lesson)
    assert notebook.shown_gpu(lesson / "tiny.ipynb") == "NVIDIA H200"


@pytest.mark.parametrize("file", ["stopped", "broken"])
def test_a_notebook_that_did_not_run_through_stays(file, lesson):
    before = (lesson / "tiny.ipynb").read_bytes()
    (lesson / file).touch()
    notebook.main(["record"])
    assert (lesson / "tiny.ipynb").read_bytes() == before


# Ctrl-C

ELSEWHERE = """
    import pathlib, sys
    from shared import cells, machine, notebook
    cells.ROOT = notebook.ROOT = pathlib.Path.cwd()
    notebook.machine = lambda: machine.Machine("NVIDIA H200", "cuda")
    sys.exit(notebook.main(["record"]))
"""
PRETEND = "import shared.machine\nshared.machine.machine = lambda: shared.machine.Machine('NVIDIA H200', 'cuda')"


def test_ctrl_c_ends_the_command_in_one_line_and_keeps_what_was_recorded(course):
    lesson = [PRETEND, *LESSON[:3], "import time\ntime.sleep(60)"]
    before = write(course, *lesson).read_bytes()
    write(another(course), *lesson)
    command = [sys.executable, "-u", "-c", textwrap.dedent(ELSEWHERE)]
    place = {"cwd": course.parent, "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **place) as process:
        said = next(line for line in process.stdout if "cell 6 of 6" in line or "Error" in line)
        assert "cell 6 of 6" in said
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert rest == "Interrupted. The same command goes on from here.\n"
    assert process.returncode == 130
    assert Journal(course.parent / "recording-nvidia-h200.unfinished").recorded("week01_tiny") == ["speed"]
    assert len(rows(course, "speed")) == 1
    assert (course / "tiny.ipynb").read_bytes() == before


def test_an_interrupted_run_promises_nothing(lesson, capsys):
    (lesson / "stopped").touch()
    assert notebook.main(["run"]) == 130
    assert capsys.readouterr().out.endswith("\nInterrupted.\n")
