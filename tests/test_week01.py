"""Week 1's softmax against the kinds of fault that users of such kernels report. The kernels come from the notebook."""

import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
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
from shared.machine import interpreting

week = load(1)
softmax, tell_and_wait, pack, unpack = week.softmax, week.tell_and_wait, week.pack, week.unpack
INF, NAN = float("inf"), float("nan")
pytestmark = quiet


def reference(x, dim=-1):
    return torch.softmax(x, dim)


def agrees(got, want, reduction, roundings=1, terms=0.0):
    _, reason = difference(got, want, got.dtype, reduction, roundings, terms)
    assert not reason, reason


def gradients_agree(y, dy, got, dim=-1, roundings=1):
    """dx from the rounded y that the kernel saw, in float64."""
    y, dy = y.detach().double(), dy.double()
    want = y * (dy - (y * dy).sum(dim, keepdim=True))
    terms = (y.abs().amax(dim) * dy.abs().amax(dim)).nan_to_num(0, 0, 0).max().item()
    agrees(got, want, y.shape[dim], roundings, terms)


def both_ways(x, dim=-1, dy=None):
    """Forward and backward of x with NaN in all new memory, each compared with float64. Returns y and dx."""
    leaf = x.detach().requires_grad_()
    dy = draw(*x.shape, dtype=x.dtype) if dy is None else dy
    with poisoned():
        y = softmax(leaf, dim)
        (dx,) = torch.autograd.grad(y, leaf, dy)
    agrees(y, reference(x.double(), dim), x.shape[dim])
    gradients_agree(y, dy, dx, dim)
    return y, dx


# --- any shape, any strides ------------------------------------------------------------------------------------------

CASES = {
    "one element": lambda draw: {"x": draw(1)},
    "1-D": lambda draw: {"x": draw(300)},
    "one column": lambda draw: {"x": draw(5, 1)},
    "two columns": lambda draw: {"x": draw(70, 2)},
    "31": lambda draw: {"x": draw(9, 31)},
    "32": lambda draw: {"x": draw(9, 32)},
    "33": lambda draw: {"x": draw(9, 33)},
    "1000": lambda draw: {"x": draw(5, 1000)},
    "1023": lambda draw: {"x": draw(3, 1023)},
    "1024": lambda draw: {"x": draw(3, 1024)},
    "1025": lambda draw: {"x": draw(9, 1025)},
    "1032, a multiple of 8": lambda draw: {"x": draw(3, 1032)},
    "2041, a full block with every shift": lambda draw: {"x": draw(9, 2041)},
    "2048": lambda draw: {"x": draw(2, 2048)},
    "16384": lambda draw: {"x": draw(1, 16384)},
    "16385": lambda draw: {"x": draw(2, 16385)},
    "32768": lambda draw: {"x": draw(1, 32768)},
    "32769": lambda draw: {"x": draw(2, 32769)},
    "transposed": lambda draw: {"x": draw(300, 64).T},
    "every second column": lambda draw: {"x": draw(7, 400)[:, ::2]},
    "every second column, long": lambda draw: {"x": draw(3, 8000)[:, ::2]},
    "every third row": lambda draw: {"x": draw(9, 1100)[::3]},
    "one row, repeated": lambda draw: {"x": draw(500).expand(6, 500)},
    "one column, repeated": lambda draw: {"x": draw(6, 1).expand(6, 1500)},
    "one number, repeated": lambda draw: {"x": draw(1).expand(3, 1500)},
    "overlapping rows": lambda draw: {"x": draw(1220).unfold(0, 1200, 7)},
    "starts off the 16-byte grid": lambda draw: {"x": draw(5 * 1201 + 1)[1:].view(5, 1201)},
    "starts off it, short rows": lambda draw: {"x": draw(5 * 64 + 3)[3:].view(5, 64)},
    "along the first dimension": lambda draw: {"x": draw(130, 20), "dim": 0},
    "the same, long": lambda draw: {"x": draw(20_000, 3), "dim": 0},
    "the same, one column": lambda draw: {"x": draw(3000, 1), "dim": 0},
    "the same, transposed": lambda draw: {"x": draw(20, 1500).T, "dim": 0},
    "3-D, last": lambda draw: {"x": draw(2, 3, 1100), "dim": 2},
    "3-D, middle": lambda draw: {"x": draw(3, 50, 7), "dim": -2},
    "3-D, first": lambda draw: {"x": draw(40, 3, 5), "dim": -3},
    "3-D, padded rows": lambda draw: {"x": draw(3, 4, 60)[:, :, :50], "dim": 1},
    "4-D, permuted": lambda draw: {"x": draw(2, 3, 5, 40).permute(0, 2, 3, 1), "dim": 2},
    "4-D, channels last": lambda draw: {"x": draw(2, 8, 3, 5).to(memory_format=torch.channels_last), "dim": 1},
    "masked scores": lambda draw: {"x": draw(5, 300).masked_fill(draw(5, 300) > 0, -INF)},
    "scores of 10,000": lambda draw: {"x": draw(4, 2000, scale=1e4)},
    "no rows": lambda draw: {"x": draw(0, 5)},
    "no columns": lambda draw: {"x": draw(5, 0)},
    "no batch": lambda draw: {"x": draw(0, 3, 4), "dim": 1},
    "nothing": lambda draw: {"x": draw(0), "dim": 0},
}


@pytest.mark.versions
def test_any_shape_and_strides_both_ways():
    check(
        softmax, reference, CASES, dtypes=DTYPES, reduction=lambda x, dim=-1: x.shape[dim],
        terms=lambda y, dy: (y * dy).abs(),
    )  # fmt: skip


def test_a_row_longer_than_tritons_largest_block():
    both_ways(draw(1, 2**20 + 3))


def test_a_number_alone():
    x = torch.tensor(3.0, device=DEVICE, requires_grad=True)
    for dim in (0, -1):
        y = softmax(x, dim)
        assert y.shape == () and y.item() == 1.0
        assert torch.autograd.grad(y, x)[0].item() == 0.0


@pytest.mark.parametrize("n", [50, 1201, 1216, 17_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_may_have_any_strides(layout, n):
    m = 1 if n == 17_000 else 5
    dy = LAYOUTS[layout](m, n)
    kept = dy.clone()
    both_ways(draw(m, n), dy=dy)
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("n", [40, 1300])
def test_the_gradient_of_a_sum(n):
    x, w = draw(4, n).requires_grad_(), draw(n)
    softmax(x).sum().backward()  # hands a gradient of stride 0
    assert x.grad.abs().max() < 1e-6
    x.grad = None
    (softmax(x, 0) @ w).sum().backward()
    other = x.detach().double().requires_grad_()
    (torch.softmax(other, 0) @ w.double()).sum().backward()
    agrees(x.grad, other.grad, n, 2, 1.0)


def test_empty_inputs_backward():
    for shape, dim in (((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((0,), 0), ((2, 0, 3), 2), ((0, 2**21), 1)):
        x = draw(*shape).requires_grad_()
        y = softmax(x, dim)
        y.sum().backward()
        assert y.shape == x.grad.shape == torch.Size(shape)


# --- each kernel alone, with NaN around its input and a mark around its output ---------------------------------------

ALONE = {
    "tile of one row": ("tile", {"BLOCK_M": 1}),
    "tile of 4 rows": ("tile", {"BLOCK_M": 4}),
    "online, 16 at a time": ("online", {"BLOCK_M": 1, "BLOCK_N": 16}),
    "online, 4 rows": ("online", {"BLOCK_M": 4, "BLOCK_N": 16}),
    "split, 1 program": ("split", {"SPLIT": 1, "ALIGN": 1}),
    "split, 1 program, grid of 4": ("split", {"SPLIT": 1, "ALIGN": 4}),
    "split, 1 program, grid of 8": ("split", {"SPLIT": 1, "ALIGN": 8}),
    "split, 2 programs": ("split", {"SPLIT": 2, "ALIGN": 1}),
    "split, 4 programs, grid of 4": ("split", {"SPLIT": 4, "ALIGN": 4}),
    "split, 2 programs, grid of 8": ("split", {"SPLIT": 2, "ALIGN": 8}),
}
LENGTHS = {"tile": [1, 2, 16, 17, 100, 128, 129], "online": [1, 15, 16, 17, 48, 49], "split": [16, 17, 64, 125, 1021]}


def alone(name, tensors, backward=False):
    """Launch one kernel on 2-D tensors, with the smallest block that can hold a row or a part."""
    kind, options = ALONE[name]
    n, options = tensors[0].shape[1], dict(options)
    if kind == "tile":
        options["BLOCK_N"] = triton.next_power_of_2(n)
    if kind == "split":  # what sticks out of a block for being off the grid is in the rim
        options["BLOCK_N"] = max(triton.next_power_of_2(triton.cdiv(n, options["SPLIT"])), 16)
    launch = one_after_another if options.get("SPLIT", 1) > 1 and interpreting() else week.launch
    launch(tuple(week.as_rows(t, 1) for t in tensors), kind, options, backward)


def one_after_another(tensors, kind, options, backward=False):
    """`launch` for the interpreter, whose programs run one after another and so would wait for ever.

    The kernel runs twice: first to learn what each program posts, then with the posts of a row's later programs put on
    the board when its first program asks.
    """
    split, words, asked = options["SPLIT"], [], []

    def learn(board_ptr, part, word, SPLIT):
        words.append(word)
        return tl.zeros((split,), tl.int64)

    def answer(board_ptr, part, word, SPLIT):
        first = len(asked)
        asked.append(word)
        for other in range(1, split) if first % split == 0 else ():
            tl.atomic_xchg(board_ptr + other, words[first + other], sem="relaxed")
            tl.atomic_add(board_ptr + split, 1, sem="relaxed")
        return tell_and_wait(board_ptr, part, word, SPLIT)

    for replacement in (learn, answer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(week, "tell_and_wait", replacement)
            week.launch(tensors, kind, options, backward)


def spread(values, stride, mark):
    """The same values in rows `stride` apart, and all the memory, filled with `mark` around them."""
    m, n = values.shape
    everything = torch.full((m * stride + 64,), mark, dtype=values.dtype, device=values.device)
    view = everything.as_strided((m, n), (stride, 1))
    view.copy_(values)
    return view, everything


@pytest.mark.versions
@pytest.mark.parametrize("name", ALONE)
def test_each_kernel_alone(name):
    """Row strides differ and put rows on every shift; nothing outside a row may be used or written."""
    kind, options = ALONE[name]
    align = options.get("ALIGN", 1)
    dtype = torch.float16 if align == 8 or options.get("BLOCK_M") == 4 else torch.float32
    for n in LENGTHS[kind] if options.get("SPLIT", 1) == 1 else LENGTHS[kind][2:]:
        m, stride = max(5, align + 1), n + 5 + n % 2  # rows an odd number apart: every shift occurs
        x, _ = spread(draw(m, n, dtype=dtype), stride, NAN)
        y, memory_of_y = spread(torch.full_like(x, 5), stride + 2 * align, 7.0)
        alone(name, (x, y))
        agrees(y, reference(x.double()), n)
        assert (memory_of_y == 7).sum() == memory_of_y.numel() - m * n, "written outside a row"
        saved, _ = spread(y.contiguous(), stride, NAN)
        dy, _ = spread(draw(m, n, dtype=dtype), stride + 2 * align, NAN)
        dx, memory_of_dx = spread(torch.full_like(x, 99), stride, 99.0)
        alone(name, (saved, dy, dx), backward=True)
        gradients_agree(saved, dy, dx)
        assert (memory_of_dx == 99).sum() == memory_of_dx.numel() - m * n, "written outside a row"


@on_cpu
@pytest.mark.parametrize("n", [1, 43])
def test_parts_shorter_than_the_grid_or_empty(n):
    """No GPU of today gets such a plan: it takes 256 multiprocessors. The kernel must still keep to its row."""
    x, _ = spread(draw(5, n), n + 5 + n % 2, NAN)
    y, memory_of_y = spread(torch.full_like(x, 5), n + 5 + n % 2, 7.0)
    alone("split, 4 programs, grid of 4", (x, y))
    agrees(y, reference(x.double()), n)
    assert (memory_of_y == 7).sum() == memory_of_y.numel() - 5 * n, "written outside a row"


def odd_rows(n=64):
    """Rows of scores without a sensible answer, or with one that is easily missed. Blocks are 16 long."""
    rows = draw(16, n)
    rows[0, 40] = INF
    rows[1] = -INF
    rows[2, 3] = NAN
    rows[3, :20] = -INF  # the first block, and a bit
    rows[4, 40:] = -INF
    rows[5] = -INF
    rows[5, n - 1] = -3  # a single score, in the last block
    rows[6] *= 1e30
    rows[7] = -1e30
    rows[8] = torch.where(rows[8] > 0, 3e38, -3e38)
    rows[9] *= 1e4
    rows[10] = -1e4 + rows[10]
    rows[10, :32] = -INF  # whole parts masked, and scores so low that e^-score overflows
    rows[11, 10], rows[11, 50] = INF, -INF
    rows[12, 5], rows[12, 60] = NAN, INF
    rows[13, 0] = -INF
    rows[14], rows[15] = 0, 700
    rows[14, 17] = -INF
    return rows


@pytest.mark.versions
@pytest.mark.parametrize("name", [name for name in ALONE if "4 programs" not in name])
def test_rows_that_are_infinite_or_nan(name):
    dtype = torch.float16 if "8" in name else torch.float32
    x = odd_rows().to(dtype)  # float16 makes infinities of the large ones
    y, dy, dx = torch.full_like(x, 5), draw(16, 64, dtype=dtype), torch.full_like(x, 5)
    alone(name, (x, y))
    want = reference(x.double())
    assert want.isnan().any(dim=1).sum() >= 4 and want.isfinite().all(dim=1).sum() >= 5
    for row in range(16):
        agrees(y[row], want[row], 64)
    alone(name, (y, dy, dx), backward=True)
    for row in range(16):
        gradients_agree(y[row], dy[row], dx[row])


@pytest.mark.parametrize("repeats", [1, 40, 400])
def test_such_rows_through_the_function(repeats):
    x = odd_rows().repeat(1, repeats).requires_grad_()
    y, dy = softmax(x), draw(*x.shape)
    agrees(y, reference(x.detach().double()), x.shape[1])
    gradients_agree(y, dy, torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(dtype):
    x = draw(3, 1500, dtype=dtype, scale=1e4 if dtype == torch.float16 else 1e30)
    assert both_ways(x)[0].isfinite().all()


# --- several programs a row ------------------------------------------------------------------------------------------


@triton.jit
def ask_kernel(board_ptr, words_ptr, word, SPLIT: tl.constexpr):
    words = tell_and_wait(board_ptr, 1, word, SPLIT)
    tl.store(words_ptr + tl.arange(0, SPLIT), words)


@triton.jit
def pack_kernel(high_ptr, low_ptr, word_ptr, out_ptr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    word = pack(tl.load(high_ptr + lanes), tl.load(low_ptr + lanes))
    high, low = unpack(word)
    tl.store(word_ptr + lanes, word)
    tl.store(out_ptr + lanes, high)
    tl.store(out_ptr + N + lanes, low)


@on_cpu
def test_a_program_waits_for_all_words_and_not_only_for_the_count():
    board, words = torch.zeros(5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    seen = board.numpy()  # another thread plays the three other programs: their count arrives before their words

    def others():
        while seen[4] == 0:
            time.sleep(0.01)
        time.sleep(0.05)
        seen[4] += 3
        for part in (0, 3, 2):
            time.sleep(0.05)
            seen[part] = 2**40 + part

    thread = threading.Thread(target=others)
    thread.start()
    ask_kernel[(1,)](board, words, 2**40 + 1, SPLIT=4)
    thread.join()
    assert words.tolist() == [2**40 + part for part in range(4)]


@on_cpu
def test_words_survive_the_board():
    """No posted word may be 0, the sign of "not posted", and both halves come back bit by bit."""
    high = torch.tensor([-INF, INF, NAN, 0.0, -0.0, 1e-45, -3.5, 3e38, -1.0, 1.0, 0.0, -1e30, 2.0, -2.0, 5.0, -INF])
    low = torch.tensor([0.0, 1.0, NAN, 1.0, 1.0, INF, 2.0, 7.5, -1.0, -0.0, 1e-45, 3.0, -5e-39, 8.0, 9.0, NAN])
    word, out = torch.zeros(16, dtype=torch.int64), torch.zeros(2, 16)
    pack_kernel[(1,)](high, low, word, out, N=16)
    assert (word != 0).all()
    assert torch.equal(out.view(torch.int32), torch.stack([high, low]).view(torch.int32))


def recorded(tensors, backward=False, multiprocessors=132):
    """What `launch` would start by `plan` on a GPU with so many multiprocessors: (kernel, grid, arguments, options)."""
    calls = []
    with as_on_a_gpu(week, multiprocessors) as patch:
        kind, options = week.plan(tensors, backward)
        for name, kernels in week.KERNELS.items():
            patch.setitem(week.KERNELS, name, tuple(Recorder(kernel, calls) for kernel in kernels))
        week.launch(tensors, kind, options, backward)
    return kind, *calls[0]


def unreal(outer, n, stride=None, dtype=torch.float32, inner=1):
    """A tensor without memory, as `as_rows` gives it."""
    strides = (stride or n * inner, inner, 1)
    return torch.empty_strided((outer, n, inner), strides, dtype=dtype, device="meta")


def plan_lengths():
    near = [2**p + d for p in range(10, 22) for d in range(-20, 21)]
    rims = [block - rim for block in (4096, 8192) for rim in (1, 3, 4, 7, 8, 16)]
    cut = [parts * length + d for length in rims for parts in (2, 8, 64) for d in (-1, 0, 1)]
    some = np.random.default_rng().integers(1025, 1_200_000, 60).tolist()
    return sorted({*near, *cut, *some, *range(1025, 1041), 12_345, 50_257, 262_145, 524_289})


@pytest.mark.parametrize("multiprocessors", [40, 132, 192])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_covers_every_element_once(dtype, backward, multiprocessors):
    for n in plan_lengths():
        for stride in (n, n + 4):  # in bfloat16 the second shifts the rows of the two tensors unequally
            first, second = unreal(7, n, stride, dtype), unreal(7, n, dtype=dtype)
            tensors = (first, second, first) if backward else (first, second)
            kind, _, grid, given, options = recorded(tensors, backward, multiprocessors)
            where = f"{n} with a row stride of {stride}: {kind} {options}"
            if kind != "split":
                assert grid[0] * options["BLOCK_M"] >= 7 > (grid[0] - 1) * options["BLOCK_M"], where
                assert kind == "online" or options["BLOCK_N"] >= n, where
                assert options["BLOCK_M"] * options["BLOCK_N"] <= 64 * 32 * options["num_warps"], where
                continue
            split, align, block = options["SPLIT"], options["ALIGN"], options["BLOCK_N"]
            assert grid == (7 * split,) and split <= multiprocessors, where
            assert block <= 128 * 32 * options["num_warps"], where
            assert (stride - n) % align == 0, f"{where}: rows are shifted unequally"
            parts = np.clip(n - np.arange(split) * given["part_cols"], 0, given["part_cols"])
            assert parts.sum() == n, where
            assert parts.min() > 0, f"{where}: a program without work"
            assert split == 1 or given["part_cols"] % align == 0, where
            shift = np.arange(align)
            assert ((shift + parts.max()) // align * align).max() <= block, f"{where}: a part outgrows its block"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_row_is_not_cut_finer_than_it_must(dtype, backward):
    """65,536 numbers fill 8 blocks of 8,192: with 16 programs half of all lanes would idle."""
    for n in (65_536, 131_072, 262_144):
        tensors = (unreal(7, n, dtype=dtype),) * (3 if backward else 2)
        kind, _, _, _, options = recorded(tensors, backward)
        assert kind == "split" and options["SPLIT"] * options["BLOCK_N"] == n, f"{n}: {options}"


@pytest.mark.versions
@on_cpu
@pytest.mark.parametrize(("n", "dtype"), [(65_536, torch.float32), (50_257, torch.float16)], ids=str)
def test_a_row_cut_as_on_an_h200(n, dtype):
    x, dy = draw(2, n, dtype=dtype), draw(2, n, dtype=dtype)
    with poisoned():
        y, dx = torch.empty_like(x), torch.empty_like(x)
    for tensors, backward in (((x, y), False), ((y, dy, dx), True)):
        tensors = tuple(week.as_rows(t, 1) for t in tensors)
        kind, _, _, _, options = recorded(tensors, backward)
        assert kind == "split" and options["SPLIT"] > 1
        one_after_another(tensors, kind, options, backward)
    agrees(y, reference(x.double()), n)
    gradients_agree(y, dy, dx)


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_apart():
    """Rows lie 2^30 elements apart in memory that is reserved and never touched elsewhere.

    Every tensor of every case has its own place there, so that an offset that wraps round 2^31 or 2^32 meets another
    tensor's row, or nothing at all.
    """
    stride, reserved = 2**30 + 11, torch.empty(2**31 + 2**27, dtype=torch.float16)
    used = 0

    def far(values):
        nonlocal used
        used += 2**14
        return reserved.as_strided(values.shape, (stride, 1), used).copy_(values)

    def case(kind, options, n, shape):
        """Softmax along `shape(x)`'s second dimension of three rows of n numbers."""
        values = torch.randn(2, 3, n).half()
        x, y, dy, dx = (shape(far(t)) for t in (values[0], values[0], values[1], values[1]))
        week.launch((x, y), kind, options)
        agrees(y, reference(x.double(), 1), x.shape[1])
        week.launch((y, dy, dx), kind, options, backward=True)
        gradients_agree(y, dy, dx, 1)

    rows, across, columns = (lambda t: t[:, :, None]), (lambda t: t[None]), (lambda t: t.T[:, :, None])
    case("tile", {"BLOCK_M": 2, "BLOCK_N": 64}, 40, rows)
    case("online", {"BLOCK_M": 2, "BLOCK_N": 32}, 100, rows)
    case("split", {"SPLIT": 1, "BLOCK_N": 128, "ALIGN": 1}, 100, rows)
    case("split", {"SPLIT": 1, "BLOCK_N": 128, "ALIGN": 8}, 100, rows)
    case("tile", {"BLOCK_M": 16, "BLOCK_N": 4}, 40, across)
    case("online", {"BLOCK_M": 16, "BLOCK_N": 2}, 40, across)
    case("tile", {"BLOCK_M": 2, "BLOCK_N": 4}, 40, columns)
    case("online", {"BLOCK_M": 2, "BLOCK_N": 2}, 40, columns)
    for n, dim in ((200, 1), (1100, 1), (200, 0)):
        x, dy = far(torch.randn(3, n).half()).requires_grad_(), far(torch.randn(3, n).half())
        y = softmax(x, dim)
        agrees(y, reference(x.detach().double(), dim), x.shape[dim])
        gradients_agree(y, dy, torch.autograd.grad(y, x, dy)[0], dim)
    touched_little()


def test_rows_past_2_to_the_31():
    elsewhere(_far_apart, timeout=100, TRITON_INTERPRET="1")


# --- wrong requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "dim", "error", "says"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), -1, TypeError, r"x.*float64.*taken.*float16.*bfloat16.*float32"),
        (torch.zeros(3, 4, dtype=torch.int64), -1, TypeError, r"x.*int64.*taken.*float32"),
        (torch.zeros(3, 4, dtype=torch.bool), -1, TypeError, r"x.*bool.*taken"),
        (torch.zeros(3, 4, dtype=torch.complex64), -1, TypeError, r"x.*complex64.*taken"),
        ([[1.0, 2.0]], -1, TypeError, r"x.*Tensor.*list"),
        (None, -1, TypeError, r"x.*Tensor.*NoneType"),
        (np.zeros((3, 4), np.float32), -1, TypeError, r"x.*Tensor.*ndarray"),
        (torch.zeros(3, 4).to_sparse(), -1, ValueError, r"x.*sparse.*taken"),
        (torch.zeros(3, 4, device="meta"), -1, ValueError, r"x.*meta.*takes"),
        (torch.zeros(3, 4, device=DEVICE), 2, ValueError, r"dim.*2.*-2 to 1"),
        (torch.zeros(3, 4, device=DEVICE), -3, ValueError, r"dim.*-3.*-2 to 1"),
        (torch.zeros((), device=DEVICE), 1, ValueError, r"dim.*1.*-1 to 0"),
        (torch.zeros(0, 4, device=DEVICE), 2, ValueError, r"dim.*2.*-2 to 1"),
        (torch.zeros(3, 4, device=DEVICE), 1.0, TypeError, r"dim.*int.*float"),
        (torch.zeros(3, 4, device=DEVICE), None, TypeError, r"dim.*int.*NoneType"),
        (torch.zeros(3, 4, device=DEVICE), True, TypeError, r"dim.*int.*bool"),
    ],
    ids=lambda value: f"{value.dtype} {value.layout} {value.device}" if isinstance(value, torch.Tensor) else None,
)
def test_a_wrong_request_is_refused_in_words(monkeypatch, x, dim, error, says):
    monkeypatch.setattr(week, "launch", lambda *args, **options: pytest.fail("launched"))
    with pytest.raises(error, match=says):
        softmax(x, dim)


# --- autograd --------------------------------------------------------------------------------------------------------


def test_only_the_output_is_held_and_nothing_without_a_gradient():
    x = draw(40, 70)
    assert memory.held_bytes(softmax, x) == 0
    assert not softmax(x).requires_grad
    with torch.no_grad():
        assert not softmax(x.requires_grad_()).requires_grad
    assert memory.held_bytes(softmax, x.requires_grad_()) == x.nbytes


@on_cpu
def test_nothing_is_allocated_but_the_results():
    for n in (50, 2000):
        x, dy = draw(8, n), draw(8, n)
        assert memory.peak_bytes(softmax, x) <= x.nbytes + 64
        leaf = x.clone().requires_grad_()
        y = softmax(leaf)
        backward = lambda y=y, leaf=leaf, dy=dy: torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert memory.peak_bytes(backward) <= x.nbytes + 64


@pytest.mark.parametrize("n", [40, 1300])
def test_a_scaled_loss(n):
    x, dy = draw(4, n).requires_grad_(), draw(4, n)
    plain, scaled = (torch.autograd.grad((softmax(x) * dy).sum() * scale, x)[0] for scale in (1, 1024))
    assert torch.equal(scaled, 1024 * plain)


@pytest.mark.parametrize("n", [40, 1300])
def test_going_backward_twice(n):
    x, dy = draw(4, n).requires_grad_(), draw(4, n)
    y = softmax(x)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    assert torch.equal(x.grad, first + second)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


@pytest.mark.parametrize("n", [40, 1300, 20_000])
def test_a_gradient_that_two_share_stays_as_it_was(n):
    a, b, dy = draw(2, n).requires_grad_(), draw(2, n).requires_grad_(), draw(2, n)
    kept = dy.clone()
    together = torch.autograd.grad([softmax(a), softmax(b), softmax(a)], [a, b], [dy, dy, dy])
    assert torch.equal(dy, kept)
    one = [torch.autograd.grad(softmax(x), x, dy)[0] for x in (a, b)]
    assert torch.equal(together[1], one[1]) and torch.equal(together[0], 2 * one[0])


@pytest.mark.parametrize("n", [40, 1300])
def test_neither_input_nor_saved_output_is_changed(n):
    x = draw(4, n)
    kept, leaf = x.clone(), x.detach().requires_grad_()
    middle = leaf * 1.0
    y = softmax(middle)
    before = y.detach().clone()
    torch.autograd.grad(y, leaf, draw(4, n), retain_graph=True)
    assert torch.equal(x, kept) and torch.equal(middle, x) and torch.equal(y, before)
    middle.add_(1)  # not saved, so this is allowed, as with torch.softmax
    torch.autograd.grad(y, leaf, draw(4, n))


def test_an_output_changed_in_place_makes_autograd_raise():
    x = draw(4, 50).requires_grad_()
    y = softmax(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("loss", [lambda y: y[:, 0].sum(), lambda y: y.square().sum()], ids=["linear", "square"])
def test_a_second_derivative_is_right_or_refused(loss):
    """With create_graph, a gradient that silently lost its history gives a wrong second derivative and no error."""
    x = draw(3, 20).requires_grad_()
    other = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(loss(torch.softmax(other, -1)), other, create_graph=True)
    penalty = lambda gradient, x: gradient.square().sum() + 1e-3 * x.sum()  # as a gradient penalty in a loss
    (want,) = torch.autograd.grad(penalty(want, other), other)
    try:
        (dx,) = torch.autograd.grad(loss(softmax(x)), x, create_graph=True)
        (got,) = torch.autograd.grad(penalty(dx, x), x)
    except RuntimeError as error:
        assert "twice" in str(error) or "create_graph" in str(error) or "second" in str(error), error
    else:
        assert torch.allclose(got.double(), want, atol=1e-5)


def test_torch_func_is_served_or_refused_in_words():
    x = draw(3, 20)
    for transform in (lambda f: torch.func.grad(lambda x: f(x).square().sum()), torch.vmap):
        try:
            got = transform(softmax)(x)
        except RuntimeError as error:
            assert "setup_context" in str(error) or "softmax" in str(error), error
        else:
            assert torch.allclose(got, transform(reference)(x), atol=1e-6)


def test_a_negated_view():
    """PyTorch keeps the imaginary part of a conjugate as positive numbers in memory with a mark to negate them."""
    x = torch.complex(draw(4, 60), draw(4, 60)).conj().imag
    dy = torch.complex(draw(4, 60), draw(4, 60)).conj().imag
    assert x.is_neg() and dy.is_neg()
    both_ways(x, dy=dy)
    both_ways(x.detach().resolve_neg(), dy=dy)


def test_a_saved_tensor_that_comes_back_with_other_strides():
    """A hook may keep saved tensors elsewhere (on a CPU, compressed) and need not remember their strides."""
    x, dy = draw(6, 80).requires_grad_(), draw(6, 80)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        y = softmax(x)
    gradients_agree(y, dy, torch.autograd.grad(y, x, dy)[0])


def test_in_a_checkpoint():
    x, dy = draw(4, 50).requires_grad_(), draw(4, 50)
    y = checkpoint(softmax, x, use_reentrant=False)
    gradients_agree(y, dy, torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16], ids=str)
def test_under_autocast(dtype):
    weight, x = draw(60, 50).requires_grad_(), draw(4, 50)
    with torch.autocast(DEVICE, dtype=dtype):
        scores = x @ weight.T
        assert scores.dtype == dtype
        y = softmax(scores)
        loss = (y * draw(4, 60)).float().sum()
    agrees(y, reference(scores.detach().double()), 60)
    loss.backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.isfinite().all() and weight.grad.any()


def weighed(x, w):
    return (softmax(x * 2) * w).sum() * 3


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(weighed, backend="eager")
    for n in (30, 1300):
        x, w = draw(4, n).requires_grad_(), draw(4, n)
        got, want = (torch.autograd.grad(f(x, w), x)[0] for f in (compiled, weighed))
        assert torch.allclose(got, want)


# --- what is moved ---------------------------------------------------------------------------------------------------

PASSES = {"tile": (2, 3), "online": (3, 5), "split": (2, 3)}  # over the tensor, forward and backward


@on_cpu
@pytest.mark.parametrize("name", [name for name, (_, options) in ALONE.items() if options.get("SPLIT", 1) == 1])
def test_bytes_moved_by_each_kernel(name):
    align = ALONE[name][1].get("ALIGN", 1)
    for m, n in ((9, 77), (3, 129)) if align == 1 else ((9, 1029),):
        x, y, dy = draw(m, n), draw(m, n), draw(m, n)
        forward, backward = PASSES[ALONE[name][0]]
        assert memory.traffic(alone, name, (x, y)).total == forward * m * n * 4
        assert memory.traffic(alone, name, (y, dy, x), backward=True).total == backward * m * n * 4


@on_cpu
@pytest.mark.parametrize("shape", [(64, 1000), (5, 1300), (3, 12_345), (30, 40, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_moved_by_the_function(shape, dtype):
    x, dy = draw(*shape, dtype=dtype).requires_grad_(), draw(*shape, dtype=dtype)
    for dim in (-1, 1) if len(shape) == 3 else (-1,):
        y = softmax(x, dim)
        moved = memory.traffic(softmax, x.detach(), dim)
        assert (moved.read, moved.written) == (x.nbytes, x.nbytes)
        moved = memory.traffic(torch.autograd.grad, y, x, dy)
        assert (moved.read, moved.written) == (2 * x.nbytes, x.nbytes)


@on_cpu
def test_bytes_moved_by_a_split_row(monkeypatch):
    """The row once in and once out, and for each program: a ticket, two posts, and the board."""
    x, y, split = draw(3, 1029), draw(3, 1029), 4
    monkeypatch.setattr(week, "tell_and_wait", lambda *args: tl.zeros((split,), tl.int64))
    tensors = week.as_rows(x, 1), week.as_rows(y, 1)
    moved = memory.traffic(week.launch, tensors, "split", {"BLOCK_N": 512, "SPLIT": split, "ALIGN": 4})
    board, tickets = 8 * (1 + 3 * (split + 1)), 16 * 3 * split
    assert moved.total == 2 * x.nbytes + board + tickets


@on_cpu
def test_the_lessons_claim():
    x = draw(97, 333)
    m, n = x.shape
    assert memory.traffic(week.softmax_unfused, x).total == (8 * m * n + 4 * m) * 4
    assert memory.traffic(week.first_softmax, x).total == 2 * m * n * 4


# --- what the compiler makes of it -----------------------------------------------------------------------------------

COMPILED = {  # the shape (outer, n_cols, inner): whether its loads and stores are 16 bytes wide
    "short rows": ((4096, 256, 1), True),
    "a row, a program": ((4096, 4096, 1), True),
    "the same, off the grid": ((4096, 12_345, 1), True),
    "a row, several programs": ((256, 65_536, 1), True),
    "the same, off the grid ": ((256, 50_257, 1), True),
    "along the first dimension": ((1, 256, 1024), True),
    "the same, off the grid  ": ((1, 256, 1001), False),
}


def compile_jobs():
    for label, (shape, wide) in COMPILED.items():
        for dtype in (torch.float32, torch.bfloat16):
            for backward in (False, True):
                tensors = (unreal(shape[0], shape[1], inner=shape[2], dtype=dtype),) * (2 + backward)
                _, kernel, _, given, options = recorded(tensors, backward)
                types = {name: as_type(value) for name, value in given.items()}
                sizes = {name: value for name, value in options.items() if name != "num_warps"}
                newer = {(torch.bfloat16, False): ["sm_90"], (torch.float32, True): ["sm_80"]}
                for target in ["sm_75", *newer.get((dtype, backward), [])]:
                    name = f"{label.strip()}, {NAMES[dtype]}, {'backward' if backward else 'forward'}"
                    warps = {"num_warps": options["num_warps"]}
                    yield (name, kernel, types | sizes, target, warps), wide


@pytest.mark.versions
def test_compiled_code():
    jobs = list(compile_jobs())
    wrong = []
    for ((name, _, _, target, _), wide), made in zip(jobs, compile_many(job for job, _ in jobs), strict=True):
        loads, stores = made.count("LDG", "128"), made.count("STG", "128")
        if made.spill_bytes or made.shared_bytes > 64 * 1024 or (wide and not (loads and stores)):
            wrong.append(f"{name}, {target}: {made.summary()}")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


SPLIT_ROWS = [(n, torch.float32) for n in (50_257, 65_536, 70_001, 131_072, 500_000)]
SPLIT_ROWS += [(n, torch.bfloat16) for n in (50_257, 65_536, 131_072, 250_001)] + [(50_257, torch.float16)]


@gpu
@pytest.mark.parametrize(("n", "dtype"), SPLIT_ROWS, ids=str)
def test_gpu_rows_shared_by_programs(n, dtype):
    x = draw(2**24 // n + 1, n, dtype=dtype)  # many more programs than run at once
    kind, options = week.plan((week.as_rows(x, 1), week.as_rows(x, 1)))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    assert processors < 128 or (kind == "split" and options["SPLIT"] > 1)
    for _ in range(3):
        both_ways(x)


@gpu
@pytest.mark.parametrize("layout", ["of a sum", "every second column", "rows with a gap of one", "a row, repeated"])
def test_gpu_gradients_of_long_rows(layout):
    both_ways(draw(40, 70_001), dy=LAYOUTS[layout](40, 70_001))


@gpu
@pytest.mark.parametrize(
    ("n", "dtype"), [(1_200_001, torch.float32), (600_001, torch.bfloat16), (2**22, torch.float16)], ids=str
)
def test_gpu_rows_that_no_split_can_hold(n, dtype):
    x = draw(3, n, dtype=dtype)
    assert week.plan((week.as_rows(x, 1), week.as_rows(x, 1)))[0] == "online"
    both_ways(x)


@gpu
def test_gpu_odd_rows_shared_by_programs():
    for dtype in (torch.float32, torch.bfloat16):
        x = odd_rows().repeat_interleave(1024, dim=1).to(dtype)  # whole parts are masked
        y, dy = softmax(x.requires_grad_()), draw(*x.shape, dtype=dtype)
        want = reference(x.detach().double())
        (dx,) = torch.autograd.grad(y, x, dy)
        for row in range(len(x)):
            agrees(y[row], want[row], x.shape[1])
            gradients_agree(y[row], dy[row], dx[row])


def _streams():
    """Rows shared by programs on five streams of three priorities at once, beside work that fills the GPU."""
    shapes = [(96, 65_536, torch.float32), (64, 131_072, torch.bfloat16), (128, 50_257, torch.bfloat16),
              (9, 1_000_000, torch.float32), (64, 70_001, torch.float16)]  # fmt: skip
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, -2, 0, -1)]
    inputs = [(draw(m, n, dtype=dtype).requires_grad_(), draw(m, n, dtype=dtype)) for m, n, dtype in shapes]
    first = [(y := softmax(x), torch.autograd.grad(y, x, dy)[0]) for x, dy in inputs]
    for (x, dy), (y, dx) in zip(inputs, first, strict=True):
        agrees(y, reference(x.detach().double()), x.shape[1])
        gradients_agree(y, dy, dx)
    a, same = torch.randn(4096, 4096, device="cuda"), []
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(busy):
            a @ a
        for (x, dy), (y, dx), stream in zip(inputs, first, streams, strict=True):
            with torch.cuda.stream(stream):
                z = softmax(x)
                dz = torch.autograd.grad(z, x, dy)[0]
                # the order in which a row's programs arrive changes nothing: their posts are added up in one order
                same += [(z == y).all(), (dz == dx).all()]
    torch.cuda.synchronize()
    assert all(bool(value) for value in same)


@gpu
def test_gpu_programs_that_wait_do_not_wait_for_ever():
    elsewhere(_streams, timeout=60)


@gpu
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2**23 + 16, 256), 1), ((2**31 // 4097 + 9, 4097), 1), ((2**31 // 65_536 + 9, 65_536), 1),
     ((5, 2**31 // 5 + 99), 0), ((2**15 + 9, 9000, 8), 1)],
    ids=str,
)  # fmt: skip
def test_gpu_more_than_2_to_the_31_elements(shape, dim):
    needs_memory(60)
    x, dy = (torch.empty(shape, dtype=torch.float16, device=DEVICE).normal_() for _ in range(2))
    leaf = x.detach().requires_grad_()
    with poisoned():
        y = softmax(leaf, dim)
        (dx,) = torch.autograd.grad(y, leaf, dy)
    y = y.detach()
    along = 1 if dim == 0 else 0
    size = max(1, x.shape[along] * 2**27 // x.numel())
    for start in [*range(0, x.shape[along], 4 * size), x.shape[along] - size]:  # a quarter of it, and the end
        part = [t.narrow(along, start, min(size, x.shape[along] - start)) for t in (x, y, dy, dx)]
        agrees(part[1], reference(part[0].double(), dim), x.shape[dim])
        gradients_agree(part[1], part[2], part[3], dim)
    assert not y.isnan().any() and not dx.isnan().any()


@gpu
def test_gpu_more_than_2_to_the_31_rows():
    needs_memory(30)
    x = torch.empty((2**31 + 77, 1), dtype=torch.float16, device=DEVICE).normal_()
    with poisoned():
        y = softmax(x)
    assert y.amin() == y.amax() == 1
    assert not y.isnan().any()


def _one_enormous_row():
    """2^31 - 1 columns: a loop's counter of 32 bits would step past its end and never leave."""
    x = torch.full((1, 2**31 - 1), -INF, dtype=torch.float16, device="cuda")
    at = torch.tensor([0, 2**30, 2**31 - 7, 2**31 - 2], device="cuda")
    x[0, at] = torch.arange(4.0, dtype=torch.float16, device="cuda")
    y = softmax(x.requires_grad_())
    agrees(y[0, at], torch.arange(4.0, dtype=torch.float64, device="cuda").softmax(0), 4)
    assert y.count_nonzero() == 4
    dy = torch.zeros_like(y)
    dy[0, at[1]] = 1
    for grad in (dy, dy.new_ones(()).expand_as(y)):  # the second is not read along memory: another kernel
        (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        gradients_agree(y[0, at], grad[0, at], dx[0, at])
        assert dx.count_nonzero() <= 4


@gpu
def test_gpu_one_row_of_2_to_the_31_columns():
    needs_memory(40)
    elsewhere(_one_enormous_row, timeout=60)


@gpu
def test_gpu_refuses_a_tensor_on_the_cpu():
    with pytest.raises(ValueError, match=r"x is on cpu.*cuda"):
        softmax(torch.zeros(3, 4))


@gpu
def test_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for n in (100, 4097, 65_536):
        x, dy = draw(40, n).to("cuda:1"), draw(40, n).to("cuda:1")
        with torch.cuda.device(0):
            y, dx = both_ways(x, dy=dy)
        assert y.device == dx.device == x.device


@gpu
@pytest.mark.parametrize("n", [1000, 12_345, 65_536])
def test_gpu_in_a_cuda_graph(n):
    x, dy = draw(300, n).requires_grad_(), draw(300, n)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(softmax(x), x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    for _ in range(5):
        with torch.no_grad():
            x.copy_(draw(300, n))
        graph.replay()
        agrees(y, reference(x.detach().double()), n)
        gradients_agree(y, dy, dx)


@gpu
def test_gpu_inside_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(weighed)
    for n in (300, 65_536):
        x, w = draw(40, n).requires_grad_(), draw(40, n)
        got, want = (torch.autograd.grad(f(x, w), x)[0] for f in (compiled, weighed))
        assert torch.allclose(got, want, atol=1e-6)


@gpu
def test_gpu_peak_memory():
    for n in (1000, 65_536):
        x = draw(2**25 // n, n)
        assert memory.peak_bytes(softmax, x) <= 1.01 * x.nbytes


def test_gradients_and_inputs_that_are_zeros_without_memory():
    """PyTorch's sgn, and so the second derivative of abs, hands on a tensor of zeros that has no address."""
    x = draw(3, 20).requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x).sgn().sum(), x)
    assert dx.shape == x.shape and (dx == 0).all()
    nothing = torch._efficientzerotensor((3, 20), device=DEVICE)
    assert torch.allclose(softmax(nothing), torch.full((3, 20), 1 / 20, device=DEVICE))
