"""Week 4's matmul against the kinds of fault that users of such kernels report. The kernels come from the notebook."""

import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from shared import memory
from shared.cells import ROOT, load
from shared.checks import check, difference, poisoned
from shared.compiled import compile_many
from shared.machine import interpreting, machine

week = load(4)
matmul, tile_position = week.matmul, week.tile_position
DEVICE, DTYPES = machine().device, machine().dtypes
HALF, BRAIN, FULL, NAN = torch.float16, torch.bfloat16, torch.float32, float("nan")
on_cpu = pytest.mark.skipif(not interpreting(), reason="looks into Triton's interpreter")
gpu = pytest.mark.gpu
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning")


def draw(*shape, dtype=FULL):
    return torch.randn(shape, device=DEVICE).to(dtype)


def negated(*shape, dtype=FULL):
    return torch._neg_view(draw(*shape, dtype=dtype))  # memory holds the opposite numbers


def within_nan(values, pitch, flipped=False):
    """The same values as a view of memory that is otherwise NaN; `flipped`: neighbours in memory are in a column."""
    if flipped:
        return within_nan(values.mT, pitch).mT
    around = torch.full(((values.shape[0] + 2) * pitch + 8,), NAN, dtype=values.dtype, device=values.device)
    return around.as_strided(values.shape, (pitch, 1), pitch + 8 - pitch % 8).copy_(values)


def agrees(got, want, reduction, roundings=1, terms=0.0):
    _, reason = difference(got, want, got.dtype, max(reduction, 1), roundings, terms)
    assert not reason, reason


def both_ways(a, b, dc=None, roundings=1, **options):
    """Forward and backward of a @ b with NaN in all new memory, each compared with float64. Returns c, da, db."""
    leaves, exact = ([make(x.detach()).requires_grad_() for x in (a, b)] for make in (lambda x: x, torch.Tensor.double))
    want = torch.matmul(*exact)
    dc = draw(*want.shape, dtype=a.dtype) if dc is None else dc
    kept = dc.clone()
    with poisoned():
        c = matmul(*leaves, **options)
        grads = torch.autograd.grad(c, leaves, dc)
    assert torch.equal(dc, kept), "the incoming gradient was overwritten"
    agrees(c, want, a.shape[-1])
    for got, other in zip(grads, torch.autograd.grad(want, exact, dc.double()), strict=True):
        agrees(got, other, 4 * max(*a.shape, *b.shape), roundings, dc.abs().max().item())
    return c, *grads


# --- any shape, any strides ------------------------------------------------------------------------------------------

CASES = {
    "511 cubed": lambda d: (d(511, 511), d(511, 511)),
    "nothing divides": lambda d: (d(300, 301), d(301, 199)),
    "cut by one": lambda d: (d(129, 257), d(257, 127)),
    "M 1": lambda d: (d(1, 200), d(200, 64)),
    "N 1": lambda d: (d(70, 200), d(200, 1)),
    "K 1": lambda d: (d(70, 1), d(1, 40)),
    "K below a block": lambda d: (d(40, 7), d(7, 48)),
    "one element": lambda d: (d(1, 1), d(1, 1)),
    "K 0": lambda d: (d(5, 0), d(0, 7)),
    "M 0": lambda d: (d(0, 3), d(3, 7)),
    "N 0": lambda d: (d(4, 3), d(3, 0)),
    "empty vectors": lambda d: (d(0), d(0)),
    "batch 0": lambda d: (d(0, 4, 5), d(0, 5, 6)),
    "batch 0 by a matrix": lambda d: (d(2, 0, 4, 5), d(5, 6)),
    "batch with K 0": lambda d: (d(2, 4, 0), d(0, 6)),
    "a transposed": lambda d: (d(136, 72).T, d(136, 80)),
    "b transposed": lambda d: (d(72, 136), d(80, 136).T),
    "both transposed": lambda d: (d(136, 200).T, d(80, 136).T),
    "both transposed, no 16 bytes": lambda d: (d(101, 71).T, d(79, 101).T),
    "every second column": lambda d: (d(64, 160)[:, ::2], d(80, 128)[:, ::2]),
    "every third row": lambda d: (d(150, 80)[::3], d(240, 64)[::3]),
    "a row, repeated": lambda d: (d(80).expand(64, 80), d(80, 72)),
    "a column, repeated": lambda d: (d(64, 80), d(80, 1).expand(80, 72)),
    "a number, repeated": lambda d: (d(1).expand(30, 40), d(1).expand(40, 50)),
    "overlapping rows": lambda d: (d(400).unfold(0, 72, 8), d(72, 40)),
    "off the 16-byte grid": lambda d: (d(64 * 80 + 1)[1:].view(64, 80), d(80, 72)),
    "dot": lambda d: (d(300), d(300)),
    "vector, matrix": lambda d: (d(300), d(300, 20)),
    "matrix, strided vector": lambda d: (d(20, 300), d(600)[::2]),
    "vector, batch": lambda d: (d(30), d(2, 3, 30, 20)),
    "batch, vector": lambda d: (d(2, 3, 20, 30), d(30)),
    "3-D by 2-D": lambda d: (d(3, 40, 64), d(64, 48)),
    "3-D transposed by 2-D": lambda d: (d(40, 3, 64).transpose(0, 1), d(64, 48)),
    "3-D repeated by 2-D": lambda d: (d(40, 64).expand(3, 40, 64), d(64, 48)),
    "2-D by 3-D": lambda d: (d(40, 64), d(3, 64, 48)),
    "3-D by 3-D": lambda d: (d(3, 40, 60), d(3, 60, 50)),
    "4-D, broadcast both ways": lambda d: (d(2, 1, 33, 40), d(1, 3, 40, 34)),
    "4-D by 3-D": lambda d: (d(2, 3, 33, 40), d(3, 40, 34)),
    "heads as (B, S, H, D)": lambda d: (d(2, 33, 3, 32).transpose(1, 2), d(2, 35, 3, 32).transpose(1, 2).mT),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_and_strides_both_ways(dtype):
    cases = {case: lambda d, make=make: dict(zip("ab", make(d), strict=True)) for case, make in CASES.items()}
    longest = lambda a, b: 4 * max(*a.shape, *b.shape, a.numel() // max(a.shape[-1], 1), 1)
    check(matmul, lambda a, b: a @ b, cases, dtypes=[dtype], reduction=longest, terms=lambda c, dc: dc.abs())


def test_1000_by_999_by_1001():
    a, b = draw(1000, 1001), draw(1001, 999)
    with poisoned():
        agrees(matmul(a, b), a.double() @ b.double(), 1001)


def test_bfloat16():
    """Also in the interpreter, whose own bfloat16 arithmetic is wrong."""
    both_ways(draw(70, 90, dtype=BRAIN), draw(90, 40, dtype=BRAIN))


GRADIENTS = {
    "of a sum": lambda m, n, t: draw(1, dtype=t)[0].expand(m, n),
    "a row, repeated": lambda m, n, t: draw(n, dtype=t).expand(m, n),
    "a column, repeated": lambda m, n, t: draw(m, 1, dtype=t).expand(m, n),
    "transposed": lambda m, n, t: draw(n, m, dtype=t).T,
    "every second column": lambda m, n, t: draw(m, 2 * n, dtype=t)[:, ::2],
    "within NaN": lambda m, n, t: within_nan(draw(m, n, dtype=t), n + 8),
    "off the 16-byte grid": lambda m, n, t: draw(m * n + 1, dtype=t)[1:].view(m, n),
    "negated": lambda m, n, t: negated(m, n, dtype=t),
}


@pytest.mark.parametrize("layout", GRADIENTS)
def test_a_gradient_may_have_any_strides(layout):
    for dtype in (FULL, HALF):
        both_ways(draw(72, 40, dtype=dtype), draw(40, 96, dtype=dtype), GRADIENTS[layout](72, 96, dtype))


def test_negated_views():
    for a, b in ((negated(40, 56), draw(56, 30)), (negated(2, 8, 16, dtype=HALF), negated(16, 8, dtype=HALF))):
        both_ways(a, b, roundings=2)


def test_infinity_and_nan_stay_in_their_rows_and_columns():
    a, b = draw(150, 140), draw(140, 150)
    a[3, 5], a[149, 139], b[7, 149] = float("inf"), NAN, float("-inf")
    agrees(matmul(a, b), a.double() @ b.double(), 140)


@pytest.mark.parametrize(("dtype", "pitch"), [(HALF, 120), (HALF, 131), (FULL, 131)], ids=str)
def test_nothing_around_an_operand_is_used(dtype, pitch):
    for flipped in (False, True):
        both_ways(*(within_nan(draw(*shape, dtype=dtype), pitch, flipped) for shape in ((72, 104), (104, 88))))


# --- each kernel alone, with NaN around its operands and marks around its output --------------------------------------


def alone(launch, a, b):
    """Check what launch(a, b, c) writes to c; numbers around it must stay as they are."""
    whole = torch.full((a.shape[0] * b.shape[1] + 128,), 7.0, dtype=a.dtype, device=DEVICE)
    c = whole[64:-64].view(a.shape[0], b.shape[1]).fill_(NAN)
    launch(a, b, c)
    agrees(c, a.double() @ b.double(), a.shape[1])
    assert (whole[:64] == 7).all() and (whole[-64:] == 7).all(), "written outside the matrix"


@pytest.mark.parametrize("k", [0, 1, 128, 300])
def test_row_times_column_alone(k):
    def launch(a, b, c):
        kernel, strides = week.row_times_column_kernel, (*a.stride(), *b.stride())
        kernel[(c.numel(),)](a, b, c, c.shape[1], k, *strides, BLOCK_K=128)

    a, b = within_nan(draw(3, k, dtype=HALF), k + 8), within_nan(draw(k, 5, dtype=HALF), k + 8, True)
    alone(launch, a, b)
    alone(launch, b.mT, a.mT)


@pytest.mark.parametrize("more", [{}, {"PREFETCH": True}, {"PREFETCH": True, "UPCAST": True}], ids=str)
@pytest.mark.parametrize("group", [1, 8])
def test_tiled_alone(group, more):
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": group, "num_warps": 4, **more}
    launch = lambda a, b, c: week.run_tiled(a[None, None], b[None, None], c, **blocks)
    for (m, n, k), flip in (((290, 70, 1), False), ((33, 130, 32), True), ((290, 130, 65), False), ((32, 64, 0), True)):
        alone(launch, within_nan(draw(m, k, dtype=HALF), k + 9), within_nan(draw(k, n, dtype=HALF), k + n, flip))


@pytest.mark.parametrize("flip", itertools.product([False, True], repeat=2), ids=str)
def test_persistent_alone(flip):
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4}
    shapes = (((200, 136, 72), 8, 5), ((64, 64, 32), 1, 5), ((8, 72, 40), 8, 1), ((640, 72, 8), 8, 3))
    for (m, n, k), group, programs in shapes:
        a, b = (within_nan(draw(*s, dtype=HALF), 648, f) for s, f in zip(((m, k), (k, n)), flip, strict=True))
        assert [week.orientation(matrix) for matrix in (a, b)] == ["NT"[f] for f in flip]
        alone(lambda a, b, c, g=group, p=programs: week.run_persistent(a, b, c, p, GROUP_M=g, **blocks), a, b)


@triton.jit
def order_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.arange(0, SIZE)
    row, col = tile_position(tile, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + 2 * tile, row, mask=tile < tiles_m * tiles_n)
    tl.store(out_ptr + 2 * tile + 1, col, mask=tile < tiles_m * tiles_n)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_every_tile_is_visited_once_and_in_groups(group):
    for tiles_m, tiles_n in itertools.product((1, 2, 7, 8, 9, 17, 32), (1, 2, 5, 31)):
        out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=DEVICE)
        order_kernel[(1,)](out, tiles_m, tiles_n, GROUP_M=group, SIZE=1024)
        every = itertools.product(range(tiles_m), range(tiles_n))
        assert out.tolist() == [[m, n] for m, n in sorted(every, key=lambda at: (at[0] // group, at[1], at[0]))]


def test_what_a_descriptor_can_see():
    x, large = draw(64, 72, dtype=HALF), torch.empty_strided((4, 2**31), (2**31, 1), dtype=HALF, device="meta")
    seen = {"N": [x, x[:, :8], x[::2], x[8:, 16:40], draw(3, 1032)[:, :1000]], "T": [x.T, x[:, :40].T]}
    seen[None] = [x[:, 1:], x[:, ::2], x[:1].expand(9, 72), x[:, :1].expand(64, 8), draw(5, 7, dtype=HALF), draw(9, 1)]
    seen[None] += [x.flatten()[1:321].view(40, 8), x.as_strided((9, 72), (8, 1)), large, large.T]
    for how, matrices in seen.items():
        assert [week.orientation(matrix) for matrix in matrices] == [how] * len(matrices)


# --- what is launched, moved and held ---------------------------------------------------------------------------------


class OneProgram:
    """A kernel of which only one program runs, in the interpreter; `grids` keeps what was asked for."""

    def __init__(self, kernel, number):
        self.kernel, self.number, self.grids = kernel, number, []

    def __getitem__(self, grid):
        builder = sys.modules["triton.runtime.interpreter"].interpreter_builder
        set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
        self.grids.append(grid)

        def launch(*arguments, **options):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(builder, "set_grid_dim", lambda *_: set_dim(*grid, 1, 1))
                patch.setattr(builder, "set_grid_idx", lambda *_: set_idx(self.number % grid[0], 0, 0))
                self.kernel[(1,)](*arguments, **options)

        return launch


@on_cpu
def test_more_tiles_than_a_small_grid_axis_has(monkeypatch):
    monkeypatch.setattr(week, "tiled_kernel", OneProgram(week.tiled_kernel, 70_000))
    a, b = draw(70_001, 2, 3), draw(70_001, 3, 2)
    c = matmul(a, b)
    assert week.tiled_kernel.grids == [(70_001,)]  # all on the first axis, which takes 2^31 - 1
    agrees(c[70_000], a[70_000].double() @ b[70_000].double(), 3)


@pytest.mark.parametrize("asked", ["ieee", "tf32"])
def test_tf32_only_where_it_was_asked_for(monkeypatch, asked):
    given, ways = [], week.way
    monkeypatch.setattr(week, "run_persistent", lambda a, b, c, n, **options: given.append("descriptors"))
    monkeypatch.setattr(week, "run_tiled", lambda a, b, c, **options: given.append(options["INPUT_PRECISION"]))
    for capability in CAPABILITIES:
        monkeypatch.setattr(week, "way", lambda _, *rest, capability=capability: ways(capability, *rest))
        a, b = (draw(32, 32).requires_grad_() for _ in range(2))
        torch.autograd.grad(matmul(a, b, input_precision=asked).sum(), (a, b))
        tf32 = asked == "tf32" and capability >= 80
        assert given[-3:] == 3 * ["tf32" if tf32 else "ieee"]
        assert tf32 == (ways(capability, FULL, asked, True, True) != "no tensor cores")


@pytest.mark.parametrize("only", [0, 1])
def test_no_work_for_a_gradient_that_nobody_wants(only):
    operands = draw(40, 50), draw(50, 60)
    leaf, dc = operands[only].requires_grad_(), draw(40, 60)
    c = matmul(*operands)
    moved = memory.traffic(torch.autograd.grad, c, leaf, dc) if interpreting() else None
    assert moved is None or moved.total == dc.nbytes + sum(x.nbytes for x in operands)


def test_nothing_is_held_that_no_gradient_needs():
    a, b = draw(40, 50), draw(50, 60)
    product = lambda a, b: matmul(a * 1, b * 1)
    assert memory.held_bytes(product, a, b) == 0 and not matmul(a, b).requires_grad
    with torch.no_grad():
        assert not matmul(a.clone().requires_grad_(), b).requires_grad
    held = [memory.held_bytes(product, a.clone().requires_grad_(x), b.clone().requires_grad_(not x)) for x in (1, 0)]
    assert held == [b.nbytes, a.nbytes], "the gradient of one operand takes the other alone"


@on_cpu
def test_a_batch_that_shares_a_weight_makes_one_gradient_of_it():
    """And not one for each matrix of the batch, to be added up."""
    for a in (draw(4, 8, 64), draw(8, 4, 64).transpose(0, 1)):
        b, dc = draw(64, 72).requires_grad_(), draw(4, 8, 72)
        c = matmul(a, b)
        assert memory.peak_bytes(matmul, a, b.detach()) <= c.nbytes + a.nbytes
        backward = lambda b=b, c=c, dc=dc: torch.autograd.grad(c, b, dc, retain_graph=True)
        assert memory.peak_bytes(backward) <= b.nbytes + a.nbytes + dc.nbytes


@on_cpu
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 64), (150, 80, 40), (64, 200, 8)])
def test_bytes_moved(m, n, k):
    """A once for each column of tiles, B once for each row, C once: not a byte beyond the edges."""
    a, b, c = draw(m, k, dtype=HALF), draw(k, n, dtype=HALF), draw(m, n, dtype=HALF)
    for bm, bn, run in ((64, 64, {}), (32, 128, {"PREFETCH": True}), (64, 64, None)):
        blocks = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": 32, "GROUP_M": 8}
        if run is None:
            moved = memory.traffic(week.run_persistent, a, b, c, 3, **blocks)
        else:
            moved = memory.traffic(week.run_tiled, a[None, None], b[None, None], c, **blocks, **run)
        read = a.nbytes * triton.cdiv(n, bn) + b.nbytes * triton.cdiv(m, bm)
        assert (moved.read, moved.written) == (read, c.nbytes)


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """Operands and outputs with elements 2^31 apart, in memory that is reserved and hardly touched."""
    reserved = torch.empty(2**31 + 2**26, dtype=HALF)

    def far(m, n, stride, at=0):
        return reserved.as_strided((m, n), stride, at * 2**14).copy_(torch.randn(m, n))

    for pitch in (2**30 + 8, 2**30 + 11):  # with a descriptor and without
        both_ways(far(3, 40, (pitch, 1)), far(40, 3, (1, pitch), 1))
        both_ways(far(40, 3, (1, pitch)), far(3, 40, (pitch, 1), 1), far(40, 40, (1, 2**25), 2))
    for pitch in (2**23, 2**23 - 1):  # past 2^31 only from one tile to the next
        both_ways(far(260, 16, (pitch, 1)), far(16, 260, (1, pitch), 1))
        both_ways(far(16, 260, (1, pitch)), far(260, 16, (pitch, 1), 1))
    a, b = reserved.as_strided((3, 4, 8), (2**30 + 11, 8, 1)).copy_(torch.randn(3, 4, 8)), draw(3, 8, 4, dtype=HALF)
    both_ways(a, b)
    both_ways(b, a)
    a, c = far(3, 40, (2**30 + 11, 1)), torch.empty(3, 3, dtype=HALF)
    week.row_times_column_kernel[(9,)](a, a.T, c, 3, 40, *a.stride(), *a.T.stride(), BLOCK_K=64)
    agrees(c, a.double() @ a.double().T, 40)
    week.tiled_kernel, week.persistent_kernel = (OneProgram(k, -1) for k in (week.tiled_kernel, week.persistent_kernel))
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8}
    for batch, m, n in ((2**15 + 8, 200, 328), (1, 2**15 + 8, 2**16 + 8), (1, 65, 2**25 + 8), (1, 2**25 + 8, 64)):
        a, b, c = torch.zeros(m, 16).half(), torch.zeros(n, 16).half().T, reserved.as_strided((batch, m, n), (m * n, n, 1))
        want = a[-1:].normal_().double() @ b[:, -1:].normal_().double()
        for run in ("tiled", "persistent")[: 2 if batch == 1 else 1]:
            last = c[-1, -1:, -1:].fill_(NAN)  # of the last tile, whose program alone runs
            if run == "tiled":
                week.run_tiled(a.expand(1, batch, m, 16), b.expand(1, batch, 16, n), c, **blocks)
            else:
                week.run_persistent(a, b, c[0], 2**40, **blocks)
            agrees(last, want, 16)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < 2**20, f"this was to touch less than 1 GiB, not {peak} KiB"


def elsewhere(task, timeout, **environment):
    """Run a function of this file in another Python, which can crash or be stopped without taking pytest along."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", f"import test_week04; test_week04.{task}()"]
    done = subprocess.run(command, env=environment, stdin=-3, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-4000:]}"


def test_elements_past_2_to_the_31():
    elsewhere("_far_apart", 100, TRITON_INTERPRET="1")
CAPABILITIES = {75: 40, 80: 108, 86: 84, 89: 58, 90: 132, 100: 148}
