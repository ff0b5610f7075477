"""Live definitions, taken from the cells that ran, and run again in another process."""

import inspect
import linecache
import os
import sys

import pytest
import torch
from IPython.core.compilerop import CachingCompiler

from shared import cells
from shared.sources import sources

pytestmark = pytest.mark.versions

KERNEL = """\
@triton.jit
def scale_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, twice(tl.load(x_ptr + at)) * FACTOR)

def scale(x):
    scale_kernel[(1,)](x, BLOCK=WIDTH)
    return x
"""
HELPER = "@triton.jit\ndef twice(x):\n    return 2 * x\n"


class Notebook:
    """Runs cells in one namespace as IPython does, which keeps their text for `linecache`."""

    def __init__(self):
        self.names, self.compiler, self.count = {"__name__": "__main__"}, CachingCompiler(), 0

    def run(self, text):
        self.count += 1
        file = self.compiler.cache(text, self.count)
        exec(compile(text, file, "exec"), self.names)

    def __getitem__(self, name):
        return self.names[name]


@pytest.fixture
def notebook():
    book = Notebook()
    book.run("import torch\nimport triton\nimport triton.language as tl\nfrom pathlib import Path as P")
    book.run("FACTOR = tl.constexpr(10)\nWIDTH = 4")
    book.run(HELPER + "raise_if_run_again = print('a cell may say something')")
    book.run(KERNEL + "shown = [scale_kernel.fn.__name__ for _ in range(2)]\nprint(shown)")
    return book


def run_scale(function, *arguments):
    return function(torch.ones(4)).tolist(), *arguments, os.environ.get("TRITON_INTERPRET")


def fail(_):
    raise KeyError("a reason")


def die(_):
    print("last words", file=sys.stderr)
    os.abort()


def notebook_again():
    return Notebook()


def names(objects):
    return [type(each).__name__ + " " + each.__name__ for each in objects]


def test_a_live_function_takes_along_what_it_needs_and_nothing_else(notebook):
    texts = sources(notebook["scale"])
    whole = "\n".join(texts)
    assert whole.index("def twice") < whole.index("def scale_kernel") < whole.index("def scale(x)")
    assert not any(word in whole for word in ("print", "shown", "raise_if", "Path", "import torch"))
    for text in texts:  # line numbers hold, for Triton's messages and its line information
        if "def scale(x)" in text:
            assert text.splitlines().index("def scale(x):") == KERNEL.splitlines().index("def scale(x):")


def test_what_the_reader_edited_last_counts(notebook):
    answer = cells.in_subprocess(run_scale, notebook["scale"], "passed on", interpret=True)
    assert answer == ([20.0] * 4, "passed on", "1")
    notebook.run(HELPER.replace("2 * x", "3 * x"))
    notebook.run("FACTOR = tl.constexpr(100)")
    assert cells.in_subprocess(run_scale, notebook["scale"], interpret=True)[0] == [300.0] * 4
    notebook.run("def one():\n    return 1\n\ndef total(x):\n    return x + one()\n")
    notebook.run("def one():\n    return 2\n")  # the cell of `total` still has the first
    assert cells.in_subprocess(run_scale, notebook["total"], interpret=True)[0] == [3.0] * 4
    again = cells.execute(sources(notebook["scale"]), "again")
    assert sources(again.scale)[-1] == sources(notebook["scale"])[-1]


def test_classes_wrappers_and_second_names_are_followed(notebook):
    notebook.run(
        "import functools\nimport dataclasses\nfrom torch.nn.functional import silu\n"
        "@dataclasses.dataclass\nclass Limit:\n    most: float = 1.0\n    def clip(self, x): return min(x, self.most)\n"
        "LIMIT = Limit(2.0)\nCHOICES = [triton.Config({'BLOCK': 4}, num_warps=2), LIMIT.most]\n"
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * LIMIT.clip(5.0)\n"
        "    @staticmethod\n    def backward(ctx, g): return g * 2\n"
        "double = Double.apply\nfirst = functools.wraps(double)(lambda x: double(x))\n"
    )
    notebook.run("alias = scale\n@torch.no_grad()\ndef both(x): return alias(double(silu(x) * 0 + x)) + len(CHOICES)\n")
    assert cells.in_subprocess(run_scale, notebook["both"], interpret=True)[0] == [42.0] * 4
    assert cells.in_subprocess(run_scale, notebook["double"], interpret=False) == ([2.0] * 4, None)
    kinds = cells.in_subprocess(names, [notebook["Double"], torch.nn.functional.silu, torch.exp], interpret=False)
    assert kinds == ["FunctionMeta Double", "function silu", "builtin_function_or_method exp"]


def test_a_magic_in_a_cell_stays_behind(notebook):
    notebook.names["get_ipython"] = lambda: type("Shell", (), {"run_line_magic": print})
    notebook.run("get_ipython().run_line_magic('matplotlib', 'inline')\ndef plain():\n    return 1\n")
    assert [text.strip() for text in sources(notebook["plain"])] == ["def plain():\n    return 1"]


def test_a_function_of_a_file_works_too():
    assert "class Notebook" in "".join(sources(notebook_again))
    assert sources(names)[0].endswith(inspect.getsource(names))


def test_what_has_no_source_is_refused(notebook):
    notebook.run("def outer():\n    def inner(): pass\n    return inner\nnameless = lambda: 1\n")
    del linecache.cache[notebook["twice"].fn.__code__.co_filename]
    for value in (lambda: 0, notebook["nameless"], notebook["twice"], notebook["outer"]()):
        with pytest.raises(ValueError, match="no source"):
            sources(value)
    first = notebook["outer"]
    notebook.run("def outer(): pass")
    with pytest.raises(ValueError, match="two definitions of outer"):
        sources(first, notebook["outer"])


def test_the_other_process_says_why_it_failed(notebook):
    with pytest.raises(RuntimeError, match=r"(?s)fail failed in its own process.*KeyError: 'a reason'"):
        cells.in_subprocess(fail, notebook["scale"], interpret=False)
    with pytest.raises(RuntimeError, match=r"(?s)status -6.*last words"):
        cells.in_subprocess(die, notebook["scale"], interpret=False)
