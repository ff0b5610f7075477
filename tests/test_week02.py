"""Week 2's RMSNorm against the kinds of fault that users of such kernels report. The kernels come from the notebook."""

import contextlib
import inspect
import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
from common import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    NAMES,
    Recorder,
    as_on_a_gpu,
    as_type,
    draw,
    elsewhere,
    gpu,
    needs_memory,
    on_cpu,
    quiet,
    touched_little,
)
from torch.nn.functional import rms_norm as pytorch_rms_norm
from torch.utils.checkpoint import checkpoint

from shared import memory
from shared.cells import load
from shared.checks import difference, poisoned
from shared.compiled import compile_many
from shared.machine import machine
from shared.sources import origin

week = load(2)
rms_norm, add_rms_norm = week.rms_norm, week.add_rms_norm
INF, NAN, EPS = float("inf"), float("nan"), 1e-6
pytestmark = quiet


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These tensors are small; PyTorch's threads spin while they wait for each other, which costs beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected(x, weight=None, eps=EPS, residual=None, dy=None, dtotal=None, total=None):
    """{name: (float64 value, size of the terms that cancel in it, terms in its sum)} for the outputs and gradients.

    total: what the kernel saved, which is the sum after its rounding; r is that of the exact sum.
    """
    exact = x.double() if residual is None else x.double() + residual.double()
    r = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    w = 1.0 if weight is None else weight.double()
    wanted = {"y": (exact * r * w, 0.0, exact.shape[-1])}
    if residual is not None:
        wanted["total"] = exact, 0.0, 1
    if dy is None:
        return wanted
    x_hat, g = (exact if total is None else total.double()) * r, dy.double()
    if weight is not None:
        products = (g * x_hat).reshape(exact.shape[:-1].numel(), exact.shape[-1])
        wanted["dw"] = products.sum(0), largest(products), len(products)
    first, second = g * w * r, x_hat * (x_hat * g * w).mean(-1, keepdim=True) * r
    third = 0.0 if dtotal is None else dtotal.double()
    size = max(largest(first), largest(second), 0.0 if dtotal is None else largest(third))
    wanted["dx"] = first - second + third, size, exact.shape[-1]
    return wanted


def largest(t):
    return t.abs().nan_to_num(0, 0, 0).max().item() if t.numel() else 0.0


def agree(got, wanted, where=""):
    """Each of `got` as `wanted`, which `expected` made; got: {name: (tensor, dtype that it must have)}."""
    for name, (tensor, dtype) in got.items():
        want, terms, count = wanted[name]
        _, reason = difference(tensor, want, dtype, max(count, 4), terms=terms)
        assert not reason, f"{where} {name}: {reason}"


def both_ways(x, weight=None, residual=None, eps=EPS, dy=None, dtotal=None):
    """Forward and backward with NaN in all new memory, all compared with float64. Returns outputs and gradients."""
    dy = draw(*x.shape, dtype=x.dtype) if dy is None else dy
    leaf, other, w = (None if t is None else t.detach().requires_grad_() for t in (x, residual, weight))
    kept = [(t, t.clone()) for t in (x, residual, weight, dy, dtotal) if t is not None]
    with poisoned():
        if residual is None:
            outputs, upstream = (rms_norm(leaf, w, eps),), (dy,)
        else:
            dtotal = draw(*x.shape, dtype=x.dtype) if dtotal is None else dtotal
            outputs, upstream = add_rms_norm(leaf, other, w, eps), (dy, dtotal)
        leaves = {name: t for name, t in (("dx", leaf), ("dresidual", other), ("dw", w)) if t is not None}
        gradients = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), upstream), strict=True))
    wanted = expected(x, weight, eps, residual, dy, dtotal, None if residual is None else outputs[1].detach())
    got = {name: (t, x.dtype) for name, t in zip(("y", "total"), outputs, strict=False)}
    got |= {name: (t, weight.dtype if name == "dw" else x.dtype) for name, t in gradients.items() if t is not None}
    agree(got, wanted | {"dresidual": wanted["dx"]})
    for tensor, before in kept:
        assert torch.equal(tensor.nan_to_num(7), before.nan_to_num(7)), "an input was overwritten"
    return *outputs, *gradients.values()


@pytest.mark.parametrize("weighted", [False, True])
def test_what_these_tests_expect_is_what_pytorch_computes_in_float64(weighted):
    x, residual = torch.randn(2, 5, 70, dtype=torch.float64), torch.randn(2, 5, 70, dtype=torch.float64)
    weight = torch.randn(70, dtype=torch.float64).requires_grad_() if weighted else None
    dy, dtotal = torch.randn_like(x), torch.randn_like(x)
    total = (x + residual).requires_grad_()
    y = pytorch_rms_norm(total, (70,), weight, 0.3)
    leaves = [total, weight] if weighted else [total]
    gradients = torch.autograd.grad(((y * dy).sum() + (total * dtotal).sum()), leaves)
    wanted = expected(x, weight, 0.3, residual, dy, dtotal)
    for name, tensor in zip(("y", "total", "dx", "dw"), (y, total, *gradients), strict=False):
        assert torch.allclose(wanted[name][0], tensor, rtol=1e-12, atol=1e-12), name


# --- any shape, any strides ------------------------------------------------------------------------------------------

# Without a weight x is scaled: r near 1 rounds x * r back to x in float16, no matter how right the kernel is.
CASES = {  # x, and the length of the weight where there is one
    "one element": lambda draw: (draw(1), draw(1)),
    "one element, 4-D": lambda draw: (draw(1, 1, 1, 1), draw(1)),
    "1-D": lambda draw: (draw(300), draw(300)),
    "1-D, no weight": lambda draw: (draw(300), None),
    "one column": lambda draw: (draw(5, 1), draw(1)),
    "one column, many rows": lambda draw: (draw(70_001, 1), draw(1)),
    "two columns": lambda draw: (draw(70, 2), draw(2)),
    "three columns, many rows": lambda draw: (draw(20_000, 3), draw(3)),
    "many rows, no weight": lambda draw: (draw(9000, 17), None),
    "31": lambda draw: (draw(9, 31), draw(31)),
    "32": lambda draw: (draw(9, 32), draw(32)),
    "33": lambda draw: (draw(9, 33), draw(33)),
    "1000": lambda draw: (draw(5, 1000), draw(1000)),
    "1023": lambda draw: (draw(3, 1023), draw(1023)),
    "1024": lambda draw: (draw(3, 1024), draw(1024)),
    "1025": lambda draw: (draw(150, 1025), draw(1025)),
    "8191": lambda draw: (draw(3, 8191), draw(8191)),
    "8193": lambda draw: (draw(3, 8193), draw(8193)),
    "16383": lambda draw: (draw(7, 16_383), draw(16_383)),
    "16384": lambda draw: (draw(9, 16_384), draw(16_384)),
    "16385": lambda draw: (draw(7, 16_385), draw(16_385)),
    "16385, one row": lambda draw: (draw(16_385), draw(16_385)),
    "32768": lambda draw: (draw(2, 32_768), draw(32_768)),
    "32769": lambda draw: (draw(4, 32_769), draw(32_769)),
    "32769, no weight": lambda draw: (draw(2, 32_769, scale=1.4), None),
    "transposed": lambda draw: (draw(300, 64).T, draw(300)),
    "every second column": lambda draw: (draw(7, 400)[:, ::2], draw(400)[::2]),
    "every second column, long": lambda draw: (draw(3, 40_000)[:, ::2], draw(40_000)[::2]),
    "every third row": lambda draw: (draw(9, 1100)[::3], draw(1100)),
    "one row, repeated": lambda draw: (draw(500).expand(6, 500), draw(500)),
    "one column, repeated": lambda draw: (draw(6, 1).expand(6, 1500), draw(1500)),
    "one number, repeated": lambda draw: (draw(1).expand(3, 1500), draw(1).expand(1500)),
    "overlapping rows": lambda draw: (draw(1220).unfold(0, 1200, 7), draw(1200)),
    "starts off the 16-byte grid": lambda draw: (draw(5 * 1201 + 1)[1:].view(5, 1201), draw(1202)[1:]),
    "padded rows": lambda draw: (draw(9, 1210)[:, :1200], draw(1200)),
    "one row, every second column": lambda draw: (draw(1, 500)[:, ::2], draw(250)),
    "one column of a matrix": lambda draw: (draw(50, 4)[:, 1], draw(50, 4)[:, 2]),
    "weight repeated": lambda draw: (draw(9, 300), draw(1).expand(300)),
    "3-D": lambda draw: (draw(2, 3, 1100), draw(1100)),
    "3-D, transposed in front": lambda draw: (draw(3, 50, 70).transpose(0, 1), draw(70)),
    "3-D, the last dimension is far apart": lambda draw: (draw(3, 50, 70).transpose(1, 2), draw(50)),
    "3-D, rows that no view can count": lambda draw: (draw(3, 4, 60)[:, :, :50], draw(50)),
    "4-D, permuted": lambda draw: (draw(2, 3, 5, 40).permute(0, 2, 3, 1), draw(3)),
    "4-D, channels last": lambda draw: (draw(2, 8, 3, 5).to(memory_format=torch.channels_last), draw(5)),
    "heads": lambda draw: (draw(2, 5, 3 * 64).view(2, 5, 3, 64).transpose(1, 2), draw(64)),
    "values of 10,000": lambda draw: (draw(4, 2000, scale=1e4).clamp(-6e4, 6e4), draw(2000)),
    "values of 0.0001": lambda draw: (draw(4, 2000, scale=1e-4), draw(2000)),
    "no rows": lambda draw: (draw(0, 5), draw(5)),
    "no columns": lambda draw: (draw(5, 0), draw(0)),
    "no batch": lambda draw: (draw(0, 3, 4), draw(4)),
    "no batch in the middle": lambda draw: (draw(2, 0, 4), None),
    "nothing": lambda draw: (draw(0), draw(0)),
}


def made(case, dtype):
    return CASES[case](lambda *shape, scale=1.0: draw(*shape, dtype=dtype, scale=scale))


@pytest.mark.versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_any_shape_and_strides_both_ways(case, dtype):
    both_ways(*made(case, dtype))


@pytest.mark.versions
@pytest.mark.parametrize("case", CASES)
def test_any_shape_and_strides_with_a_residual(case):
    dtype = DTYPES[list(CASES).index(case) % len(DTYPES)]
    x, weight = made(case, dtype)
    both_ways(x, weight, residual=draw(*x.shape, dtype=dtype) * min(1, 1e5 / max(largest(x), 1)))
    both_ways(draw(*x.shape, dtype=dtype), weight, residual=x.clamp(-4, 4) if "10,000" in case else x)


def test_a_row_longer_than_tritons_largest_block():
    both_ways(draw(1, 2**20 + 3))


@pytest.mark.parametrize("n", [50, 1201, 17_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_may_have_any_strides(layout, n):
    m = 4 if n == 17_000 else 5
    given, plain = LAYOUTS[layout], LAYOUTS["contiguous"]
    x, weight, residual = draw(m, n), draw(n), draw(m, n)
    both_ways(x, weight, dy=given(m, n))
    both_ways(x, weight, residual, dy=plain(m, n), dtotal=given(m, n))
    both_ways(x, weight, residual, dy=given(m, n), dtotal=plain(m, n))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_residual_may_have_any_strides(layout):
    both_ways(draw(5, 1201), draw(1201), residual=LAYOUTS[layout](5, 1201))
    both_ways(LAYOUTS[layout](5, 1201), draw(1201), residual=draw(5, 1201))


@pytest.mark.parametrize("n", [40, 1300])
def test_the_gradient_of_a_sum(n):
    x, weight, residual = draw(4, n).requires_grad_(), draw(n).requires_grad_(), draw(4, n).requires_grad_()
    y, total = add_rms_norm(x, residual, weight)
    (y.sum() + 2 * total.sum()).backward()  # hands gradients of stride 0
    ones = torch.ones_like(x)
    wanted = expected(x.detach(), weight.detach(), EPS, residual.detach(), ones, 2 * ones, total.detach())
    agree({"dx": (x.grad, x.dtype), "dw": (weight.grad, x.dtype)}, wanted)
    assert torch.equal(x.grad, residual.grad)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 3), (0, 2**21), (2, 3, 0)], ids=str)
def test_empty_inputs_backward(shape):
    x, residual = draw(*shape).requires_grad_(), draw(*shape).requires_grad_()
    weight = draw(shape[-1], dtype=torch.float16).requires_grad_()
    with poisoned():
        y = rms_norm(x, weight)
        y.sum().backward()
        assert y.shape == x.grad.shape == torch.Size(shape)
        assert weight.grad.dtype == torch.float16 and not weight.grad.any() and weight.grad.shape == weight.shape
        y, total = add_rms_norm(x, residual)
        (y.sum() + total.sum()).backward()
    assert y.shape == total.shape == residual.grad.shape == torch.Size(shape)


# --- weights of another dtype, and arguments without a gradient ------------------------------------------------------


@pytest.mark.parametrize("n", [1, 50, 1025, 17_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_a_weight_of_another_dtype(dtype, weight_dtype, n):
    """y, total and dx have x's dtype and dw has the weight's, not rounded to x's on its way."""
    x, weight, residual = draw(7, n, dtype=dtype), draw(n, dtype=weight_dtype), draw(7, n, dtype=dtype)
    both_ways(x, weight)
    both_ways(x, weight, residual)


@pytest.mark.skipif(DEVICE == "cuda", reason="the next line is how the interpreter can take bfloat16 at all")
@pytest.mark.parametrize("n", [50, 17_000])
def test_a_bfloat16_weight_in_the_interpreter(n):
    weight = draw(n).bfloat16().requires_grad_()  # loads of it are right there, and stores round down
    x, dy = draw(6, n), draw(6, n)
    y = rms_norm(x, weight)
    wanted = expected(x, weight.detach(), dy=dy)
    agree({"y": (y, torch.float32)}, wanted)
    (dw,) = torch.autograd.grad(y, weight, dy)
    assert dw.dtype == torch.bfloat16
    assert torch.allclose(dw.double(), wanted["dw"][0], rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("shape", [(9, 70), (70, 33), (5, 17_000)], ids=str)
def test_only_the_gradients_that_are_asked_for(shape):
    """All eight choices: each gradient is right, and nothing comes for an argument that needs none."""
    n = shape[-1]
    x, residual, weight, dy, dtotal = draw(*shape), draw(*shape), draw(n), draw(*shape), draw(*shape)
    y, total = add_rms_norm(x, residual, weight)
    wanted = expected(x, weight, EPS, residual, dy, dtotal, total)
    wanted |= {"dresidual": wanted["dx"]}
    for chosen in itertools.product((False, True), repeat=3):
        leaves = [t.clone().requires_grad_(c) for t, c in zip((x, residual, weight), chosen, strict=True)]
        with poisoned():
            outputs = add_rms_norm(*leaves)
        assert torch.equal(outputs[0], y) and torch.equal(outputs[1], total)
        assert outputs[0].requires_grad == any(chosen)
        if any(chosen):
            with poisoned():
                (outputs[0] * dy + outputs[1] * dtotal).sum().backward()
        for name, leaf in zip(("dx", "dresidual", "dw"), leaves, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad, f"{name}, {chosen}"
            if leaf.grad is not None:
                agree({name: (leaf.grad, torch.float32)}, wanted, chosen)


def test_the_sum_needs_a_gradient_only_if_its_terms_do():
    """A frozen x and residual below a trained weight: nobody needs the gradient of their sum, nor works for it."""
    y, total = add_rms_norm(draw(3, 20), draw(3, 20), draw(20).requires_grad_())
    assert y.requires_grad and not total.requires_grad


@pytest.mark.parametrize("n", [60, 17_000])
def test_only_one_of_the_two_outputs_is_used(n):
    x, residual, weight = draw(4, n), draw(4, n), draw(n)
    dy = draw(4, n)
    for used in (0, 1):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        with poisoned():
            outputs = add_rms_norm(*leaves)
            outputs[used].backward(dy)
        if used == 1:  # the norm is not in its way: the gradient as it came
            assert torch.equal(leaves[0].grad, dy) and torch.equal(leaves[1].grad, dy)
            assert leaves[2].grad is None or not leaves[2].grad.any()
            continue
        wanted = expected(x, weight, EPS, residual, dy, None, outputs[1].detach())
        agree({"dx": (leaves[0].grad, x.dtype), "dw": (leaves[2].grad, x.dtype)}, wanted)
        assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_no_gradient_is_another_tensor_in_disguise():
    """x.grad, residual.grad and the incoming gradient may not share memory: an optimizer changes them in place."""
    for used in (0, 1):
        x, residual, dy = draw(3, 20).requires_grad_(), draw(3, 20).requires_grad_(), draw(3, 20)
        add_rms_norm(x, residual)[used].backward(dy)
        assert len({t.data_ptr() for t in (x.grad, residual.grad, dy)}) == 3


def test_the_residuals_own_gradient_is_added_after_the_norms():
    """A constant gradient for the sum: a norm's derivative taken of it would lose its part along x."""
    x, residual = draw(5, 40).requires_grad_(), torch.zeros(5, 40, device=DEVICE)
    y, total = add_rms_norm(x, residual)
    ((y * 0).sum() + (total * x.detach()).sum()).backward()
    assert torch.equal(x.grad, x.detach())


@pytest.mark.parametrize("n", [50, 17_000])
def test_x_as_its_own_residual(n):
    x, dy, dtotal = draw(4, n).requires_grad_(), draw(4, n), draw(4, n)
    y, total = add_rms_norm(x, x)
    (dx,) = torch.autograd.grad([y, total], x, [dy, dtotal])
    wanted = expected(x.detach(), None, EPS, x.detach(), dy, dtotal)
    wanted["dx"] = 2 * wanted["dx"][0], 2 * wanted["dx"][1], n
    agree({"y": (y, y.dtype), "total": (total, y.dtype), "dx": (dx, y.dtype)}, wanted)


# --- each kernel alone, with NaN around its input and a mark around its output ---------------------------------------


def spread(values, stride, mark=NAN):
    """The same values in rows `stride` apart, and `mark` in all the memory around them."""
    m, n = values.shape
    everything = torch.full((m * stride + 64,), mark, dtype=values.dtype, device=values.device)
    view = everything.as_strided((m, n), (stride, 1), 32)
    view.copy_(values)
    return view


class Marked:
    """An output with 7 in its memory and around it."""

    def __init__(self, *shape, dtype=torch.float32):
        self.whole = torch.full((int(np.prod(shape)) + 128,), 7.0, dtype=dtype, device=DEVICE)
        self.inside = self.whole[64:-64].view(shape)

    def untouched_outside(self):
        return (self.whole[:64] == 7).all() and (self.whole[-64:] == 7).all()


def forward_alone(x, residual, weight, y, total, r, eps, grid, **options):
    """The forward kernel as given: the function would choose other blocks in the interpreter."""
    given = dict(x_ptr=x, residual_ptr=residual, weight_ptr=weight, y_ptr=y, total_ptr=total, r_ptr=r, eps=eps)
    start(week.rms_norm_kernel, grid, given, x, options, r=x if residual is None else residual)


def backward_alone(x, dy, dtotal, r, weight, dx, partial, crew, **options):
    kernel = week.rms_norm_backward_kernel if "AHEAD" in options else week.rms_norm_backward_long_kernel
    given = dict(
        x_ptr=x, dy_ptr=dy, dtotal_ptr=dtotal, r_ptr=r, weight_ptr=weight, dx_ptr=dx, partial_ptr=partial
    )  # fmt: skip
    start(kernel, crew, given, x, options, d=dy, t=dy if dtotal is None else dtotal)


def start(kernel, grid, given, x, options, **strided):
    """Launch with the sizes of x and the strides of x and others, each under the name that the kernel has for it."""
    sizes = {"n_rows": x.shape[0], "n_cols": x.shape[1], "N_COLS": x.shape[1], "ALIGN": 1}
    for letter, tensor in {"x": x, **strided}.items():
        sizes |= {f"stride_{letter}m": tensor.stride(0), f"stride_{letter}n": tensor.stride(1)}
    names = inspect.signature(origin(kernel)[0]).parameters
    kernel[(grid,)](**{name: value for name, value in {**sizes, **given, **options}.items() if name in names})


@pytest.mark.parametrize(("block_m", "block_n"), [(1, 16), (4, 16), (2, 64), (8, 4), (1, 128)])
def test_the_forward_kernel_alone(block_m, block_n):
    """Rows lie apart; nothing outside a row may be used or written, in either walk."""
    turn = itertools.count()
    for n in (1, block_n - 1, block_n, block_n + 1, 3 * block_n, 3 * block_n + 1):
        m, which = block_m * 2 + 1, next(turn)
        dtype = DTYPES[which % len(DTYPES)]
        x, weight = spread(draw(m, n, dtype=dtype), n + 5), spread(draw(1, n), n)[0] if which % 3 else None
        residual = spread(draw(m, n, dtype=dtype), n + 3) if which % 2 else None
        outputs = [Marked(m, n, dtype=dtype), Marked(m, n, dtype=dtype), Marked(m)]
        y, total, r = (output.inside for output in outputs)
        total, r = total if which % 2 else None, r if which != 1 else None
        grid = triton.cdiv(m, block_m)
        known = {"N_COLS": n if which % 2 else None}  # a length known when the kernel is compiled, or not
        forward_alone(x, residual, weight, y, total, r, 0.01, grid, BLOCK_M=block_m, BLOCK_N=block_n, **known)
        wanted = expected(x, weight, 0.01, residual)
        exact = x.double() if residual is None else x.double() + residual.double()
        wanted["r"] = torch.rsqrt(exact.square().mean(-1) + 0.01), 0.0, n
        got = {"y": (y, dtype), "total": (total, dtype), "r": (r, torch.float32)}
        agree({name: pair for name, pair in got.items() if pair[0] is not None}, wanted, f"{n} columns,")
        assert all(output.untouched_outside() for output in outputs), "written outside an output"


BACKWARD = {
    "a row a turn": {"BLOCK_M": 1, "AHEAD": False},
    "a row a turn, the next one on its way": {"BLOCK_M": 1, "AHEAD": True},
    "four rows a turn": {"BLOCK_M": 4, "AHEAD": False},
    "four rows a turn, the next ones on their way": {"BLOCK_M": 4, "AHEAD": True},
    "rows of any length": {"BLOCK_N": 16},
    "rows of any length, a large block": {"BLOCK_N": 64},
}


@pytest.mark.versions
@pytest.mark.parametrize("crew", [1, 2, 5, 11])
@pytest.mark.parametrize("name", BACKWARD)
def test_each_backward_kernel_alone(name, crew):
    """A crew of one, some, and more programs than there are rows; with and without each argument."""
    options = dict(BACKWARD[name])
    for turn, n in enumerate((1, 16, 17, 49, 64, 65)):
        m = (9, 8, 10)[turn % 3]
        dtype = DTYPES[turn % len(DTYPES)]
        if "AHEAD" in options:
            options["BLOCK_N"] = triton.next_power_of_2(n)
        with_weight, need_dx, need_dw = turn != 2, turn != 4, turn not in (2, 3)
        x, dy, dtotal = (spread(draw(m, n, dtype=dtype), n + gap) for gap in (5, 3, 7))
        weight = spread(draw(1, n), n)[0] if with_weight else None
        dtotal = dtotal if turn in (1, 2, 3, 5) else None
        r = spread(torch.rsqrt(x.double().square().mean(-1) + EPS).float()[None], m)[0]
        dx, partial = Marked(m, n, dtype=dtype), Marked(crew, n)
        if "AHEAD" not in options:
            partial.inside.zero_()
        results = dx.inside if need_dx else None, partial.inside if need_dw else None
        backward_alone(x, dy, dtotal, r, weight, *results, crew, **options)
        where = f"{m} rows of {n},"
        assert dx.untouched_outside() and partial.untouched_outside(), f"{where} written outside an output"
        wanted = expected(x, weight, dy=dy, dtotal=dtotal)
        if need_dx:
            agree({"dx": (dx.inside, dtype)}, wanted, where)
        if need_dw:
            agree({"dw": (partial.inside.sum(0), torch.float32)}, wanted, where)
            tiles = triton.cdiv(m, options.get("BLOCK_M", 1))
            x_hat = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
            tile_of = torch.arange(m, device=DEVICE) // options.get("BLOCK_M", 1)
            for program in range(crew):  # each line is the sum over the program's own rows: none twice, none missing
                line = (dy.double() * x_hat)[tile_of % crew == program].sum(0)
                assert torch.allclose(partial.inside[program].double(), line, atol=1e-5), f"{where} line {program}"
                assert program < tiles or not partial.inside[program].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_partial_lines_alone(dtype):
    for n_lines, n, block in ((1, 1, 16), (2, 16, 16), (63, 17, 16), (64, 40, 16), (65, 100, 32), (300, 33, 64)):
        lines, dw = spread(draw(1, n_lines * n), n_lines * n).view(n_lines, n), Marked(n, dtype=dtype)
        week.add_partials_kernel[(triton.cdiv(n, block),)](lines, dw.inside, n_lines, n, BLOCK_M=64, BLOCK_N=block)
        agree({"dw": (dw.inside, dtype)}, {"dw": (lines.double().sum(0), largest(lines), n_lines)})
        assert dw.untouched_outside()


# --- what a GPU would be given ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(multiprocessors=132):
    """A list that fills with what would be started: (kernel, grid, arguments by name, options)."""
    calls = []
    with as_on_a_gpu(week, multiprocessors) as patch:
        for name in ("rms_norm", "rms_norm_backward", "rms_norm_backward_long", "add_partials"):
            patch.setattr(week, f"{name}_kernel", Recorder(getattr(week, f"{name}_kernel"), calls))
        yield calls


def unreal(m, n, stride=None, dtype=torch.float32):
    return torch.empty_strided((m, n), (stride or n, 1), dtype=dtype, device="meta")


def plan_lengths():
    near = [2**p + d for p in range(0, 22) for d in (-17, -16, -1, 0, 1, 8, 16)]
    some = np.random.default_rng().integers(1, 1_200_000, 30).tolist()
    return sorted({n for n in [*near, *some, 3, 5, 12_345, 50_257, 3072, 5120, 2**27 + 1] if n > 0})


def sensible(options, where):
    """Within Triton's limits, and with no more numbers a thread than registers can hold."""
    block = options.get("BLOCK_M", 1) * options["BLOCK_N"]
    warps = options.get("num_warps", 4)
    for size in (options.get("BLOCK_M", 1), options["BLOCK_N"], warps):
        assert isinstance(size, int) and size >= 1 and size & (size - 1) == 0, f"{where} {options}: no power of two"
    assert block <= 2**20 and warps <= 32, f"{where} {options}: beyond Triton's limits"
    assert block <= 32 * 32 * warps, f"{where} {options}: too much for a thread"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forward_plan_covers_every_row_once(dtype):
    for n, m, gap in itertools.product(plan_lengths(), (1, 2, 7, 4096, 2**24 + 1), (0, 8, 1)):
        with recorded() as calls:
            week.launch_forward(unreal(m, n, n + gap, dtype), None, None, None, None, None, EPS)
            week.launch_forward(unreal(m, n, dtype=dtype), unreal(m, n, n + gap, dtype), None, None, None, None, EPS)
        (_, grid, given, options), (_, _, both, both_options) = calls
        assert options["ALIGN"] in (1, 16 // dtype.itemsize)
        assert m == 1 or (given["stride_xm"] % options["ALIGN"] == 0 and n % options["ALIGN"] == 0)
        assert m == 1 or all(both[f"stride_{t}m"] % both_options["ALIGN"] == 0 for t in "xr")
        where = f"{m} rows of {n}, {n + gap} apart:"
        sensible(options, where)
        assert grid[0] * options["BLOCK_M"] >= m > (grid[0] - 1) * options["BLOCK_M"], where
        assert (given["n_rows"], given["n_cols"]) == (m, n) and (m == 1 or given["stride_xm"] == n + gap), where
        assert options["N_COLS"] in (None, n), where
        assert options["BLOCK_N"] < 2 * n or n == 1, f"{where} {options}: columns that are never there"


@pytest.mark.parametrize("multiprocessors", [1, 40, 108, 132])
def test_the_backward_plan_covers_every_row_once(multiprocessors):
    for n, m in itertools.product(plan_lengths(), (1, 2, 7, 131, 4096, 2**24 + 1)):
        x = unreal(m, n)
        with recorded(multiprocessors) as calls:
            dx, dw = week.launch_backward(x, x, None, unreal(1, m)[0], unreal(1, n)[0], True, True)
        (_, (crew,), given, options), (_, add_grid, added, add_options) = calls
        where = f"{m} rows of {n} on {multiprocessors}: crew of {crew}, {options}"
        sensible(options, where)
        sensible(add_options, where)
        tiles = triton.cdiv(m, options.get("BLOCK_M", 1))
        assert 1 <= crew <= tiles, f"{where} a program without work"
        assert crew <= 8 * multiprocessors, f"{where}: a line of dw each"
        assert "AHEAD" not in options or options["BLOCK_N"] >= n, f"{where}: a row outgrows its block"
        assert given["partial_ptr"].shape == (crew, n) and given["partial_ptr"].dtype == torch.float32, where
        assert (added["n_lines"], added["n_cols"]) == (crew, n), where
        assert add_grid[0] * add_options["BLOCK_N"] >= n > (add_grid[0] - 1) * add_options["BLOCK_N"], where
        assert dx.shape == x.shape and dw.shape == (n,), where
        with recorded(multiprocessors) as calls:
            week.launch_backward(x, unreal(m, n, n + 4), unreal(m, n, n + 1 + m % 4), x[:, 0], None, True, False)
        ((_, _, given, options),) = calls
        align = options.get("ALIGN", 1)
        assert m == 1 or all(given[f"stride_{t}m"] % align == 0 for t in "xdt"), f"{where}: rows are off the grid"


@on_cpu
def test_the_interpreters_plans_cover_every_row_once():
    for n, m in itertools.product(plan_lengths(), (1, 2, 7, 131, 70_001)):
        options = week.plan([unreal(m, n)])
        sensible(options | {"num_warps": 32} if options["BLOCK_M"] * options["BLOCK_N"] <= 2**15 else
                 {"BLOCK_N": 1}, f"{m} rows of {n}:")  # fmt: skip
        crew, blocks = week.plan_backward(m, n, "cpu")
        assert 1 <= crew <= triton.cdiv(m, blocks.get("BLOCK_M", 1))
        assert "AHEAD" not in blocks or blocks["BLOCK_N"] >= n


@on_cpu
@pytest.mark.parametrize(
    ("shape", "multiprocessors"),
    [((2100, 1), 1), ((70, 31), 2), ((9, 300), 40), ((19, 1030), 1), ((6, 2049), 132), ((5, 8200), 2),
     ((3, 16_384), 2), ((3, 16_385), 1)],
    ids=str,
)  # fmt: skip
def test_blocks_as_on_a_gpu(shape, multiprocessors):
    """Everything through the functions, with the blocks and the crews of a GPU."""
    n, few = shape[-1], shape[-1] > 4000  # the sum of lines takes a program for every 16 columns
    dtype = torch.float16 if n % 2 else torch.float32
    x, residual = draw(*shape, dtype=dtype, scale=1.4), draw(*shape, dtype=dtype)
    with as_on_a_gpu(week, multiprocessors):
        both_ways(x, draw(n) if not few else None)
        if few:  # dw without the sum over all of it
            weight = draw(n).requires_grad_()
            partial_lines(x, weight.detach(), multiprocessors)
        both_ways(x, None if few else draw(n), residual)
        both_ways(draw(shape[0], n + 1, dtype=dtype, scale=1.4)[:, 1:])  # off the grid of 16 bytes: other blocks


def partial_lines(x, weight, multiprocessors):
    """The backward kernel's lines of dw with the GPU's blocks, added up by PyTorch."""
    m, n = x.shape
    dy, r = draw(m, n, dtype=x.dtype), torch.rsqrt(x.double().square().mean(-1) + EPS).float()
    crew, options = week.plan_backward(m, n, x.device)
    partial, dx = torch.zeros(crew, n), torch.full_like(x, NAN)
    backward_alone(x, dy, None, r, weight, dx, partial, crew, **options)
    agree({"dx": (dx, x.dtype), "dw": (partial.sum(0), torch.float32)}, expected(x, weight, dy=dy))


# --- values ----------------------------------------------------------------------------------------------------------


def odd_rows(n=64):
    """Rows with infinities and NaN, rows of zeros, rows whose squares overflow or vanish."""
    rows = draw(16, n)
    rows[0, 40] = INF
    rows[1, 3] = NAN
    rows[2] = 0
    rows[3, 5], rows[3, 50] = INF, -INF
    rows[4, 0], rows[4, n - 1] = NAN, INF
    rows[5] = -INF
    rows[6] *= 1e30
    rows[7] = 1e33
    rows[8, 7] = 1e33
    rows[9] *= 1e-30
    rows[10] *= 1e4
    rows[11] *= 1e-4
    rows[12] = -0.0
    rows[13, 1:] = 0
    rows[14, :-1] = 0
    return rows


@pytest.mark.parametrize("repeats", [1, 40, 300])
@pytest.mark.parametrize("weighted", [False, True])
def test_odd_rows_as_pytorch(repeats, weighted):
    """NaN and infinities where F.rms_norm in float32 has them, in both directions, and in no other row."""
    x = odd_rows().repeat(1, repeats)
    n = x.shape[1]
    weight, dy = draw(n) if weighted else None, draw(16, n)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = rms_norm(mine, weight), pytorch_rms_norm(other, (n,), weight, EPS)
    (dx,), (dwant,) = torch.autograd.grad(y, mine, dy), torch.autograd.grad(want, other, dy)
    for row in range(16):
        for what, a, b in (("y", y[row], want[row]), ("dx", dx[row], dwant[row])):
            assert torch.equal(a.isnan(), b.isnan()), f"row {row}, {what}: {a[:50:7]}, expected {b[:50:7]}"
            size = largest(b[b.isfinite()])
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * size, equal_nan=True), f"row {row}, {what}"


def test_such_rows_spoil_only_their_own_row_and_the_weights_gradient_as_pytorch():
    x, dy = odd_rows(), draw(16, 64)
    weights = [torch.ones(64, device=DEVICE, requires_grad=True) for _ in range(2)]
    outputs = rms_norm(x, weights[0]), pytorch_rms_norm(x, (64,), weights[1], EPS)
    got, want = (torch.autograd.grad(y, w, dy)[0] for y, w in zip(outputs, weights, strict=True))
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any()
    both_ways(odd_rows()[9:], draw(64))


@pytest.mark.parametrize("eps", [1e-6, 1e-12])
@pytest.mark.parametrize("n", [1, 100, 20_000])
def test_rows_of_zeros(n, eps):
    x, weight = torch.zeros(3, n, device=DEVICE), draw(n)
    y, dx, dw = both_ways(x, weight, eps=eps)
    assert not y.any() and not dw.any()
    assert torch.allclose(dx, dx, rtol=0)  # no NaN
    x[1] = draw(n)  # zeros beside numbers
    both_ways(x, weight, eps=1e-6)
    total = add_rms_norm(x, -x, weight, eps)
    assert not total[0].any() and not total[1].any()


def test_rows_of_zeros_without_eps_are_nan_as_pytorch():
    x = torch.zeros(2, 40, device=DEVICE)
    assert torch.equal(rms_norm(x, None, 0).isnan(), pytorch_rms_norm(x, (40,), None, 0.0).isnan())
    both_ways(draw(5, 300), draw(300), eps=0)
    both_ways(draw(5, 300), draw(300), draw(5, 300), eps=0)


@pytest.mark.parametrize("eps", [1, 100.0, 0.5, np.float32(0.25), np.float64(3), np.int64(2), Fraction(1, 3), 1e30])
def test_eps_is_inside_the_root(eps):
    x, weight = draw(5, 70), draw(70)
    both_ways(x, weight, eps=float(eps))
    y = rms_norm(x, weight, eps)
    agree({"y": (y, x.dtype)}, expected(x, weight, float(eps)))
    assert torch.allclose(y, pytorch_rms_norm(x, (70,), weight, float(eps)), atol=1e-5)
    assert torch.equal(y, add_rms_norm(x, torch.zeros_like(x), weight, eps)[0])
    assert torch.equal(y, rms_norm(x, eps=eps, weight=weight))


def test_large_values():
    both_ways(draw(5, 2000, dtype=torch.float16, scale=1e4).clamp(-6e4, 6e4), draw(2000, dtype=torch.float16))
    assert both_ways(torch.full((3, 3000), 6e4, dtype=torch.float16, device=DEVICE))[0].isfinite().all()
    x = draw(3, 300, scale=1e18)  # squares of 1e36
    assert torch.allclose(rms_norm(x), pytorch_rms_norm(x, (300,), None, EPS), rtol=1e-5)
    x = draw(3, 300, scale=1e30)  # squares that overflow: zeros, as PyTorch
    assert torch.equal(rms_norm(x), pytorch_rms_norm(x, (300,), None, EPS))
    big = torch.full((2, 50), 6e4, dtype=torch.float16, device=DEVICE)
    y, total = add_rms_norm(big, big)  # the sum is normalised before it is rounded
    assert total.isinf().all() and torch.allclose(y.float(), torch.ones(2, 50, device=DEVICE))


def test_the_sum_is_normalised_before_it_is_rounded():
    """float16 steps by 2 at 2,049 to 4,096: after rounding, 2,048 + 1 is 2,048."""
    x = torch.full((1, 64), 2048.0, dtype=torch.float16, device=DEVICE)
    x[0, ::2] = 1.0
    residual = torch.ones_like(x)
    y, total = add_rms_norm(x, residual, torch.full((64,), 1024.0, device=DEVICE))
    exact = expected(x, torch.full((64,), 1024.0, device=DEVICE), EPS, residual)
    agree({"y": (y, torch.float16), "total": (total, torch.float16)}, exact)


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def programs_from(first):
    """The interpreter's program numbers start there instead of at 0: the last programs of an enormous launch."""
    from triton.runtime.interpreter import interpreter_builder as builder

    with pytest.MonkeyPatch.context() as patch:
        dim, idx = builder.set_grid_dim, builder.set_grid_idx
        patch.setattr(builder, "set_grid_dim", lambda x, y, z: dim(x + first, y, z))
        patch.setattr(builder, "set_grid_idx", lambda x, y, z: idx(x + first, y, z))
        yield


class Far:
    """Memory that is reserved and never touched, except for rows 2^30 elements apart.

    Every tensor of every case has its own place there, so that an offset that wraps round 2^31 or 2^32 meets another
    tensor's row, or nothing at all.
    """

    def __init__(self):
        self.reserved, self.used = torch.empty(2**31 + 2**27, dtype=torch.float16), 0

    def __call__(self, n):
        self.used += 2**16
        return self.reserved.as_strided((3, n), (2**30 + 11, 1), self.used).copy_(torch.randn(3, n))


VAST = 2**21, 1024  # from this row on, row times columns passes 2^31 in every result


def _forward_past_2_to_the_31():
    far = Far()
    for n, shape in itertools.product((20, 40), (lambda t: t, lambda t: t.T)):
        x, residual = shape(far(n)), shape(far(n))
        (m, n), weight = x.shape, torch.randn(x.shape[1])
        y, total, r = torch.empty(m, n).half(), torch.empty(m, n).half(), torch.empty(m)
        blocks = {"BLOCK_M": 2, "BLOCK_N": 16} if n > 3 else {"BLOCK_M": 16, "BLOCK_N": 2}
        for other in (residual, None):
            forward_alone(x, other, weight, y, total, r, EPS, triton.cdiv(m, blocks["BLOCK_M"]), **blocks)
            agree({"y": (y, y.dtype)}, expected(x, weight, EPS, other))
    first, n = VAST
    x, residual, weight = (torch.randn(n).half() for _ in range(3))
    wanted = expected(x[None], weight, EPS, residual[None])
    x, residual = x.expand(first + 2, n), residual.expand(first + 2, n)
    y, total = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
    r = torch.empty(first + 2)
    with programs_from(first):
        forward_alone(x, residual, weight, y, total, r, EPS, 2, BLOCK_M=1, BLOCK_N=512)
    for row in (first, first + 1):
        agree({"y": (y[None, row], y.dtype), "total": (total[None, row], y.dtype)}, wanted, row)
    _columns_past_2_to_the_31()


def _backward_past_2_to_the_31():
    far = Far()
    kinds = (
        lambda n: {"BLOCK_M": 2, "BLOCK_N": triton.next_power_of_2(n), "AHEAD": True},
        lambda n: {"BLOCK_M": 1, "BLOCK_N": triton.next_power_of_2(n), "AHEAD": False},
        lambda n: {"BLOCK_N": 16 if n > 3 else 2},
    )
    for kind, shape in itertools.product(kinds, (lambda t: t, lambda t: t.T)):
        x, dy, dtotal = (shape(far(30)) for _ in range(3))
        (m, n), weight = x.shape, torch.randn(x.shape[1])
        r = torch.rsqrt(x.double().square().mean(-1) + EPS).float()
        dx, partial = torch.empty(m, n).half(), torch.zeros(2, n)
        backward_alone(x, dy, dtotal, r, weight, dx, partial, 2, **kind(n))
        got = {"dx": (dx, dx.dtype), "dw": (partial.sum(0), torch.float32)}
        agree(got, expected(x, weight, EPS, dy=dy, dtotal=dtotal), kind(n))
    first, n = VAST
    x, dy, dtotal, weight = (torch.randn(n).half() for _ in range(4))
    wanted = expected(x[None], weight, EPS, dy=dy[None], dtotal=dtotal[None])
    r = torch.rsqrt(x.double().square().mean() + EPS).float().repeat(first + 2)
    x, dy, dtotal = (t.expand(first + 2, n) for t in (x, dy, dtotal))
    for kind in kinds:
        dx, partial = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape)
        partial[first:] = 0
        with programs_from(first):
            backward_alone(x, dy, dtotal, r, weight, dx, partial, 2, **kind(n) | {"BLOCK_M": 1})
        for row in (first, first + 1):
            got = {"dx": (dx[None, row], dx.dtype), "dw": (partial[row], torch.float32)}
            agree(got, wanted, f"{kind(n)}, {row}")
    for n in (200, 16_400):
        both_ways(far(n), torch.randn(n), far(n), dy=far(n), dtotal=far(n))
    both_ways(far(40).T, torch.randn(3), dy=far(40).T)
    touched_little()


def _columns_past_2_to_the_31():
    """The sum of lines, for the columns after 2^31."""
    n, block = 2**31 + 100, 16
    partial, dw = torch.empty((1, n)), torch.empty(n, dtype=torch.float16)
    values = torch.randn(100)
    partial[0, -100:] = values
    with programs_from(2**31 // block):
        week.add_partials_kernel[(7,)](partial, dw, 1, n, BLOCK_M=64, BLOCK_N=block)
    assert torch.equal(dw[-100:], values.half())
    touched_little()


def _lines_past_2_to_the_31():
    """The sum of lines, whose third line starts past 2^31: 300 programs on rows of 8 million numbers."""
    n = 2**30 + 11
    partial, dw = torch.empty((3, n)), torch.empty(n, dtype=torch.float16)
    values = torch.randn(3, 16)
    partial[:, :16] = values
    week.add_partials_kernel[(1,)](partial, dw, 3, n, BLOCK_M=64, BLOCK_N=16)
    agree({"dw": (dw[:16], dw.dtype)}, {"dw": (values.double().sum(0), largest(values), 3)})
    touched_little()


@pytest.mark.parametrize("task", [_forward_past_2_to_the_31, _backward_past_2_to_the_31, _lines_past_2_to_the_31])
def test_offsets_past_2_to_the_31(task):
    elsewhere(task, timeout=100, TRITON_INTERPRET="1")


# --- wrong requests --------------------------------------------------------------------------------------------------


def zeros(*shape, dtype=torch.float32, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


X = zeros(3, 4)
WRONG = {  # arguments by name, the error, its words
    "float64": ({"x": zeros(3, 4, dtype=torch.float64)}, TypeError, r"x.*float64.*taken.*float16.*bfloat16.*float32"),
    "int64": ({"x": zeros(3, 4, dtype=torch.int64)}, TypeError, r"x.*int64.*taken.*float32"),
    "bool": ({"x": zeros(3, 4, dtype=torch.bool)}, TypeError, r"x.*bool.*taken"),
    "complex": ({"x": zeros(3, 4, dtype=torch.complex64)}, TypeError, r"x.*complex64.*taken"),
    "float8": ({"x": zeros(3, 4).to(torch.float8_e4m3fn)}, TypeError, r"x.*float8.*taken"),
    "a list": ({"x": [[1.0, 2.0]]}, TypeError, r"x.*Tensor.*list"),
    "None": ({"x": None}, TypeError, r"x.*Tensor.*NoneType"),
    "NumPy": ({"x": np.zeros((3, 4), np.float32)}, TypeError, r"x.*Tensor.*ndarray"),
    "a number": ({"x": zeros()}, ValueError, r"x.*0 dimensions.*taken: 1"),
    "sparse": ({"x": torch.zeros(3, 4).to_sparse()}, ValueError, r"x.*sparse.*taken"),
    "sparse rows": ({"x": torch.eye(4).to_sparse_csr()}, ValueError, r"x.*sparse.*taken"),
    "meta": ({"x": zeros(3, 4, device="meta")}, ValueError, r"x.*meta.*takes"),
    "weight too long": ({"x": X, "weight": zeros(5)}, ValueError, r"weight.*5.*taken: 4.*x"),
    "weight too short": ({"x": X, "weight": zeros(3)}, ValueError, r"weight.*3.*taken: 4.*x"),
    "weight of one": ({"x": X, "weight": zeros(1)}, ValueError, r"weight.*1.*taken: 4.*x"),
    "weight empty": ({"x": X, "weight": zeros(0)}, ValueError, r"weight.*0.*taken: 4.*x"),
    "weight 2-D": ({"x": X, "weight": zeros(3, 4)}, ValueError, r"weight.*2 dimensions.*\(3, 4\).*1"),
    "weight 0-D": ({"x": X, "weight": zeros()}, ValueError, r"weight.*0 dimensions"),
    "weight float64": ({"x": X, "weight": zeros(4, dtype=torch.float64)}, TypeError, r"weight.*float64.*taken"),
    "weight int32": ({"x": X, "weight": zeros(4, dtype=torch.int32)}, TypeError, r"weight.*int32.*taken"),
    "weight a number": ({"x": X, "weight": 1.0}, TypeError, r"weight.*Tensor.*float"),
    "weight sparse": ({"x": X, "weight": torch.zeros(4).to_sparse()}, ValueError, r"weight.*sparse"),
    "weight meta": ({"x": X, "weight": zeros(4, device="meta")}, ValueError, r"weight.*meta.*takes"),
    "weight for no rows": ({"x": zeros(0, 4), "weight": zeros(5)}, ValueError, r"weight.*5.*taken: 4"),
    "eps negative": ({"x": X, "eps": -1e-6}, ValueError, r"eps.*-1e-06.*1e38"),
    "eps NaN": ({"x": X, "eps": NAN}, ValueError, r"eps.*nan.*1e38"),
    "eps infinite": ({"x": X, "eps": INF}, ValueError, r"eps.*inf.*1e38"),
    "eps None": ({"x": X, "eps": None}, TypeError, r"eps.*number.*NoneType"),
    "eps a string": ({"x": X, "eps": "1e-6"}, TypeError, r"eps.*number.*str"),
    "eps a bool": ({"x": X, "eps": True}, TypeError, r"eps.*number.*bool"),
    "eps a tensor": ({"x": X, "eps": torch.tensor(1e-6)}, TypeError, r"eps.*number.*Tensor"),
    "eps complex": ({"x": X, "eps": 1j}, TypeError, r"eps.*number.*complex"),
    "eps in the weight's place": ({"x": X, "weight": 1e-5}, TypeError, r"weight.*Tensor.*float"),
    "residual None": ({"x": X, "residual": None}, TypeError, r"residual.*Tensor.*NoneType"),
    "residual a number": ({"x": X, "residual": 0.0}, TypeError, r"residual.*Tensor.*float"),
    "residual a row": ({"x": X, "residual": zeros(4)}, ValueError, r"residual.*\(4,\).*taken: \(3, 4\).*x"),
    "residual one row": ({"x": X, "residual": zeros(1, 4)}, ValueError, r"residual.*\(1, 4\).*taken: \(3, 4\)"),
    "residual one column": ({"x": X, "residual": zeros(3, 1)}, ValueError, r"residual.*\(3, 1\).*taken: \(3, 4\)"),
    "residual with more rows": ({"x": X, "residual": zeros(4, 4)}, ValueError, r"residual.*\(4, 4\).*taken: \(3, 4\)"),
    "residual transposed": ({"x": X, "residual": zeros(4, 3)}, ValueError, r"residual.*\(4, 3\).*taken: \(3, 4\)"),
    "residual flat": ({"x": X, "residual": zeros(12)}, ValueError, r"residual.*\(12,\).*taken: \(3, 4\)"),
    "residual 3-D": ({"x": X, "residual": zeros(1, 3, 4)}, ValueError, r"residual.*\(1, 3, 4\).*taken: \(3, 4\)"),
    "x a row": ({"x": zeros(4), "residual": X}, ValueError, r"residual.*\(3, 4\).*taken: \(4,\)"),
    "residual float16": ({"x": X, "residual": X.half()}, TypeError, r"residual.*float16.*taken.*float32.*x"),
    "residual float64": ({"x": X, "residual": X.double()}, TypeError, r"residual.*float64.*taken"),
    "x float16": ({"x": X.half(), "residual": X}, TypeError, r"residual.*float32.*taken.*float16.*x"),
    "residual meta": ({"x": X, "residual": zeros(3, 4, device="meta")}, ValueError, r"residual.*meta.*takes"),
    "residual sparse": ({"x": X, "residual": torch.zeros(3, 4).to_sparse()}, ValueError, r"residual.*sparse"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_in_words(monkeypatch, case):
    arguments, error, says = WRONG[case]
    for name in ("launch_forward", "launch_backward"):
        monkeypatch.setattr(week, name, lambda *args, **options: pytest.fail("launched"))
    functions = [add_rms_norm] if "residual" in arguments else [rms_norm, add_rms_norm]
    for function in functions:
        given = dict(arguments)
        if function is add_rms_norm and "residual" not in given:
            given["residual"] = given["x"]
        with pytest.raises(error, match=says):
            function(**given)


@pytest.mark.filterwarnings("ignore:.*[Nn]ested:UserWarning")
def test_a_nested_tensor_is_refused_in_words():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([zeros(2, 4), zeros(3, 4)], layout=layout)
        with pytest.raises(ValueError, match=r"x is a nested tensor.*taken"):
            rms_norm(nested)
        with pytest.raises(ValueError, match=r"residual is a nested tensor.*taken"):
            add_rms_norm(X, nested)


# --- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [40, 1300, 17_000])
def test_only_the_input_and_four_bytes_a_row_are_held(n):
    x, residual, weight = draw(8, n), draw(8, n), draw(n)
    assert memory.held_bytes(rms_norm, x, weight) == 0 == memory.held_bytes(add_rms_norm, x, residual, weight)
    assert not rms_norm(x, weight).requires_grad
    for trained in (x, weight):
        trained.requires_grad_()
        with torch.no_grad():
            assert not rms_norm(x, weight).requires_grad
        assert memory.held_bytes(rms_norm, x, weight) == 4 * 8  # and x and the weight, which exist anyway
        assert memory.held_bytes(add_rms_norm, x, residual, weight) == x.nbytes + 4 * 8  # the new residual: an output
        trained.requires_grad_(False)


@on_cpu
def test_no_memory_for_the_sum_without_a_residual():
    x, weight = draw(8, 50), draw(50)
    assert memory.peak_bytes(rms_norm, x, weight) <= x.nbytes


@on_cpu
@pytest.mark.parametrize("n", [50, 2000])
def test_nothing_is_allocated_but_the_results(n):
    x, dy, weight, residual = draw(8, n), draw(8, n), draw(n), draw(8, n)
    assert memory.peak_bytes(add_rms_norm, x, residual, weight) <= 2 * x.nbytes
    crew, _ = week.plan_backward(8, n, "cpu")
    for trained, limit in (
        ((True, False, False), x.nbytes),
        ((False, True, False), x.nbytes),
        ((False, False, True), (crew + 1) * 4 * n),
        ((True, True, True), x.nbytes + (crew + 1) * 4 * n),
    ):
        leaves = [t.clone().requires_grad_(c) for t, c in zip((x, residual, weight), trained, strict=True)]
        assert memory.peak_bytes(add_rms_norm, *leaves) <= 2 * x.nbytes + 4 * 8
        outputs = add_rms_norm(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        for used in (outputs[:1], outputs) if any(trained[:2]) else (outputs[:1],):
            backward = lambda used=used, wanted=wanted: torch.autograd.grad(
                used, wanted, [dy] * len(used), retain_graph=True
            )
            assert memory.peak_bytes(backward) <= limit, trained


@pytest.mark.parametrize("n", [40, 1300, 17_000])
def test_a_scaled_loss(n):
    x, weight, dy = draw(4, n).requires_grad_(), draw(n).requires_grad_(), draw(4, n)
    plain, scaled = (torch.autograd.grad((rms_norm(x, weight) * dy).sum() * s, [x, weight]) for s in (1, 1024))
    assert all(torch.equal(b, 1024 * a) for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("n", [40, 1300, 17_000])
def test_going_backward_twice(n):
    leaves = [t.requires_grad_() for t in (draw(4, n), draw(4, n), draw(n))]
    outputs, upstream = add_rms_norm(*leaves), (draw(4, n), draw(4, n))
    first, second = (torch.autograd.grad(outputs, leaves, upstream, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.autograd.backward(outputs, upstream, retain_graph=True)
    torch.autograd.backward(outputs, upstream)
    assert all(torch.equal(leaf.grad, 2 * a) for leaf, a in zip(leaves, first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(outputs, upstream)


@pytest.mark.parametrize(("m", "n"), [(4, 40), (300, 33), (7, 1300), (7, 17_000)])
def test_the_weights_gradient_is_the_same_bit_by_bit_each_time(m, n):
    x, weight, dy = draw(m, n, dtype=torch.float16).requires_grad_(), draw(n).requires_grad_(), draw(m, n).half()
    first, *others = (torch.autograd.grad(rms_norm(x, weight), [x, weight], dy) for _ in range(3))
    for other in others:
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


@pytest.mark.parametrize("n", [40, 1300, 17_000])
def test_a_gradient_that_two_share_stays_as_it_was(n):
    a, b, residual = (draw(2, n).requires_grad_() for _ in range(3))
    dy = draw(2, n)
    kept = dy.clone()
    y, total = add_rms_norm(a, residual)
    together = torch.autograd.grad([y, total, rms_norm(b), rms_norm(b)], [a, residual, b], [dy] * 4)
    assert torch.equal(dy, kept), "the incoming gradient was overwritten"
    wanted = expected(a.detach(), None, EPS, residual.detach(), dy, dy, total.detach())
    agree({"dx": (together[0], dy.dtype)}, wanted)
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[2], 2 * torch.autograd.grad(rms_norm(b), b, dy)[0])


def test_a_chain_of_blocks_as_in_a_transformer():
    """Three residual blocks: each total goes on to the next, each y into a product; all the gradients of the chain."""
    n, layers = 48, 3
    x, weights = draw(2, 5, n), [draw(n) for _ in range(layers)]
    matrices = [draw(n, n) / 8 for _ in range(layers)]

    def chain(add, x, weights, matrices):
        h, residual = x, torch.zeros_like(x)
        for weight, matrix in zip(weights, matrices, strict=True):
            y, residual = add(h, residual, weight)
            h = y @ matrix
        return (h * residual).sum()

    exact = lambda x, residual, w: (pytorch_rms_norm(x + residual, (n,), w, EPS), x + residual)
    mine = [t.clone().requires_grad_() for t in (x, *weights, *matrices)]
    other = [t.double().requires_grad_() for t in (x, *weights, *matrices)]
    split = lambda leaves: (leaves[0], leaves[1 : 1 + layers], leaves[1 + layers :])
    got = torch.autograd.grad(chain(add_rms_norm, *split(mine)), mine)
    want = torch.autograd.grad(chain(exact, *split(other)), other)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("n", [40, 1300, 17_000])
def test_neither_inputs_nor_what_was_saved_are_changed(n):
    leaves = [t.requires_grad_() for t in (draw(4, n), draw(4, n), draw(n))]
    before = [t.detach().clone() for t in leaves]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t, t.clone())) or t, lambda t: t):
        y, total = add_rms_norm(*leaves)
    after = y.detach().clone(), total.detach().clone()
    torch.autograd.grad([y, total], leaves, [draw(4, n), draw(4, n)], retain_graph=True)
    assert all(torch.equal(t, kept) for t, kept in zip(leaves, before, strict=True))
    assert all(torch.equal(t, kept) for t, kept in saved) and len(saved) == 3
    assert torch.equal(y, after[0]) and torch.equal(total, after[1])
    y.mul_(2)  # y is not saved, so this is allowed
    torch.autograd.grad([y, total], leaves, [draw(4, n), draw(4, n)])


@pytest.mark.parametrize("changed", ["x", "weight", "total"])
def test_a_saved_tensor_changed_in_place_makes_autograd_raise(changed):
    x, weight = draw(4, 50).requires_grad_(), draw(50).requires_grad_()
    middle, w = x * 1, weight * 1
    if changed == "total":
        y, total = add_rms_norm(middle, draw(4, 50), w)
        total.add_(1)
    else:
        y = rms_norm(middle, w)
        (middle if changed == "x" else w).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


LOSSES = {
    "linear": lambda y, total: y[..., 0].sum(),
    "square": lambda y, total: (y * y.detach().cos() + y.square()).sum(),
    "both outputs": lambda y, total: y.square().sum() + total.pow(3).sum(),
    "only the sum": lambda y, total: total.pow(3).sum(),
}


def second_derivatives(functions, inputs, loss):
    """Of a gradient penalty in a loss, after every input; a float64 copy through PyTorch beside it."""
    found = []
    for function, dtype in zip(functions, (torch.float32, torch.float64), strict=True):
        bases = {name: t.detach().to(dtype).requires_grad_() for name, (t, _) in inputs.items()}
        leaves = {name: view(bases[name]) for name, (_, view) in inputs.items()}
        y, total = function(**leaves)
        options = {"create_graph": True, "allow_unused": True}
        gradients = torch.autograd.grad(loss(y, total), list(bases.values()), **options)
        penalty = sum((g.square() * g.detach().sin()).sum() for g in gradients if g is not None)
        penalty = penalty + sum(1e-3 * base.sum() for base in bases.values())
        found.append((*gradients, *torch.autograd.grad(penalty, list(bases.values()))))
    return found


def both_agree(found, where):
    for got, want in zip(*found, strict=True):
        assert (got is None or not got.any()) if want is None else True, where
        if want is not None:
            assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4 * max(1, largest(want))), where


def mine(x, residual=None, weight=None):
    return (rms_norm(x, weight, 0.1), x) if residual is None else add_rms_norm(x, residual, weight, 0.1)


def pytorchs(x, residual=None, weight=None):
    total = x if residual is None else x + residual
    return pytorch_rms_norm(total, total.shape[-1:], weight, 0.1), total


plain = lambda t: t


@pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 2, 10)], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_second_derivative_is_right(loss, shape):
    """With create_graph, a gradient that silently lost its history gives a wrong second derivative and no error."""
    arguments = {"x": (draw(*shape), plain), "residual": (draw(*shape), plain), "weight": (draw(shape[-1]), plain)}
    for names in (["x"], ["x", "weight"], ["x", "residual"], ["x", "residual", "weight"]):
        if loss == "only the sum" and names[-1] == "weight":
            continue  # no gradient comes to the weight
        found = second_derivatives((mine, pytorchs), {name: arguments[name] for name in names}, LOSSES[loss])
        both_agree(found, names)


def test_a_second_derivative_after_a_weight_with_strides():
    inputs = {"x": (draw(3, 20), plain), "weight": (draw(40), lambda w: w[::2])}
    both_agree(second_derivatives((mine, pytorchs), inputs, LOSSES["square"]), "every second")


def test_a_second_derivative_after_views_of_the_inputs():
    inputs = {"x": (draw(20, 3), lambda t: t.T), "residual": (draw(20), lambda t: t.expand(3, 20))}
    both_agree(second_derivatives((mine, pytorchs), inputs, LOSSES["both outputs"]), "views")


def test_create_graph_changes_no_gradient_and_asks_for_none_of_frozen_arguments():
    for shape in ((4, 50), (0, 50), (4, 0)):
        x, weight = draw(*shape).requires_grad_(), draw(shape[-1])
        y, dy = rms_norm(x, weight), draw(*shape)
        first, second = (torch.autograd.grad(y, x, dy, retain_graph=True, create_graph=g)[0] for g in (False, True))
        assert torch.allclose(first, second, atol=1e-6) and first.shape == second.shape


def test_float16_with_create_graph():
    x, weight = draw(4, 50, dtype=torch.float16).requires_grad_(), draw(50).requires_grad_()
    dx, dw = torch.autograd.grad(rms_norm(x, weight).float().square().sum(), [x, weight], create_graph=True)
    assert dx.dtype == torch.float16 and dw.dtype == torch.float32
    (dx.float().square().sum() + dw.sum()).backward()
    assert x.grad.dtype == torch.float16 and weight.grad.dtype == torch.float32


def test_torch_func_is_served_or_refused_in_words():
    x = draw(3, 20)
    reference = lambda x: pytorch_rms_norm(x, x.shape[-1:], None, EPS)
    transforms = (
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        torch.vmap,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    )
    for transform in transforms:
        try:
            got = transform(rms_norm)(x)
        except RuntimeError as error:
            assert "setup_context" in str(error) or "rms_norm" in str(error), error
        else:
            assert torch.allclose(got, transform(reference)(x), atol=1e-6)


def test_forward_mode_is_refused_in_words():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(draw(3, 20), draw(3, 20))
        with pytest.raises(RuntimeError, match=r"jvp|forward"):
            rms_norm(dual)


@pytest.mark.parametrize("n", [60, 17_000])
def test_a_negated_view(n):
    """PyTorch keeps the imaginary part of a conjugate as positive numbers in memory with a mark to negate them."""
    negated = lambda *shape: torch.complex(draw(*shape), draw(*shape)).conj().imag
    x, residual, weight, dy, dtotal = (negated(4, n), negated(4, n), negated(n), negated(4, n), negated(4, n))
    assert x.is_neg() and weight.is_neg() and dy.is_neg()
    both_ways(x, weight, dy=dy)
    both_ways(x, weight, residual, dy=dy, dtotal=dtotal)
    both_ways(x.resolve_neg(), weight.resolve_neg(), residual, dy=dy.resolve_neg(), dtotal=dtotal)
    only = x.detach().requires_grad_()
    assert torch.equal(torch.autograd.grad(add_rms_norm(only, residual)[1], only, dtotal)[0], dtotal)


WAYS_BACK = {
    "columns first": (lambda t: t.t().contiguous(), lambda t: t.t()),
    "every second": (lambda t: torch.stack([t, torch.full_like(t, NAN)], -1), lambda t: t[..., 0]),
    "expanded": (lambda t: t.clone(), lambda t: t[None].expand(2, *t.shape)[1]),
    "off the grid": (lambda t: torch.cat([t.new_zeros(1), t.flatten()]), None),
}


@pytest.mark.parametrize("way", WAYS_BACK)
@pytest.mark.parametrize("n", [80, 17_000])
def test_saved_tensors_that_come_back_with_other_strides(way, n):
    """A hook may keep saved tensors elsewhere (on a CPU, compressed) and need not remember their strides."""
    x, residual, weight, dy = draw(6, n).requires_grad_(), draw(6, n), draw(n).requires_grad_(), draw(6, n)
    away, back = WAYS_BACK[way]
    keep = lambda t: (away(t), t.shape)
    bring = lambda kept: kept[0][1:].view(kept[1]) if back is None else back(kept[0])
    with torch.autograd.graph.saved_tensors_hooks(keep, bring):
        y, total = add_rms_norm(x, residual, weight)
    dx, dw = torch.autograd.grad(y, [x, weight], dy)
    wanted = expected(x.detach(), weight.detach(), EPS, residual, dy, None, total.detach())
    agree({"dx": (dx, x.dtype), "dw": (dw, x.dtype)}, wanted)


def test_saved_tensors_kept_on_the_cpu():
    x, weight, dy = draw(6, 80).requires_grad_(), draw(80).requires_grad_(), draw(6, 80)
    with torch.autograd.graph.save_on_cpu():
        y = rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y, [x, weight], dy)
    agree({"dx": (dx, x.dtype), "dw": (dw, x.dtype)}, expected(x.detach(), weight.detach(), dy=dy))


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant):
    leaves = [t.requires_grad_() for t in (draw(4, 50), draw(4, 50), draw(50))]
    upstream = draw(4, 50), draw(4, 50)
    outputs = checkpoint(add_rms_norm, *leaves, use_reentrant=reentrant)
    torch.autograd.backward(outputs, upstream)
    plain = torch.autograd.grad(add_rms_norm(*leaves), leaves, upstream)
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16], ids=str)
def test_under_autocast(dtype):
    """Activations in half precision beside a float32 weight."""
    matrix, weight, x = draw(60, 50).requires_grad_(), draw(60).requires_grad_(), draw(4, 50)
    with torch.autocast(DEVICE, dtype=dtype):
        h = x @ matrix.T
        assert h.dtype == dtype
        y, total = add_rms_norm(h, h.detach() * 0.5, weight)
        assert y.dtype == total.dtype == dtype
        loss = (y * draw(4, 60)).float().sum() + total.float().sum()
        wanted = expected(h.detach(), weight.detach(), EPS, h.detach() * 0.5)
    agree({"y": (y, dtype), "total": (total, dtype)}, wanted)
    loss.backward()
    for leaf in (matrix, weight):
        assert leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all() and leaf.grad.any()


def test_in_inference_mode():
    x, weight = draw(4, 50), draw(50)
    with torch.inference_mode():
        y = rms_norm(x, weight)
        z, total = add_rms_norm(x * 1, x * 0, weight)
    assert torch.equal(y, rms_norm(x, weight)) and torch.equal(y, z) and torch.equal(total, x)


def test_a_parameter_and_its_float32_gradient():
    norm = torch.nn.RMSNorm(70, eps=0.01, device=DEVICE)
    torch.nn.init.normal_(norm.weight)
    x, dy = draw(2, 9, 70), draw(2, 9, 70)
    (want,) = torch.autograd.grad(norm(x), norm.weight, dy)
    y = rms_norm(x, norm.weight, norm.eps)
    assert torch.allclose(y, norm(x), atol=1e-5)
    y.backward(dy)
    assert torch.allclose(norm.weight.grad, want, atol=1e-4)


def both_functions(x, residual, weight):
    y, total = add_rms_norm(x * 2, residual, weight)
    return (y * y.detach().cos()).sum() * 3 + (rms_norm(total + 1) * total).sum()


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(both_functions, backend="eager")
    for n in (30, 1300):
        leaves = [t.requires_grad_() for t in (draw(4, n), draw(4, n), draw(n))]
        got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, both_functions))
        assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))


# --- what is moved ---------------------------------------------------------------------------------------------------

MOVED = [(64, 1000), (300, 33), (5, 1300), (7, 16_384), (7, 16_385), (3, 40_001), (3, 4, 70), (300,)]


def moved_forward(x, residual, weight, held):
    """Bytes (read, written): x and the residual twice, the weight once a program; y, the sum, and r if it is held."""
    m, terms = x.shape[:-1].numel(), 1 if residual is None else 2
    programs = triton.cdiv(m, week.plan([week.as_rows(x)])["BLOCK_M"])
    weights = 0 if weight is None else programs * weight.nbytes
    return 2 * terms * x.nbytes + weights, terms * x.nbytes + 4 * m * held


def moved_backward(x, weight, dtotal, need_dx=True, need_dw=True):
    m, n = x.shape[:-1].numel(), x.shape[-1]
    crew, options = week.plan_backward(m, n, x.device)
    lines, dw = (crew * n * 4, weight.nbytes) if need_dw else (0, 0)
    weights = 0 if weight is None else weight.nbytes
    if "AHEAD" in options:  # each once; the weight once a program
        read, written = 2 * x.nbytes + 4 * m + crew * weights, lines
    else:  # x, dy, r and weight in each walk; the line again for each row
        walks, chunks = 1 + need_dx, triton.cdiv(n, options["BLOCK_N"])
        read, written = walks * (2 * x.nbytes + 4 * m * chunks + m * weights), lines
        read, written = read + 4 * m * n * need_dw, written + 4 * m * n * need_dw
    return read + need_dx * dtotal * x.nbytes + lines, written + need_dx * x.nbytes + dw


@on_cpu
@pytest.mark.parametrize("shape", MOVED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_moved(shape, dtype):
    n = shape[-1]
    x, residual, weight = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype), draw(n)
    dy, dtotal = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    moved = memory.traffic(rms_norm, x)
    assert (moved.read, moved.written) == moved_forward(x, None, None, False)
    moved = memory.traffic(add_rms_norm, x, residual, weight)
    assert (moved.read, moved.written) == moved_forward(x, residual, weight, False)
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    moved = memory.traffic(rms_norm, leaves[0], weight)
    assert (moved.read, moved.written) == moved_forward(x, None, weight, True)
    outputs = add_rms_norm(*leaves)
    moved = memory.traffic(torch.autograd.grad, outputs, leaves, (dy, dtotal))
    assert (moved.read, moved.written) == moved_backward(x, weight, True)


@on_cpu
@pytest.mark.parametrize("shape", [(64, 1000), (7, 16_385)], ids=str)
def test_no_bytes_for_what_is_frozen(shape):
    x, residual, weight, dy = draw(*shape), draw(*shape), draw(shape[-1]), draw(*shape)
    grad = lambda outputs, leaves: memory.traffic(torch.autograd.grad, outputs, leaves, [dy] * len(outputs))
    leaf = x.clone().requires_grad_()
    moved = grad([rms_norm(leaf, weight)], [leaf])  # a frozen weight
    assert (moved.read, moved.written) == moved_backward(x, weight, False, need_dw=False)
    moved = grad([rms_norm(leaf)], [leaf])
    assert (moved.read, moved.written) == moved_backward(x, None, False, need_dw=False)
    leaf = residual.clone().requires_grad_()  # a frozen x and weight
    moved = grad(add_rms_norm(x, leaf, weight), [leaf])
    assert (moved.read, moved.written) == moved_backward(x, weight, True, need_dw=False)
    leaf = weight.clone().requires_grad_()  # a frozen x and residual: nobody reads the gradient of the sum
    for outputs in ([rms_norm(x, leaf)], add_rms_norm(x, residual, leaf)):
        moved = grad([output for output in outputs if output.requires_grad], [leaf])
        read, written = moved_backward(x, weight, False, need_dx=False)
        assert moved.read <= read and moved.written == written
    leaves = [t.clone().requires_grad_() for t in (x, residual)]
    moved = grad(add_rms_norm(*leaves, weight)[1:], leaves)  # only the sum is used: its gradient is passed on
    assert moved.total == 0


@on_cpu
def test_no_bytes_for_a_backward_that_cannot_come():
    x, weight = draw(300, 33), draw(33).requires_grad_()
    with torch.no_grad():
        moved = memory.traffic(rms_norm, x, weight)
    assert (moved.read, moved.written) == moved_forward(x, None, weight, False)


@on_cpu
def test_a_view_costs_no_copy():
    """Strides that a kernel can follow are followed; a copy shows as bytes moved and allocated."""
    for x in (draw(5, 600)[:, ::2], draw(9, 310)[::3, :300], draw(300).expand(5, 300), draw(4, 3, 300).transpose(0, 1)):
        kept = x.numel() * 4
        copied = x.ndim == 3  # no single stride counts these rows
        assert memory.traffic(add_rms_norm, x, x).read == (4 + 2 * copied) * kept
        assert memory.peak_bytes(add_rms_norm, x, x) <= (2 + 2 * copied) * kept


# --- what the compiler makes of it -----------------------------------------------------------------------------------

SHAPES = {  # rows, columns: whether loads and stores are 16 bytes wide
    "short rows": ((65_536, 256), True),
    "4,096": ((4096, 4096), True),
    "8,192": ((4096, 8192), True),
    "16,384": ((4096, 16_384), True),
    "40,000": ((4096, 40_000), True),
    "12,345, off the grid": ((4096, 12_345), False),
}


def compile_jobs():
    turn = itertools.count()
    for (label, (shape, wide)), dtype in itertools.product(SHAPES.items(), (torch.float32, torch.bfloat16)):
        x, weight = unreal(*shape, dtype=dtype), unreal(1, shape[1])[0]
        r = unreal(1, shape[0])[0]
        newer = ("sm_80", "sm_90")[next(turn) % 2]
        with recorded() as calls:
            week.launch_forward(x, x, weight, x, x, r, EPS)
            week.launch_backward(x, x, None, r, weight, True, True)
            week.launch_backward(x, x, x, r, weight, True, True)
        forward, plain, _, with_residual, _ = calls
        for what, call, target in (
            ("forward", forward, newer if dtype == torch.bfloat16 else "sm_75"),
            ("backward", plain, "sm_75"),
            ("backward with a residual", with_residual, newer),
        ):
            if what == "backward" and (dtype == torch.bfloat16 or shape[1] in (12_345, 8192)):
                continue  # these take a second or two each
            kernel, _, given, options = call
            kinds = {name: as_type(value) for name, value in given.items()}
            sizes = {name: value for name, value in options.items() if name != "num_warps"}
            yield (f"{label}, {NAMES[dtype]}, {what}", kernel, kinds | sizes, target,
                   {"num_warps": options["num_warps"]}), wide  # fmt: skip
    with recorded() as calls:
        week.launch_backward(unreal(4096, 4096), unreal(4096, 4096), None, *unreal(2, 4096), True, True)
    kernel, _, given, options = calls[1]
    kinds = {name: as_type(value) for name, value in given.items()}
    yield ("sum of lines", kernel, kinds | options, "sm_75", {}), None


@pytest.mark.versions
def test_compiled_code():
    jobs = list(compile_jobs())
    wrong = []
    for ((name, _, _, target, _), wide), made in zip(jobs, compile_many(job for job, _ in jobs), strict=True):
        loads, stores = made.count("LDG", "128"), made.count("STG", "128")
        spills = 0 if "forward" in name else 256 if "residual" in name else 16  # a handful, of 64 or 128 registers
        if made.spill_bytes > spills or made.shared_bytes > 64 * 1024 or (wide and not (loads and stores)):
            wrong.append(f"{name}, {target}: {made.summary()}")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


GPU_SHAPES = [(20_000, 64), (5000, 127), (3000, 1000), (2000, 4096), (1111, 5120), (700, 8191), (600, 8192),
              (500, 16_384), (500, 16_383), (400, 16_385), (300, 40_001), (300, 65_536), (7, 1_000_003)]  # fmt: skip


@gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_both_ways_with_more_rows_than_programs(shape, dtype):
    n = shape[-1]
    both_ways(draw(*shape, dtype=dtype), draw(n, dtype=dtype))
    both_ways(draw(*shape, dtype=dtype), draw(n), draw(*shape, dtype=dtype))
    both_ways(draw(shape[0], n + 1, dtype=dtype)[:, 1:], draw(n, dtype=dtype))  # off the grid of 16 bytes


@gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [4096, 16_384, 40_001])
def test_gpu_gradients_of_any_strides(layout, n):
    both_ways(draw(300, n), draw(n), draw(300, n), dy=LAYOUTS[layout](300, n), dtotal=LAYOUTS[layout](300, n))


@gpu
@pytest.mark.parametrize("crew", [1, 3, 64, 65, 1000])
@pytest.mark.parametrize("n", [4096, 16_384, 20_000])
def test_gpu_a_crew_of_any_size(n, crew):
    """The long kernel adds to its line for each row: what one thread wrote, the next row must read."""
    m = 777
    x, dy, dtotal, weight = draw(m, n), draw(m, n), draw(m, n), draw(n)
    r = torch.rsqrt(x.double().square().mean(-1) + EPS).float()
    _, options = week.plan_backward(m, n, x.device)
    dx, dw = week.launch_backward(x, dy, dtotal, r, weight, True, True, chosen=(crew, options))
    agree({"dx": (dx, x.dtype), "dw": (dw, x.dtype)}, expected(x, weight, dy=dy, dtotal=dtotal))


@gpu
@pytest.mark.parametrize("n", [100, 4096, 16_384, 40_001])
def test_gpu_the_weights_gradient_is_the_same_each_time(n):
    x, weight, dy = draw(3000, n).bfloat16().requires_grad_(), draw(n).requires_grad_(), draw(3000, n).bfloat16()
    y = rms_norm(x, weight)
    first, *others = (torch.autograd.grad(y, [x, weight], dy, retain_graph=True) for _ in range(5))
    for other in others:
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


def some_rows_agree(x, y, dy=None, dx=None):
    m = len(x)
    size = max(1, min(m, 2**25 // x.shape[1]))
    for start in sorted({*range(0, m - size, max(m // 8, 1)), 2**31 // x.shape[1] % m, m - size}):
        part = slice(start, start + size)
        wanted = expected(x[part], dy=None if dy is None else dy[part])
        agree({"y": (y[part], x.dtype)}, wanted, start)
        if dy is not None:
            agree({"dx": (dx[part], x.dtype)}, wanted, start)


@gpu
def test_gpu_a_million_and_a_half_rows_of_4096():
    needs_memory(28)
    x = torch.empty((1_500_000, 4096), dtype=torch.bfloat16, device=DEVICE).normal_()
    with torch.no_grad():
        y = rms_norm(x)
    some_rows_agree(x, y)
    assert not y.isnan().any()
    if machine().memory_bytes < 60 * 2**30:
        return
    leaf, weight, dy = x.detach().requires_grad_(), torch.ones(4096, device=DEVICE, requires_grad=True), y.detach()
    dx, dw = torch.autograd.grad(rms_norm(leaf, weight), [leaf, weight], dy)
    some_rows_agree(x, y, dy, dx)
    assert not dx.isnan().any() and torch.allclose(dw, torch.full_like(dw, 1.5e6), rtol=0.02)


@gpu
@pytest.mark.parametrize(
    "shape", [(2**23 + 16, 256), (2**31 // 4097 + 9, 4097), (2**31 // 40_001 + 9, 40_001)], ids=str
)
def test_gpu_more_than_2_to_the_31_elements(shape):
    needs_memory(60)
    x, dy = (torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_() for _ in range(2))
    leaf, weight = x.detach().requires_grad_(), torch.ones(shape[1], device=DEVICE, requires_grad=True)
    with poisoned():
        y = rms_norm(leaf, weight)
        dx, dw = torch.autograd.grad(y, [leaf, weight], dy)
    some_rows_agree(x, y.detach(), dy, dx)
    assert not y.isnan().any() and not dx.isnan().any() and not dw.isnan().any()
    want = torch.zeros(shape[1], dtype=torch.float64, device=DEVICE)
    size = 2**26 // shape[1]
    for start in range(0, shape[0], size):
        part = slice(start, start + size)
        want += expected(x[part], torch.ones(shape[1], device=DEVICE), dy=dy[part])["dw"][0]
    assert torch.allclose(dw.double(), want, rtol=1e-4, atol=1e-4 * largest(want))


@gpu
def test_gpu_more_than_2_to_the_31_elements_in_the_partial_lines():
    """As many programs as there are rows of 16.8 million: the lines of dw pass 2^31 elements."""
    needs_memory(40)
    n = 2**24 + 5
    m = 140
    x = torch.empty((m, n), dtype=torch.float16, device=DEVICE).normal_()
    weight = torch.ones(n, device=DEVICE, requires_grad=True)
    (dw,) = torch.autograd.grad(rms_norm(x, weight), weight, x)
    want = torch.zeros(n, device=DEVICE)
    for row in x:
        want += row.float().square() * torch.rsqrt(row.float().square().mean() + EPS)
    assert torch.allclose(dw, want, rtol=1e-4, atol=1e-4)


@gpu
def test_gpu_more_than_2_to_the_31_rows():
    needs_memory(30)
    x = torch.full((2**31 + 77, 1), 3.0, dtype=torch.float16, device=DEVICE)
    with poisoned(), torch.no_grad():
        y = rms_norm(x)
    assert y.amin() == y.amax() == 1
    assert not y.isnan().any()


def _one_enormous_row():
    """2^31 - 1 columns: a loop's counter of 32 bits would step past its end and never leave."""
    n = 2**31 - 1
    x = torch.zeros((1, n), dtype=torch.float16, device="cuda")
    at = torch.tensor([0, 2**30, 2**31 - 7, 2**31 - 2], device="cuda")
    x[0, at] = 1000.0
    y = rms_norm(x.requires_grad_())
    assert torch.allclose(y[0, at].float(), torch.full((4,), (n / 4) ** 0.5, device="cuda"), rtol=1e-2)
    assert y.count_nonzero() == 4
    dy = torch.zeros_like(y)
    dy[0, 1] = 1
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx[0, 1] > 0 and dx.count_nonzero() == 1


@gpu
def test_gpu_one_row_of_2_to_the_31_columns():
    needs_memory(40)
    elsewhere(_one_enormous_row, timeout=120)


@gpu
def test_gpu_odd_rows():
    for dtype in (torch.float32, torch.bfloat16):
        x = odd_rows().repeat(1, 20).to(dtype)
        y, want = rms_norm(x), pytorch_rms_norm(x.float(), (x.shape[1],), None, EPS)
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.allclose(y.float(), want, rtol=1e-2, atol=1e-4, equal_nan=True)


@gpu
def test_gpu_refuses_a_tensor_on_the_cpu():
    x, weight = draw(3, 4), draw(4)
    for arguments, says in (
        ((torch.zeros(3, 4),), r"x is on cpu.*cuda"),
        ((x, torch.zeros(4)), r"weight is on cpu.*cuda"),
        ((torch.zeros(3, 4), weight), r"x is on cpu.*cuda"),
    ):
        with pytest.raises(ValueError, match=says):
            rms_norm(*arguments)
    with pytest.raises(ValueError, match=r"residual is on cpu.*cuda"):
        add_rms_norm(x, torch.zeros(3, 4))


@gpu
def test_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for n in (100, 4097, 40_001):
        x, residual, dy, dtotal = (draw(40, n).to("cuda:1") for _ in range(4))
        weight = draw(n).to("cuda:1")
        with torch.cuda.device(0):
            outputs = both_ways(x, weight, residual, dy=dy, dtotal=dtotal)
        assert all(t.device == x.device for t in outputs)
        with pytest.raises(ValueError, match=r"weight is on cuda:0.*cuda:1"):
            rms_norm(x, weight.to("cuda:0"))
        with pytest.raises(ValueError, match=r"residual is on cuda:0.*cuda:1"):
            add_rms_norm(x, residual.to("cuda:0"))


@gpu
@pytest.mark.parametrize("n", [1000, 16_384, 20_001])
def test_gpu_in_a_cuda_graph(n):
    leaves = [t.requires_grad_() for t in (draw(300, n), draw(300, n), draw(n))]
    upstream = draw(300, n), draw(300, n)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(add_rms_norm(*leaves), leaves, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = add_rms_norm(*leaves)
        dx, _, dw = torch.autograd.grad([y, total], leaves, upstream)
    for _ in range(5):  # a replay starts from lines of dw that the last one filled
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        x, residual, weight = (leaf.detach() for leaf in leaves)
        wanted = expected(x, weight, EPS, residual, *upstream, total.detach())
        got = {"y": y, "total": total, "dx": dx, "dw": dw}
        agree({name: (t, t.dtype) for name, t in got.items()}, wanted)


@gpu
@pytest.mark.filterwarnings("ignore")
def test_gpu_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(both_functions)
    for n in (300, 20_000):
        leaves = [t.requires_grad_() for t in (draw(40, n), draw(40, n), draw(n))]
        got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, both_functions))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, want, strict=True))


@gpu
@pytest.mark.parametrize("n", [1000, 4096, 16_384, 40_000])
def test_gpu_peak_memory(n):
    m = 2**26 // n
    x, residual, weight, dy = draw(m, n), draw(m, n), draw(n), draw(m, n)
    with torch.no_grad():
        assert memory.peak_bytes(rms_norm, x, weight) <= 1.01 * x.nbytes
        assert memory.peak_bytes(add_rms_norm, x, residual, weight) <= 2.01 * x.nbytes
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    outputs = add_rms_norm(*leaves)
    crew, _ = week.plan_backward(m, n, x.device)
    backward = lambda: torch.autograd.grad(outputs, leaves, (dy, dy), retain_graph=True)
    assert memory.peak_bytes(backward) <= 1.01 * x.nbytes + (crew + 2) * 4 * n


@gpu
def test_gpu_squares_that_vanish_below_the_smallest_normal_number():
    """rsqrt.approx with .ftz would take a mean square of 1e-40 for 0; eps = 0 alone lets it get that far."""
    x = draw(4, 300, scale=1e-20)
    got, want = rms_norm(x, None, 0), pytorch_rms_norm(x, (300,), None, 0.0)
    assert torch.allclose(got, want, rtol=1e-2)


def test_gradients_and_inputs_that_are_zeros_without_memory():
    """PyTorch's sgn, and so the second derivative of abs, hands on a tensor of zeros that has no address."""
    x, weight = draw(3, 20).requires_grad_(), draw(20).requires_grad_()
    y, total = add_rms_norm(x, x.detach(), weight)
    only_y = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    both = torch.autograd.grad(y.sum() + total.sgn().sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(only_y, both, strict=True))
    dx, dw = torch.autograd.grad(rms_norm(x, weight).sgn().sum(), (x, weight))
    assert (dx == 0).all() and (dw == 0).all()
    assert (rms_norm(torch._efficientzerotensor((3, 20), device=DEVICE), weight) == 0).all()
    assert (rms_norm(x, torch._efficientzerotensor((20,), device=DEVICE)) == 0).all()
