"""Week 7's cross-entropy, whose gradient takes the place of the logits: is it right, and is nothing else harmed?"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
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
from torch.utils.checkpoint import checkpoint

from shared import memory
from shared.cells import load
from shared.checks import check, difference, poisoned
from shared.compiled import compile_many

week = load("week07_fused_cross_entropy")
cross_entropy = week.cross_entropy
HALF, BRAIN, FULL, NAN, INF = torch.float16, torch.bfloat16, torch.float32, math.nan, math.inf
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = quiet


def reference(logits, target, softcap=None, **options):
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target.long(), **options)


def consumed(logits, target, **options):
    """Of logits that are no leaf, so that the gradient takes their place."""
    return cross_entropy(logits * 1, target, **options)


def targets(*shape, ignored=0, ignore_index=-100, dtype=torch.int64):
    """Random targets for logits of this shape; the first of every `ignored` is ignored."""
    target = torch.randint(shape[min(1, len(shape) - 1)], shape[:1] * (len(shape) > 1) + shape[2:], device=DEVICE)
    if ignored:
        target.view(-1)[::ignored] = ignore_index
    return target.to(dtype)


def agrees(got, want, roundings=2, terms=0.0):
    reason = difference(got, want, got.dtype, 1000, roundings, terms)[1]
    assert not reason, reason


def both_ways(logits, target, upstream=None, **options):
    """Loss and gradient by the float64 reference."""
    exact = logits.detach().double().requires_grad_()
    loss = reference(exact, target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.double()
    return loss.detach(), torch.autograd.grad(loss, exact, upstream)[0]


# --- as PyTorch's ----------------------------------------------------------------------------------------------------


def case(*shape, ignored=0, dtype=torch.int64, target=None, **options):
    def make(draw):
        about = {"ignored": ignored, "ignore_index": options.get("ignore_index", -100), "dtype": dtype}
        made = targets(*shape, **about) if target is None else torch.tensor(target, device=DEVICE).to(dtype)
        return {"logits": draw(*shape, scale=3), "target": made} | options

    return make


CASES = {
    "one row, no batch": case(7),
    "one row, no batch, ignored": case(9, ignored=1, reduction="sum"),
    "one class": case(3, 1),
    "two classes": case(9, 2, ignored=3),
    "a row of 4,096": case(3, 4096, ignored=3),
    "a row of 4,099, capped": case(3, 4099, softcap=4.0, reduction="none"),
    "50,257": case(2, 50_257, softcap=30),
    "102,400": case(2, 102_400, reduction="sum"),
    "131,072": case(2, 131_072, label_smoothing=0.1),
    "pictures": case(2, 33, 3, ignored=4),
    "larger pictures, not reduced": case(2, 17, 2, 3, ignored=5, reduction="none", softcap=2.5),
    "ignored, summed": case(5, 65, ignored=2, reduction="sum", label_smoothing=0.3, softcap=5),
    "all ignored": case(3, 65, ignored=1),
    "all ignored, summed": case(3, 65, ignored=1, reduction="sum", label_smoothing=0.1),
    "class 0 ignored": case(9, 5, ignored=3, ignore_index=0),
    "class 4 ignored": case(9, 5, ignored=3, ignore_index=4, reduction="none", label_smoothing=0.2),
    "an enormous number ignored": case(5, 5, ignored=3, ignore_index=2**62),
    "smoothed to the mean": case(3, 65, label_smoothing=1.0),
    "a low cap": case(3, 70, softcap=0.5),
    "a cap above all": case(3, 70, softcap=1e6),
    "targets of int32": case(5, 300, ignored=3, dtype=torch.int32),
    "targets of int8": case(5, 100, ignored=3, dtype=torch.int8),
    "targets of uint8": case(5, 200, ignored=3, ignore_index=255, dtype=torch.uint8),
    "156, which is -100 in bytes": case(2, 200, target=[156, 3], dtype=torch.uint8, reduction="none"),
    "2^16 - 100": case(2, 70_000, target=[2**16 - 100, 3], dtype=torch.int32, reduction="none"),
    "no rows": case(0, 5),
    "no rows, summed": case(0, 5, reduction="sum"),
    "pictures without points": case(2, 5, 0, reduction="none"),
}


@pytest.mark.versions
@pytest.mark.parametrize("function, dtype", [(cross_entropy, FULL), (consumed, HALF), (consumed, BRAIN)])
def test_as_pytorch(function, dtype):
    """`check` hands in gradients of any scale, and strided ones to losses that are not reduced."""
    chosen = CASES if dtype != BRAIN or DEVICE != "cpu" else dict(itertools.islice(CASES.items(), 0, None, 3))
    check(function, reference, chosen, dtypes=[dtype], reduction=1000, terms=lambda out, upstream: upstream.abs())


ROWS = {
    "the target's is -inf": lambda x: x[:, 2].fill_(-INF),
    "a first block is -inf": lambda x: x[:, :2048].fill_(-INF),
    "all but a few are -inf": lambda x: x[:, 3:].fill_(-INF),
    "a row is -inf": lambda x: x[1].fill_(-INF),
    "one is inf": lambda x: x[1, 700].fill_(INF),
    "the target's is inf": lambda x: x[1, 2].fill_(INF),
    "one is NaN": lambda x: x[1, 2999].fill_(NAN),
    "all are inf": lambda x: x.fill_(INF),
    "far from zero": lambda x: x.add_(1e4),
    "very large": lambda x: x.mul_(1e4 if x.dtype == HALF else 1e30),
    "very large, alike": lambda x: x.fill_(6e4 if x.dtype == HALF else 1e30),
    "very low, alike": lambda x: x.fill_(-6e4 if x.dtype == HALF else -1e30),
}


@both_dtypes
@pytest.mark.parametrize("row", ROWS)
def test_rows_with_infinities_nan_and_large_numbers(row, dtype):
    """A capped row of infinities is finite: nothing may leak in from lanes past the last class."""
    values, target = draw(2, 3001, dtype=dtype), torch.tensor([2, 2], device=DEVICE)
    ROWS[row](values)
    for options in ({}, {"label_smoothing": 0.1}, {"softcap": 20.0}):
        leaf = values.clone().requires_grad_()
        loss = cross_entropy(leaf * 1, target, reduction="none", **options)
        wanted, gradient = both_ways(values, target, reduction="none", **options)
        agrees(loss, wanted.to(dtype))  # which may overflow in float16
        agrees(torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0], gradient)


# --- the gradient in the logits' place -------------------------------------------------------------------------------


class Placed(torch.autograd.Function):
    """The identity into given memory: logits that are no leaf, of any strides, as an operator may leave them."""

    @staticmethod
    def forward(ctx, values, view):
        out = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        return out.copy_(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def strided(x, dtype):
    """Memory full of 7 that is laid out as `x` is: (view, all of it, which of it lies outside the view)."""
    around = torch.full((x.untyped_storage().nbytes() // x.itemsize,), 7.0, dtype=dtype, device=DEVICE)
    outside = torch.ones_like(around, dtype=torch.bool)
    outside.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return around.as_strided(x.shape, x.stride(), x.storage_offset()), around, outside


PLACES = {name: make(3, 301) for name, make in LAYOUTS.items() if "repeated" not in name and name != "of a sum"} | {
    "gaps everywhere": draw(6, 3 * 301)[1::2, 1::3],
    "one row, no batch": draw(602)[::2],
    "pictures": draw(2, 33, 3, 2),
    "pictures, channels last": draw(2, 33, 3).transpose(1, 2).contiguous().transpose(1, 2),
    "a text without its last token": draw(2, 4, 33)[:, :-1].transpose(1, 2),
}


@both_dtypes
@pytest.mark.parametrize("place", PLACES)
def test_the_gradient_takes_the_place_of_logits_of_any_strides(place, dtype):
    view, around, outside = strided(PLACES[place], dtype)
    leaf, target = draw(*view.shape, dtype=dtype).requires_grad_(), targets(*view.shape, ignored=4)
    logits = Placed.apply(leaf, view)
    version = logits._version
    with poisoned():
        loss = cross_entropy(logits, target, reduction="none")
        upstream = torch.randn_like(loss)
        found = torch.autograd.grad(loss, (logits, leaf), upstream)
    wanted, gradient = both_ways(leaf, target, upstream, reduction="none")
    agrees(loss, wanted)
    for one in found:
        agrees(one, gradient)
    assert found[0].data_ptr() == logits.data_ptr() and found[0].stride() == logits.stride()
    assert logits._version > version
    assert (around[outside] == 7).all(), "written outside the logits"


@pytest.mark.versions
@both_dtypes
def test_when_the_logits_are_overwritten(dtype):
    """In float16 not before the loss's scale is known. Who changes logits or targets until then is told."""
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    for changed in (None, 0, 1):
        given = leaf * 1, target.clone()
        loss = cross_entropy(*given)
        assert torch.equal(given[0], leaf) == (given[0]._version == 0) == (dtype == HALF)
        if changed is None:
            loss.backward()
            assert not torch.equal(given[0], leaf) and given[0]._version > 0
        else:
            given[changed].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def of_leaf(change):
    return lambda values: (lambda leaf: (leaf, change(leaf)))(values.clone().requires_grad_())


def of_graph(change):
    return lambda values: (lambda h: (h, change(h)))(values.clone().requires_grad_() * 1)


def view_of_part(values):
    """A leaf that is a view of a tensor, which is no leaf or requires no gradient; and a view of the leaf."""
    leaf = values[1:].requires_grad_()
    return values, leaf[:, 1:]


KEPT = {
    "a leaf": of_leaf(lambda x: x),
    "a leaf seen otherwise": of_leaf(lambda x: x.view(13, 20)),
    "rows of a leaf": of_leaf(lambda x: x[1:]),
    "a view of a view of a leaf": of_leaf(lambda x: x.T[::2].T[:2]),
    "one of a leaf's rows": of_leaf(lambda x: x.unbind()[1]),
    "a parameter's part": lambda values: (values, torch.nn.Parameter(values)[1:]),
    "a part that is a leaf": lambda values: (values, values[1:].requires_grad_()),
    "a view of a part that is a leaf": view_of_part,
    "a graph's, detached": of_graph(lambda h: h.detach().requires_grad_()),
    "part of a graph's, detached": of_graph(lambda h: h.detach()[1:].requires_grad_()[:, 2:]),
    "a row, repeated": of_graph(lambda h: h[0].expand(3, 65)),
    "a column, repeated": of_graph(lambda h: h[:, :1].expand(4, 65)),
    "overlapping windows": of_graph(lambda h: h[0].unfold(0, 20, 7)),
    "overlapping windows over classes": of_graph(lambda h: h[0].unfold(0, 20, 7).T),
    "rows": of_graph(lambda h: h[1:]),
    "one of two chunks": of_graph(lambda h: h.chunk(2)[1]),
    "one of a split": of_graph(lambda h: h.split([30, 35], dim=1)[0]),
    "one row": of_graph(lambda h: h.unbind()[2]),
}
OVERWRITTEN = {
    "a graph's": of_graph(lambda h: h),
    "seen otherwise": of_graph(lambda h: h.view(13, 20)),
    "seen transposed": of_graph(lambda h: h.T),
}


@both_dtypes
@pytest.mark.parametrize("logits", [*KEPT, *OVERWRITTEN])
def test_whose_memory_is_written(logits, dtype):
    """That of leaves, of parts and of what overlaps is not."""
    whole, part = (KEPT | OVERWRITTEN)[logits](draw(4, 65, dtype=dtype))
    before, version, target, gradients = whole.detach().clone(), whole._version, targets(*part.shape), []
    n, same = part.numel(), before.as_strided(part.shape, part.stride(), part.storage_offset())
    part.register_hook(lambda gradient: gradients.append(gradient.clone()))
    loss = cross_entropy(part, target)
    loss.backward()
    for got, wanted in zip((loss, *gradients), both_ways(same, target), strict=True):
        agrees(got, wanted)
    changed = (whole != before).sum()
    if logits in KEPT:
        assert changed == 0 and whole._version == version
    else:
        assert n / 2 < changed <= n and whole._version > version


@both_dtypes
def test_logits_without_a_gradient_are_left_alone(dtype):
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    logits, wanted = leaf * 1, both_ways(leaf, target)[0]
    for context, given in (
        (torch.no_grad(), logits),
        (torch.inference_mode(), logits),
        (torch.enable_grad(), logits.detach()),
    ):
        with context:
            loss = cross_entropy(given, target)
        agrees(loss, wanted)
        assert not loss.requires_grad and torch.equal(logits, leaf) and logits._version == 0


def test_logits_made_in_inference_mode():
    with torch.inference_mode():
        logits, target = draw(3, 65), targets(3, 65)
        agrees(cross_entropy(logits, target), F.cross_entropy(logits.double(), target))
    agrees(cross_entropy(logits, target), F.cross_entropy(logits.double(), target))


def used_twice(use):
    return lambda x: (lambda h: (h, use(h)))(x * 1)


SAVED = {
    "an output": lambda x: (x.tanh(), 0),
    "an output seen otherwise": lambda x: (x.view(13, 15).exp().view(3, 65), 0),
    "probabilities": lambda x: (x.softmax(1), 0),
    "an input of another use": used_twice(lambda h: h.square().sum()),
}


@both_dtypes
@pytest.mark.parametrize("saved", SAVED)
def test_what_autograd_saved_of_the_logits_makes_it_raise(saved, dtype):
    leaf = draw(3, 65, dtype=dtype).requires_grad_()
    logits, other = SAVED[saved](leaf)
    loss = cross_entropy(logits, targets(3, 65)) + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("seen", [lambda h: h, lambda h: h.view(3, 65)], ids=["itself", "a view"])
def test_any_other_use_of_consumed_logits_makes_autograd_raise(when, seen):
    """In float16 the logits live until the backward pass: there it adds up."""
    for dtype in (torch.float16, torch.float32):
        leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
        logits = leaf * 1
        early = logits.sum() if when == "before" else 0
        loss = cross_entropy(seen(logits), target)
        total = loss + (early if when == "before" else logits.sum())
        if dtype == torch.float16:
            total.backward()
            agrees(leaf.grad, both_ways(leaf, target)[1] + 1, terms=2.0)
        else:
            with pytest.raises(RuntimeError, match="something else used them too"):
                total.backward()


def test_logits_are_consumed_once():
    target, leaf = targets(3, 65), draw(3, 65).requires_grad_()
    logits = leaf * 1
    cross_entropy(logits, target)
    for again in (logits, logits.view(3, 65), logits[1:]):
        with pytest.raises(RuntimeError, match="an earlier call"):
            cross_entropy(again, target[: len(again)])
    logits.detach().copy_(leaf.detach())  # written anew: logits once more
    agrees(cross_entropy(logits.detach(), target), both_ways(leaf, target)[0])


@both_dtypes
def test_two_halves_of_one_tensor(dtype):
    leaf, target = draw(4, 65, dtype=dtype).requires_grad_(), targets(4, 65)
    first, second = (leaf * 1).chunk(2)
    (cross_entropy(first, target[:2]) + cross_entropy(second, target[2:])).backward()
    agrees(leaf.grad, 2 * both_ways(leaf, target)[1])


@both_dtypes
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, dtype):
    """There autograd does not compare versions: the loss has to leave the logits alone."""
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    step = lambda x: cross_entropy(torch.tanh(x), target)
    exact = leaf.detach().double().requires_grad_()
    F.cross_entropy(torch.tanh(exact), target).backward()
    try:
        checkpoint(step, leaf, use_reentrant=reentrant).backward()
    except RuntimeError as error:
        assert reentrant and "modified by an inplace operation" in str(error)
    else:
        agrees(leaf.grad, exact.grad)


# --- the backward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_incoming_gradient_may_have_any_strides(layout):
    """And is not changed."""
    leaf, target, upstream = draw(2, 40, 5).requires_grad_(), targets(2, 40, 5, ignored=4), LAYOUTS[layout](2, 5)
    kept = upstream.clone()
    loss = cross_entropy(leaf * 1, target, reduction="none")
    gradient = torch.autograd.grad(loss, leaf, upstream)[0]
    agrees(gradient, both_ways(leaf, target, upstream, reduction="none")[1])
    assert torch.equal(upstream, kept)


@both_dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sums_and_scales_of_the_loss(reduction, dtype):
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    wanted = both_ways(leaf, target, reduction=reduction)[1]
    for scaled in (lambda loss: (1024 * loss).sum(), lambda loss: loss.expand(1024, *loss.shape).sum()):
        (gradient,) = torch.autograd.grad(scaled(cross_entropy(leaf * 1, target, reduction=reduction)), leaf)
        agrees(gradient, 1024 * wanted)


@pytest.mark.parametrize("autocast, scale", [(True, 65536.0), (False, 32768.0)])
def test_a_loss_scale_saves_small_gradients_from_float16(autocast, scale):
    """As GradScaler does: many of these gradients are 0 in float16, and multiplied they are not."""
    leaf, target = draw(4, 1000, scale=3).half().requires_grad_(), targets(4, 1000)
    wanted = both_ways(leaf, target)[1]
    assert (wanted.half() == 0).sum() > 100, "this would show nothing"
    with torch.autocast(DEVICE, HALF, enabled=autocast):
        loss = cross_entropy(leaf * 1, target)
    (loss.float() * scale).backward()
    agrees(leaf.grad, wanted * scale, roundings=1)


@both_dtypes
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_ignored_rows_have_gradient_zero_whatever_they_hold_or_are_handed(reduction, dtype):
    values, target = draw(4, 65, dtype=dtype), targets(4, 65, ignored=2)
    values[0], values[2] = NAN, INF
    for upstream in (1.0, NAN, INF, -INF):
        leaf = values.clone().requires_grad_()
        loss = cross_entropy(leaf * 1, target, reduction=reduction, label_smoothing=0.1)
        (gradient,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))
        assert loss.isfinite().all() and (gradient[::2] == 0).all()
        if upstream == 1:
            agrees(gradient[1::2], both_ways(values[1::2], target[1::2], reduction=reduction, label_smoothing=0.1)[1])
        else:
            assert not gradient[1::2].isfinite().any()


@both_dtypes
def test_a_second_backward_and_a_second_derivative_are_refused(dtype):
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    loss = cross_entropy(leaf * 1, target)
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = gradient.clone()
    with pytest.raises(RuntimeError, match="handed out"):
        torch.autograd.grad(loss, leaf)
    assert torch.equal(gradient, kept)
    with pytest.raises(RuntimeError, match=r"create_graph|differentia|derivative"):
        torch.autograd.grad(cross_entropy(leaf * 1, target), leaf, create_graph=True)


@both_dtypes
def test_zeros_without_memory_and_negated_views(dtype):
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    zeros = torch._efficientzerotensor((), device=DEVICE, dtype=dtype)
    assert not torch.autograd.grad(cross_entropy(leaf * 1, target), leaf, zeros)[0].any()
    agrees(cross_entropy(torch._neg_view(leaf * 1), target), both_ways(-leaf, target)[0])
    (gradient,) = torch.autograd.grad(cross_entropy(torch._neg_view(leaf * 1), target), leaf)
    agrees(gradient, -both_ways(-leaf, target)[1])


# --- what else stands around it --------------------------------------------------------------------------------------


@both_dtypes
def test_saved_tensors_may_be_taken_elsewhere(dtype):
    leaf, target = draw(3, 65, dtype=dtype).requires_grad_(), targets(3, 65)
    for logits in (lambda: leaf, lambda: leaf * 1):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            loss = cross_entropy(logits(), target)
        agrees(torch.autograd.grad(loss, leaf)[0], both_ways(leaf, target)[1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint(use_reentrant):
    x, weight, target = draw(5, 8).requires_grad_(), draw(65, 8).requires_grad_(), targets(5, 65)
    step = lambda x: cross_entropy(x @ weight.T, target)
    found = torch.autograd.grad(step(x), (x, weight))
    checkpoint(step, x, use_reentrant=use_reentrant).backward()
    assert torch.equal(x.grad, found[0]) and torch.equal(weight.grad, found[1])


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_under_autocast(dtype):
    """The loss is float32, as PyTorch's, so that a loss scale does not overflow."""
    x, weight, target = draw(5, 8).requires_grad_(), draw(65, 8).requires_grad_(), targets(5, 65)
    with torch.autocast(DEVICE, dtype):
        logits = x @ weight.T
        wanted, gradient = both_ways(logits, target)
        loss = cross_entropy(logits, target)
    assert logits.dtype == dtype and loss.dtype == FULL
    torch.testing.assert_close(loss.double(), wanted, atol=1e-4, rtol=4e-3 if dtype == BRAIN else 1e-4)
    loss.backward()
    torch.testing.assert_close(weight.grad.double(), gradient.T @ x.detach().double(), atol=1e-2, rtol=1e-2)


def a_head(x, weight, target):
    return cross_entropy(x @ weight.T, target, label_smoothing=0.1) * 2


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(a_head, backend="eager")
    inputs, target = (draw(3, 8).requires_grad_(), draw(65, 8).requires_grad_()), targets(3, 65)
    got, want = (torch.autograd.grad(f(*inputs, target), inputs) for f in (compiled, a_head))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


# --- wrong requests --------------------------------------------------------------------------------------------------

X, T = torch.zeros(3, 5, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
WRONG = {
    "no tensor": (([[1.0]], T), {}, TypeError, "logits must be a torch.Tensor, got list"),
    "float64": ((X.double(), T), {}, TypeError, "logits has dtype torch.float64"),
    "0-d": ((X[0, 0], T), {}, ValueError, r"logits has (0|no) dim"),
    "logits elsewhere": ((X.to("meta"), T), {}, ValueError, "logits is on meta"),
    "no classes": ((X[:, :0], T), {}, ValueError, "logits has shape|target"),
    "no target": ((X, None), {}, TypeError, "target must be a torch.Tensor, got NoneType"),
    "probabilities": ((X, X), {}, TypeError, "target has dtype torch.float32.*class probabilities are not taken"),
    "marks": ((X, T.bool()), {}, TypeError, "target has dtype torch.bool"),
    "target of two dimensions": ((X, T[:, None]), {}, ValueError, r"target has shape \(3, 1\).*\(3,\)"),
    "a row for no batch": ((X[0], T[:1]), {}, ValueError, r"target has shape \(1,\).*\(\)"),
    "target elsewhere": ((X, T.to("meta")), {}, ValueError, "target is on meta"),
    "another reduction": ((X, T), {"reduction": "batchmean"}, ValueError, "reduction.*batchmean"),
    "smoothed above 1": ((X, T), {"label_smoothing": 1.5}, ValueError, "label_smoothing.*1.5"),
    "smoothed by NaN": ((X, T), {"label_smoothing": NAN}, ValueError, "label_smoothing.*nan"),
    "smoothed by nothing": ((X, T), {"label_smoothing": None}, TypeError, "label_smoothing.*None"),
    "a cap below 0": ((X, T), {"softcap": -30.0}, ValueError, "softcap.*-30"),
    "NaN for a cap": ((X, T), {"softcap": NAN}, ValueError, "softcap.*nan"),
    "a word for a cap": ((X, T), {"softcap": "30"}, TypeError, "softcap.*30"),
    "a truth ignored": ((X, T), {"ignore_index": True}, TypeError, "ignore_index.*True"),
    "too large a number ignored": ((X, T), {"ignore_index": 2**70}, ValueError, f"ignore_index.*{2**70}"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_in_words(name):
    arguments, options, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        cross_entropy(*arguments, **options)


@both_dtypes
@pytest.mark.parametrize("wrong, dtype_of_targets", [
    (-1, torch.int64), (5, torch.int64), (2**40, torch.int64), (-(2**63), torch.int64), (2**32, torch.int64),
    (-101, torch.int32), (-128, torch.int8), (255, torch.uint8),
])  # fmt: skip
def test_targets_out_of_range_are_refused_before_anything_is_written(wrong, dtype_of_targets, dtype):
    leaf, target = draw(4, 5, dtype=dtype).requires_grad_(), torch.tensor([1, -100, 4, 1]).to(dtype_of_targets)
    target[3] = wrong
    logits, ignored = leaf * 1, 156 if dtype_of_targets == torch.uint8 else -100
    for given in (logits, leaf, logits.detach()):
        with pytest.raises(ValueError, match=rf"target.*{wrong}\b"):  # on a GPU, backward is where it is known
            loss = cross_entropy(given, target.to(DEVICE), ignore_index=ignored)
            assert loss.isnan()
            loss.backward()
        assert torch.equal(logits, leaf)


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """In memory that is hardly touched: rows, classes, targets or gradients so far apart that offsets pass 2^31."""
    reserved, used = torch.empty(2**32 + 2**24, dtype=HALF), 0

    def far(*shape, axis=0, dtype=HALF):
        nonlocal used
        used += 2**16  # bytes
        strides = [1, 7, 1009][: len(shape)][::-1]
        strides[axis] = 2**31 // (shape[axis] - 1)
        return reserved.view(dtype).as_strided(shape, strides, used // dtype.itemsize)

    for dtype, axis in ((HALF, 0), (HALF, 1), (HALF, 2), (FULL, 0)):  # float32's is scaled by a kernel of its own
        shape = (5, 33, 3)[: max(axis, 1) + 1]
        leaf, target = draw(*shape, dtype=dtype).requires_grad_(), targets(*shape, ignored=4)
        upstream = draw(*target.shape, dtype=dtype)
        wanted = both_ways(leaf, target, upstream, reduction="none")
        logits = Placed.apply(leaf, far(*shape, axis=axis, dtype=dtype))
        target = far(*target.shape, dtype=torch.int8).copy_(target)
        upstream = far(*target.shape, dtype=dtype).copy_(upstream)
        loss = cross_entropy(logits, target, reduction="none")
        (gradient,) = torch.autograd.grad(loss, logits, upstream)
        for one, other in zip((loss, gradient), wanted, strict=True):
            agrees(one, other)
        assert gradient.data_ptr() == logits.data_ptr()
    touched_little()


@on_cpu
def test_offsets_past_2_to_the_31():
    elsewhere(_far_apart, timeout=100, TRITON_INTERPRET="1")


# --- what is moved and held ------------------------------------------------------------------------------------------


@on_cpu
@both_dtypes
@pytest.mark.parametrize("N, C", [(5, 4099), (4, 50_257)])
def test_bytes_moved(N, C, dtype):
    """The loss alone reads the logits once; with its gradient they are read twice and written once."""
    leaf, target = draw(N, C, dtype=dtype).requires_grad_(), targets(N, C)
    size, small = leaf.nbytes, 300 * N
    moved = memory.traffic(cross_entropy, leaf.detach(), target)
    assert size <= moved.read <= size + small and moved.written <= small
    logits = leaf * 1
    moved = memory.traffic(lambda: torch.autograd.grad(cross_entropy(logits, target), logits))
    assert 2 * size <= moved.read <= 2 * size + small
    assert size <= moved.written <= size + small


@both_dtypes
def test_no_second_matrix_is_allocated(dtype):
    leaf, target = draw(3, 9000, dtype=dtype).requires_grad_(), targets(3, 9000)
    small = 3 * 200 if DEVICE == "cpu" else 2**16
    for options in ({}, {"reduction": "none", "softcap": 30.0}):
        step = lambda logits, options=options: torch.autograd.grad(
            cross_entropy(logits, target, **options).sum(), logits
        )
        assert memory.peak_bytes(cross_entropy, leaf.detach(), target, **options) <= small
        assert memory.peak_bytes(lambda: step(leaf * 1)) <= leaf.nbytes + small  # noqa: B023
        assert memory.peak_bytes(step, leaf) <= leaf.nbytes + small
        assert memory.held_bytes(cross_entropy, leaf * 1, target, **options) <= leaf.nbytes + small  # hooks: a copy
    assert memory.held_bytes(cross_entropy, leaf.detach(), target) == 0


# --- what the compiler makes of it -----------------------------------------------------------------------------------


def launched(shape, dtype, **options):
    """What a GPU is given for such logits: the loss, both, the gradient, and its scaling."""
    launches, options = [], {"reduction": "mean", "ignore_index": -100, **options}
    empty = lambda *size, dtype: torch.empty(size, dtype=dtype, device="meta")
    logits, numbers = empty(*shape, 1, dtype=dtype), empty(shape[0], dtype=FULL)
    target, valid = empty(shape[0], dtype=torch.int64), empty(3, dtype=torch.int64)
    with as_on_a_gpu(week) as patch:
        for kernel in ("cross_entropy_kernel", "scale_kernel"):
            patch.setattr(week, kernel, Recorder(getattr(week, kernel), launches))
        for given, gradient in (
            ((numbers, None, None), False),
            ((numbers, None, None), True),
            ((None, numbers, numbers), True),
        ):
            week.launch(logits, target, valid, *given, options, gradient=gradient)
        week.scale(logits, target, valid, numbers, -100)
    return dict(zip(("loss", "both", "gradient", "scaling"), launches, strict=True))


def compile_jobs():
    plain, all_options = {"label_smoothing": 0.0, "softcap": None}, {"label_smoothing": 0.1, "softcap": 30.0}
    for n_cols, dtype, options, target in (
        (128_256, BRAIN, plain, "sm_90"), (128_256, BRAIN, all_options, "sm_90"), (50_257, BRAIN, plain, "sm_80"),
        (32_000, FULL, plain, "sm_80"), (50_257, FULL, all_options, "sm_75"), (32_000, HALF, plain, "sm_75"),
        (50_257, HALF, all_options, "sm_75"),
    ):  # fmt: skip
        for what, (kernel, _, given, sizes) in launched((4096, n_cols), dtype, **options).items():
            if what != ("both" if dtype == HALF else "gradient"):  # which this dtype does not use
                kinds = {name: as_type(value) for name, value in given.items()}
                warps = {"num_warps": sizes.pop("num_warps")}
                yield f"{what}, {n_cols}, {NAMES[dtype]}, {target}, {options}", kernel, kinds | sizes, target, warps


@pytest.mark.versions
def test_compiled_code():
    """16 bytes at a time but for the rim, targets and the like; no spills, with all options at once hardly any."""
    jobs, wrong = list(compile_jobs()), []
    for (label, *_), made in zip(jobs, compile_many(jobs), strict=True):
        allowed = 32 if "'softcap': 30.0" in label else 0
        loads, stores = (made.count(name) - made.count(name, "128") for name in ("LDG", "STG"))
        wide = made.count("LDG", "128") >= 4 and (label.startswith("loss") or made.count("STG", "128") >= 4)
        if not wide or loads > 9 or stores > 3 or made.spill_bytes > allowed or made.shared_bytes > 1024:
            wrong.append(f"{label}: {made.summary()}, {loads} and {stores} narrow")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
@pytest.mark.parametrize("C", [7, 1000, 8191, 50_257, 128_256, 262_147])
def test_gpu_sizes_of_models(C, dtype):
    """Right, the same bits every time, and no second matrix."""
    leaf, target = draw(200, C, dtype=dtype, scale=2).requires_grad_(), targets(200, C, ignored=5)
    for options in ({}, {"label_smoothing": 0.1, "softcap": 30.0, "reduction": "none"}):
        upstream = draw(200, dtype=dtype) if options else torch.tensor(3.0, dtype=dtype, device=DEVICE)
        runs = []
        for _ in range(2):
            loss = cross_entropy(leaf * 1, target, **options)
            runs.append((loss.detach(), *torch.autograd.grad(loss, leaf, upstream)))
        for got, again, wanted in zip(*runs, both_ways(leaf, target, upstream, **options), strict=True):
            agrees(got, wanted, terms=upstream.abs().max().item())
            assert torch.equal(got, again)
    step = lambda: torch.autograd.grad(cross_entropy(leaf.clone(), target), leaf)
    assert memory.peak_bytes(step) <= leaf.nbytes + 2**21
    with pytest.raises(ValueError, match="target"):  # at once, or as soon as the GPU has told
        assert cross_entropy(leaf.detach(), target + C).isnan()
        torch.cuda.synchronize()
        cross_entropy(leaf.detach(), target)


@gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_gpu_more_than_2_to_the_31_logits(dtype):
    needs_memory(30)
    N, C = 2**14 + 9, 131_073
    logits = torch.empty(N, C, dtype=dtype, device=DEVICE).normal_().requires_grad_() * 1
    target = targets(N, C)
    few = torch.tensor([0, 1, N // 2, N - 1], device=DEVICE)
    wanted, gradient = both_ways(logits[few], target[few], reduction="none")
    loss = cross_entropy(logits, target, reduction="none")
    (got,) = torch.autograd.grad(loss.sum(), logits)
    agrees(loss[few], wanted)
    agrees(got[few], gradient)
    assert got.data_ptr() == logits.data_ptr() and not got.isnan().any()


@gpu
def test_gpu_devices():
    x, target = draw(3, 65), targets(3, 65)
    with pytest.raises(ValueError, match=r"logits is on cpu.*cuda"):
        cross_entropy(x.cpu(), target)
    with pytest.raises(ValueError, match=r"target is on cpu.*cuda"):
        cross_entropy(x, target.cpu())
    if torch.cuda.device_count() > 1:  # and one that is not the current
        for dtype in (HALF, FULL):
            leaf = x.to("cuda:1", dtype).requires_grad_()
            loss = cross_entropy(leaf * 1, target.to("cuda:1"))
            agrees(torch.autograd.grad(loss, leaf)[0], both_ways(leaf, target.to("cuda:1"))[1])
