"""What a wrong output looks like: each slip has its hint, and no other output has one."""

import math

import pytest
import torch

from shared.checks import compare_all, difference
from shared.hints import hint, swapped

WANT = torch.randn(24, 24, generator=torch.Generator().manual_seed(1)).double()
WIDE = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)).double()


def but(want, index, value):
    """``want`` with other values at ``index``: a number, or a function of those that should be there."""
    got = want.clone()
    got[index] = value(got[index]) if callable(value) else value
    return got


def remark(got, want):
    """The hint on an output, as the checks ask for it."""
    near = torch.isclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
    return hint(got, want, ~near)


SLIPS = {  # output, what is expected, the hint
    "transpose": (WANT.T, WANT, "it is the transpose of what is expected"),
    "transposes": (WANT.view(9, 8, 8).mT, WANT.view(9, 8, 8), "it is the transpose of what is expected"),
    "sign": (-WANT, WANT, "its sign is the wrong way round"),
    "factor": (WANT / 24, WANT, "all of it is 0.04167 times what is expected"),
    "negative factor": (-2 * WANT, WANT, "all of it is -2 times what is expected"),
    "constant": (WANT + 0.5, WANT, "all of it is too large by the same 0.5"),
    "constant taken away": (WANT - 0.25, WANT, "all of it is too small by the same 0.25"),
    "zero": (0 * WANT, WANT, "all of it is 0"),
    "tail columns": (but(WIDE, (..., slice(32, None)), lambda x: x + 1), WIDE, "only from column 32 on (a tail"),
    "tail rows": (but(WANT, slice(16, None), 0), WANT, "only from row 16 on (a tail"),
    "tail of a vector": (but(WIDE[0], slice(32, None), 0), WIDE[0], "only from element 32 on (a tail"),
    "single column": (but(WIDE, (..., 3), 9), WIDE, "only in column 3 of 0 to 39"),
    "single row": (but(WANT, 5, 9), WANT, "only in row 5 of 0 to 23"),
    "some columns": (but(WIDE, (..., slice(4, None, 2)), 9), WIDE, "only in 18 of 40 columns, the first is 4"),
    "NaN": (math.nan * WANT, WANT, "NaN everywhere: not written"),
    "NaN tail": (but(WIDE, (..., slice(32, None)), math.nan), WIDE, "NaN only from column 32 on (a tail"),
    "NaN row": (but(WANT, 7, math.nan), WANT, "NaN only in row 7 of 0 to 23"),
}


@pytest.mark.parametrize(("got", "want", "words"), SLIPS.values(), ids=SLIPS)
def test_a_slip_has_its_hint(got, want, words):
    assert remark(got, want).startswith(words)


SILENT = {  # outputs on which there is nothing to remark
    "right": (WANT, WANT),
    "right and zero": (0 * WANT, 0 * WANT),
    "random": (torch.randn(24, 24).double(), WANT),
    "random, wide": (torch.randn(6, 40).double(), WIDE),
    "infinite everywhere": (math.inf * WANT, WANT),
    "expected to be NaN": (WANT, math.nan * WANT),
    "one number": (torch.tensor([2.0]).double(), torch.tensor([1.0]).double()),
    "a scalar": (torch.tensor(2.0).double(), torch.tensor(1.0).double()),
    "a little imprecise": (WANT + 1e-4 * torch.randn(24, 24), WANT),
    "a little imprecise, and symmetric": (WANT + WANT.T + 1e-4 * torch.randn(24, 24), WANT + WANT.T),
}


@pytest.mark.parametrize(("got", "want"), SILENT.values(), ids=SILENT)
def test_an_output_that_is_right_or_just_wrong_has_no_hint(got, want):
    assert remark(got, want) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_hint_stands_the_rounding_of_the_output(dtype):
    _, reason = difference((-WANT).to(dtype), WANT, dtype, reduction=1)
    assert reason.endswith("Hint: its sign is the wrong way round")


def test_a_wrong_scalar_has_a_verdict():
    _, reason = difference(torch.tensor(1.0), torch.tensor(2.0).double(), torch.float32, reduction=1)
    assert reason.startswith("an element is 1, expected 2 ")


# swapped operands


def draws(*shapes):
    return {name: torch.randn(*shape).double() for name, shape in zip("abc", shapes, strict=False)}


def product(a, b):
    return a @ b


def test_swapped_operands_are_named():
    inputs = draws((8, 8), (8, 8))
    assert swapped(product, inputs, inputs["b"] @ inputs["a"]) == "it would be right with a and b swapped"


def test_the_first_of_several_outputs_tells_of_swapped_operands():
    inputs = draws((8, 8), (8, 8))
    assert swapped(lambda a, b: (a - b, a), inputs, inputs["b"] - inputs["a"])


def test_of_three_operands_the_swapped_ones_are_named():
    inputs = draws((8, 8), (8, 8), (8, 8))
    got = inputs["a"] @ inputs["c"] + inputs["b"]
    assert swapped(lambda a, b, c: a @ b + c, inputs, got) == "it would be right with b and c swapped"


@pytest.mark.parametrize("wrong", [torch.randn(8, 8).double(), torch.zeros(8, 8), torch.full((8, 8), math.nan)])
def test_another_wrong_output_is_no_swap(wrong):
    assert swapped(product, draws((8, 8), (8, 8)), wrong) == ""


def test_operands_that_may_be_swapped_are_not_blamed():
    inputs = draws((8, 8), (8, 8))
    assert swapped(lambda a, b: a + b, inputs, 1.0001 * (inputs["a"] + inputs["b"])) == ""


def test_what_is_no_tensor_or_of_another_shape_is_not_swapped():
    inputs = draws((8, 8), (8, 4)) | {"dim": 1, "n": 1}
    assert swapped(lambda a, b, dim, n: a @ b, inputs, torch.randn(8, 4)) == ""


def first_only(error):
    """A reference that takes its operands in one order: its first has a one in the corner."""

    def reference(a, b):
        if a[0, 0] != 1:
            raise error("not so")
        return a @ b

    return reference


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_reference_that_cannot_be_swapped_does_not_hide_the_verdict(error):
    case = lambda draw: {"a": but(draw(8, 8), (0, 0), 1), "b": draw(8, 8)}
    options = {"dtypes": [torch.float32], "reduction": 8, "backward": False}
    (failure,) = compare_all(lambda a, b: -(a @ b), first_only(error), {"square": case}, **options).failures
    assert failure["what"] == "output 0"
    assert failure["reason"].endswith("Hint: its sign is the wrong way round")


def test_the_checks_name_swapped_operands():
    case = lambda draw: {"a": draw(8, 8), "b": draw(8, 8)}
    options = {"dtypes": [torch.float32], "reduction": 8, "backward": False}
    report = compare_all(lambda a, b: b @ a, product, {"square": case}, **options)
    assert "Hint: it would be right with a and b swapped" in report.verdict
