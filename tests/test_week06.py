"""Week 6's RoPE against the kinds of fault that users of such kernels report. The kernels come from the notebook."""

import itertools
import re

import pytest
import torch
import triton
from common import (
    DEVICE,
    DTYPES,
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
from shared.checks import check, compare_all, difference, poisoned
from shared.compiled import compile_many
from shared.machine import interpreting

week = load(6)
apply_rope, rope_tables, rope_unfused = week.apply_rope, week.rope_tables, week.rope_unfused
HALF, BRAIN, FULL, NAN = torch.float16, torch.bfloat16, torch.float32, float("nan")
both_pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
pytestmark = quiet


def heads_of(n, B=2, S=9, D=16, dtype=FULL):
    """(B, n, S, D) as attention sees it, in memory of the order (B, S, n, D)."""
    return draw(B, S, n, D, dtype=dtype).transpose(1, 2)


def tables(S, R, start=0, dtype=FULL, interleaved=False):
    return rope_tables(start + torch.arange(S, device=DEVICE), R, interleaved=interleaved, dtype=dtype)


def any_tables(*shape, dtype=FULL):
    """Numbers that are no cosines and sines, different in the two columns of a pair."""
    return tuple(draw(*shape, dtype=dtype) for _ in range(2))


def rope(query, key, tables, interleaved=False):
    return apply_rope(query, key, *tables, interleaved=interleaved)


def reference(query, key, tables, interleaved=False):
    """The formula of Hugging Face's models, written once more, row by row of pairs."""
    cos, sin = (table.double() for table in tables)
    cos, sin = (table[:, None] if table.ndim == 3 else table for table in (cos, sin))
    r = cos.shape[-1]
    first, second = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    results = []
    for x in (query, key):
        y = x.clone()
        y[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
        y[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
        results.append(y)
    return tuple(results)


def agrees(got, want):
    _, reason = difference(got, want, got.dtype, 2, 1)
    assert not reason, reason


def all_agree(got, want):
    for one, other in zip(got, want, strict=True):
        agrees(one, other)


def turned_back(query, key, tables, interleaved=False):
    """The derivative by autograd in float64: the gradients of two inputs for the gradients of the outputs."""
    leaves = [torch.zeros_like(t, dtype=torch.float64).requires_grad_() for t in (query, key)]
    return torch.autograd.grad(reference(*leaves, tables, interleaved), leaves, [query.double(), key.double()])


# --- any shape, any strides, any tables ------------------------------------------------------------------------------

LAYOUTS = {
    "dense": lambda d, B, n, S, D: d(B, n, S, D),
    "by position": lambda d, B, n, S, D: d(B, S, n, D).transpose(1, 2),
    "position before batch": lambda d, B, n, S, D: d(S, B, n, D).permute(1, 2, 0, 3),
    "every second column": lambda d, B, n, S, D: d(B, S, n, 2 * D)[..., ::2].transpose(1, 2),
    "every second position": lambda d, B, n, S, D: d(B, n, 2 * S, D)[:, :, ::2],
    "columns before positions": lambda d, B, n, S, D: d(B, n, D, S).transpose(2, 3),
    "part of a projection": lambda d, B, n, S, D: d(B, S, n + 3, D)[:, :, 1 : n + 1].transpose(1, 2),
    "one head, repeated": lambda d, B, n, S, D: d(B, 1, S, D).expand(B, n, S, D),
    "one number, repeated": lambda d, B, n, S, D: d(1).expand(B, n, S, D),
    "starts off the 16-byte grid": lambda d, B, n, S, D: d(B * n * S * D + 1)[1:].view(B, n, S, D),
}  # fmt: skip


def case(B=2, heads=(2, 1), S=17, D=16, R=None, layout="by position", made=None, interleaved=False, **options):
    R = D if R is None else R

    def make(d):
        query, key = (LAYOUTS[layout](d, B, n, S, D) for n in heads)
        given = made() if made else tables(S, R, interleaved=interleaved, **options)
        return {"query": query, "key": key, "tables": given, "interleaved": interleaved}

    return make


def padded_left(S=17, R=16, interleaved=False):
    """As models number the positions of texts that begin after 0, 5 and 16 tokens of padding."""
    positions = (torch.arange(S, device=DEVICE) - torch.tensor([[0], [5], [16]], device=DEVICE)).clamp(0)
    return rope_tables(positions, R, interleaved=interleaved)


def negated(d):
    """The imaginary part of a conjugate: positive numbers in memory, with a mark to negate them."""
    return torch.complex(d(2, 3, 5, 16).float(), d(2, 3, 5, 16).float()).conj().imag


def cases(interleaved):
    same = {"interleaved": interleaved}
    found = {layout: case(layout=layout, D=20, R=12, **same) for layout in LAYOUTS}
    found |= {
        "20 of 80": case(D=80, R=20, **same),
        "32 of 80": case(D=80, R=32, **same),
        "2 of 3": case(D=3, R=2, **same),
        "2 of 64": case(D=64, R=2, **same),
        "62 of 64": case(D=64, R=62, **same),
        "96 of 96": case(D=96, **same),
        "one pair": case(D=2, **same),
        "grouped heads": case(heads=(4, 2), **same),
        "one key head": case(heads=(4, 1), **same),
        "as many key heads": case(heads=(3, 3), **same),
        "5 and 3 heads": case(heads=(5, 3), **same),
        "more key heads": case(heads=(1, 5), **same),
        "one position": case(B=3, S=1, start=99, **same),
        "one of everything": case(B=1, S=1, heads=(1, 1), start=5, **same),
        "a long text": case(B=1, S=1030, heads=(2, 1), D=64, **same),
        "positions past 32K": case(start=40_000, **same),
        "positions past a million": case(start=1_000_000, **same),
        "each text its positions": case(B=3, made=lambda: padded_left(**same), **same),
        "tables of (1, S, R)": case(made=lambda: tuple(t[None] for t in tables(17, 16, **same)), **same),
        "any tables": case(D=40, made=lambda: any_tables(17, 24), **same),
        "any tables, each text its own": case(made=lambda: any_tables(2, 17, 16), **same),
        "any tables, one position": case(S=1, made=lambda: any_tables(2, 1, 16), **same),
        "tables in bfloat16": case(dtype=BRAIN, **same),
        "tables in float16 and float64": case(made=lambda: (draw(17, 16, dtype=HALF), draw(17, 16).double()), **same),
        "tables expanded": case(made=lambda: (draw(1, 16).expand(17, 16), draw(17, 1).expand(17, 16)), **same),
        "tables expanded over texts": case(
            made=lambda: tuple(t.expand(2, 17, 16) for t in any_tables(1, 17, 16)), **same
        ),
        "cosines expanded over texts": case(made=lambda: (draw(1, 17, 16).expand(2, 17, 16), draw(2, 17, 16)), **same),
        "tables transposed and sliced": case(made=lambda: (draw(16, 17).T, draw(34, 32)[::2, ::2]), **same),
        "no texts": case(B=0, **same),
        "no positions": case(S=0, **same),
        "no query heads": case(heads=(0, 2), **same),
        "no key heads": case(heads=(2, 0), **same),
        "no heads": case(heads=(0, 0), **same),
        "no columns": case(D=0, **same),
    }
    return found


@pytest.mark.versions
@both_pairings
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_strides_and_tables_both_ways(dtype, interleaved):
    """`check` also hands in gradients that are contiguous, repeated, and every second column of others."""
    chosen = cases(interleaved)
    if interpreting() and dtype == HALF:  # it takes a moment there: every third will do
        chosen = dict(itertools.islice(chosen.items(), int(interleaved), None, 3))
    check(rope, reference, chosen, dtypes=[dtype], reduction=2, roundings=1)


@both_pairings
def test_the_lessons_formula_is_the_reference(interleaved):
    def formula(query, key, tables, interleaved):
        return rope_unfused(query, key, *(t.double() for t in tables), interleaved)

    for name, make in cases(interleaved).items():
        if "no columns" not in name:
            inputs = {key: t.double() if key in ("query", "key") else t for key, t in make(draw).items()}
            for got, want in zip(formula(**inputs), reference(**inputs), strict=True):
                assert torch.allclose(got, want, atol=1e-12), name


@both_pairings
def test_a_negated_view(interleaved):
    query, key, dq = negated(draw), negated(draw), negated(draw)
    assert query.is_neg() and dq.is_neg()
    given = any_tables(5, 16)
    all_agree(rope(query, key, given, interleaved), reference(query.double(), key.double(), given, interleaved))
    leaf = query.detach().resolve_neg().requires_grad_()
    (got,) = torch.autograd.grad(rope(leaf, key, given, interleaved)[0], leaf, dq)
    agrees(got, turned_back(dq, key, given, interleaved)[0])


@both_pairings
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_may_have_any_strides(layout, interleaved):
    """And it comes back in the order in memory of the input that it belongs to."""
    query, key = (heads_of(n, D=20).requires_grad_() for n in (3, 2))
    given = any_tables(2, 9, 12)
    upstream = [LAYOUTS[layout](draw, *t.shape) for t in (query, key)]
    kept = [g.clone() for g in upstream]
    with poisoned():
        got = torch.autograd.grad(rope(query, key, given, interleaved), (query, key), upstream)
    all_agree(got, turned_back(*upstream, given, interleaved))
    assert all(g.stride() == t.stride() for g, t in zip(got, (query, key), strict=True))
    assert all(torch.equal(g, k) for g, k in zip(upstream, kept, strict=True))


def test_the_gradient_of_a_sum():
    query, key = heads_of(3).requires_grad_(), heads_of(1).requires_grad_()
    given = any_tables(9, 16)
    sum(out.sum() for out in rope(query, key, given)).backward()  # hands gradients of stride 0
    all_agree([query.grad, key.grad], turned_back(torch.ones_like(query), torch.ones_like(key), given))


def test_empty_inputs_backward():
    for shape in ((0, 2, 9, 16), (2, 2, 0, 16), (2, 0, 9, 16), (2, 2, 9, 0)):
        query = draw(*shape).requires_grad_()
        out, _ = rope(query, query.detach(), tables(shape[2], shape[3]))
        out.sum().backward()
        assert out.shape == query.grad.shape == torch.Size(shape)


def test_results_lie_in_memory_as_their_inputs():
    for layout in ("dense", "by position", "position before batch", "columns before positions"):
        query, key = (LAYOUTS[layout](draw, 2, n, 9, 16) for n in (3, 2))
        for out, x in zip(rope(query, key, tables(9, 16)), (query, key), strict=True):
            assert out.stride() == x.stride(), layout
    for layout in ("every second column", "one head, repeated"):  # nothing is left unused between the results
        query = LAYOUTS[layout](draw, 2, 3, 9, 16)
        assert rope(query, query, tables(9, 16))[0].untyped_storage().nbytes() == 2 * 3 * 9 * 16 * 4


# --- what it is for --------------------------------------------------------------------------------------------------


@both_pairings
def test_dot_products_depend_on_the_distance_alone(interleaved):
    query, key = draw(1, 1, 1, 64).expand(1, 1, 40, 64), draw(1, 1, 1, 64).expand(1, 1, 40, 64)
    for start in (0, 5000):
        q, k = rope(query, key, tables(40, 64, start, interleaved=interleaved), interleaved)
        scores = (q @ k.mT)[0, 0]
        for distance in range(-20, 21):
            values = scores.diagonal(distance)
            assert torch.allclose(values, values[0], atol=1e-4)
    assert scores.std() > 0.1


@both_pairings
def test_tables_hold_the_angles(interleaved):
    positions = torch.tensor([[0, 1, 7], [40_000, 131_071, 1_000_000]], device=DEVICE)
    cos, sin = rope_tables(positions, 20, base=5e5, interleaved=interleaved)
    assert cos.shape == sin.shape == (2, 3, 20) and cos.dtype == FULL
    for column in range(20):
        pair = column // 2 if interleaved else column % 10
        angle = positions.double() * 5e5 ** (-2 * pair / 20)
        assert torch.allclose(cos[..., column].double(), angle.cos(), atol=1e-7)
        assert torch.allclose(sin[..., column].double(), angle.sin(), atol=1e-7)


def test_the_first_kernel_and_the_one_that_computes_angles():
    x, given = draw(2, 3, 9, 20), tables(9, 20)
    agrees(week.first_rope(x, *given), reference(x.double(), x.double(), given)[0])
    for D in (20, 64):
        x, positions = heads_of(3, S=37, D=D), 3 + 2 * torch.arange(37, device=DEVICE)
        want = reference(x.double(), x.double(), rope_tables(positions, D))[0]
        assert torch.allclose(week.rope_from_positions(x, positions).double(), want, atol=1e-4)


# --- the plan and the launch -----------------------------------------------------------------------------------------


class Spy(Recorder):
    """Writes down the launches and lets them happen."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            Recorder.__getitem__(self, grid)(*args, **options)
            return self.kernel[grid](*args, **options)

        return launch


def recorded(query, key, cos, sin, interleaved=False):
    """What `launch` would start by `plan` on a GPU: (grid, arguments, options)."""
    launches = []
    with as_on_a_gpu(week) as patch:
        patch.setattr(week, "rope_kernel", Recorder(week.rope_kernel, launches))
        week.launch(query, key, cos, sin, torch.empty_like(query), torch.empty_like(key), 1.0, interleaved)
    return launches[0][1:]


def unreal(B, n, S, D, dtype=BRAIN, by_position=True):
    """A tensor without memory."""
    if by_position:
        return torch.empty(B, S, n, D, dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty(B, n, S, D, dtype=dtype, device="meta")


@both_pairings
def test_a_plan_covers_every_position_and_fits_the_registers(interleaved):
    sizes = itertools.product((1, 7, 1024, 4097), (2, 3, 64, 80, 128, 256, 1024, 8192), (1.0, 0.25, 0.01))
    for (S, D, part), n in itertools.product(sizes, (1, 40)):
        R = max(int(D * part) // 2 * 2, 2)
        query, key, table = unreal(3, n, S, D), unreal(3, 1, S, D), torch.empty(S, R, device="meta")
        grid, given, options = recorded(query, key, table, table, interleaved)
        where = f"S {S}, D {D}, R {R}: {options}"
        blocks = grid[0] // (3 * (n + 1))
        assert grid == (3 * (n + 1) * blocks,) and given["q_heads"] == n and given["k_heads"] == 1, where
        assert blocks * options["BLOCK_S"] >= S > (blocks - 1) * options["BLOCK_S"], where
        threads = 32 * options["num_warps"]
        assert options["BLOCK_S"] * triton.next_power_of_2(R // 2) <= 32 * threads, where
        assert options["BLOCK_S"] * triton.next_power_of_2(max(D - R, 1)) <= 64 * threads, where
        assert 1 <= options["num_warps"] <= 16, where


def test_the_plan_that_was_tuned():
    """Positions in a tile and warps, by head dimension, turned columns and pairing."""
    for (D, R, interleaved), (block_s, num_warps) in {
        (128, 128, False): (16, 4),
        (64, 64, False): (32, 4),
        (80, 32, False): (64, 8),
        (128, 128, True): (8, 1),
    }.items():
        table = torch.empty(4096, R, device="meta")
        for by_position in (True, False):
            query, key = (unreal(2, n, 4096, D, by_position=by_position) for n in (8, 2))
            _, _, options = recorded(query, key, table, table, interleaved)
            assert (options["BLOCK_S"], options["num_warps"]) == (block_s, num_warps)


def surrounded(values, mark):
    """The same values as a view of memory that is otherwise filled with `mark`, and all that memory."""
    B, n, S, D = values.shape
    around = torch.full((B + 1, S + 2, n + 2, D + 3), mark, dtype=values.dtype, device=values.device)
    view = around[:B, 1 : S + 1, 1 : n + 1, 2 : D + 2].transpose(1, 2)
    view.copy_(values)
    return view, around


@pytest.mark.versions
@both_pairings
@pytest.mark.parametrize("block_s", [1, 2, 8, 16])
def test_each_tile_with_nan_around_inputs_and_marks_around_outputs(block_s, interleaved):
    options = {"BLOCK_S": block_s, "num_warps": 1}
    for q_heads, k_heads, D, R, sign in ((3, 1, 7, 6, 1), (1, 2, 6, 6, -1), (2, 2, 11, 4, 1)):
        query, key = draw(2, q_heads, 9, D), draw(2, k_heads, 9, D)
        given = [surrounded(t[:, None], NAN)[0][:, 0] for t in any_tables(2, 9, R)]
        inside = [surrounded(t, NAN)[0] for t in (query, key)]
        outside = [surrounded(torch.zeros_like(t), 7.0) for t in (query, key)]
        week.launch(*inside, *given, *[view for view, _ in outside], sign, interleaved, options)
        turn = reference if sign > 0 else turned_back
        all_agree([view for view, _ in outside], turn(query.double(), key.double(), given, interleaved))
        for view, around in outside:
            assert (around == 7).sum() == around.numel() - view.numel(), "written outside the tensor"


def test_one_launch_forward_and_the_same_one_backward(monkeypatch):
    """Only `sign` and the tensors differ, so the backward needs no compilation of its own."""
    spy = Spy(week.rope_kernel, [])
    monkeypatch.setattr(week, "rope_kernel", spy)
    query, key = heads_of(3).requires_grad_(), heads_of(2).requires_grad_()
    out = rope(query, key, tables(9, 16))
    torch.autograd.grad(out, (query, key), [torch.randn_like(t) for t in out])
    (_, grid, given, options), (_, other_grid, other, other_options) = spy.launches
    assert grid == other_grid and options == other_options
    numbers, others = ({k: v for k, v in g.items() if not isinstance(v, torch.Tensor)} for g in (given, other))
    assert numbers.pop("sign") == 1.0 and others.pop("sign") == -1.0
    assert numbers == others


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """Along each axis in turn, elements lie so far apart, in memory hardly touched, that offsets pass 2^31."""
    reserved, used = torch.empty(2**31 + 2**27, dtype=HALF), 0

    def far(values, axis):
        nonlocal used
        used += 2**12
        strides = [1, 7, 31, 101, 401][: values.ndim][::-1]
        strides[axis] = 2**30 if values.shape[axis] == 3 else 2**25  # of three rows, or of 66 columns
        return reserved.as_strided(values.shape, strides, used).copy_(values)

    for (axis, R), interleaved in itertools.product([(0, 4), (1, 4), (2, 4), (3, 66), (3, 64)], (False, True)):
        shape = [2, 1, 2, 4]
        shape[axis] = 66 if axis == 3 else 3
        where = f"axis {axis}, {R} columns turned, interleaved {interleaved}"
        for which in ("inputs", "results", "tables"):
            query, key, dq, dk = draw(*shape).half(), draw(*shape).half(), draw(*shape).half(), draw(*shape).half()
            cos, sin = any_tables(shape[0], shape[2], R, dtype=HALF)
            if which == "inputs":
                query, key = far(query, axis), far(key, axis)
            if which == "results":
                dq, dk = far(dq, axis), far(dk, axis)
            if which == "tables" and axis != 1:
                cos, sin = (far(t, max(axis - 1, 0)) for t in (cos, sin))
            want = reference(query.double(), key.double(), (cos, sin), interleaved)
            week.launch(query, key, cos, sin, dq, dk, 1.0, interleaved, {"BLOCK_S": 2, "num_warps": 1})
            for got, expected in zip((dq, dk), want, strict=True):
                assert not difference(got, expected, HALF, 2)[1], f"{where}, {which}"
    leaf = far(draw(3, 2, 2, 4).half(), 0).requires_grad_()
    given = any_tables(3, 2, 4)
    upstream = far(draw(3, 2, 2, 4).half(), 0)
    (got,) = torch.autograd.grad(apply_rope(leaf, leaf.detach(), *given)[0], leaf, upstream)
    agrees(got, turned_back(upstream, upstream, given)[0])
    touched_little()


def test_offsets_past_2_to_the_31():
    elsewhere(_far_apart, timeout=100, TRITON_INTERPRET="1")


# --- wrong requests --------------------------------------------------------------------------------------------------

Q, K = torch.zeros(2, 4, 9, 16, device=DEVICE), torch.zeros(2, 2, 9, 16, device=DEVICE)
T, WIDE, LONG = (torch.zeros(*shape, device=DEVICE) for shape in ((9, 16), (9, 18), (10, 16)))
ODD, THREE, ENORMOUS = T[:, :15], T.expand(3, 9, 16), Q[:1, :1, :1, :1].expand(1, 1, 1, 2**21)
WRONG = {
    "odd rotary_dim": ((Q, K, ODD, ODD), ValueError, r"cos has 15 columns.*even.*head_dim 16"),
    "rotary_dim above head_dim": ((Q, K, WIDE, WIDE), ValueError, r"cos has 18 columns.*at most head_dim 16"),
    "no columns in the tables": ((Q, K, T[:, :0], T[:, :0]), ValueError, r"cos has 0 columns"),
    "sin narrower": ((Q, K, T, T[:, :8]), ValueError, r"sin has shape \(9, 8\).*\(9, 16\), as cos"),
    "tables too short": ((Q, K, T[:8], T[:8]), ValueError, r"cos has shape \(8, 16\).*\(9, R\)"),
    "sin too long": ((Q, K, T, LONG), ValueError, r"sin has shape \(10, 16\).*\(9, R\)"),
    "tables of three texts": ((Q, K, THREE, THREE), ValueError, r"cos has shape.*\(2, 9, R\)"),
    "one table a text": ((Q, K, T.expand(2, 9, 16), T), ValueError, r"sin has shape \(9, 16\).*\(2, 9, 16\), as cos"),
    "tables 1-D": ((Q, K, T[0], T[0]), ValueError, r"cos has 1 dim.*2 to 3"),
    "tables of integers": ((Q, K, T.long(), T), TypeError, r"cos has dtype torch.int64.*float64"),
    "tables that learn": ((Q, K, T, T.clone().requires_grad_()), ValueError, r"sin requires a gradient.*detach"),
    "tables elsewhere": ((Q, K, T.to("meta"), T), ValueError, r"cos is on meta"),
    "no sin": ((Q, K, T, None), TypeError, r"sin must be a torch.Tensor, got NoneType"),
    "key with other positions": ((Q, K[:, :, :8], T, T), ValueError, r"key has shape \(2, 2, 8, .*\(2, any, 9, 16\)"),
    "key with other texts": ((Q, K[:1], T, T), ValueError, r"key has shape \(1, 2, 9, 16\)"),
    "key with another head_dim": ((Q, K[..., :8], T, T), ValueError, r"key has shape \(2, 2, 9, 8\)"),
    "key in another dtype": ((Q, K.half(), T, T), TypeError, r"key has dtype torch.float16.*float32, as query"),
    "key elsewhere": ((Q, K.to("meta"), T, T), ValueError, r"key is on meta"),
    "no key": ((Q, None, T, T), TypeError, r"key must be a torch.Tensor, got NoneType"),
    "float64": ((Q.double(), K.double(), T, T), TypeError, r"query has dtype torch.float64.*float32"),
    "integers": ((Q.long(), K.long(), T, T), TypeError, r"query has dtype torch.int64"),
    "3-D": ((Q[0], K[0], T, T), ValueError, r"query has 3 dim.*4 to 4"),
    "query elsewhere": ((Q.to("meta"), K, T, T), ValueError, r"query is on meta"),
    "sparse": ((Q.to_sparse(), K, T, T), ValueError, r"query has layout torch.sparse"),
    "an enormous head": (
        (ENORMOUS, ENORMOUS, T[:1], T[:1]), ValueError, r"query has 2,097,152 numbers in a head.*16,384",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_in_words(monkeypatch, name):
    arguments, error, says = WRONG[name]
    monkeypatch.setattr(week, "launch", lambda *args, **options: pytest.fail("launched"))
    with pytest.raises(error, match=says):
        apply_rope(*arguments)


# --- autograd --------------------------------------------------------------------------------------------------------


def leaves_of(*needs, dtype=FULL):
    return [heads_of(n, dtype=dtype).requires_grad_(need) for n, need in zip((4, 1), needs, strict=True)]


@on_cpu
@pytest.mark.parametrize("frozen", ["query", "key"])
def test_a_frozen_input_costs_nothing(frozen):
    query, key = leaves_of(frozen != "query", frozen != "key")
    given = any_tables(9, 16)
    out_q, out_k = rope(query, key, given)
    assert (out_q.requires_grad, out_k.requires_grad) == (frozen != "query", frozen != "key")
    all_agree((out_q, out_k), reference(query.detach().double(), key.detach().double(), given))
    out, leaf = (out_k, key) if frozen == "query" else (out_q, query)
    upstream = torch.randn_like(out)
    moved = memory.traffic(torch.autograd.grad, out, leaf, upstream, retain_graph=True)
    rows = leaf.shape[0] * leaf.shape[1] * 2 * given[0].nbytes  # each head asks for both tables
    assert (moved.read, moved.written) == (leaf.nbytes + rows, leaf.nbytes)
    (got,) = torch.autograd.grad(out, leaf, upstream)
    pair = (upstream, torch.zeros_like(key)) if frozen == "key" else (torch.zeros_like(query), upstream)
    agrees(got, turned_back(*pair, given)[frozen == "query"])


@on_cpu
def test_an_output_that_nobody_used_costs_nothing():
    query, key = leaves_of(True, True)
    given = tables(9, 16)
    _, out_k = rope(query, key, given)
    upstream = torch.randn_like(out_k)
    moved = memory.traffic(torch.autograd.grad, out_k, key, upstream, retain_graph=True)
    assert moved.written == key.nbytes
    got = torch.autograd.grad(out_k, (query, key), upstream, allow_unused=True)
    assert got[0] is None
    agrees(got[1], turned_back(torch.zeros_like(query), upstream, given)[1])


def test_nothing_is_held_but_the_tables():
    query, key = leaves_of(True, True)
    cos, sin = tables(9, 16)
    assert memory.held_bytes(apply_rope, query, key, cos, sin) == 0
    assert memory.held_bytes(lambda query, key: apply_rope(query, key, cos, sin), query, key) == cos.nbytes + sin.nbytes
    assert memory.held_bytes(apply_rope, query.detach(), key.detach(), cos, sin) == 0
    with torch.no_grad():
        assert not apply_rope(query, key, cos, sin)[0].requires_grad


@on_cpu
def test_nothing_is_allocated_but_the_results():
    query, key = leaves_of(True, True)
    given, size = any_tables(2, 9, 16), query.nbytes + key.nbytes
    assert memory.peak_bytes(rope, query.detach(), key.detach(), given) <= size + 64
    out = rope(query, key, given)
    upstream = [torch.randn_like(t) for t in out]
    assert memory.peak_bytes(torch.autograd.grad, out, (query, key), upstream, retain_graph=True) <= size + 64


def test_going_backward_twice():
    query, key = leaves_of(True, True)
    out = rope(query, key, tables(9, 16))
    upstream = [torch.randn_like(t) for t in out]
    first, second = (torch.autograd.grad(out, (query, key), upstream, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.autograd.backward(out, upstream, retain_graph=True)
    torch.autograd.backward(out, upstream)
    assert torch.equal(query.grad, 2 * first[0]) and torch.equal(key.grad, 2 * first[1])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(out, upstream)


def test_a_scaled_loss():
    query, key = leaves_of(True, True)
    weights = torch.randn_like(query)
    loss = lambda scale: (rope(query, key, tables(9, 16))[0] * weights).sum() * scale
    plain, scaled = (torch.autograd.grad(loss(scale), query)[0] for scale in (1, 1024))
    assert torch.equal(scaled, 1024 * plain)


def test_a_gradient_that_two_share_stays_as_it_was():
    query, other = heads_of(3).requires_grad_(), heads_of(3).requires_grad_()
    given, upstream = any_tables(9, 16), torch.randn_like(query)
    kept = upstream.clone()
    outputs = [*rope(query, query, given), rope(other, query.detach(), given)[0]]
    together = torch.autograd.grad(outputs, (query, other), [upstream] * 3)
    assert torch.equal(upstream, kept)
    one = turned_back(upstream, upstream, given)[0]
    agrees(together[0], 2 * one)
    agrees(together[1], one)


def test_neither_input_is_changed_and_inputs_may_change_afterwards():
    query, key = leaves_of(True, True)
    given = any_tables(9, 16)
    kept = [t.detach().clone() for t in (query, key, *given)]
    middle = query * 1.0
    out_q, _ = rope(middle, key, given)
    upstream = torch.randn_like(query)
    torch.autograd.grad(out_q, query, upstream, retain_graph=True)
    assert all(torch.equal(t, k) for t, k in zip((middle, key, *given), kept, strict=True))
    middle.add_(1)  # neither is saved, so both may be overwritten
    out_q.mul_(2)
    agrees(torch.autograd.grad(out_q, query, upstream)[0], 2 * turned_back(upstream, key, given)[0])


def test_tables_changed_before_the_backward_make_autograd_raise():
    query, key = leaves_of(True, True)
    given = any_tables(9, 16)
    out, _ = rope(query, key, given)
    given[1].neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@both_pairings
def test_the_second_and_third_derivative(interleaved):
    query, key = leaves_of(True, True)
    given, upstream = any_tables(2, 9, 16), [torch.randn_like(t).requires_grad_() for t in (query, key)]
    out = rope(query, key, given, interleaved)
    first = torch.autograd.grad(out, (query, key), upstream, create_graph=True)
    directions = [torch.randn_like(t).requires_grad_() for t in first]
    second = torch.autograd.grad(first, upstream, directions, create_graph=True)
    all_agree(second, reference(*(d.detach().double() for d in directions), given, interleaved))
    third = torch.autograd.grad(second, directions, [u.detach() for u in upstream])
    all_agree(third, turned_back(*(u.detach() for u in upstream), given, interleaved))


def test_a_gradient_penalty():
    query, key = leaves_of(True, True)
    given, weight = any_tables(9, 16), torch.randn_like(query)
    found = []
    for leaf, function in ((query, rope), (query.detach().double().requires_grad_(), reference)):
        turned = function(leaf, key.detach().to(leaf.dtype), given)[0]
        (gradient,) = torch.autograd.grad((turned.sin() * weight).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), leaf)[0])
    assert torch.allclose(found[0].double(), found[1], atol=1e-3)


def test_torch_func_is_served_or_refused_in_words():
    query, key = leaves_of(False, False)
    given = tables(9, 16)
    try:
        got = torch.func.grad(lambda query: rope(query, key, given)[0].square().sum())(query)
    except RuntimeError as error:
        assert "setup_context" in str(error), error
    else:
        assert torch.allclose(got, 2 * query, atol=1e-5)


def test_in_a_checkpoint():
    query, key = leaves_of(True, True)
    given = any_tables(9, 16)
    out = checkpoint(rope, query, key, given, use_reentrant=False)
    upstream = [torch.randn_like(t) for t in out]
    all_agree(torch.autograd.grad(out, (query, key), upstream), turned_back(*upstream, given))


@pytest.mark.parametrize("dtype", [HALF, BRAIN] if DEVICE == "cuda" else [HALF], ids=str)
def test_under_autocast(dtype):
    weight, x = draw(4 * 16, 32).requires_grad_(), draw(2, 9, 32)
    given = tables(9, 16)
    with torch.autocast(DEVICE, dtype=dtype):
        query = (x @ weight.T).unflatten(-1, (4, 16)).transpose(1, 2)
        assert query.dtype == dtype
        out = rope(query, query[:, :1], given)
        loss = sum(t.float().square().sum() for t in out)
    all_agree(out, reference(query.detach().double(), query.detach()[:, :1].double(), given))
    loss.backward()
    assert weight.grad.dtype == FULL and weight.grad.isfinite().all() and weight.grad.any()


def squashed(query, key, cos, sin):
    return sum((out * out.cos()).sum() for out in apply_rope(query * 2, key, cos, sin))


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(squashed, backend="eager")
    for S in (9, 13):
        query, key, given = heads_of(3, S=S).requires_grad_(), heads_of(1, S=S), tables(S, 16)
        got, want = (torch.autograd.grad(f(query, key, *given), query)[0] for f in (compiled, squashed))
        assert torch.allclose(got, want)


# --- what is moved ---------------------------------------------------------------------------------------------------


@on_cpu
@both_pairings
@pytest.mark.parametrize(("D", "R"), [(64, 64), (80, 20), (3, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_moved(dtype, D, R, interleaved):
    """Each number once in and once out; of the tables, what is asked by each head."""
    query, key = (heads_of(n, D=D, dtype=dtype).requires_grad_() for n in (4, 1))
    for table_dtype in (FULL, BRAIN):
        given = tables(9, R, dtype=table_dtype, interleaved=interleaved)
        size, asked = query.nbytes + key.nbytes, 2 * 5 * 2 * given[0].nbytes
        moved = memory.traffic(rope, query.detach(), key.detach(), given, interleaved)
        assert (moved.read, moved.written) == (size + asked, size)
        out = rope(query, key, given, interleaved)
        moved = memory.traffic(torch.autograd.grad, out, (query, key), [torch.randn_like(t) for t in out])
        assert (moved.read, moved.written) == (size + asked, size)


@on_cpu
def test_the_lessons_claim():
    query, key, (cos, sin) = heads_of(5, D=34), heads_of(3, D=34), tables(9, 34)
    n = query.numel() + key.numel()
    moved = memory.traffic(rope_unfused, query, key, cos, sin)
    assert moved.read == (5.5 * n + 4 * cos.numel()) * 4
    assert moved.written == 4.5 * n * 4


def test_the_check_sees_what_users_have_reported():
    """One key head left unturned, positions of the first text for all, the wrong pairs, the wrong way."""

    def first_text(query, key, tables, interleaved=False):
        return rope(query, key, tuple(t[:1] if t.ndim == 3 else t for t in tables), interleaved)

    def lone_key(query, key, tables, interleaved=False):
        out_q, out_k = rope(query, key, tables, interleaved)
        return out_q, key.clone() if key.shape[1] == 1 else out_k

    def wrong_pairs(query, key, tables, interleaved=False):
        return rope(query, key, tables, not interleaved)

    def wrong_way(query, key, tables, interleaved=False):
        return rope(query, key, (tables[0], -tables[1]), interleaved)

    few = {name: make for name, make in cases(False).items() if name in ("one key head", "each text its positions")}
    for broken in (first_text, lone_key, wrong_pairs, wrong_way):
        report = compare_all(broken, reference, few, dtypes=[FULL], reduction=2, backward=False)
        assert report.failures, broken.__name__


# --- what the compiler makes of it -----------------------------------------------------------------------------------

COMPILED = {  # heads, D, R, interleaved, order in memory
    "Llama 3": (32, 8, 128, 128, False, True),
    "heads before positions": (32, 8, 128, 128, False, False),
    "interleaved": (32, 8, 128, 128, True, True),
    "head of 64": (32, 8, 64, 64, False, True),
    "32 of 80": (32, 32, 80, 32, False, True),
    "GPT-J": (16, 16, 256, 64, True, True),
    "one key head, 256": (8, 1, 256, 256, False, True),
}


def compile_jobs():
    for name, (q_heads, k_heads, D, R, interleaved, by_position) in COMPILED.items():
        for dtype, targets in ((BRAIN, ("sm_75", "sm_80", "sm_90")), (FULL, ("sm_75",))):
            query, key = (unreal(4, n, 4096, D, dtype, by_position) for n in (q_heads, k_heads))
            table = torch.empty(4096, R, dtype=dtype, device="meta")
            _, given, options = recorded(query, key, table, table, interleaved)
            warps = {"num_warps": options.pop("num_warps")}
            types = {argument: as_type(value) for argument, value in given.items()}
            types |= dict.fromkeys(("q_heads", "k_heads"), "i32")  # which the kernel does not specialise
            for target in targets:
                yield f"{name}, {NAMES[dtype]}", week.rope_kernel, types | options, target, warps


@pytest.mark.versions
def test_compiled_code():
    """16 bytes at a time (turned columns of a partial head: 8), no spills, most requests before the first product."""
    jobs, wrong = list(compile_jobs()), []
    for (name, _, types, target, _), made in zip(jobs, compile_many(jobs), strict=True):
        loads, stores = made.count("LDG"), made.count("STG")
        partial = types["ROTARY_DIM"] < types["HEAD_DIM"]
        wide_loads, wide_stores = (
            made.count(name, "128") + partial * made.count(name, "64") for name in ("LDG", "STG")
        )
        wide = loads == wide_loads > 0 and stores == wide_stores > 0
        code = [re.search(r"\b(LDG|FMUL|FFMA|FADD)\b", line) for line in made.sass.splitlines()]
        order = [found[1] for found in code if found]
        at_once = order.index("FMUL") > loads // 2 or partial
        if not wide or made.spill_bytes or made.shared_bytes > 64 * 1024 or made.registers > 128 or not at_once:
            wrong.append(f"{name}, {target}: {made.summary()} {order}")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@both_pairings
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
@pytest.mark.parametrize(("D", "R"), [(128, 128), (64, 64), (80, 32), (256, 64)])
def test_gpu_sizes_of_models(D, R, dtype, interleaved):
    query, key = (heads_of(n, B=2, S=1031, D=D, dtype=dtype).requires_grad_() for n in (8, 2))
    given = tables(1031, R, dtype=dtype, interleaved=interleaved)
    with poisoned():
        out = rope(query, key, given, interleaved)
        upstream = [torch.randn_like(t) for t in out]
        gradients = torch.autograd.grad(out, (query, key), upstream)
    all_agree(out, reference(query.detach().double(), key.detach().double(), given, interleaved))
    all_agree(gradients, turned_back(*upstream, given, interleaved))


@gpu
def test_gpu_backward_runs_the_code_that_forward_compiled():
    query, key = (heads_of(n, D=48, dtype=HALF).requires_grad_() for n in (4, 2))
    compiled = week.rope_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    out = rope(query, key, tables(9, 48))
    torch.autograd.grad(out, (query, key), [torch.randn_like(t) for t in out])
    for n in (1, 16):  # nor does another number of heads
        rope(heads_of(n, D=48, dtype=HALF), heads_of(1, D=48, dtype=HALF), tables(9, 48))
    assert len(compiled) == before + 1


@gpu
def test_gpu_a_grid_past_65535():
    query, key, given = heads_of(20, S=4096), heads_of(1, S=4096), tables(4096, 16)
    out = torch.empty_like(query), torch.empty_like(key)
    week.launch(query, key, *given, *out, 1.0, False, {"BLOCK_S": 1, "num_warps": 1})
    all_agree(out, reference(query.double(), key.double(), given))


@gpu
@both_pairings
def test_gpu_more_than_2_to_the_31_elements(interleaved):
    needs_memory(60)
    S = 2**18 + 9
    query = torch.empty(1, S, 64, 128, dtype=BRAIN, device=DEVICE).normal_().transpose(1, 2).requires_grad_()
    key, given = heads_of(1, B=1, S=S, D=128, dtype=BRAIN), tables(S, 128, interleaved=interleaved)
    assert query.numel() > 2**31
    with poisoned():
        out = rope(query, key, given, interleaved)
        (back,) = torch.autograd.grad(out[0], query, query.detach())
    for start in (0, S // 2, S - 999):
        part = slice(start, start + 999)
        x, few = query.detach()[:, :, part], tuple(table[part] for table in given)
        want = reference(x.double(), key[:, :, part].double(), few, interleaved)
        all_agree([t[:, :, part] for t in out], want)
        agrees(back[:, :, part], turned_back(x, x, few, interleaved)[0])
    assert not out[0].isnan().any() and not back.isnan().any()


@gpu
def test_gpu_refuses_tensors_on_the_cpu():
    query, key, given = heads_of(2), heads_of(1), tables(9, 16)
    for arguments, says in (
        ((query.cpu(), key, *given), r"query is on cpu.*cuda"),
        ((query, key.cpu(), *given), r"key is on cpu.*cuda"),
        ((query, key, given[0].cpu(), given[1]), r"cos is on cpu.*cuda"),
    ):
        with pytest.raises(ValueError, match=says):
            apply_rope(*arguments)


@gpu
def test_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    query, key = (heads_of(n).to("cuda:1").requires_grad_() for n in (4, 2))
    given = [table.to("cuda:1") for table in tables(9, 16)]
    with torch.cuda.device(0):
        out = rope(query, key, given)
        upstream = [torch.randn_like(t) for t in out]
        gradients = torch.autograd.grad(out, (query, key), upstream)
    all_agree(out, reference(query.detach().double(), key.detach().double(), given))
    all_agree(gradients, turned_back(*upstream, given))


@gpu
def test_gpu_in_a_cuda_graph():
    query, key = (heads_of(n, S=300, D=64).requires_grad_() for n in (4, 2))
    given, upstream = tables(300, 64), [torch.randn_like(t) for t in (query, key)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(rope(query, key, given), (query, key), upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rope(query, key, given)
        gradients = torch.autograd.grad(out, (query, key), upstream)
    for _ in range(3):
        with torch.no_grad():
            query.copy_(torch.randn_like(query))
        graph.replay()
        all_agree(out, reference(query.detach().double(), key.detach().double(), given))
        all_agree(gradients, turned_back(*upstream, given))


@gpu
def test_gpu_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(squashed)
    query, key, given = heads_of(3, S=300, D=64).requires_grad_(), heads_of(1, S=300, D=64), tables(300, 64)
    got, want = (torch.autograd.grad(f(query, key, *given), query)[0] for f in (compiled, squashed))
    assert torch.allclose(got, want, atol=1e-4)


@gpu
def test_gpu_peak_memory():
    query, key = (heads_of(n, S=4096, D=128) for n in (8, 2))
    assert memory.peak_bytes(rope, query, key, tables(4096, 128)) <= 1.01 * (query.nbytes + key.nbytes)


def test_gradients_and_inputs_that_are_zeros_without_memory():
    """PyTorch's sgn, and so the second derivative of abs, hands on a tensor of zeros that has no address."""
    query, key = heads_of(2).requires_grad_(), heads_of(1)
    dq = torch.autograd.grad(rope(query, key, tables(9, 16))[0].sgn().sum(), query)[0]
    assert dq.shape == query.shape and (dq == 0).all()
    nothing = torch._efficientzerotensor(query.shape, device=query.device)
    assert (rope(nothing, key, tables(9, 16))[0] == 0).all()


@pytest.mark.parametrize("wrong", ["False", 1, None, [0]])
def test_a_pairing_that_is_neither_true_nor_false(wrong):
    with pytest.raises(TypeError, match="interleaved must be a bool, got"):
        week.apply_rope(heads_of(2), heads_of(1), *tables(9, 16), interleaved=wrong)
