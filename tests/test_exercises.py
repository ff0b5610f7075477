"""Every exercise knows the right answer, the stub, and answers that only look right."""

import importlib
import re

import pytest
from common import quiet
from exercises import checks, run, solution

pytestmark = quiet
WEEKS = range(1, 10)
EXERCISES = [(week, check) for week in WEEKS for check in checks(week)]
WRONG = {week: importlib.import_module(f"wrong_answers.week{week:02d}").ANSWERS for week in WEEKS}
ANSWERS = [(week, check, name) for week, found in WRONG.items() for check in found for name in found[check]]


def lines(printed: str) -> list[str]:
    """The verdicts among the lines that an exercise prints."""
    return [line for line in printed.splitlines() if line.startswith(("Solved", "Not "))]


@pytest.mark.versions
@pytest.mark.parametrize(("week", "check"), EXERCISES)
def test_the_solution_is_accepted(week, check):
    (verdict,) = lines(run(week, solution(check)))
    assert verdict.startswith("Solved: ")


@pytest.mark.versions
@pytest.mark.parametrize(("week", "check"), EXERCISES)
def test_the_stub_is_not(week, check):
    (verdict,) = lines(run(week, check))
    assert verdict.startswith("Not right yet: " if check == "repair-check" else "Not solved yet: ")


@pytest.mark.parametrize(("week", "check", "name"), ANSWERS)
def test_a_wrong_answer_is_rejected_with_a_hint(week, check, name):
    answer, hint = WRONG[week][check][name]
    printed = run(week, check, answer)
    assert "Not solved yet" not in printed
    assert re.search(hint, printed), printed


@pytest.mark.parametrize("week", WEEKS)
def test_every_exercise_has_two_wrong_answers_and_every_week_a_broken_kernel(week):
    assert set(WRONG[week]) == set(checks(week))
    assert all(len(answers) >= 2 for answers in WRONG[week].values())
    assert checks(week)[0] == "repair-check" and 2 <= len(checks(week)) <= 3
