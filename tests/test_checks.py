"""The checks on kernels known to be wrong, one kind of slip each, and on right ones that look odd."""

import math
import re

import pytest
import torch

from shared.checks import CheckFailed, check, compare_all, difference, exercise, poisoned

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = {
    "square": lambda draw: {"a": draw(48, 48), "b": draw(48, 48)},
    "tall": lambda draw: {"a": draw(64, 33), "b": draw(33, 20)},
    "transposed": lambda draw: {"a": draw(40, 64).T, "b": draw(40, 24)},
}
OPTIONS = {"dtypes": DTYPES, "reduction": 64}


def reference(a, b):
    return a @ b


def product(a, b):
    """A right kernel: it sums in float32 and rounds once."""
    return (a.float() @ b.float()).to(a.dtype)


def gradients(a, b, g):
    return product(g, b.T), product(a.T, g)


def with_gradients(backward):
    """The right product, with ``backward(a, b, g)`` as its gradients."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return product(a, b)

        @staticmethod
        def backward(ctx, g):
            return backward(*ctx.saved_tensors, g)

    return lambda a, b: Product.apply(a, b)


def unwritten(right):
    """A copy of ``right`` whose last element nobody writes."""
    out = torch.empty_like(right)
    out.flatten()[:-1] = right.flatten()[:-1]
    return out


def one_nan(a, b):
    out = product(a, b)
    out[-1, -1] = math.nan
    return out


def tf32(x):
    """``x`` with the 10 bits of mantissa that TF32 keeps."""
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32)


def raises(a, b):
    raise IndexError("out of range")


def overwrites_input(a, b):
    out = product(a, b)
    a[0] = 0
    return out


WRONG_OUTPUTS = {
    "NaN": (one_nan, "1 of .* elements are NaN"),
    "unwritten": (lambda a, b: unwritten(product(a, b)), "1 of .* elements are NaN"),
    "swapped": (lambda a, b: product(b, a), "an element is"),
    "transposed": (lambda a, b: product(a, b).T, "an element is"),
    "shape that broadcasts": (lambda a, b: product(a, b)[:1], r"shape \(1, 48\), expected \(48, 48\)"),
    "dtype": (lambda a, b: product(a, b).double(), "dtype torch.float64"),
    "last column dropped": (lambda a, b: product(a[:, :-1], b[:-1]), "an element is"),
    "nothing": (lambda a, b: None, "a NoneType, expected a tensor"),
    "two outputs": (lambda a, b: (product(a, b), a), "there are 2, expected 1"),
    "raises": (raises, "IndexError: out of range"),
    "input": (overwrites_input, "input a: was overwritten"),
}


@pytest.mark.parametrize(("function", "reason"), WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_output_is_caught(function, reason, dtype):
    with pytest.raises(CheckFailed, match=f"(?s)WRONG: .*{reason}"):
        check(function, reference, {"square": CASES["square"]}, dtypes=[dtype], reduction=48, backward=False)


def overwrites_gradient(a, b, g):
    found = gradients(a, b, g)
    g[0] = 0
    return found


def overwrites_input_later(a, b, g):
    found = gradients(a, b, g)
    b[0] = 0
    return found


def ignores_strides(a, b, g):
    return gradients(a, b, g.as_strided(g.shape, (g.shape[1], 1)))


WRONG_GRADIENTS = {
    "swapped": (lambda a, b, g: gradients(a, b, g)[::-1], "gradient of [ab]: an element is"),
    "missing": (lambda a, b, g: (product(g, b.T), None), "run: RuntimeError"),
    "zero": (lambda a, b, g: (product(g, b.T), torch.zeros_like(b)), "gradient of b: an element is 0"),
    "unwritten": (lambda a, b, g: (unwritten(product(g, b.T)), product(a.T, g)), "gradient of a: 1 of .* NaN"),
    "incoming ignored": (lambda a, b, g: gradients(a, b, torch.ones_like(g)), "gradient of [ab]: an element is"),
    "incoming overwritten": (overwrites_gradient, "incoming gradient: was overwritten"),
    "incoming strides ignored": (ignores_strides, "gradient of [ab]: an element is"),
    "input overwritten": (overwrites_input_later, "input b: was overwritten"),
}


@pytest.mark.parametrize(("backward", "reason"), WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
def test_a_wrong_gradient_is_caught(backward, reason):
    failures = compare_all(with_gradients(backward), reference, CASES, **OPTIONS).failures
    for dtype in ("float32", "float16", "bfloat16"):
        said = [f"{row['what']}: {row['reason']}" for row in failures if row["dtype"] == dtype]
        assert any(re.match(reason, words) for words in said), said


def test_expanded_and_strided_gradients_are_tried():
    """Each case gets a contiguous gradient in one dtype, and an expanded and a strided one in the two others."""
    failures = compare_all(with_gradients(ignores_strides), reference, CASES, **OPTIONS).failures
    assert sorted(row["case"] for row in failures) == sorted([*CASES, *CASES])


def test_a_right_kernel_passes(capsys):
    table = check(with_gradients(gradients), reference, CASES, **OPTIONS)
    assert list(table.index) == list(CASES)
    assert set(table.columns) == {"float32", "float16", "bfloat16"}
    assert ((table >= 0) & (table <= 1)).all(axis=None)
    assert "Right: " in capsys.readouterr().out


THOUSANDTH = {  # right, wrong by one part in a thousand, reference, a case, terms in a sum
    "product": (
        product, lambda a, b: product(1.001 * a.float(), b.float()).to(a.dtype), reference,
        lambda draw: {"a": draw(48, 48), "b": draw(48, 48)}, 48,
    ),
    "sum": (
        lambda x: x.float().sum(1).to(x.dtype), lambda x: (1.001 * x.float().sum(1)).to(x.dtype), lambda x: x.sum(1),
        lambda draw: {"x": draw(2000, 30)}, 30,
    ),
    "softmax": (
        lambda x: x.softmax(1), lambda x: (1.001 * x.float().softmax(1)).to(x.dtype), lambda x: x.softmax(1),
        lambda draw: {"x": draw(32, 500, scale=0.5)}, 500,
    ),
    "gradient": (
        with_gradients(gradients), with_gradients(lambda a, b, g: gradients(a, b, 1.001 * g.float())), reference,
        lambda draw: {"a": draw(256, 64), "b": draw(64, 256)}, 256,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "reference", "case", "reduction"), THOUSANDTH.values(), ids=THOUSANDTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_part_in_a_thousand_is_caught(right, wrong, reference, case, reduction, dtype):
    options = {"dtypes": [dtype], "reduction": reduction}
    check(right, reference, {"case": case}, **options)
    with pytest.raises(CheckFailed, match=r"an element is|the whole output is scaled by 1\.00"):
        check(wrong, reference, {"case": case}, **options)


def test_tf32_is_caught_where_float32_was_asked_for():
    options = {"dtypes": [torch.float32], "reduction": 64, "backward": False}
    check(product, reference, CASES, **options)
    with pytest.raises(CheckFailed, match="fails 3 of 3 cases"):
        check(lambda a, b: product(tf32(a), tf32(b)), reference, CASES, **options)


RIGHT_OUTPUTS = {
    "normal": torch.randn(100, 100),
    "empty": torch.randn(0, 100),
    "one element": torch.tensor([1 / 3]),
    "all alike": torch.full((100, 100), 1 / 3),
    "rows alike": torch.tensor([1 / 3, 0.7, 0.001]).expand(1000, 3),
    "zeros": torch.zeros(100),
    "NaN and infinities": torch.tensor([math.nan, math.inf, -math.inf, 0.1]),
    "tiny": torch.randn(1000) * 1e-7,
    "tiniest": torch.randn(1000) * 1e-40,
    "huge": torch.randn(1000).clamp(-6, 6) * 1e4,
    "far apart": torch.randn(1000).clamp(-3, 3).mul(3).exp(),
}


@pytest.mark.parametrize("want", RIGHT_OUTPUTS.values(), ids=RIGHT_OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_correctly_rounded_output_is_right(want, dtype):
    want = want.double()
    share, reason = difference(want.to(dtype), want, dtype, reduction=1)
    assert reason == ""
    assert 0 <= share <= 1


@pytest.mark.parametrize(("got", "want"), [(0.0, math.nan), (math.nan, 0.0), (math.inf, -math.inf), (3e38, math.inf)])
def test_what_is_not_finite_must_agree(got, want):
    share, reason = difference(torch.tensor([1, got]), torch.tensor([1, want]).double(), torch.float32, reduction=1)
    assert share == math.inf
    assert "NaN or infinite" in reason


@pytest.mark.parametrize("options", [{"cases": {}, "dtypes": DTYPES}, {"cases": CASES, "dtypes": []}])
def test_no_case_is_no_success(options, capsys):
    with pytest.raises(CheckFailed, match="no case at all"):
        check(product, reference, reduction=64, **options)
    assert not exercise(product, reference, reduction=64, **options)
    assert "Not right yet" in capsys.readouterr().out


def test_inputs_are_fresh_and_the_printed_seed_repeats_them():
    seen = []

    def swapped(a, b):
        seen.append(a.clone())
        return product(b, a)

    def fail(**options):
        with pytest.raises(CheckFailed) as failure:
            check(swapped, reference, {"square": CASES["square"]}, dtypes=DTYPES[:1], reduction=48, **options)
        return int(re.search(r"seed (\d+)", str(failure.value))[1])

    seed = fail()
    fail()
    fail(seed=seed)
    first, other, again = seen
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def not_written_yet(a, b):
    raise NotImplementedError("your kernel")


@pytest.mark.parametrize(
    ("function", "solved", "words"),
    [(product, True, "Solved: "), (not_written_yet, False, "Not solved yet"), (one_nan, False, "Not right yet: ")],
)
def test_an_exercise_says_where_the_reader_stands(function, solved, words, capsys):
    assert exercise(function, reference, CASES, **OPTIONS, backward=False) is solved
    assert capsys.readouterr().out.startswith(words)


def test_poison_is_taken_away_again():
    with pytest.raises(KeyError), poisoned():
        assert torch.empty(1000).isnan().all()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("misses", "wrong"), [([1.5], False), ([1.5, 1.5], True), ([1.5, 0, 1.5], True), ([1.5, 0, 0], False), ([50], True)]
)
def test_a_narrow_miss_counts_when_it_comes_again(misses, wrong):
    drawn = []

    def nearly(a):
        off = misses[len(drawn)] if len(drawn) < len(misses) else 0
        drawn.append(a)
        return a * (1 + off * 4.04 * 2**-24)  # the tolerance of a float32 number that is its own sum

    one = {"one": lambda draw: {"a": draw(1)}}
    report = compare_all(nearly, lambda a: a, one, dtypes=DTYPES[:1], reduction=1, backward=False)
    assert bool(report.failures) == wrong, report.rows
    assert len(drawn) == {(1.5,): 3, (1.5, 1.5): 2, (50,): 1}.get(tuple(misses), 3)
