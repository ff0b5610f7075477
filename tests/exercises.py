"""Run one exercise of a notebook apart from the rest of it: its check cell with the stub, the solution or an answer."""

import contextlib
import io
from functools import cache

import nbformat

from shared.cells import execute, find
from shared.sources import statements_of

SHOW = "from IPython.display import display\n"  # which a notebook has without an import


@cache
def _cells(week: int) -> dict[str, list]:
    """The code cells' statements by the cell's id; a statement is (names bound, names used, text)."""
    cells = nbformat.read(find(week), as_version=4).cells
    return {cell.id: statements_of(cell.source + "\n") for cell in cells if cell.cell_type == "code"}


def checks(week: int) -> list[str]:
    """The ids of a week's cells that check an exercise, in order."""
    return [name for name in _cells(week) if name.endswith("-check")]


def solution(check: str) -> str:
    """The id of the cell with the solution to the exercise that the cell ``check`` checks."""
    return "solution-" + check.removesuffix("-check")


def run(week: int, cell: str, answer: str = "") -> str:
    """What a check or solution cell prints when just those statements of the notebook ran before it that it needs.

    ``answer`` is what a reader wrote: it stands in for the definitions of the same names in the stub's cell.
    """
    before = []
    for name, statements in _cells(week).items():
        if name == cell:
            break
        if answer and name == cell.removesuffix("-check"):
            own = statements_of(answer)
            answered = set().union(*(bound for bound, _, _ in own))
            statements = [*(s for s in statements if not s[0] & answered), *own]
        before += statements
    steps = _cells(week)[cell]
    said = io.StringIO()
    with contextlib.chdir(find(week).parent), contextlib.redirect_stdout(said):
        execute([SHOW, *_needed(before, steps), "print('\\f')\n", *(text for _, _, text in steps)])
    return said.getvalue().partition("\f\n")[2]


def _needed(before: list, steps: list) -> list[str]:
    """The texts among the statements ``before`` that bind a name which ``steps``, or one of these, use."""
    wanted, count = set().union(*(used for _, used, _ in steps)), -1
    while len(wanted) > count:
        count = len(wanted)
        wanted |= set().union(*(used for bound, used, _ in before if bound & wanted))
    return [text for bound, _, text in before if bound & wanted]
