"""Week 3: attention against float64, and the kinds of fault that users of such kernels have reported."""

import inspect
import itertools
import math
import re
import tempfile

import pytest
import torch
import triton
from common import DEVICE, DTYPES, Recorder, draw, elsewhere, gpu, on_cpu, quiet, touched_little

from shared.cells import in_subprocess
from shared.checks import compare_all, difference, poisoned
from shared.compiled import compile_many
from shared.memory import held_bytes, traffic
from shared.notebook import load

week = load(3)
flash_attention = week.flash_attention
KERNELS = {0: week.forward_kernel, 1: week.query_gradient_kernel, 2: week.key_gradients_kernel}
pytestmark = quiet
OPTIONS = {"roundings": 3, "output_roundings": 2, "terms": lambda out, grad: 4 * grad.abs()}


def reference(query, key, value, is_causal=False, scale=None):
    return week.attention_unfused(query, key, value, is_causal, scale)


def case(B, q_heads, kv_heads, n_queries, n_keys, head_dim, **more):
    return lambda draw: (
        {
            "query": draw(B, q_heads, n_queries, head_dim, scale=4),
            "key": draw(B, kv_heads, n_keys, head_dim),
            "value": draw(B, kv_heads, n_keys, head_dim),
        }
        | more
    )


def agree(cases, dtypes=DTYPES):
    longest = lambda query, key, value, **rest: 2 * max(*query.shape[2:], *key.shape[2:], 1)
    report = compare_all(flash_attention, reference, cases, dtypes=dtypes, reduction=longest, **OPTIONS)
    assert not report.failures and report.rows, report.verdict


def tensors(B=1, q_heads=2, kv_heads=1, n_queries=40, n_keys=50, head_dim=32, dtype=torch.float32, grad=True):
    shapes = (B, q_heads, n_queries, head_dim), *2 * [(B, kv_heads, n_keys, head_dim)]
    return [draw(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


# --- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.versions
@on_cpu
@pytest.mark.parametrize("head_dim", [1, 16, 20, 32, 80, 96, 200, 256])
def test_heads_of_any_size(head_dim):
    agree({"causal": case(1, 2, 1, 37, 45, head_dim, is_causal=True)}, dtypes=[torch.float32])


@pytest.mark.versions
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 130), (127, 128), (128, 128), (129, 257), (200, 70), (260, 100)])
def test_lengths_below_at_and_above_a_block(lengths, is_causal):
    agree({"lengths": case(1, 1, 1, *lengths, 64, is_causal=is_causal)}, dtypes=[torch.float16])


@pytest.mark.parametrize("heads", [(3, 1), (4, 2), (6, 2), (2, 2)])
def test_grouped_heads(heads):
    agree({"grouped": case(2, *heads, 33, 47, 64, is_causal=True)}, dtypes=[torch.float32])


@pytest.mark.parametrize("scale", [-0.1, 0.0, 0.3, -0.0, 1e-50, -1e-50, 1e-40])
def test_any_scale(scale):
    agree({"scale": case(1, 2, 1, 40, 50, 16, scale=scale, is_causal=True)}, dtypes=[torch.float32])


BLOCKS = [(32, 64), (64, 32), (16, 16), (128, 16)]


@pytest.mark.versions
@on_cpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_m, block_n", BLOCKS)
@pytest.mark.parametrize("way", ["pointers", "registers", "descriptors", "no tensor cores"])
def test_every_way_in_every_shape_of_block(way, block_m, block_n, is_causal):
    dtype = torch.float32 if way == "no tensor cores" else torch.float16
    query, key, value = tensors(1, 2, 1, 75, 83, 32, dtype, grad=False)
    query, grad = 4 * query, draw(1, 2, 75, 32, dtype=dtype)
    choices = [week.configuration(way, 32, kernel) | {"BLOCK_M": block_m, "BLOCK_N": block_n} for kernel in range(3)]
    with poisoned():
        out, lse = week.launch_forward(query, key, value, is_causal, 0.2, **choices[0])
        found = out, *week.launch_backward(query, key, value, out, lse, grad, is_causal, 0.2, choices=choices)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    wanted = reference(*exact, is_causal, 0.2)
    wanted = wanted, *torch.autograd.grad(wanted, exact, grad.double())
    for one, other in zip(found, wanted, strict=True):
        assert difference(one, other, dtype, 200, 2, 4 * grad.abs().max().item())[1] == ""


def test_lse_is_the_logarithm_of_the_sum():
    query, key, value = tensors(grad=False)
    lse = week.launch_forward(query, key, value, False, 0.5)[1]
    exact = query.double() @ key.double().mT * 0.5
    torch.testing.assert_close(lse.double(), exact.logsumexp(-1) / math.log(2), atol=1e-5, rtol=1e-5)


def test_large_numbers_and_scores_of_minus_infinity():
    query, key, value = tensors(n_keys=300, grad=False)
    for q, k in ((1e4 * query, 1e4 * key), (1e19 * query.abs(), -1e19 * key.abs())):
        torch.testing.assert_close(
            flash_attention(q, k, value), reference(q, k, value), equal_nan=True, atol=1e-3, rtol=1e-3
        )
    low = key.clone().abs()
    low[:, :, :200] = -math.inf  # scores of the first blocks are -inf, and must not spoil the others
    got = flash_attention(query.abs() + 1, low, value)
    torch.testing.assert_close(got, reference(query.abs() + 1, low, value), atol=1e-5, rtol=1e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_infinity_go_where_they_go_in_pytorch(which, poison):
    inputs = tensors(grad=False)
    inputs[which][0, 0, 7, 3] = poison
    assert torch.equal(flash_attention(*inputs, is_causal=True).isnan(), reference(*inputs, is_causal=True).isnan())


# --- layouts ---------------------------------------------------------------------------------------------------------


VIEWS = {
    "(B, S, H, D) in memory": lambda B, H, S, D: draw(B, S, H, D).transpose(1, 2),
    "D outermost": lambda B, H, S, D: draw(D, B, H, S).permute(1, 2, 3, 0),
    "every second number": lambda B, H, S, D: draw(B, H, S, 2 * D)[..., ::2],
    "every second row": lambda B, H, S, D: draw(B, H, 2 * S, D)[:, :, ::2],
    "one head seen as many": lambda B, H, S, D: draw(B, 1, S, D).expand(B, H, S, D),
    "one row seen as many": lambda B, H, S, D: draw(B, H, 1, D).expand(B, H, S, D),
    "one number": lambda B, H, S, D: draw(1).expand(B, H, S, D),
    "off the 16-byte grid": lambda B, H, S, D: draw(B * H * S * D + 1)[1:].view(B, H, S, D),
    "negated": lambda B, H, S, D: torch._neg_view(draw(B, H, S, D)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_inputs_and_gradients(view):
    inputs = [VIEWS[view](2, 2, 35, 32) for _ in range(3)]
    grad = VIEWS[view](2, 2, 35, 32)
    kept = grad.clone()
    for layouts in (inputs, [x.contiguous() for x in inputs]):
        leaves = [x.detach().requires_grad_() for x in layouts]
        exact = [x.detach().double().requires_grad_() for x in layouts]
        with poisoned():
            out = flash_attention(*leaves, is_causal=True)
            found = out, *torch.autograd.grad(out, leaves, grad)
        wanted = reference(*exact, is_causal=True)
        wanted = wanted, *torch.autograd.grad(wanted, exact, grad.double())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    assert torch.equal(grad, kept)


def test_one_tensor_as_query_key_and_value():
    x = draw(1, 2, 30, 16).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = draw(1, 2, 30, 16)
    (got,) = torch.autograd.grad(flash_attention(x, x, x), x, grad, create_graph=True)
    (plain,) = torch.autograd.grad(flash_attention(x, x, x), x, grad)
    (want,) = torch.autograd.grad(reference(exact, exact, exact), exact, grad.double(), create_graph=True)
    for one in (got, plain):
        torch.testing.assert_close(one.double(), want, atol=1e-5, rtol=1e-5)
    second, wanted = torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), exact)[0]
    torch.testing.assert_close(second.double(), wanted, atol=1e-4, rtol=1e-4)


def far_apart():
    """Run in another process: a row stride past 2^31 elements, and heads that far apart."""
    apart = load(3)
    memory = torch.empty(2**31 + 2**21, dtype=torch.float16)
    view = memory.as_strided((1, 2, 3, 16), (1, 2**31 + 64, 16, 1))
    rows = memory.as_strided((1, 1, 3, 16), (1, 1, 2**30, 1))
    for x in (view, rows):
        x.copy_(torch.randn(x.shape))
        out = apart.flash_attention(x, x, x)
        torch.testing.assert_close(out, apart.flash_attention(*3 * [x.contiguous()]))
    touched_little()


@on_cpu
def test_offsets_past_2_to_the_31():
    elsewhere(far_apart, 120, TRITON_INTERPRET="1")


# --- nothing to do, or less ------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """Launches instead of running kernels."""
    made = []
    for name in ("forward_kernel", "delta_kernel", "query_gradient_kernel", "key_gradients_kernel"):
        monkeypatch.setattr(week, name, Recorder(getattr(week, name), made))
    return made


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5), (1, 0, 0, 5, 5), (1, 2, 1, 0, 5), (1, 2, 1, 5, 0), (1, 2, 2, 0, 0)])
def test_nothing_to_attend_to(shape, launches):
    inputs = tensors(*shape, 16)
    out = flash_attention(*inputs, is_causal=True)
    assert out.shape == inputs[0].shape and not out.any()
    for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert grad.shape == x.shape and not grad.any()
    assert launches == []


@pytest.mark.parametrize(
    "which, kernels", [(0, {"query_gradient_kernel"}), (1, {"key_gradients_kernel"}), (2, {"key_gradients_kernel"})]
)
def test_what_nobody_needs_is_not_computed(which, kernels, launches):
    inputs = tensors(grad=False)
    inputs[which].requires_grad_()
    torch.autograd.grad(flash_attention(*inputs), inputs[which], torch.ones(1, 2, 40, 32, device=DEVICE))
    assert {name.__name__ for name, *_ in launches} == {"forward_kernel", "delta_kernel"} | kernels


def test_more_heads_than_a_second_axis_could_count(launches):
    x = draw(1).expand(40_000, 2, 3, 16)
    flash_attention(x, x, x)
    ((_, grid, *_),) = launches
    assert grid == (80_000,)


def test_twice_backward_gives_the_same_bits_and_leaves_the_gradient():
    inputs, grad = tensors(), draw(1, 2, 40, 32)
    kept = grad.clone()
    out = flash_attention(*inputs, is_causal=True)
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    again = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and torch.equal(grad, kept)


def test_second_derivatives():
    inputs = tensors(n_queries=7, n_keys=6, head_dim=16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = draw(1, 2, 7, 16)
    found = torch.autograd.grad(flash_attention(*inputs), inputs, grad, create_graph=True)
    wanted = torch.autograd.grad(reference(*exact), exact, grad.double(), create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in found), inputs)
    others = torch.autograd.grad(sum(x.square().sum() for x in wanted), exact)
    for one, other in zip((*found, *second), (*wanted, *others), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("which", range(3))
def test_second_derivatives_where_one_input_alone_needs_them(which):
    inputs = tensors(n_queries=7, n_keys=6, head_dim=16, grad=False)
    inputs[which].requires_grad_()
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    (found,) = torch.autograd.grad(flash_attention(*inputs).sin().sum(), inputs[which], create_graph=True)
    (wanted,) = torch.autograd.grad(reference(*exact).sin().sum(), exact[which], create_graph=True)
    second, other = (torch.autograd.grad(g.square().sum(), x[which])[0] for g, x in ((found, inputs), (wanted, exact)))
    torch.testing.assert_close(second.double(), other, atol=1e-4, rtol=1e-4)


def test_changing_what_was_saved_raises():
    for change in range(4):
        inputs = [2 * x for x in tensors()]
        out = flash_attention(*inputs)
        (*inputs, out)[change].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_zeros_without_memory_as_gradient():
    inputs = tensors()
    zeros = torch._efficientzerotensor((1, 2, 40, 32), device=DEVICE)
    assert not any(grad.any() for grad in torch.autograd.grad(flash_attention(*inputs), inputs, zeros))


def test_autocast():
    inputs = tensors()
    with torch.autocast(DEVICE, torch.float16):
        assert flash_attention(*inputs).dtype == torch.float16


def test_compiled_by_pytorch():
    inputs = tensors(grad=False)
    compiled = torch.compile(lambda *x: flash_attention(*x) + 1, backend="eager")
    torch.testing.assert_close(compiled(*inputs), flash_attention(*inputs) + 1)


# --- refused ---------------------------------------------------------------------------------------------------------

x = torch.empty(1, 6, 5, 32, device=DEVICE)
REFUSED = {
    "query has 3 dimensions": lambda: flash_attention(x[0], x, x),
    "key must be a torch.Tensor, got list": lambda: flash_attention(x, [1], x),
    "query has dtype torch.float64": lambda: flash_attention(x.double(), x, x),
    "value has dtype torch.float16; taken: torch.float32": lambda: flash_attention(x, x, x.half()),
    "query has heads of 300 numbers": lambda: flash_attention(*3 * [x.new_empty(1, 1, 2, 300)]),
    "query has heads of 0 numbers": lambda: flash_attention(*3 * [x.new_empty(1, 1, 2, 0)]),
    "key has 4 heads; taken: a divisor of the 6": lambda: flash_attention(x, x[:, :4], x[:, :4]),
    "key has 0 heads": lambda: flash_attention(x, x[:, :0], x[:, :0]),
    r"key has shape \(1, 6, 5, 16\)": lambda: flash_attention(x, x[..., :16], x),
    r"key has shape \(2, 6, 5, 32\)": lambda: flash_attention(x, x.new_empty(2, 6, 5, 32), x),
    r"value has shape \(1, 6, 4, 32\)": lambda: flash_attention(x, x, x[:, :, :4]),
    "is_causal must be a bool, got int": lambda: flash_attention(x, x, x, is_causal=1),
    "scale must be a number, got str": lambda: flash_attention(x, x, x, scale="1"),
    "scale must be a number, got bool": lambda: flash_attention(x, x, x, scale=True),
    "scale is nan; taken: a number of float32's range": lambda: flash_attention(x, x, x, scale=math.nan),
    "scale is inf": lambda: flash_attention(x, x, x, scale=math.inf),
    "scale is 1000000": lambda: flash_attention(x, x, x, scale=10**400),
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_requests_are_refused_by_name_before_any_launch(words, launches):
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words]()
    assert launches == []


# --- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_moved_and_held():
    S, D = 256, 64
    inputs = tensors(1, 1, 1, S, S, D)
    moved = traffic(flash_attention, *(x.detach() for x in inputs))
    assert (moved.read, moved.written) == (4 * (S * D + 2 * 2 * S * D), 4 * (S * D + S))
    assert traffic(week.attention_unfused, *(x.detach() for x in inputs)).total == 4 * (6 * S * S + 4 * S * D)
    assert held_bytes(flash_attention, *inputs) == 4 * (S * D + S)


def test_no_atomics():
    assert not any("atomic" in inspect.getsource(kernel.fn) for kernel in KERNELS.values())


# --- choosing, and what the compiler makes of it ----------------------------------------------------------------------


def test_the_way_for_each_gpu():
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert week.way(75, half, True) == "registers"
    assert week.way(75, brain, True) == "no tensor cores"
    assert {week.way(n, half, False) for n in (80, 86, 89, 90, 100, 120)} == {"pointers"}
    assert {week.way(n, brain, True) for n in (90, 100)} == {"descriptors"}
    assert {week.way(n, half, True) for n in (80, 86, 89, 120)} == {"pointers"}
    assert {week.way(n, full, True) for n in (75, 80, 90)} == {"no tensor cores"}


def test_what_a_descriptor_sees():
    x = torch.empty(2, 3, 40, 64, dtype=torch.float16)
    good = x, x.transpose(1, 2), x[:, :, ::2], x[..., :32], x[:1, :1], torch.empty(1, 1, 1, 20, dtype=torch.float16)
    bad = x.mT, x[..., ::2], x[..., 1:], x[:1].expand(2, -1, -1, -1), torch.empty(1, 1, 2, 20, dtype=torch.float16)
    assert [week.describable(view) for view in (*good, *bad)] == 6 * [True] + 5 * [False]


def job(way, target, head_dim, kernel, is_causal, kind=None):
    """A kernel as it would be launched for a head of this size, for `compile_many`."""
    choice = week.configuration(way, head_dim, kernel)
    constants = {name: choice.pop(name) for name in list(choice) if name.isupper()} | {"IS_CAUSAL": is_causal}
    kind = kind or {"registers": "fp16", "no tensor cores": "fp32"}.get(way, "bf16")
    rows = {"query": "BLOCK_M", "grad": "BLOCK_M", "key": "BLOCK_N", "value": "BLOCK_N"}
    signature = {}
    for name in KERNELS[kernel].arg_names:
        if name in rows and constants["DESCRIBED"]:
            signature[name] = f"tensordesc<{kind}[1,1,{constants[rows[name]]},{constants['BLOCK_D']}]>"
        elif name in rows or name.endswith("_ptr"):
            signature[name] = "*fp32:16" if name in ("lse_ptr", "delta_ptr") else f"*{kind}:16"
        elif name.startswith("stride"):
            signature[name] = "i32:1" if name.endswith("d") else "i32:16"
        elif name not in constants:
            signature[name] = "fp32" if "scale" in name else "i32"
    return (way, kind, head_dim, kernel, is_causal), KERNELS[kernel], signature | constants, target, choice


@pytest.mark.versions
def test_a_t4_gets_its_tensor_cores_without_spills():
    plans = [
        (head_dim, kernel, is_causal) for head_dim in (64, 128) for kernel in KERNELS for is_causal in (False, True)
    ]
    jobs = [job("registers", "sm_75", *plan) for plan in plans]
    spills = 0 if triton.__version__.startswith("3.6.") else 16  # Colab has 3.6; 3.9 spills up to 16 bytes at D = 64
    for (label, *_), made in zip(jobs, compile_many(jobs), strict=True):
        found = made.summary()
        assert found["tensor core (HMMA/HGMMA/IMMA)"] > 0, label
        assert found["spills (bytes)"] <= spills and found["shared (KiB)"] <= 64, (label, found)


@pytest.mark.versions
def test_tiles_fit_every_kind_of_gpu():
    jobs = [job("registers", "sm_75", head_dim, kernel, True) for head_dim in (32, 256) for kernel in KERNELS]
    for kind in ("fp32", "bf16"):
        jobs += [job("no tensor cores", "sm_75", 256, kernel, True, kind) for kernel in KERNELS]
    jobs += [job("pointers", "sm_80", head_dim, kernel, True) for head_dim in (128, 256) for kernel in KERNELS]
    jobs += [job("descriptors", "sm_90", head_dim, kernel, True) for head_dim in (128, 256) for kernel in KERNELS]
    limits = {"sm_75": 64, "sm_80": 99, "sm_90": 227}
    for (label, _, _, target, _), made in zip(jobs, compile_many(jobs), strict=True):
        assert made.summary()["shared (KiB)"] <= limits[target], (label, made.summary())


def compile_specialists(kernel, plans):
    """Task for a process of its own: (bytes of stack, PTX) of Step 6's kernel for an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from shared.compiled import _tool

    found = []
    for head_dim, is_causal, kind in plans:
        constants = {"IS_CAUSAL": is_causal, "CUBICS": head_dim == 64, "STAGES": 2 if head_dim == 128 else 3}
        signature = {}
        for parameter in kernel.params:
            name = parameter.name
            if name in ("query", "key", "value", "out"):
                block = [1, 1, 128 if name in ("key", "value") else 64, head_dim]
                layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)
                signature[name] = f"tensordesc<{kind}{block},{layout!r}>"
            else:
                other = {"lse_ptr": "*fp32", "scale": "fp32"}.get(name, "i32")
                signature[name] = "constexpr" if name in constants else other
        source = GluonASTSource(kernel, signature, constants, {})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        found.append((int(re.search(r"STACK:(\d+)", usage)[1]), made.metadata.shared, made.asm["ptx"]))
    return found


@pytest.mark.versions
def test_the_specialists_compile_without_spills():
    plans = [(64, False, "bf16"), (64, True, "fp16"), (128, False, "fp16"), (128, True, "bf16")]
    for stack, shared, ptx in in_subprocess(compile_specialists, week.hopper_forward_kernel, plans, interpret=False):
        assert stack == 0 and shared <= 227 * 1024
        assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx and "cp.async.bulk.tensor" in ptx


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch):
    """An entry for each launch of the specialists, which still run."""
    entries, run = [], week.launch_hopper
    monkeypatch.setattr(week, "launch_hopper", lambda *args: (entries.append(1), run(*args)))
    return entries


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_specialists_and_descriptors(head_dim, is_causal, used):
    in_rows = lambda draw: (
        {
            name: draw(2, 170, heads, head_dim, scale=4 if name == "query" else 1).transpose(1, 2)
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        }
        | {"is_causal": is_causal}
    )
    shapes = [
        (1, 1, 1, 1, 1),
        (2, 4, 2, 77, 300),
        (1, 3, 3, 300, 77),
        (1, 2, 1, 1000, 1000),
        (1, 2, 2, 1024, 1024),
        (3, 80, 40, 200, 200),
    ]
    cases = {str(shape): case(*shape, head_dim, is_causal=is_causal) for shape in shapes} | {"(B, S, H, D)": in_rows}
    agree(cases, dtypes=[torch.float16, torch.bfloat16])
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(used) == 14


@gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_specialists_pass_nan_on(head_dim, is_causal, poison, used):
    # with a mask, the table's way makes NaN of 0 times an invisible value's NaN, and a kernel never sees that value
    for which, place in itertools.product(range(2 if is_causal else 3), (7, 130, 299)):  # first, second, last block
        inputs = [draw(1, 2, 300, head_dim, dtype=torch.bfloat16) for _ in range(3)]
        for column in range(head_dim):  # a quarter of the exponentials is a polynomial: hit each kind of column
            inputs[which][0, column % 2, (place + 7 * column) % 300 if which == 1 else place, column] = poison
        exact = [x.double() for x in inputs]
        got, want = flash_attention(*inputs, is_causal=is_causal), reference(*exact, is_causal=is_causal)
        assert torch.equal(got.isnan(), want.isnan()), (which, place)
    if torch.cuda.get_device_capability()[0] == 9:
        assert len(used) == (6 if is_causal else 9)


@gpu
def test_who_serves_what(used):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("specialists are for compute capability 9.0")
    for dtype, head_dim, view, expected in (
        (torch.bfloat16, 64, lambda x: x, 1), (torch.float32, 64, lambda x: x, 0), (torch.bfloat16, 96, lambda x: x, 0),
        (torch.bfloat16, 128, lambda x: x[:, :1].expand(-1, 2, -1, -1), 0),
    ):  # fmt: skip
        used.clear()
        inputs = [view(draw(1, 2, 70, head_dim, dtype=dtype)) for _ in range(3)]
        error = (flash_attention(*inputs).double() - reference(*(x.double() for x in inputs))).abs().max()
        assert error < 0.02 and len(used) == expected


@gpu
def test_the_same_bits_every_time():
    inputs = [x.requires_grad_() for x in tensors(2, 8, 4, 1000, 1000, 128, torch.bfloat16, grad=False)]
    grad = draw(2, 8, 1000, 128, dtype=torch.bfloat16)
    runs = [torch.autograd.grad(flash_attention(*inputs, is_causal=True), inputs, grad) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@gpu
def test_tensors_of_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        inputs = [torch.randn(1, 2, 70, 64, device="cuda:1", dtype=torch.float16) for _ in range(3)]
        torch.testing.assert_close(flash_attention(*inputs), reference(*inputs), atol=1e-2, rtol=1e-2)
