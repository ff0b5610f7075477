"""Week 4's matmul against the kinds of fault that users of such kernels report. The kernels come from the notebook."""

import itertools
import sys

import pytest
import torch
import triton
import triton.language as tl
from common import DEVICE, DTYPES, draw, elsewhere, gpu, on_cpu, quiet, start_elsewhere, touched_little

from shared import memory
from shared.cells import load
from shared.checks import check, difference, poisoned
from shared.compiled import compile_many
from shared.machine import interpreting, machine

week = load(4)
matmul, tile_position, tiled_kernel, persistent_kernel = (
    week.matmul, week.tile_position, week.tiled_kernel, week.persistent_kernel
)  # fmt: skip
HALF, BRAIN, FULL, NAN = torch.float16, torch.bfloat16, torch.float32, float("nan")
PROCESSORS = {75: 40, 80: 108, 86: 84, 89: 58, 90: 132, 100: 148}  # of a GPU of each capability
pytestmark = quiet


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter takes time for each element of a tile, inside the matrix or not."""
    for name in week.INTERPRETER_TILE:
        monkeypatch.setitem(week.INTERPRETER_TILE, name, 64)


def within_nan(values, gap=8):
    """The same values as a view of memory that is otherwise NaN, with a gap between rows."""
    (m, n), pitch = values.shape, values.shape[1] + gap
    around = torch.full(((m + 2) * pitch + 8,), NAN, dtype=values.dtype, device=values.device)
    return around.as_strided((m, n), (pitch, 1), pitch + 8 - pitch % 8).copy_(values)


def agrees(got, want, reduction, terms=0.0):
    _, reason = difference(got, want, got.dtype, max(reduction, 1), 1, terms)
    assert not reason, reason


def both_ways(a, b, dc=None, **options):
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
        agrees(got, other, 4 * max(*a.shape, *b.shape), dc.abs().max().item())
    return c, *grads


# --- any shape, any strides ------------------------------------------------------------------------------------------

CASES = {
    "nothing divides": lambda d: (d(200, 201), d(201, 199)), "cut by one": lambda d: (d(129, 65), d(65, 127)),
    "M 1": lambda d: (d(1, 200), d(200, 64)), "N 1": lambda d: (d(70, 200), d(200, 1)),
    "K 1": lambda d: (d(70, 1), d(1, 40)), "K 7": lambda d: (d(40, 7), d(7, 48)), "1": lambda d: (d(1, 1), d(1, 1)),
    "K 0": lambda d: (d(5, 0), d(0, 7)), "M 0": lambda d: (d(0, 3), d(3, 7)), "N 0": lambda d: (d(4, 3), d(3, 0)),
    "empty vectors": lambda d: (d(0), d(0)), "batch of K 0": lambda d: (d(2, 4, 0), d(0, 6)),
    "batch 0": lambda d: (d(0, 4, 5), d(0, 5, 6)), "batch 0 by 2-D": lambda d: (d(2, 0, 4, 5), d(5, 6)),
    "a transposed": lambda d: (d(136, 72).T, d(136, 80)), "b transposed": lambda d: (d(72, 136), d(80, 136).T),
    "both transposed": lambda d: (d(72, 136).T, d(80, 72).T), "the same, odd": lambda d: (d(101, 71).T, d(79, 101).T),
    "every second column": lambda d: (d(64, 160)[:, ::2], d(80, 128)[:, ::2]),
    "every third row": lambda d: (d(150, 80)[::3], d(240, 64)[::3]),
    "a row, repeated": lambda d: (d(80).expand(64, 80), d(80, 72)),
    "a column, repeated": lambda d: (d(64, 80), d(80, 1).expand(80, 72)),
    "a number, repeated": lambda d: (d(1).expand(30, 40), d(1).expand(40, 50)),
    "overlapping rows": lambda d: (d(400).unfold(0, 72, 8), d(72, 40)),
    "off the 16-byte grid": lambda d: (d(64 * 80 + 1)[1:].view(64, 80), d(80, 72)),
    "negated a": lambda d: (torch._neg_view(d(40, 56)), d(56, 30)),  # memory holds the opposite numbers
    "negated b": lambda d: (d(2, 8, 16), torch._neg_view(d(16, 8))),
    "within NaN": lambda d: (within_nan(d(72, 104)), within_nan(d(88, 104)).T),
    "within NaN, odd": lambda d: (within_nan(d(104, 72), 9).T, within_nan(d(104, 88), 9)),
    "some NaN and infinity": lambda d: (
        d(70, 80).masked_fill_(d(70, 80) > 3.2, NAN), d(80, 90).masked_fill_(d(80, 90) > 3.2, -float("inf"))
    ),
    "dot": lambda d: (d(300), d(300)), "vector, matrix": lambda d: (d(300), d(300, 20)),
    "matrix, strided vector": lambda d: (d(20, 300), d(600)[::2]),
    "vector, batch": lambda d: (d(30), d(2, 3, 30, 20)), "batch, vector": lambda d: (d(2, 3, 20, 30), d(30)),
    "3-D by 2-D": lambda d: (d(3, 40, 64), d(64, 48)), "2-D by 3-D": lambda d: (d(40, 64), d(3, 64, 48)),
    "3-D transposed by 2-D": lambda d: (d(40, 3, 64).transpose(0, 1), d(64, 48)),
    "3-D repeated by 2-D": lambda d: (d(40, 64).expand(3, 40, 64), d(64, 48)),
    "3-D by 3-D": lambda d: (d(3, 40, 60), d(3, 60, 50)), "4-D by 3-D": lambda d: (d(2, 3, 33, 40), d(3, 40, 34)),
    "4-D, broadcast both ways": lambda d: (d(2, 1, 33, 40), d(1, 3, 40, 34)),
    "heads as (B, S, H, D)": lambda d: (d(2, 33, 3, 32).transpose(1, 2), d(2, 35, 3, 32).transpose(1, 2).mT),
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_and_strides_both_ways(dtype):
    some = list(CASES.items())[:: 3 if interpreting() and dtype == FULL else 1]  # float32 takes fewer ways
    cases = {case: lambda d, make=make: dict(zip("ab", make(d), strict=True)) for case, make in some}
    longest = lambda a, b: 4 * max(*a.shape, *b.shape, a.numel() // max(a.shape[-1], 1), 1)
    check(matmul, lambda a, b: a @ b, cases, dtypes=[dtype], reduction=longest, terms=lambda c, dc: dc.abs())


def test_511_cubed_and_bfloat16(monkeypatch):
    both_ways(draw(70, 90, dtype=BRAIN), draw(90, 40, dtype=BRAIN))  # the interpreter's own bfloat16 is wrong
    monkeypatch.undo()
    a, b = draw(511, 511), draw(511, 511)
    with poisoned():
        agrees(matmul(a, b), a.double() @ b.double(), 511)


GRADIENTS = {
    "of a sum": lambda d: d(1, 1).expand(72, 96), "a row, repeated": lambda d: d(96).expand(72, 96),
    "a column, repeated": lambda d: d(72, 1).expand(72, 96), "transposed": lambda d: d(96, 72).T,
    "every second column": lambda d: d(72, 192)[:, ::2], "within NaN": lambda d: within_nan(d(72, 96)),
    "off the 16-byte grid": lambda d: d(72 * 96 + 1)[1:].view(72, 96), "negated": lambda d: torch._neg_view(d(72, 96)),
}  # fmt: skip


@pytest.mark.parametrize("layout", GRADIENTS)
def test_a_gradient_may_have_any_strides(layout):
    for dtype in (FULL, HALF):
        both_ways(draw(72, 40, dtype=dtype), draw(40, 96, dtype=dtype), GRADIENTS[layout](draw).to(dtype))


# --- each kernel alone, with NaN around its operands and marks around its output --------------------------------------


def alone(launch, a, b):
    """Check what launch(a, b, c) writes to c; numbers around it must stay as they are."""
    whole = torch.full((a.shape[0] * b.shape[1] + 128,), 7.0, dtype=a.dtype, device=DEVICE)
    c = whole[64:-64].view(a.shape[0], b.shape[1]).fill_(NAN)
    launch(a, b, c)
    agrees(c, a.double() @ b.double(), a.shape[1])
    assert (whole[:64] == 7).all() and (whole[-64:] == 7).all(), "written outside the matrix"


def half(m, n, flipped=False, gap=8):
    return half(n, m, gap=gap).T if flipped else within_nan(draw(m, n, dtype=HALF), gap)


@pytest.mark.parametrize("k", [0, 1, 128, 300])
def test_row_times_column_alone(k):
    def launch(a, b, c):
        week.row_times_column_kernel[(c.numel(),)](a, b, c, c.shape[1], k, *a.stride(), *b.stride(), BLOCK_K=128)

    alone(launch, half(3, k), half(k, 5, True))
    alone(launch, half(3, k, True), half(k, 5))


@pytest.mark.versions
@pytest.mark.parametrize("more", [{}, {"PREFETCH": True}, {"PREFETCH": True, "UPCAST": True}], ids=str)
@pytest.mark.parametrize("group", [1, 8])
def test_tiled_alone(group, more):
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": group, "num_warps": 4, **more}
    launch = lambda a, b, c: week.run_tiled(a[None, None], b[None, None], c, **blocks)
    for m, n, k, flip in ((290, 70, 1, False), (33, 130, 32, True), (290, 130, 65, False), (32, 64, 0, True)):
        alone(launch, half(m, k, gap=9), half(k, n, flip))


@pytest.mark.versions
@pytest.mark.parametrize(("flip_a", "flip_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_persistent_alone(flip_a, flip_b):
    for m, n, k, group, programs in ((200, 136, 72, 8, 5), (64, 64, 32, 1, 5), (8, 72, 40, 8, 1), (640, 72, 8, 8, 3)):
        a, b, blocks = half(m, k, flip_a), half(k, n, flip_b), {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
        assert [week.orientation(matrix) for matrix in (a, b)] == ["NT"[flip_a], "NT"[flip_b]]
        blocks |= {"GROUP_M": group, "num_warps": 4}
        alone(lambda a, b, c, p=programs, o=blocks: week.run_persistent(a, b, c, p, **o), a, b)


@triton.jit
def order_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.arange(0, SIZE)
    row, col = tile_position(tile, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + 2 * tile, row, mask=tile < tiles_m * tiles_n)
    tl.store(out_ptr + 2 * tile + 1, col, mask=tile < tiles_m * tiles_n)


@triton.jit
def lesser(x, y):
    return tl.minimum(x, y)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_every_tile_is_visited_once_and_in_groups(group, monkeypatch):
    if interpreting():  # where Python's own min does not go element by element
        monkeypatch.setattr(week, "min", lesser, raising=False)
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
    monkeypatch.setattr(week, "tiled_kernel", OneProgram(tiled_kernel, 70_000))
    a, b = draw(70_001, 2, 3), draw(70_001, 3, 2)
    c = matmul(a, b)
    assert week.tiled_kernel.grids == [(70_001,)]  # all on the first axis, which takes 2^31 - 1
    agrees(c[70_000], a[70_000].double() @ b[70_000].double(), 3)


@pytest.mark.parametrize("asked", ["ieee", "tf32"])
def test_tf32_only_where_it_was_asked_for(monkeypatch, asked):
    given, ways = [], week.way
    monkeypatch.setattr(week, "run_persistent", lambda *args, **options: given.append("descriptors"))
    monkeypatch.setattr(week, "run_tiled", lambda *args, **options: given.append(options["INPUT_PRECISION"]))
    for capability in PROCESSORS:
        monkeypatch.setattr(week, "way", lambda _, *rest, capability=capability: ways(capability, *rest))
        a, b = (draw(32, 32).requires_grad_() for _ in range(2))
        torch.autograd.grad(matmul(a, b, input_precision=asked).sum(), (a, b))
        tf32 = asked == "tf32" and capability >= 80
        assert given[-3:] == 3 * ["tf32" if tf32 else "ieee"]
        assert tf32 == (ways(capability, FULL, asked, True, True) != "no tensor cores")


def test_nothing_is_computed_or_held_that_no_gradient_needs():
    product = lambda a, b: matmul(a * 1, b * 1)
    for needs in ((False, False), (True, False), (False, True), (True, True)):
        a, b = draw(40, 50).requires_grad_(needs[0]), draw(50, 60).requires_grad_(needs[1])
        with torch.no_grad():
            assert not matmul(a, b).requires_grad
        leaves, dc = [x for x in (a, b) if x.requires_grad], draw(40, 60)
        if leaves and interpreting():
            moved = memory.traffic(torch.autograd.grad, matmul(a, b), leaves, dc)
            assert moved.total == len(leaves) * (dc.nbytes + a.nbytes + b.nbytes), needs
        held = memory.held_bytes(product, a, b)
        assert held == needs[0] * b.nbytes + needs[1] * a.nbytes, f"held, when a and b need gradients: {needs}"


@on_cpu
def test_a_weight_that_a_batch_shares_gets_one_gradient():
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
    for bm, bn, more in ((64, 64, {}), (32, 128, {"PREFETCH": True}), (64, 64, None)):
        blocks = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": 32, "GROUP_M": 8, **(more or {})}
        if more is None:
            moved = memory.traffic(week.run_persistent, a, b, c, 3, **blocks)
        else:
            moved = memory.traffic(week.run_tiled, a[None, None], b[None, None], c, **blocks)
        assert (moved.read, moved.written) == (a.nbytes * triton.cdiv(n, bn) + b.nbytes * triton.cdiv(m, bm), c.nbytes)


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """Operands and outputs with elements 2^31 apart, in memory that is reserved and hardly touched."""
    week.INTERPRETER_TILE.update(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
    reserved = torch.empty(2**31 + 2**26, dtype=HALF)

    def far(m, n, stride, at=0):
        return reserved.as_strided((m, n), stride, at * 2**14).copy_(torch.randn(m, n))

    for pitch in (2**30 + 8, 2**30 + 11):  # with a descriptor and without
        both_ways(far(3, 40, (pitch, 1)), far(40, 3, (1, pitch), 1))
        both_ways(far(40, 3, (1, pitch)), far(3, 40, (pitch, 1), 1), far(40, 40, (1, 2**25), 2))
    for pitch in (2**23, 2**23 + 1):  # past 2^31 only from one tile to the next
        both_ways(far(260, 16, (pitch, 1)), draw(16, 8, dtype=HALF))
        both_ways(draw(8, 16, dtype=HALF), far(16, 260, (1, pitch)))
        both_ways(far(8, 260, (1, pitch)), far(260, 8, (pitch, 1), 1))
    both_ways(far(3, 65, (1, 2**25 + 1)), far(65, 3, (2**25 + 1, 1), 1))  # and in one step along K
    a, b = reserved.as_strided((3, 4, 8), (2**30 + 11, 8, 1)).copy_(torch.randn(3, 4, 8)), draw(3, 8, 4, dtype=HALF)
    both_ways(a, b)
    both_ways(b, a)
    for a in (far(3, 33, (2**30 + 11, 1)), far(3, 33, (1, 2**26))):
        c = torch.empty(3, 3, dtype=HALF)
        week.row_times_column_kernel[(9,)](a, a.T, c, 3, 33, *a.stride(), *a.T.stride(), BLOCK_K=64)
        agrees(c, a.double() @ a.double().T, 33)
    week.tiled_kernel, week.persistent_kernel = OneProgram(tiled_kernel, -1), OneProgram(persistent_kernel, -1)
    blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8}
    for batch, m, n in ((2**15 + 8, 200, 328), (1, 2**15 + 8, 2**16 + 8), (1, 65, 2**25 + 8), (1, 2**25 + 8, 64)):
        a, b = torch.empty(m, 16, dtype=HALF), torch.empty(n, 16, dtype=HALF).T
        want = a[-1:].normal_().double() @ b[:, -1:].normal_().double()
        c = reserved.as_strided((batch, m, n), (m * n, n, 1))
        last = c[-1, -1:, -1:].fill_(NAN)  # of the last tile, whose program alone runs
        week.run_tiled(a.expand(1, batch, m, 16), b.expand(1, batch, 16, n), c, **blocks)
        agrees(last, want, 16)
        if batch == 1:
            last.fill_(NAN)
            week.run_persistent(a, b, c[0], 2**40, **blocks)
            agrees(last, want, 16)
    touched_little()


@pytest.fixture(scope="module", autouse=True)
def meanwhile(request):
    """Runs beside the other tests, if it was asked for."""
    asked = any(getattr(item, "originalname", "") == "test_elements_past_2_to_the_31" for item in request.session.items)
    return start_elsewhere(_far_apart, 100, TRITON_INTERPRET="1") if asked else None


def test_elements_past_2_to_the_31(meanwhile):
    meanwhile()


# --- wrong requests, and autograd's habits ----------------------------------------------------------------------------


def zeros(*shape, dtype=FULL, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


WRONG = [
    (zeros(3, 4), zeros(4, 5, dtype=HALF), TypeError, r"b .*float16.*taken: .*float32.*a"),
    (zeros(3, 4, dtype=torch.float64), zeros(4, 5, dtype=torch.float64), TypeError, r"a .*float64.*taken.*bfloat16"),
    (zeros(3, 4), zeros(4, 5, dtype=torch.int64), TypeError, r"b .*int64.*taken.*float32"),
    (zeros(3, 4, dtype=torch.complex64), zeros(4, 5), TypeError, r"a .*complex64.*taken"),
    ([[1.0]], zeros(1, 1), TypeError, r"a .*Tensor.*list"), (zeros(1, 1), None, TypeError, r"b .*Tensor.*NoneType"),
    (zeros(3, 4), zeros(5, 3), ValueError, r"b .*\(5, 3\).*taken: 4 rows.*a .*\(3, 4\)"),
    (zeros(4), zeros(3), ValueError, r"b .*\(3,\).*taken: 4 rows"),
    (zeros(0, 4), zeros(0, 3), ValueError, r"b .*taken: 4 rows"),
    (zeros(2, 3, 4), zeros(3, 4, 5), ValueError, r"b .*\(3, 4, 5\).*taken.*broadcasts.*\(2, 3, 4\)"),
    (zeros(1, 1, 1, 3, 4), zeros(4, 5), ValueError, r"a .*5 dimensions.*taken: 1 to 4"),
    (zeros(3, 4), zeros(1, 1, 1, 4, 5), ValueError, r"b .*5 dimensions.*taken: 1 to 4"),
    (zeros(), zeros(4, 5), ValueError, r"a .*0 dimensions.*taken"),
    (zeros(3, 4).to_sparse(), zeros(4, 5), ValueError, r"a .*sparse.*taken"),
    (zeros(3, 4, device="meta"), zeros(4, 5), ValueError, r"a .*meta.*takes"),
    (zeros(3, 4), zeros(4, 5, device="meta"), ValueError, r"b .*meta.*takes"),
    pytest.param(zeros(3, 4), zeros(4, 5, device="cpu"), ValueError, r"b .*cpu.*cuda", marks=gpu),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "error", "says"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_request_is_refused_in_words(monkeypatch, a, b, error, says):
    monkeypatch.setattr(week, "product", lambda *args: pytest.fail("went on"))
    with pytest.raises(error, match=says):
        matmul(a, b)


@pytest.mark.parametrize("value", ["tf32x3", None, True])
def test_an_unknown_precision_is_refused(value):
    with pytest.raises(ValueError, match=rf"input_precision is {value!r}; taken: 'ieee', 'tf32'"):
        matmul(zeros(3, 4), zeros(4, 5), input_precision=value)


def test_a_scaled_loss_and_going_backward_twice():
    a, b, dc = draw(40, 50).requires_grad_(), draw(50, 30).requires_grad_(), draw(40, 30)
    plain, scaled = (torch.autograd.grad((matmul(a, b) * dc).sum() * scale, (a, b)) for scale in (1, 1024))
    c = matmul(a, b)
    c.backward(dc, retain_graph=True)
    c.backward(dc)
    for leaf, one, many in zip((a, b), plain, scaled, strict=True):
        assert torch.equal(many, 1024 * one) and torch.equal(leaf.grad, 2 * one)
    together = torch.autograd.grad([matmul(a, b), matmul(a.detach(), b)], [a, b], [dc, dc])  # a gradient that two share
    assert torch.equal(together[0], plain[0]) and torch.equal(together[1], 2 * plain[1])
    with pytest.raises(RuntimeError, match="second time"):
        c.backward(dc)


def test_second_derivatives():
    a, b, v = draw(20, 30), draw(2, 30, 10), draw(2, 20, 10)
    found = []
    for function, kind in ((matmul, FULL), (torch.matmul, torch.float64)):
        x, y = a.to(kind).requires_grad_(), b.to(kind).requires_grad_()
        loss = (function(x, y).square() * v.to(kind)).sum()
        first = torch.autograd.grad(loss, (x, y), create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), (x, y)))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


def test_saved_tensors_that_come_back_with_other_strides():
    a, b, dc = draw(20, 72).requires_grad_(), draw(72, 40).requires_grad_(), draw(20, 40)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mT.contiguous(), lambda t: t.mT):
        c = matmul(a, b)
    da, db = torch.autograd.grad(c, (a, b), dc)
    agrees(da, dc.double() @ b.double().T, 40)
    agrees(db, a.double().T @ dc.double(), 20)


def test_changes_in_place_are_seen():
    a, b, bias = draw(4, 5).requires_grad_(), draw(5, 6).requires_grad_(), draw(6).requires_grad_()
    c = matmul(a, b)
    c += bias  # the result is free to change
    c.relu_().sum().backward()
    mask = (a.double() @ b.double() + bias > 0).double()
    assert torch.allclose(a.grad.double(), mask @ b.double().T, atol=1e-5)
    assert torch.equal(bias.grad, mask.sum(0).float())
    middle = a * 1
    c = matmul(middle, b)
    middle.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.sum().backward()


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_under_autocast(dtype):
    weight = draw(60, 50).requires_grad_()
    for x in (draw(4, 60), draw(4, 60, dtype=dtype)):
        with torch.autocast(DEVICE, dtype=dtype):
            c = matmul(x, weight)
        c.float().sum().backward()
        agrees(c, x.to(dtype).double() @ weight.to(dtype).double(), 60)
        assert c.dtype == dtype and weight.grad.dtype == FULL and weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    function = lambda a, b: (matmul(a * 2, b) + 1).square().sum()
    a, b = draw(30, 40).requires_grad_(), draw(40, 8)
    compiled = torch.compile(function, backend="inductor" if DEVICE == "cuda" else "eager")
    got, want = (torch.autograd.grad(f(a, b), a)[0] for f in (compiled, function))
    assert torch.allclose(got, want, rtol=1e-4)


# --- what the compiler makes of it -----------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (512, 512, 1), (1000, 999, 1), (2048, 2048, 1), (4096, 11_008, 1), (8192, 8192, 1), (300, 300, 7)]
SHAPES += [(1, 4096, 1), (16, 16, 300), (1024, 1024, 1), (640, 1408, 1), (1536, 1536, 1), (3000, 3000, 1)]
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # that a block may have; 227 KiB on a B200 too
UNIT = {75: "HMMA.1688.F32", 80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
NAMES = {HALF: "fp16", BRAIN: "bf16", FULL: "fp32"}


def plans():
    """Every (capability, way, dtype, input precision, options) that some product gets on some GPU, once."""
    asked = itertools.product(PROCESSORS, NAMES, ("ieee", "tf32"), (True, False), (True, False), SHAPES)
    found = {}
    for capability, dtype, precision, described, vectors, shape in asked:
        way = week.way(capability, dtype, precision, described, vectors)
        precise = precision if dtype == FULL and way != "no tensor cores" else "ieee"
        options = week.configuration(way, dtype, *shape, PROCESSORS[capability])
        found[capability, way, dtype, precise, tuple(options.items())] = capability, way, dtype, precise, options
    return list(found.values())


def signature(way, dtype, options, layout):
    """The kernel and the types of its arguments; layout: which of a and b are transposed, or "odd": no stride is 1."""
    (m, n, k), kind = (options[f"BLOCK_{x}"] for x in "MNK"), NAMES[dtype]
    blocks = {name: value for name, value in options.items() if name.isupper()}
    if way == "descriptors":
        flips = {"A_TRANSPOSED": layout[0] == "T", "B_TRANSPOSED": layout[1] == "T"}
        a, b = (m, k)[:: -1 if layout[0] == "T" else 1], (k, n)[:: -1 if layout[1] == "T" else 1]
        shapes = {"a_desc": a, "b_desc": b, "c_desc": (m, n // 2)}
        types = {name: f"tensordesc<{kind}[{rows},{cols}]>" for name, (rows, cols) in shapes.items()}
        return persistent_kernel, types | dict.fromkeys("MNK", "i32:16") | blocks | flips
    size = "i32" if layout == "odd" else "i32:16"
    near = {"odd": (), "NN": ("ak", "bn"), "NT": ("ak", "bk"), "TN": ("am", "bn")}[layout]
    strides = {f"stride_{x}": "i32:1" if x in near else size for x in ("az", "ay", "am", "ak", "bz", "by", "bk", "bn")}
    types = {"a_ptr": f"*{kind}{size[3:]}", "b_ptr": f"*{kind}{size[3:]}", "c_ptr": f"*{kind}:16", "batch_y": "i32:1"}
    return tiled_kernel, types | dict.fromkeys("MNK", size) | strides | blocks


def compile_jobs():
    leave_out = {*itertools.product((80, 89, 100), ("no tensor cores", "registers")), (100, "pointers")}  # as on 90
    for capability, way, dtype, precision, options in plans():
        if capability == 86 or (capability, way) in leave_out or (dtype == BRAIN and capability > 75):
            continue
        layouts = {75: ("NN", "odd"), 80: ("NN", "NT", "TN"), 90: ("NT", "TN")}.get(capability, ("NN",))
        layouts = ("odd",) if capability > 75 and way in ("registers", "no tensor cores") else layouts
        one_will_do = capability > 75 and (dtype == FULL or (capability, way) == (90, "pointers"))
        for layout in layouts[-1:] if one_will_do else layouts:
            kernel, types = signature(way, dtype, options, layout)
            types |= {} if way == "descriptors" else {"INPUT_PRECISION": precision}
            launch = {name: value for name, value in options.items() if name.islower()}
            label = f"{capability} {way} {NAMES[dtype]} {precision} {layout} {tuple(options.values())}"
            yield (label, kernel, types, f"sm_{capability}", launch), capability, way
            if capability == 75 and layout == "odd" and options["BLOCK_M"] == 128:
                ones = {name: "i32:1" for name, value in types.items() if value == "i32"}
                large = {name: "i64" for name in ones} | {"OFFSET": tl.int64}
                yield (f"{label} of sizes 1", kernel, types | ones, "sm_75", launch), 75, "once"
                yield (f"{label} of sizes past 2^31", kernel, types | large, "sm_75", launch), 75, way
                yield (f"{label}, stock", kernel, types, "sm_75", {**launch, "tensor_cores": False}), 75, "stock"


@pytest.mark.versions
def test_tiles_suit_the_gpu():
    chosen = plans()
    for capability, way, dtype, precision, options in chosen:
        assert min(options[f"BLOCK_{x}"] for x in "MNK") >= 16, f"tl.dot takes 16: {way} {options}"
        ordinary = (dtype == FULL and precision == "ieee") or (dtype == BRAIN and capability < 80)
        assert (way == "no tensor cores") == ordinary
        assert (way == "registers") >= (capability < 80 and dtype == HALF), "a T4 has no asynchronous copies"
        assert (capability in (90, 100)) >= (way == "descriptors")
    assert [rest for found, *rest in chosen if found == 86] == [rest for found, *rest in chosen if found == 89]
    used = {(way, *list(options.values())[:2]) for _, way, _, _, options in chosen}
    assert used == {(way, *tile[:2]) for way, tiles in week.TILES.items() for tile in tiles}, "each tile is of use"


@pytest.mark.versions
def test_compiled_code():
    jobs, wrong = list(compile_jobs()), []
    for ((label, *_), capability, way), made in zip(jobs, compile_many(job for job, *_ in jobs), strict=True):
        (loop, *_), unit = made.loops() or [made.sass.splitlines()], UNIT[capability]
        tensor_cores = any(unit in line for line in (made.sass.splitlines() if capability == 100 else loop))
        good = tensor_cores == (way not in ("no tensor cores", "stock")) != any("FFMA" in line for line in loop)
        # None on a T4. Elsewhere a few registers: float16 with b transposed on an A100, odd float32 with Triton 3.9.
        spills = 0 if capability == 75 else 64
        fits = made.shared_bytes <= SHARED_KIB[capability] * 1024 and (made.spill_bytes <= spills or way == "stock")
        if not good or not fits or (way == "stock" and made.count("HMMA")):
            wrong.append(f"{label}: {made.summary()}")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


def test_sides_that_32_bits_cannot_count_are_refused():
    long = torch.zeros((), dtype=HALF, device=DEVICE).expand(2**31 - 1)
    with pytest.raises(ValueError, match=r"2147483647.*taken: sides up to 2,147,418,112"):
        matmul(long[None, :], long[:, None])


@gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL], ids=str)
def test_gpu_large_products_of_any_layout(dtype):
    both_ways(draw(1000, 1001, dtype=dtype), draw(1001, 999, dtype=dtype))
    a, b = within_nan(draw(1000, 2056, dtype=dtype)).T, within_nan(draw(4096, 1000, dtype=dtype)).T
    both_ways(a, b, draw(4096, 2056, dtype=dtype).T)
    both_ways(draw(70_001, 3, 5, dtype=dtype), draw(70_001, 5, 2, dtype=dtype))  # more tiles than a small axis has


@gpu
def test_gpu_float32_is_exact_and_tf32_is_not(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)  # is for PyTorch's own
    for n in (256, 1001):
        a, b = torch.full((n, n), 1 + 2.0**-12, device=DEVICE), torch.eye(n, device=DEVICE)
        assert torch.equal(matmul(a, b), a)
        rounded = matmul(a, b, input_precision="tf32")
        assert machine().capability < 80 or (rounded - 1).abs().max() < 2.0**-13
        both_ways(draw(n, n), draw(n, n))


@gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(2**23 + 16, 64, 256), (2**27 + 9, 3, 17), (2**16 + 8, 50_264, 16), (2**17 + 1, 16_411, 9)]
)
def test_gpu_more_than_2_to_the_31_elements(m, n, k):
    if machine().memory_bytes < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    a, b, dc = (torch.empty(shape, dtype=HALF, device=DEVICE).normal_() for shape in ((m, k), (k, n), (m, n)))
    leaves = a.requires_grad_(), b.requires_grad_(m < 2**25)  # else a single tile would take seconds to sum up
    with poisoned():
        c = matmul(a, b).detach()
        da, *db = torch.autograd.grad(matmul(a, b), [leaf for leaf in leaves if leaf.requires_grad], dc)
    for rows in (slice(0, 300), slice(m // 2, m // 2 + 300), slice(m - 300, m)):
        agrees(c[rows], a[rows].double() @ b.double(), k)
        agrees(da[rows], dc[rows].double() @ b.double().T, n)
    assert not c.isnan().any()
    for got in db:  # tensor cores cut off what does not fit while they add up, and here they add up millions
        want = sum(x.double().T @ y.double() for x, y in zip(a.detach().split(2**20), dc.split(2**20), strict=True))
        assert (got.double() - want).norm() < 0.05 * want.norm()


@gpu
def test_gpu_strides_past_2_to_the_31():
    x = torch.empty(140, 2**24 + 8, dtype=HALF, device=DEVICE).normal_()
    for a in (x[:, :40], x[:, 1:42], x[:, -50:]):
        agrees(matmul(a, a.T), a.double() @ a.double().T, 50)
        agrees(matmul(a.T, a), a.double().T @ a.double(), 140)


@gpu
def test_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for n in (99, 512):
        with torch.cuda.device(0):
            found = both_ways(*(draw(n, n, dtype=HALF).to("cuda:1") for _ in range(3)))
        assert all(x.device == torch.device("cuda:1") for x in found)
    with pytest.raises(ValueError, match=r"b .*cuda:1.*taken: cuda:0"):
        matmul(draw(3, 4).to("cuda:0"), draw(4, 5).to("cuda:1"))


@gpu
def test_gpu_in_a_cuda_graph_and_on_several_streams():
    sizes, stream, graph = (512, 1000, 301), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    operands = [[draw(n, n, dtype=HALF).requires_grad_() for _ in "ab"] for n in sizes]
    step = lambda: [(c := matmul(a, b), *torch.autograd.grad(c, (a, b), c)) for a, b in operands]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(3):
        with torch.no_grad():
            for x in itertools.chain(*operands):
                x.normal_()
        graph.replay()
        for (c, *grads), (mine, *others), (a, b) in zip(replayed, step(), operands, strict=True):
            agrees(c, a.double() @ b.double(), a.shape[1])
            assert torch.equal(c, mine) and all(map(torch.equal, grads, others))
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(priority=priority) for priority in (0, -1, 0, -1)], []
    for _, each in itertools.product(range(5), streams):
        with torch.cuda.stream(each):
            found.append(step())
    torch.cuda.synchronize()
    for results in found:
        assert all(map(torch.equal, itertools.chain(*results), itertools.chain(*replayed)))


def _as_a_t4():
    """All dtypes by both lowerings for a T4, on a newer GPU."""
    from shared import turing

    ways, made = week.way, []
    week.way = lambda capability, *rest: ways(75, *rest)
    watch = lambda grid: lambda *args, **options: made.append(tiled_kernel[grid](*args, **options))
    week.tiled_kernel = type("Watched", (), {"__getitem__": staticmethod(watch)})()
    for repaired, switch in ((False, turing.disable), (True, turing.enable)):
        switch()
        for m, n, k in ((1000, 999, 1001), (1, 300, 77), (128, 64, 32)):
            a, b = draw(m, k, dtype=HALF), draw(k, n, dtype=HALF)
            with poisoned():
                agrees(matmul(a, b), a.double() @ b.double(), k)
            assert ("mma.sync.aligned.m16n8k8." in made[-1].asm["ptx"]) == repaired
    for dtype in (HALF, BRAIN, FULL):
        both_ways(draw(300, 200, dtype=dtype), draw(200, 1300, dtype=dtype), input_precision="tf32")


@gpu
def test_gpu_lowered_as_for_a_t4():
    elsewhere(_as_a_t4, 200, TRITON_OVERRIDE_ARCH="sm75")


def test_gradients_and_inputs_that_are_zeros_without_memory():
    """PyTorch's sgn, and so the second derivative of abs, hands on a tensor of zeros that has no address."""
    a, b = draw(5, 20).requires_grad_(), draw(20, 7)
    (da,) = torch.autograd.grad(matmul(a, b).sgn().sum(), a)
    assert da.shape == a.shape and (da == 0).all()
    assert (matmul(torch._efficientzerotensor((5, 20), device=DEVICE), b) == 0).all()
