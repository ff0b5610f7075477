"""Week 9's SwiGLU layer against PyTorch in float64: right, little held, nothing overwritten that is needed."""

import contextlib
import itertools
import math
import types

import pytest
import torch
import torch.nn.functional as functional
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shared import memory
from shared.cells import load
from shared.checks import compare_all, difference, poisoned
from shared.compiled import compile_many
from shared.machine import interpreting

week = load("week09_swiglu")
swiglu, swiglu_mlp = week.swiglu, week.swiglu_mlp
HALF, BRAIN, FULL, NAN, INF = torch.float16, torch.bfloat16, torch.float32, math.nan, math.inf
NAMES_OF_INPUTS = "x", "w_gate", "w_up", "w_down"
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = quiet


def reference(gate, up):
    return functional.silu(gate) * up


def mlp_reference(x, w_gate, w_up, w_down):
    return reference(x @ w_gate.T, x @ w_up.T) @ w_down.T


def tensors(T=6, H=8, F=24, D=16, dtype=FULL, learn=(0, 1, 2, 3)):
    """x and the three weights, of outputs of about 1."""
    shapes, scales = ((T, H), (F, H), (F, H), (D, F)), (1, H, H, F)
    made = [draw(*s, dtype=dtype, scale=max(n, 1) ** -0.5) for s, n in zip(shapes, scales, strict=True)]
    return [t.requires_grad_(i in learn) for i, t in enumerate(made)]


def double(inputs):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]


def gradients(function, inputs, upstream=None, **options):
    """Of the inputs that need one."""
    out = function(*inputs)
    upstream = torch.ones_like(out) if upstream is None else upstream.to(out.dtype)
    return torch.autograd.grad(out, [t for t in inputs if t.requires_grad], upstream, **options)


def agrees(got, want, roundings=4, reduction=300, what="", terms=0.0):
    _, reason = difference(got, want, got.dtype, reduction, roundings, terms)
    assert not reason, f"{what}: {reason}"


def all_agree(got, want, **options):
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        agrees(one, other, what=f"number {number}", **options)


def same_bits(got, want):
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@contextlib.contextmanager
def launches_of(name):
    """A list that fills with the launches of a kernel; they happen."""
    found, kernel = [], getattr(week, name)

    class Spy(Recorder):
        def __getitem__(self, grid):
            def launch(*args, **options):
                Recorder.__getitem__(self, grid)(*args, **options)
                return kernel[grid](*args, **options)

            return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(week, name, Spy(kernel, found))
        yield found


def can_fuse(x, w_gate, out):
    """As `fuses`, however few the tiles are."""
    able = interpreting() or (x.dtype != FULL and torch.cuda.get_device_capability(x.device)[0] == 9)
    return able and week.describable(x) and week.describable(out)


@pytest.fixture(params=["fused", "unfused"])
def path(request, monkeypatch):
    monkeypatch.setattr(week, "fuses", can_fuse if request.param == "fused" else lambda *given: False)
    return request.param


# --- the layer -------------------------------------------------------------------------------------------------------


def case(T=6, H=8, F=24, D=16, batch=(), change=lambda *inputs: inputs):
    def make(d):
        x, weights = d(*batch, T, H), (d(F, H, scale=H**-0.5), d(F, H, scale=H**-0.5), d(D, F, scale=F**-0.5))
        return dict(zip(NAMES_OF_INPUTS, change(x, *weights), strict=True))

    return make


def halves(order):
    def change(x, w_gate, w_up, w_down):
        both = torch.cat([w_gate, w_up])
        return x, *[both.chunk(2)[i] for i in order], w_down

    return change


def far_apart(x, w_gate, w_up, w_down):
    space = torch.full((40 * 40, w_gate.shape[1]), NAN, dtype=x.dtype, device=x.device)
    upper = space[-len(w_up) :].copy_(w_up)
    return x, space[: len(w_gate)].copy_(w_gate), upper, w_down


def interleaved(x, w_gate, w_up, w_down):
    rows = torch.stack([w_gate, w_up], 1).flatten(0, 1)
    return x, rows[::2], rows[1::2], w_down


def columns(x, w_gate, w_up, w_down):
    """Both are columns of one matrix; each of their rows is on the grid of 16 bytes."""
    both = torch.cat([w_gate, w_up], 1)
    return x, both[:, : x.shape[-1]], both[:, x.shape[-1] :], w_down


def gapped(t):
    """Its rows with 16 bytes, or more, of NaN between them."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), NAN, dtype=t.dtype, device=t.device)
    return wide[..., : t.shape[-1]].copy_(t)


def off_the_grid(x, w_gate, w_up, w_down):
    """Both weights have rows of 16 bytes, or more, but one starts between."""
    space = torch.full((2 * w_up.numel() + 1,), NAN, dtype=x.dtype, device=x.device)
    lower, upper = space[: w_up.numel()].view_as(w_up), space[w_up.numel() + 1 :].view_as(w_up)
    return x, lower.copy_(w_gate), upper.copy_(w_up), w_down


turned = lambda t: t.mT.contiguous().mT
second = lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2]
CASES = {
    "small": case(),
    "one of everything": case(1, 1, 1, 1, change=lambda *inputs: [t.abs() for t in inputs]),  # where nothing cancels
    "one row": case(1, 16, 40, 8),
    "one column": case(5, 1, 8, 1),
    "odd": case(37, 50, 71, 3),
    "odd, but on the grid": case(37, 56, 72, 5),
    "several tiles": case(130, 72, 136, 20),
    "several tiles, odd": case(129, 65, 131, 7),
    "no batch": case(change=lambda x, *weights: (x[0], *weights)),
    "texts": case(5, batch=(3,)),
    "texts of texts": case(3, batch=(2, 2)),
    "texts, transposed": case(5, batch=(3,), change=lambda x, *weights: (x.transpose(0, 1), *weights)),
    "texts, repeated": case(5, change=lambda x, *weights: (x.expand(3, *x.shape), *weights)),
    "one row, repeated": case(change=lambda x, *weights: (x[:1].expand(9, 8), *weights)),
    "halves of one": case(20, 16, 40, change=halves((0, 1))),
    "halves of one, up first": case(20, 16, 40, change=halves((1, 0))),
    "one weight for both": case(change=lambda x, w, _, down: (x, w, w, down)),
    "far apart": case(20, 16, 40, change=far_apart),
    "rows in turn": case(20, 16, 40, change=interleaved),
    "off the 16-byte grid": case(20, 16, 40, change=off_the_grid),
    "columns of one": case(20, 16, 40, change=columns),
    "gate's rows repeated": case(change=lambda x, a, b, down: (x, a[:1].expand_as(a), b, down)),
    "up's columns repeated": case(change=lambda x, a, b, down: (x, a, b[:, :1].expand_as(b), down)),
    "all transposed": case(change=lambda *inputs: map(turned, inputs)),
    "weights transposed": case(change=lambda x, *weights: (x, *map(turned, weights))),
    "every second column": case(change=lambda *inputs: map(second, inputs)),
    "rows with a gap": case(20, 16, 40, change=lambda *inputs: map(gapped, inputs)),
    "one weight with a gap": case(20, 16, 40, change=lambda x, a, b, down: (x, a, gapped(b), down)),
}


@pytest.mark.versions
def test_the_layer_and_its_gradients(path):
    """`compare_all` also hands in gradients that are repeated, and every second column of others."""
    few = {name: CASES[name] for name in ("small", "odd", "texts, transposed", "halves of one, up first")}
    for dtypes, cases in (([FULL, HALF], CASES), ([BRAIN], CASES if DEVICE == "cuda" else few)):
        report = compare_all(
            swiglu_mlp, mlp_reference, cases, dtypes=dtypes, roundings=4, output_roundings=3,
            reduction=lambda **inputs: max(itertools.chain(*(t.shape for t in inputs.values()))),
        )  # fmt: skip
        assert not report.failures, report.verdict


@on_cpu
def test_which_weights_are_seen_as_one_tensor():
    fused = {name: 0 for name in CASES}
    for name, make in CASES.items():
        with launches_of("gate_up_kernel") as launches:
            swiglu_mlp(**make(lambda *shape, scale=1.0: draw(*shape, dtype=HALF, scale=scale)))
        fused[name] = [(given | options)["UP_FIRST"] for _, _, given, options in launches]
    assert fused["halves of one"] == [False] and fused["halves of one, up first"] == [True]
    assert fused["far apart"] == [False]
    for name in ("small", "odd, but on the grid", "several tiles", "one row", "texts", "rows with a gap"):
        assert len(fused[name]) == 1, name
    for name in (
        "odd",
        "one weight for both",
        "rows in turn",
        "off the 16-byte grid",
        "columns of one",
        "all transposed",
        "gate's rows repeated",
    ):
        assert not fused[name], name


@on_cpu
def test_what_lies_around_a_tile_is_left_alone():
    """The fused kernel's tiles are larger than its results, whose neighbours belong to others."""
    T, H, F = 20, 16, 40
    x, w_gate, w_up, _ = (t.detach() for t in tensors(T, H, F, dtype=HALF))
    around = torch.full((3, T + 2, F + 16), 7.0, dtype=HALF)
    gate, up, out = around[:, 1 : T + 1, 8 : F + 8]
    blocks = {"BLOCK_T": 16, "BLOCK_F": 16, "BLOCK_H": 32}
    describe = week.TensorDescriptor.from_tensor
    pair = torch.stack([w_gate, w_up])
    results = (describe(t, [16, 16]) for t in (gate, up, out))
    given = describe(x, [16, 32]), describe(pair, [2, 16, 32]), *results
    for group in (1, 2):
        week.gate_up_kernel[(3,)](*given, T, F, H, UP_FIRST=False, KEEP=True, **blocks, GROUP=group)
        want = x.double() @ w_gate.double().T, x.double() @ w_up.double().T
        all_agree((gate, up, out), (*want, reference(*want)), roundings=1)
        assert (around == 7).sum() >= around.numel() - 3 * T * F


# --- the function ----------------------------------------------------------------------------------------------------

FUNCTION_CASES = {
    "odd": lambda d: (d(33, 71), d(33, 71)),
    "one": lambda d: (d(1, 1).abs(), d(1, 1)),  # where the slope is not almost 0
    "one column": lambda d: (d(70, 1), d(70, 1)),
    "more than a tile": lambda d: (d(67, 1030), d(67, 1030)),
    "a tile": lambda d: (d(3, 1024), d(3, 1024)),
    "no batch": lambda d: (d(50), d(50)),
    "texts": lambda d: (d(2, 3, 20), d(2, 3, 20)),
    "halves": lambda d: d(20, 100).chunk(2, -1),
    "halves of texts": lambda d: d(2, 5, 42).chunk(2, -1),
    "halves, up first": lambda d: d(20, 100).chunk(2, -1)[::-1],
    "halves, one dimension": lambda d: d(100).chunk(2),
    "in turn": lambda d: d(20, 50, 2).unbind(-1),
    "one for both": lambda d: (lambda t: (t, t))(d(20, 50)),
    "overlapping": lambda d: (lambda t: (t[:-1], t[1:]))(d(21, 50)),
    "gate repeated": lambda d: (d(50).expand(20, 50), d(20, 50)),
    "up repeated": lambda d: (d(20, 50), d(20, 1).expand(20, 50)),
    "texts repeated": lambda d: (d(5, 20).expand(3, 5, 20), d(3, 1, 20).expand(3, 5, 20)),
    "one number": lambda d: (d(1).abs().expand(2, 3), d(1, 1).expand(2, 3)),
    "texts, transposed": lambda d: (d(5, 3, 20).transpose(0, 1), d(3, 20, 5).mT),
    "large": lambda d: (d(20, 50, scale=100.0), d(20, 50)),
}


@pytest.mark.versions
def test_the_function_and_its_gradients():
    named = lambda make: lambda d: dict(zip(("gate", "up"), make(d), strict=True))
    cases = {name: named(make) for name, make in FUNCTION_CASES.items()}
    report = compare_all(swiglu, reference, cases, dtypes=DTYPES, reduction=4)
    assert not report.failures, report.verdict


def test_the_function_in_bfloat16():
    pair = [draw(9, 20, dtype=BRAIN).requires_grad_() for _ in range(2)]
    agrees(swiglu(*pair), reference(*double(pair)), 1)
    all_agree(gradients(swiglu, pair), gradients(reference, double(pair)), roundings=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_inputs_and_gradient(layout):
    for gate, up, upstream in itertools.product((LAYOUTS[layout], LAYOUTS["contiguous"]), repeat=3):
        inputs = [make(9, 20).requires_grad_() for make in (gate, up)]
        upstream = upstream(9, 20)
        kept = [t.clone() for t in (*inputs, upstream)]
        with poisoned():
            got = swiglu(*inputs)
            found = torch.autograd.grad(got, inputs, upstream)
        agrees(got, reference(*double(inputs)), 1, 4)
        terms = (upstream * inputs[1]).abs().max().item()  # silu's slope may be almost 0 everywhere
        all_agree(found, gradients(reference, double(inputs), upstream), roundings=1, reduction=4, terms=terms)
        assert same_bits((*inputs, upstream), kept)


def close(dtype):
    return max(2 * torch.finfo(dtype).eps, 1e-5)


@pytest.mark.versions
@both_dtypes
def test_gate_values_of_all_sizes(dtype):
    """Also where e^-gate overflows: nothing but PyTorch's own infinities and NaN."""
    largest = torch.finfo(dtype).max
    values = [0.0, 1e-7, 9, 20, 88, 89, 100, 104, 1000, 65504, largest]
    gate = torch.tensor([*values, *(-v for v in values)], device=DEVICE, dtype=dtype).requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    got = swiglu(gate, up)
    want = double((gate, up))
    for one, other in zip(
        (got, *gradients(swiglu, (gate, up))), (reference(*want), *gradients(reference, want)), strict=True
    ):
        assert one.isfinite().all()
        assert torch.allclose(one.double(), other, rtol=close(dtype), atol=1e-30 if dtype == FULL else 1e-7)
    odd = torch.tensor([INF, -INF, NAN, 1.0, 0.0], device=DEVICE, dtype=dtype)
    inputs = [t.requires_grad_() for t in (odd.repeat_interleave(5), odd.repeat(5))]
    for one, other in zip(
        (swiglu(*inputs), *gradients(swiglu, inputs)), (reference(*inputs), *gradients(reference, inputs)), strict=True
    ):
        assert torch.allclose(one, other, rtol=close(dtype), equal_nan=True)


@both_dtypes
def test_large_gates_in_the_layer(path, dtype):
    values = [100.0, -100.0, 65504.0, -65504.0, 89.0, -89.0, 0.0]
    x = torch.tensor([[*values, 1.0]], device=DEVICE, dtype=dtype).requires_grad_()
    one = torch.eye(8, device=DEVICE, dtype=dtype)
    w_up = torch.zeros_like(one)
    w_up[:, 7] = 0.5  # times the 1 of x: up is 0.5 throughout
    inputs = [x, one, w_up, one.clone()]
    got = swiglu_mlp(*inputs)
    assert got.isfinite().all()
    assert torch.allclose(got.double(), mlp_reference(*double(inputs)), rtol=close(dtype), atol=1e-7)
    (found,), (want,) = gradients(swiglu_mlp, inputs), gradients(mlp_reference, double(inputs))
    for i in range(7):  # the last sums all
        assert torch.allclose(found[0, i].double(), want[0, i], rtol=close(dtype), atol=1e-7)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_and_infinity_stay_in_their_row(path, value):
    inputs = [t.detach() for t in tensors(F=24)]
    inputs[0][2, 3] = value
    got, want = swiglu_mlp(*inputs), mlp_reference(*double(inputs))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert not got[2].isfinite().any() and got[[0, 1, 3, 4, 5]].isfinite().all()


@both_dtypes
def test_zeros_without_memory_and_negated_views(path, dtype):
    inputs = [t.detach() for t in tensors(dtype=dtype)]
    learn = [t.requires_grad_() for t in map(torch._neg_view, inputs)]
    agrees(swiglu_mlp(*learn), mlp_reference(*(-t.double() for t in inputs)), 3)
    upstream = torch._neg_view(draw(6, 16, dtype=dtype))
    all_agree(gradients(swiglu_mlp, learn, upstream), gradients(mlp_reference, double(learn), upstream.resolve_neg()))
    zeros = torch._efficientzerotensor((6, 16), device=DEVICE, dtype=dtype)
    assert not any(g.any() for g in gradients(swiglu_mlp, learn, zeros))
    nothing = torch._efficientzerotensor((6, 8), device=DEVICE, dtype=dtype)
    assert not swiglu_mlp(nothing, *inputs[1:]).any()
    gate, up = inputs[1:3]
    pair = [torch._neg_view(t.detach()).requires_grad_() for t in (gate, up)]
    agrees(swiglu(*pair), reference(-gate.double(), -up.double()), 1)
    zeros = torch._efficientzerotensor(gate.shape, device=DEVICE, dtype=dtype)
    assert not any(g.any() for g in gradients(swiglu, pair, zeros)) and not swiglu(zeros, up).any()


EMPTY = {"no rows": {"T": 0}, "no columns": {"H": 0}, "hidden 0": {"F": 0}, "nothing comes out": {"D": 0}}


@both_dtypes
@pytest.mark.parametrize("name", EMPTY)
def test_empty(name, dtype):
    inputs = tensors(**EMPTY[name], dtype=dtype)
    with poisoned():
        got, found = swiglu_mlp(*inputs), gradients(swiglu_mlp, inputs)
    all_agree((got, *found), (mlp_reference(*double(inputs)), *gradients(mlp_reference, double(inputs))))
    for shape in ((0, 5), (5, 0), (0,), (2, 0, 3)):
        pair = [draw(*shape, dtype=dtype).requires_grad_() for _ in range(2)]
        assert swiglu(*pair).shape == shape and [g.shape for g in gradients(swiglu, pair)] == [shape] * 2


# --- what is held, and what may be overwritten -----------------------------------------------------------------------


def test_two_large_matrices_are_held(path):
    T, F = 64, 128
    inputs, size = tensors(T, 8, F), T * F * 4
    assert memory.held_bytes(swiglu_mlp, *inputs) == 2 * size
    assert memory.held_bytes(week.swiglu_mlp_eager, *inputs) == 4 * size
    for learn in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(5)):
        held = memory.held_bytes(swiglu_mlp, *tensors(T, 8, F, learn=learn))
        assert held == (0 if not learn else size if learn == (3,) else 2 * size), learn
    with torch.no_grad():
        assert memory.held_bytes(swiglu_mlp, *inputs) == 0 and not swiglu_mlp(*inputs).requires_grad
    for T in (1, 64):
        assert memory.held_bytes(swiglu, draw(T, F).requires_grad_(), draw(T, F).requires_grad_()) == 0
    both = draw(T, 2 * F).requires_grad_()
    assert memory.held_bytes(lambda both: swiglu(*both.chunk(2, -1)), both) == 0
    texts = draw(4, 16, 2 * F).requires_grad_()
    assert memory.held_bytes(lambda both: swiglu(*both.chunk(2, -1)), texts) == 0


@both_dtypes
def test_a_retained_graph_gives_the_same_bits_each_time(path, dtype):
    inputs = tensors(20, 16, 40, dtype=dtype)
    out, upstream = swiglu_mlp(*inputs), draw(20, 16, dtype=dtype)
    kept = [t.detach().clone() for t in (*inputs, upstream, out)]
    first = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    copies = [g.clone() for g in first]
    for gradient in first:
        gradient.fill_(NAN)  # it is the caller's
    again = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    last = torch.autograd.grad(out, inputs, upstream)
    assert same_bits(again, copies) and same_bits(last, copies)
    all_agree(last, gradients(mlp_reference, double(inputs), upstream))
    assert same_bits((*inputs, upstream, out), kept), "what came in was changed"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, inputs, upstream)
    assert same_bits(gradients(swiglu_mlp, inputs, upstream), copies), "not the same from run to run"


def test_the_function_retains_too():
    pair = [draw(9, 20).requires_grad_() for _ in range(2)]
    out, upstream = swiglu(*pair), draw(9, 20)
    first, again, last = (torch.autograd.grad(out, pair, upstream, retain_graph=keep) for keep in (True, True, False))
    assert same_bits(first, again) and same_bits(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, pair, upstream)


def test_part_of_the_gradients_at_a_time(path):
    inputs = tensors(20, 16, 40)
    out = swiglu_mlp(*inputs)
    found = [torch.autograd.grad(out.sum(), leaf, retain_graph=i < 3)[0] for i, leaf in enumerate(inputs)]
    all_agree(found, gradients(mlp_reference, double(inputs)))


def test_what_hooks_keep_is_not_written_over(path):
    """Hooks that hand on the very tensor; and others that copy."""
    inputs = tensors(20, 16, 40)
    want, kept = gradients(swiglu_mlp, inputs), []

    def keep(t):
        kept.append((t, t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = swiglu_mlp(*inputs)
    assert same_bits(torch.autograd.grad(out.sum(), inputs), want)
    assert any(t.numel() == 2 * 20 * 40 for t, _ in kept)
    assert all(torch.equal(t, copy) for t, copy in kept)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = swiglu_mlp(*inputs)
    assert same_bits(torch.autograd.grad(out.sum(), inputs), want)
    with torch.autograd.graph.save_on_cpu():
        out = swiglu_mlp(*inputs)
    assert same_bits(torch.autograd.grad(out.sum(), inputs), want)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert same_bits(gradients(swiglu_mlp, inputs), want)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint(path, use_reentrant):
    inputs = tensors(20, 16, 40)
    step = lambda x, *weights: swiglu_mlp(x * 2, *weights).sin()
    want = gradients(step, inputs)
    checkpoint(step, *inputs, use_reentrant=use_reentrant).sum().backward()
    assert same_bits([t.grad for t in inputs], want)
    if not use_reentrant:
        out = checkpoint(step, *inputs, use_reentrant=False).sum()
        again = [torch.autograd.grad(out, inputs, retain_graph=keep) for keep in (True, True, False)]
        assert all(same_bits(found, want) for found in again)


def test_a_backward_within_a_backward(path):
    """The inner one does not retain its graph, whatever the outer does; and the reverse."""
    inputs = tensors(20, 16, 40)
    want = gradients(swiglu_mlp, inputs)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, task):
            ctx.task = task
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                ctx.task()
            return grad, None

    for keep in (True, False):
        found, inner, other = [], swiglu_mlp(*inputs), swiglu_mlp(*inputs)
        task = lambda inner=inner, keep=keep, found=found: found.extend(
            torch.autograd.grad(inner.sum(), inputs, retain_graph=keep)
        )
        result = Inner.apply(other, task)
        got = torch.autograd.grad(result.sum(), inputs, retain_graph=not keep)
        assert same_bits(got, want) and same_bits(found, want)
        if keep:
            assert same_bits(torch.autograd.grad(inner.sum(), inputs), want)
        else:
            assert same_bits(torch.autograd.grad(other.sum(), inputs), want)


class Broken(Exception):
    pass


def fail_at(monkeypatch, number):
    """The product of that number, counted from 0, raises."""
    real, count = torch.mm, itertools.count()

    def mm(*args, **options):
        if next(count) == number:
            raise Broken
        return real(*args, **options)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_written_over_is_announced(keep):
    """Whoever took gate and up from the graph, and saved them, hears of it."""
    out = swiglu_mlp(*(inputs := tensors(20, 16, 40)))
    node = out.grad_fn
    while not hasattr(node, "_raw_saved_tensors"):
        node = node.next_functions[0][0]
    pair = node.saved_tensors[4]
    before = pair.clone(), pair._version
    torch.autograd.grad(out.sum(), inputs, retain_graph=keep)
    assert torch.equal(pair, before[0]) == keep and (pair._version == before[1]) == keep


def test_gradients_of_gate_and_up_count_their_versions_apart():
    inputs = tensors()
    swiglu_mlp(*inputs).sum().backward()
    kept = (torch.ones((), requires_grad=True) * inputs[1].grad).sum()
    inputs[2].grad.zero_()
    kept.backward()


@pytest.mark.parametrize("number", range(4))
def test_a_backward_that_failed_half_way_is_never_silently_wrong(monkeypatch, path, number):
    inputs = tensors(20, 16, 40)
    want, outputs = gradients(swiglu_mlp, inputs), [swiglu_mlp(*inputs) for _ in range(2)]
    for out, keep in zip(outputs, (True, False), strict=True):
        with monkeypatch.context() as patch:
            fail_at(patch, number)
            with pytest.raises(Broken):
                torch.autograd.grad(out.sum(), inputs, retain_graph=keep)
        if keep:  # nothing was overwritten
            assert same_bits(torch.autograd.grad(out.sum(), inputs), want)
            continue
        for options in ({"retain_graph": True}, {}):
            try:
                found = torch.autograd.grad(out.sum(), inputs, **options)
            except RuntimeError as error:
                assert "half-way" in str(error) or "second time" in str(error)
            else:
                assert number == 0 and same_bits(found, want)


@pytest.mark.parametrize("which", range(4))
def test_changing_what_came_in_makes_autograd_raise(path, which):
    given = [t * 1 for t in tensors(20, 16, 40)]
    out = swiglu_mlp(*given)
    given[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_result_may_be_changed(path):
    inputs = tensors(20, 16, 40)
    want = gradients(swiglu_mlp, inputs)
    out = swiglu_mlp(*inputs)
    out.mul_(2).add_(1)
    assert same_bits(torch.autograd.grad(out.sum(), inputs), [2 * g for g in want])


# --- gradients -------------------------------------------------------------------------------------------------------


@both_dtypes
def test_a_scaled_loss_and_a_shared_gradient(path, dtype):
    first, other = tensors(dtype=dtype), tensors(dtype=dtype)
    upstream = draw(6, 16, dtype=dtype, scale=0.1)
    kept = upstream.clone()
    want = gradients(swiglu_mlp, first, upstream)
    scaled = gradients(swiglu_mlp, first, 1024 * upstream)
    all_agree(scaled, [1024 * g for g in gradients(mlp_reference, double(first), upstream)])
    outputs = swiglu_mlp(*first), swiglu_mlp(*other)
    together = torch.autograd.grad(outputs, first + other, [upstream] * 2)
    assert torch.equal(upstream, kept) and same_bits(together[:4], want)
    assert same_bits(together[4:], gradients(swiglu_mlp, other, upstream))


def test_gradients_add_up_and_may_be_changed(path):
    """Those of w_gate and w_up come out of one product; what is done to one is not done to the other."""
    inputs = tensors()
    want = gradients(swiglu_mlp, inputs)
    for _ in range(2):
        swiglu_mlp(*inputs).sum().backward()
    assert same_bits([t.grad for t in inputs], [2 * g for g in want])
    inputs[1].grad.zero_()
    inputs[2].grad.mul_(0.5)
    assert not inputs[1].grad.any() and torch.equal(inputs[2].grad, want[2])
    torch.nn.utils.clip_grad_norm_(inputs, 1e-3)
    optimiser = torch.optim.AdamW(inputs)
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    swiglu_mlp(*inputs).sum().backward()
    all_agree([t.grad for t in inputs], gradients(mlp_reference, double(inputs)))


def test_one_parameter_in_several_places(path):
    """Tied weights, weights made of one another, and an input made of a weight."""
    leaf, x = draw(16, 16, scale=0.25).requires_grad_(), draw(5, 16).requires_grad_()
    for function in TIED.values():
        want = torch.autograd.grad(function(mlp_reference, *(exact := double((leaf, x)))).sum(), exact)
        all_agree(torch.autograd.grad(function(swiglu_mlp, leaf, x).sum(), (leaf, x)), want)


TIED = {
    "all one": lambda f, w, x: f(x, w, w, w),
    "up made of gate": lambda f, w, x: f(x, w, 2 * w, w.T),
    "gate made of up": lambda f, w, x: f(x, w.sin(), w, w.T),
    "all made of one that is no leaf": lambda f, w, x: (lambda v: f(x, v, v.cos(), v))(w * 1),
    "halves of one": lambda f, w, x: f(x, *torch.cat([w, w.cos()]).chunk(2), w),
    "an input made of a weight": lambda f, w, x: f(x @ w, w, w.T, w),
    "a weight made of the input": lambda f, w, x: f(x, w, x.T @ x, w),
}


class Products(TorchDispatchMode):
    """Counts multiplications in products of matrices."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[-1]
        assert name not in ("matmul", "bmm", "baddbmm", "linear", "einsum"), name
        if name in ("mm", "addmm", "addmm_"):
            one, other = args[-2:]
            self.total += one.shape[0] * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("learn", SUBSETS, ids=lambda s: " ".join(NAMES_OF_INPUTS[i] for i in s))
def test_what_is_frozen_costs_nothing_and_the_others_are_right(path, learn):
    """In units of one product: that with the gradient of out, and one for each weight that learns; two for x."""
    inputs = tensors(20, 16, 40, 16, learn=learn)
    upstream = draw(20, 16)
    with poisoned():
        out = swiglu_mlp(*inputs)
    with Products() as products, poisoned():
        out.backward(upstream)
    found = [t.grad for t in inputs]
    assert [g is not None for g in found] == [i in learn for i in range(4)]
    all_agree([g for g in found if g is not None], gradients(mlp_reference, double(inputs), upstream))
    needed = (learn != (3,)) + 2 * (0 in learn) + (1 in learn) + (2 in learn) + (3 in learn)
    assert products.total == needed * 20 * 16 * 40


@on_cpu
def test_peak_memory(path):
    """In units of a large matrix: gate, up and out; on the way back gate, up and the gradient of out."""
    T, H, F = 128, 8, 512
    unit, small = T * F * 4, (3 * T * H + 4 * F * H) * 4
    step = lambda *inputs: gradients(swiglu_mlp, inputs)
    for learn in ((0, 1, 2, 3), (0,), (1, 2), (3,)):
        large = 1 if path == "fused" and learn == (3,) else 3
        assert memory.peak_bytes(step, *tensors(T, H, F, H, learn=learn)) <= large * unit + small, learn
    retained = lambda *inputs: gradients(swiglu_mlp, inputs, retain_graph=True)
    assert memory.peak_bytes(retained, *tensors(T, H, F, H)) <= 5 * unit + small
    forward = memory.peak_bytes(swiglu_mlp, *tensors(T, H, F, H, learn=()))
    assert forward <= (1 if path == "fused" else 3) * unit + T * H * 4
    eager = lambda *inputs: gradients(week.swiglu_mlp_eager, inputs)
    assert memory.peak_bytes(eager, *tensors(T, H, F, H)) > 4 * unit + small


@pytest.mark.parametrize("learn", [(0,), (1,)])
def test_the_function_with_one_that_is_frozen(learn):
    pair = [draw(9, 20).requires_grad_(i in learn) for i in range(2)]
    upstream = draw(9, 20)
    swiglu(*pair).backward(upstream)
    assert [t.grad is not None for t in pair] == [i in learn for i in range(2)]
    agrees(pair[learn[0]].grad, gradients(reference, double(pair), upstream)[0], 1)


def second_derivatives(function, inputs, directions, upstream):
    """The gradient, made so that it can be differentiated, and the product of the Hessian with a direction."""
    learn = [t for t in inputs if t.requires_grad]
    first = torch.autograd.grad(function(*inputs), learn, upstream, create_graph=True)
    product = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    if not product.requires_grad:  # of something linear
        return first
    return *first, *torch.autograd.grad(product, learn, allow_unused=True)


@pytest.mark.parametrize("learn", [(0, 1, 2, 3), (0,), (1,), (2, 3), (0, 3), (1, 2)], ids=str)
def test_second_derivatives(path, learn):
    inputs = tensors(learn=learn)
    directions, upstream = [draw(*inputs[i].shape) for i in learn], draw(6, 16)
    found = second_derivatives(swiglu_mlp, inputs, directions, upstream)
    want = second_derivatives(mlp_reference, double(inputs), [d.double() for d in directions], upstream.double())
    for one, other in zip(found, want, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learn", [(0, 1), (0,), (1,)], ids=str)
def test_second_derivatives_of_the_function(learn):
    pair = [draw(9, 20).requires_grad_(i in learn) for i in range(2)]
    directions, upstream = [draw(9, 20) for _ in learn], draw(9, 20)
    found = second_derivatives(swiglu, pair, directions, upstream)
    want = second_derivatives(reference, double(pair), [d.double() for d in directions], upstream.double())
    for one, other in zip(found, want, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TIED)
def test_second_derivatives_of_one_parameter_in_several_places(name):
    """Each place has its own share: what one weight gets through another is PyTorch's to add."""
    leaf, x = draw(16, 16, scale=0.25).requires_grad_(), draw(5, 16).requires_grad_()
    directions = [draw(16, 16), draw(5, 16)]
    layer = lambda function: lambda leaf, x: TIED[name](function, leaf, x).square().sum()
    found = second_derivatives(layer(swiglu_mlp), (leaf, x), directions, None)
    want = second_derivatives(layer(mlp_reference), double((leaf, x)), [d.double() for d in directions], None)
    for one, other in zip(found, want, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-3 * other.abs().max().item())


def test_second_derivatives_of_halves_and_of_one_tensor():
    both = draw(9, 40).requires_grad_()
    ways = lambda both: both.chunk(2, -1), lambda both: (both, both), lambda both: (both, both.sin())
    for split in ways:
        layer = lambda function, split=split: lambda both: function(*split(both)).square().sum()
        found = second_derivatives(layer(swiglu), (both,), [torch.ones_like(both)], None)
        want = second_derivatives(layer(reference), double((both,)), [1], None)
        for one, other in zip(found, want, strict=True):
            assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-3)


# --- where PyTorch puts it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_under_autocast(path, dtype):
    """Weights in float32, products in the dtype of autocast, gradients in float32; wherever the backward pass is."""
    inputs = tensors(20, 16, 40)
    want, exact = gradients(mlp_reference, double(inputs)), mlp_reference(*double(inputs))
    for x in (inputs[0], inputs[0].detach().to(dtype).requires_grad_()):
        given = [x, *inputs[1:]]
        for inside in (True, False):
            with torch.autocast(DEVICE, dtype):
                out = swiglu_mlp(*given)
                found = torch.autograd.grad(out.sum(), given) if inside else None
            found = torch.autograd.grad(out.sum(), given) if found is None else found
            assert out.dtype == dtype and [g.dtype for g in found] == [x.dtype, FULL, FULL, FULL]
            for one, other in zip((out, *found), (exact, *want), strict=True):
                assert (one.double() - other).norm() <= 8 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_a_backward_under_autocast_of_a_forward_that_was_not(path, dtype):
    inputs = tensors(20, 16, 40)
    want, out = gradients(mlp_reference, double(inputs)), swiglu_mlp(*inputs)
    with torch.autocast(DEVICE, dtype):
        found = torch.autograd.grad(out.sum(), inputs)
    for one, other in zip(found, want, strict=True):
        assert one.dtype == FULL and (one.double() - other).norm() <= 8 * torch.finfo(dtype).eps * other.norm()


def test_other_tensors_under_autocast():
    inputs = tensors()
    with torch.autocast(DEVICE, BRAIN):
        for wrong in (inputs[0].double(), inputs[0].long()):
            with pytest.raises(TypeError, match=f"x has dtype {wrong.dtype}"):
                swiglu_mlp(wrong, *inputs[1:])
        pair = [draw(9, 20, dtype=HALF).requires_grad_() for _ in range(2)]
        agrees(swiglu(*pair), reference(*double(pair)), 1)


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    inputs, pair = tensors(20, 16, 40), [draw(9, 20).requires_grad_() for _ in range(2)]
    layer = lambda x, *weights: swiglu_mlp(x * 2, *weights).sin()
    function = lambda gate, up: swiglu(gate * 2, up).sin()
    for step, given in ((layer, inputs), (function, pair)):
        found = gradients(torch.compile(step, backend="eager"), given)
        for one, other in zip(found, gradients(step, given), strict=True):
            torch.testing.assert_close(one, other)


def test_transforms_are_served_or_refused_in_words():
    x, *weights = (t.detach() for t in tensors())
    layer, f = lambda x: swiglu_mlp(x, *weights).sum(), torch.func
    refused = RuntimeError, NotImplementedError
    for function, exact, given in (
        (layer, lambda x: mlp_reference(x, *weights).sum(), x),
        (lambda x: swiglu(x, x.cos()).sum(), lambda x: reference(x, x.cos()).sum(), x),
    ):
        ways = f.grad, f.jacrev, f.jacfwd, f.vmap, lambda g: lambda t: f.jvp(g, (t,), (t,))[1]
        for way in ways:
            try:
                got = way(function)(given)
            except refused as error:
                assert any(word in str(error) for word in ("setup_context", "jvp", "forward AD")), error
            else:
                assert torch.allclose(got, way(exact)(given), atol=1e-4)


def test_gradients_for_many_directions_at_once_are_right_or_refused():
    pair = [draw(20, 16).requires_grad_() for _ in range(2)]
    layer = swiglu_mlp, mlp_reference, tensors(20, 16, 40)
    for function, exact, inputs in (layer, (swiglu, reference, pair)):
        upstream = draw(3, 20, 16)
        want = torch.autograd.grad(exact(*inputs), inputs, upstream, is_grads_batched=True)
        try:
            found = torch.autograd.grad(function(*inputs), inputs, upstream, is_grads_batched=True)
        except RuntimeError:
            continue
        for one, other in zip(found, want, strict=True):
            assert torch.allclose(one, other, atol=1e-4)


def test_inference_mode(path):
    inputs = tensors(20, 16, 40)
    with torch.inference_mode():
        agrees(swiglu_mlp(*inputs), mlp_reference(*double(inputs)), 3)
        agrees(swiglu(*inputs[1:3]), reference(*double(inputs[1:3])), 1)


# --- wrong requests --------------------------------------------------------------------------------------------------

X, G, DOWN = (torch.zeros(*shape, device=DEVICE) for shape in ((3, 4), (6, 4), (5, 6)))
WRONG = {
    "no tensor": (([1.0], G, G, DOWN), TypeError, "x must be a torch.Tensor, got list"),
    "no weight": ((X, G, None, DOWN), TypeError, "w_up must be a torch.Tensor, got NoneType"),
    "float64": ((X.double(), G.double(), G.double(), DOWN.double()), TypeError, "x has dtype torch.float64"),
    "integers": ((X.long(), G, G, DOWN), TypeError, "x has dtype torch.int64"),
    "another dtype of gate": ((X, G.half(), G, DOWN), TypeError, "w_gate has dtype torch.float16.*float32, as x"),
    "another dtype of up": ((X, G, G.double(), DOWN), TypeError, "w_up has dtype torch.float64"),
    "another dtype of down": ((X, G, G, DOWN.bfloat16()), TypeError, "w_down has dtype torch.bfloat16.*float32, as x"),
    "0-d": ((X[0, 0], G, G, DOWN), ValueError, "x has (no|0) dim"),
    "gate 1-DOWN": ((X, G[0], G, DOWN), ValueError, "w_gate has 1 dim"),
    "up 3-DOWN": ((X, G, G[None], DOWN), ValueError, "w_up has 3 dim"),
    "down 1-DOWN": ((X, G, G, DOWN[0]), ValueError, "w_down has 1 dim"),
    "other columns": ((X, G[:, :3], G[:, :3], DOWN), ValueError, "x has 4 features.*3, as w_gate"),
    "gate turned": ((X, G.T, G.T, DOWN), ValueError, "x has 4 features.*6, as w_gate"),
    "up of other columns": ((X, G, G[:, :3], DOWN), ValueError, r"w_up has shape \(6, 3\).*\(6, 4\), as w_gate"),
    "up of other rows": ((X, G, G[:1], DOWN), ValueError, r"w_up has shape \(1, 4\).*\(6, 4\), as w_gate"),
    "down turned": ((X, G, G, DOWN.T), ValueError, "w_down has 5 columns; taken: 6, as w_gate has rows"),
    "x elsewhere": ((X.to("meta"), G, G, DOWN), ValueError, "x is on meta"),
    "gate elsewhere": ((X, G.to("meta"), G, DOWN), ValueError, "w_gate is on meta"),
    "up elsewhere": ((X, G, G.to("meta"), DOWN), ValueError, "w_up is on meta"),
    "down elsewhere": ((X, G, G, DOWN.to("meta")), ValueError, "w_down is on meta"),
    "sparse": ((X.to_sparse(), G, G, DOWN), ValueError, "x has layout torch.sparse"),
    "empty, of other shapes": ((X[:0], G[:, :3], G, DOWN), ValueError, "x has 4 features"),
    "empty, of another dtype": ((X[:0], G, G.half(), DOWN), TypeError, "w_up has dtype"),
    "swiglu, no tensor": (([1.0], X), TypeError, "gate must be a torch.Tensor, got list"),
    "swiglu, no up": ((X, None), TypeError, "up must be a torch.Tensor, got NoneType"),
    "swiglu, float64": ((X.double(), X.double()), TypeError, "gate has dtype torch.float64"),
    "swiglu, integers": ((X, X.long()), TypeError, "up has dtype torch.int64"),
    "swiglu, two dtypes": ((X, X.half()), TypeError, "up has dtype torch.float16.*float32, as gate"),
    "swiglu, up repeated": ((X, X[:1]), ValueError, r"up has shape \(1, 4\).*\(3, 4\), as gate"),
    "swiglu, up of more dimensions": ((X, X[None]), ValueError, r"up has shape \(1, 3, 4\).*\(3, 4\), as gate"),
    "swiglu, gate elsewhere": ((X.to("meta"), X), ValueError, "gate is on meta"),
    "swiglu, up elsewhere": ((X, X.to("meta")), ValueError, "up is on meta"),
    "swiglu, empty, of other shapes": ((X[:0], X), ValueError, "up has shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_in_words(monkeypatch, name):
    arguments, error, says = WRONG[name]
    for launcher in ("swiglu_into", "swiglu_backward_into", "gate_and_up"):
        monkeypatch.setattr(week, launcher, lambda *args, **options: pytest.fail("launched"))
    with pytest.raises(error, match=says):
        (swiglu if name.startswith("swiglu") else swiglu_mlp)(*arguments)


def test_the_function_takes_single_numbers():
    pair = [draw(1).abs().reshape(()).requires_grad_() for _ in range(2)]
    agrees(swiglu(*pair), reference(*double(pair)), 2)
    all_agree(gradients(swiglu, pair), gradients(reference, double(pair)))


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """In memory that is hardly touched: rows, or the two weights, so far apart that offsets pass 2^31."""
    reserved, used = torch.empty(2**31 + 2**27, dtype=HALF), 0

    def far(values):
        nonlocal used
        used += 2**16
        return reserved.data.as_strided(values.shape, (2**30, 1), used).copy_(values)

    new = lambda: draw(3, 40, dtype=HALF)
    both = far(draw(3, 80, dtype=HALF)).requires_grad_()
    for inputs in (both.chunk(2, -1), [new(), far(new()).requires_grad_()], [far(new()).requires_grad_(), new()]):
        learn, upstream = [t for t in inputs if t.requires_grad], far(new())
        out = swiglu(*inputs)
        agrees(out, reference(*double(inputs)), 1)
        want = gradients(reference, double(inputs), upstream)
        all_agree(torch.autograd.grad(out, learn, upstream), want, roundings=2)
    pair, grad = double((new().requires_grad_(), new().requires_grad_())), new()
    want = *gradients(reference, pair, grad), reference(*pair)
    for place in range(6):
        given = [new(), new(), new(), pair[0].detach().half(), pair[1].detach().half(), grad.clone()]
        given[place] = far(given[place])
        week.swiglu_backward_into(*given)
        all_agree(given[:3], want, roundings=2)
        out = far(new())
        week.swiglu_into(out, *given[3:5])
        agrees(out, want[2], 1)

    x, w_gate, w_up = new(), *(draw(24, 40, dtype=HALF, scale=0.2) for _ in range(2))
    want = mlp_reference(*double((x, w_gate, w_up)), torch.eye(24).double())
    used += 2**16
    lower = reserved[used:][:960].view(24, 40)
    upper = reserved[-960:].view(24, 40)
    assert upper.data_ptr() - lower.data_ptr() > 2**32
    for gate, up in ((lower, upper), (upper, lower)):
        gate, up = gate.copy_(w_gate), up.copy_(w_up)
        with launches_of("gate_up_kernel") as launches:
            agrees(week.gate_and_up(far(x), gate, up, False)[1], want, 1)
        assert launches
    touched_little()


def test_rows_too_long_for_the_kernels_are_refused():
    long = draw(1).expand(1, 2**30)
    with pytest.raises(ValueError, match="1 rows of 1073741824 are too large"):
        week.swiglu_into(long, long, long)


@on_cpu
def test_offsets_past_2_to_the_31():
    elsewhere(_far_apart, timeout=100, TRITON_INTERPRET="1")


# --- what is moved ---------------------------------------------------------------------------------------------------


@on_cpu
@both_dtypes
@pytest.mark.parametrize("T, F", [(5, 1025), (67, 40)])
def test_bytes_moved(T, F, dtype):
    gate, up = (draw(T, F, dtype=dtype).requires_grad_() for _ in range(2))
    upstream, size = draw(T, F, dtype=dtype), gate.nbytes
    moved = memory.traffic(swiglu, gate.detach(), up.detach())
    assert (moved.read, moved.written) == (2 * size, size)
    out = swiglu(gate, up)
    moved = memory.traffic(torch.autograd.grad, out, (gate, up), upstream, retain_graph=True)
    assert (moved.read, moved.written) == (3 * size, 2 * size)
    pair = draw(T, 2 * F, dtype=dtype)
    left, right = pair.chunk(2, -1)
    into = week.swiglu_backward_into
    for results, written in (((left, right, None), 2), ((left, right, upstream), 3), ((None, None, upstream), 1)):
        moved = memory.traffic(into, *results, left, right, upstream)
        assert (moved.read, moved.written) == (3 * size, written * size)


@on_cpu
def test_gate_and_up_are_stored_only_if_they_are_kept():
    T, H, F = 20, 16, 40
    inputs = [t.detach() for t in tensors(T, H, F, dtype=HALF)][:3]
    for keep, written in ((True, 3), (False, 1)):
        moved = memory.traffic(week.gate_and_up, *inputs, keep)
        assert (moved.read, moved.written) == (sum(t.nbytes for t in inputs), written * T * F * 2)


@on_cpu
def test_gradients_in_place_of_what_they_are_made_from():
    gate, up, grad = (draw(9, 20) for _ in range(3))
    pair = double((gate.requires_grad_(), up.requires_grad_()))
    want = *gradients(reference, pair, grad), reference(*pair).detach()
    for order in itertools.permutations(range(3)):  # any over any
        sources = [t.detach().clone() for t in (gate, up, grad)]
        week.swiglu_backward_into(*(sources[i] for i in order), *sources)
        all_agree([sources[i] for i in order], want, roundings=1)


def test_the_check_sees_what_could_go_wrong():
    """Gate and up swapped, a product without its sigmoid's slope, one half of a projection for both."""
    swapped = lambda x, w_gate, w_up, w_down: swiglu_mlp(x, w_up, w_gate, w_down)
    one_half = lambda x, w_gate, w_up, w_down: swiglu_mlp(x, w_gate, w_gate, w_down)

    def no_slope(x, w_gate, w_up, w_down):
        gate = x @ w_gate.T
        return (gate * torch.sigmoid(gate).detach() * (x @ w_up.T)) @ w_down.T

    for broken in (swapped, one_half, no_slope):
        few = {"small": CASES["small"]}
        report = compare_all(broken, mlp_reference, few, dtypes=[FULL], reduction=300, roundings=4)
        assert report.failures


# --- what the compiler makes of it -----------------------------------------------------------------------------------


def elementwise_jobs():
    empty = lambda *size, dtype: torch.empty(size, dtype=dtype, device="meta")
    for dtype, target in ((HALF, "sm_75"), (BRAIN, "sm_80"), (BRAIN, "sm_90"), (FULL, "sm_75")):
        launches, T, F = [], 4096, 14336
        gate, up = empty(T, 2 * F, dtype=dtype).chunk(2, -1)
        out = empty(T, F, dtype=dtype)
        with as_on_a_gpu(week) as patch:
            for name in ("swiglu_kernel", "swiglu_backward_kernel"):
                patch.setattr(week, name, Recorder(getattr(week, name), launches))
            week.swiglu_into(out, gate, up)
            for results in ((gate, up, out), (out, None, None))[: 1 + (target == "sm_90")]:
                week.swiglu_backward_into(*results, gate, up, out)
        for kernel, _, given, options in launches:
            signature = {name: as_type(value) for name, value in given.items()}
            warps = {"num_warps": options.pop("num_warps")}
            yield NAMES[dtype], kernel, signature | options, target, warps


def product_jobs():
    blocks = week.BLOCKS
    t, f, h = blocks.values()
    for dtype, up_first, keep in (("bf16", False, True), ("fp16", True, False)):
        boxes = {"x_desc": [t, h], "w_desc": [2, f, h], "gate_desc": [t, f], "up_desc": [t, f], "out_desc": [t, f]}
        signature = {name: f"tensordesc<{dtype}[{','.join(map(str, box))}]>" for name, box in boxes.items()}
        signature |= {"T": "i32", "F": "i32", "H": "i32", "UP_FIRST": up_first, "KEEP": keep, **blocks, "GROUP": 16}
        yield dtype, week.gate_up_kernel, signature, "sm_90", {"num_warps": 8, "num_stages": 4}


@pytest.mark.versions
def test_compiled_code():
    """Elementwise 16 bytes at a time; products by Hopper's copies and tensor cores; no spills."""
    elementwise, products, wrong = list(elementwise_jobs()), list(product_jobs()), []
    made = compile_many(elementwise + products)
    for (label, _, signature, target, _), code in zip(elementwise, made, strict=False):
        loads, stores = code.count("LDG"), code.count("STG")
        wide = loads == code.count("LDG", "128") > 0 and stores == code.count("STG", "128") > 0
        each = 2 if label == "fp32" else 1  # of 8 numbers a thread
        results = sum(signature.get(f"{name}_ptr") is not None for name in ("out", "grad_gate", "grad_up"))
        inputs = sum(signature.get(f"{name}_ptr") is not None for name in ("gate", "up", "grad"))
        if not wide or (loads, stores) != (each * inputs, each * results) or code.spill_bytes or code.registers > 128:
            wrong.append(f"{label}, {target}, {results} results: {code.summary()}")
    for (label, *_), code in zip(products, made[len(elementwise) :], strict=True):
        if not code.count("HGMMA") or not code.count("UTMALDG") or not code.count("UTMASTG"):
            wrong.append(f"{label}: {code.summary()}")
        if code.spill_bytes or code.shared_bytes > 227 * 1024:
            wrong.append(f"{label}: {code.summary()}")
    assert not wrong, "\n".join(wrong)


def test_when_the_products_are_fused():
    """On Hopper, in 16 bits, with rows on the grid of 16 bytes and tiles enough for two rounds of 132."""
    unreal = lambda T, H, dtype=BRAIN: torch.empty(T, H, dtype=dtype, device="meta")
    t, f = (week.BLOCKS[name] for name in ("BLOCK_T", "BLOCK_F"))
    found, sizes = {}, ((4096, 5632), (t * 11, f * 24), (t * 11, f * 23), (1, 128))
    with as_on_a_gpu(week) as patch:
        for major, (T, F), H, dtype in itertools.product((7, 8, 9, 10), sizes, (2048, 2044), (BRAIN, FULL)):
            gpu_at_hand = types.SimpleNamespace(major=major, multi_processor_count=132)
            patch.setattr(torch.cuda, "get_device_properties", lambda device, gpu_at_hand=gpu_at_hand: gpu_at_hand)
            x, w, out = unreal(T, H, dtype), unreal(F, H, dtype), unreal(T, F, dtype)
            found[major, T, F, H, dtype] = bool(week.fuses(x, w, out))
    assert {key for key, fused in found.items() if fused} == {(9, T, F, 2048, BRAIN) for T, F in sizes[:2]}


# --- on a GPU --------------------------------------------------------------------------------------------------------

LIMITS = {BRAIN: 1e-2, HALF: 2e-3, FULL: 1e-5}
all_dtypes = pytest.mark.parametrize("dtype", [BRAIN, HALF, FULL], ids=str)


def near(got, want, what="", times=1):
    """By the size of the difference, as a share of the size of what is wanted."""
    assert got.shape == want.shape and got.isfinite().all(), what
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= times * LIMITS[got.dtype], f"{what} differs by {error:.2g} of its size"


@pytest.fixture
def exact_products():
    """float32 products without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def weights_in_order(inputs, up_first):
    """The two weights as halves of one tensor."""
    x, w_gate, w_up, w_down = (t.detach() for t in inputs)
    both = torch.cat([w_up, w_gate] if up_first else [w_gate, w_up]).chunk(2)
    return [t.requires_grad_() for t in (x, *(both[::-1] if up_first else both), w_down)]


@gpu
@all_dtypes
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("T, H, F", [(512, 256, 768), (4096, 2048, 5632), (1000, 520, 4104)])
def test_gpu_sizes_of_models(exact_products, T, H, F, up_first, dtype):
    needs_memory(8)
    inputs = weights_in_order(tensors(T, H, F, H, dtype=dtype), up_first)
    upstream = draw(T, H, dtype=dtype)
    with launches_of("gate_up_kernel") as launches, poisoned():
        out = swiglu_mlp(*inputs)
        found = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    if torch.cuda.get_device_capability()[0] == 9 and T == 4096:
        assert len(launches) == (dtype != FULL)
        assert all((given | options)["UP_FIRST"] == up_first for _, _, given, options in launches)
    near(out, mlp_reference(*double(inputs)), "the result")
    want = gradients(mlp_reference, double(inputs), upstream)
    for name, one, other in zip(NAMES_OF_INPUTS, found, want, strict=True):
        near(one, other, name)
    first, again, last = (torch.autograd.grad(out, inputs, upstream, retain_graph=keep) for keep in (True, True, False))
    assert same_bits(first, again) and same_bits(first, last)
    for name, one, other in zip(NAMES_OF_INPUTS, last, want, strict=True):
        near(one, other, name)
    with torch.no_grad():  # gate and up are not stored
        near(swiglu_mlp(*inputs), out.double(), "the result without gradients")


@gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("T, H, F", [(512, 256, 768), (1, 64, 8), (37, 56, 72), (130, 1000, 264), (127, 8, 1000)])
def test_gpu_the_fused_kernel_with_few_tiles(monkeypatch, T, H, F, dtype):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    monkeypatch.setattr(week, "fuses", can_fuse)
    for up_first in (False, True):
        inputs = weights_in_order(tensors(T, H, F, 16, dtype=dtype), up_first)
        with launches_of("gate_up_kernel") as launches, poisoned():
            out = swiglu_mlp(*inputs)
        assert len(launches) == 1
        near(out, mlp_reference(*double(inputs)), "the result", times=3)
        upstream = draw(T, 16, dtype=dtype)
        want = gradients(mlp_reference, double(inputs), upstream)
        for name, one, other in zip(NAMES_OF_INPUTS, torch.autograd.grad(out, inputs, upstream), want, strict=True):
            near(one, other, name, times=3)


@gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_gpu_peak_memory(dtype):
    """Three large matrices and the gradients; PyTorch's operators need more than four."""
    T, H, F = 8192, 1024, 4096
    needs_memory(8)
    inputs = tensors(T, H, F, H, dtype=dtype)
    unit, narrow, weight = T * F * 2, T * H * 2, F * H * 2
    upstream = draw(T, H, dtype=dtype)
    peak = lambda function, **options: memory.peak_bytes(lambda: gradients(function, inputs, upstream, **options))
    ours, eager = peak(swiglu_mlp), peak(week.swiglu_mlp_eager)
    assert ours <= 3 * unit + 2 * narrow + 3 * weight + 2**22
    assert ours < 4 * unit + narrow + 3 * weight < eager + narrow
    assert peak(swiglu_mlp, retain_graph=True) <= 5 * unit + 2 * narrow + 3 * weight + 2**22


@gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_gpu_halves_of_more_than_2_to_the_31_elements(dtype):
    needs_memory(60)
    T, F = 2**17 + 9, 2**14
    both = torch.empty(T, 2 * F, dtype=dtype, device=DEVICE).normal_()
    gate, up = (t.requires_grad_() for t in both.chunk(2, -1))
    assert gate.numel() > 2**31
    upstream = torch.empty(T, F, dtype=dtype, device=DEVICE).normal_()
    with poisoned():
        out = swiglu(gate, up)
        found = torch.autograd.grad(out, (gate, up), upstream)
    for rows in (slice(0, 9), slice(T // 2, T // 2 + 9), slice(T - 9, T)):
        part = [t.detach()[rows].double().requires_grad_() for t in (gate, up)]
        agrees(out[rows], reference(*part), 2)
        all_agree([g[rows] for g in found], gradients(reference, part, upstream[rows]), roundings=2)


@gpu
def test_gpu_devices():
    inputs = tensors()
    for place, name in enumerate(NAMES_OF_INPUTS):
        with pytest.raises(ValueError, match=f"{name} is on cpu"):
            swiglu_mlp(*(t.cpu() if i == place else t for i, t in enumerate(inputs)))
    with pytest.raises(ValueError, match="up is on cpu"):
        swiglu(inputs[1], inputs[2].cpu())
    if torch.cuda.device_count() > 1:  # and one that is not the current
        there = [t.detach().to("cuda:1").requires_grad_() for t in inputs]
        all_agree(gradients(swiglu_mlp, there), gradients(mlp_reference, double(there)))
        all_agree(gradients(swiglu, there[1:3]), gradients(reference, double(there[1:3])))
