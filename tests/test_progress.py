"""Long work says how far it is, and short work nothing."""

from types import SimpleNamespace

import pytest

from shared import progress as module
from shared.progress import progress, step


@pytest.fixture
def wait(monkeypatch):
    """``wait(4)``: four seconds go by."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


@pytest.fixture
def said(capsys):
    """``said()``: the lines since it was called last."""
    return lambda: capsys.readouterr().out.splitlines()


def test_short_work_says_nothing(wait, said):
    with progress("cases", 3):
        for _ in range(3):
            wait(3.3)
            step()
    assert said() == []


def test_long_work_says_how_much_of_it_is_done(wait, said):
    with progress("cases", 36):
        for _ in range(3):
            wait(4)
            step()
    assert said() == ["  … 3 of 36 cases after 12 s"]


def test_without_a_total_it_says_how_much_is_done(wait, said):
    with progress("sizes of 'speed' timed"):
        wait(10)
        step(2)
    assert said() == ["  … 2 sizes of 'speed' timed after 10 s"]


def test_it_says_so_every_ten_seconds(wait, said):
    with progress("cases", 9):
        for _ in range(9):
            wait(5)
            step()
    assert [line.split()[1] for line in said()] == ["2", "4", "6", "8"]


def test_when_all_is_done_it_says_nothing(wait, said):
    with progress("cases", 2):
        step()
        wait(60)
        step()
    assert said() == []


def test_work_within_work_counts_for_itself(wait, said):
    with progress("kernels", 3):
        wait(6)
        step()
        with progress("cases", 5):
            wait(6)
            step()
            assert said() == []
            wait(6)
            step()
            assert said() == ["  … 2 of 5 cases after 12 s"]
        step()
        assert said() == ["  … 2 of 3 kernels after 18 s"]


def test_work_that_fails_counts_no_more(wait, said):
    with progress("kernels", 2):
        with pytest.raises(KeyError), progress("cases", 5):
            raise KeyError
        wait(11)
        step()
    assert said() == ["  … 1 of 2 kernels after 11 s"]


def test_a_step_outside_of_work_is_harmless(wait, said):
    wait(60)
    step()
    assert said() == []
