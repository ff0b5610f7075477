"""Week 5's quantised weights and their product with a few rows: packing, rounding, both kernels, what is moved."""

import dataclasses
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import triton
from common import (
    DEVICE,
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

from shared import memory
from shared.cells import load
from shared.checks import difference, poisoned
from shared.compiled import compile_many

week = load("week05")
QuantisedWeight, quantise, quantised_linear = week.QuantisedWeight, week.quantise, week.quantised_linear
HALF, BRAIN, FULL, NAN, INF = torch.float16, torch.bfloat16, torch.float32, math.nan, math.inf
EVERY, HALVES = (HALF, BRAIN, FULL), (HALF, BRAIN)
MODES = {"8 bits": (8, True), "4 bits": (4, True), "4 bits, zero points": (4, False)}
every_mode = pytest.mark.parametrize("bits, symmetric", MODES.values(), ids=MODES)
every_dtype = pytest.mark.parametrize("dtype", EVERY, ids=str)
half_dtypes = pytest.mark.parametrize("dtype", HALVES, ids=str)
pytestmark = quiet


# --- the layout, once more, in plain Python --------------------------------------------------------------------------


def pack_slowly(rows, bits):
    """Lists of codes as lists of signed 16-bit words: eights of rows, steps of columns, rows, words."""
    width, empty = 128 // bits, 2 ** (bits - 1)
    n_steps, eights = -(-len(rows[0]) // (4 * width)), -(-len(rows) // 8)
    words = [[[[0] * 32 for _ in range(8)] for _ in range(n_steps)] for _ in range(eights)]
    for row in range(8 * eights):
        codes = rows[row] if row < len(rows) else []
        codes = codes + [empty] * (4 * width * n_steps - len(codes))
        for column, code in enumerate(codes):
            chunk, inside = divmod(column, width)
            place, r = divmod(inside, 8)
            words[row // 8][chunk // 4][row % 8][chunk % 4 * 8 + r] += code << bits * place
    signed = lambda word: word - 2**16 if word >= 2**15 else word
    return [[[[signed(word) for word in row] for row in step] for step in eight] for eight in words]


def codes_of(qweight):
    """The codes of a quantised weight, one by one."""
    width, words, rows = 128 // qweight.bits, qweight.codes.tolist(), []
    for number in range(qweight.shape[0]):
        row = []
        for column in range(qweight.shape[1]):
            chunk, inside = divmod(column, width)
            word = words[number // 8][chunk // 4][number % 8][chunk % 4 * 8 + inside % 8] % 2**16
            row.append(word >> qweight.bits * (inside // 8) & 2**qweight.bits - 1)
        rows.append(row)
    return torch.tensor(rows, device=DEVICE).view(qweight.shape)


def by_columns(values, qweight):
    """Scales or zeros, one for each column."""
    group = torch.arange(qweight.shape[1], device=values.device) // qweight.group_size
    return values[:, group].double()


def by_hand(codes, bits, group_size, dtype=HALF, zeros=False):
    """A quantised weight of the given codes; scales are powers of two, zeros any."""
    (n_rows, n_cols), n_groups = codes.shape, -(-codes.shape[1] // group_size)
    words = torch.tensor(pack_slowly(codes.tolist(), bits), dtype=torch.int16, device=DEVICE)
    scales = (2.0 ** torch.randint(-3, 3, (n_rows, n_groups), device=DEVICE)).to(dtype)
    zeros = torch.randint(16, scales.shape, dtype=torch.uint8, device=DEVICE) if zeros else None
    return QuantisedWeight(words, scales, zeros, (n_rows, n_cols), bits, group_size)


def exact(qweight):
    """The weights by the definition, in float64."""
    zeros = 2 ** (qweight.bits - 1) if qweight.zeros is None else by_columns(qweight.zeros, qweight)
    return by_columns(qweight.scales, qweight) * (codes_of(qweight) - zeros)


@pytest.mark.parametrize("n_cols", [1, 8, 31, 32, 67, 300])
def test_codes_lie_where_the_layout_says(n_cols):
    """Whole numbers with a scale of one, so that their codes are known."""
    for bits, low, high in ((8, -127, 127), (4, -7, 7)):
        weight = torch.randint(low, high + 1, (6, n_cols), device=DEVICE)
        weight[:, 0] = torch.tensor([low, high] * 3, device=DEVICE)
        qweight = quantise(weight.to(HALF), bits, 1000)
        assert (qweight.scales == 1).all()
        assert qweight.codes.dtype == torch.int16 and qweight.codes.is_contiguous()
        assert qweight.codes.tolist() == pack_slowly((weight + high + 1).tolist(), bits)
        assert torch.equal(codes_of(qweight), weight + high + 1)
        assert torch.equal(qweight.dequantise(), weight.to(HALF))


def test_every_zero_point():
    """Also 0 and 15, of groups without a negative, without a positive number."""
    for dtype in EVERY:
        weight = (torch.arange(16) - torch.arange(16)[:, None]).to(DEVICE, dtype)  # row z: -z to 15 - z
        qweight = quantise(weight, 4, 16, symmetric=False)
        assert qweight.zeros.dtype == torch.uint8 and qweight.zeros[:, 0].tolist() == list(range(16))
        assert codes_of(qweight).tolist() == [list(range(16))] * 16
        torch.testing.assert_close(qweight.dequantise(), weight, rtol=0.01 if dtype == BRAIN else 2e-3, atol=0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_comes_back(bits, zeros):
    """Those of signed words too, and 0, which `quantise` makes only with zero points."""
    codes = torch.arange(7 * 75, device=DEVICE).view(7, 75) % 2**bits
    codes[0], codes[1] = 0, 2**bits - 1
    qweight = by_hand(codes, bits, 20, zeros=zeros)
    assert torch.equal(codes_of(qweight), codes)
    for dtype in (None, FULL, torch.float64):
        assert torch.equal(qweight.dequantise(dtype), exact(qweight).to(dtype or HALF))


# --- rounding --------------------------------------------------------------------------------------------------------


def check_rounding(weight, bits, group_size, symmetric):
    """Every weight within half a scale, zeros exactly, and the scales no larger than they need be."""
    (n_rows, n_cols), kept = weight.shape, weight.clone()
    qweight = quantise(weight, bits, group_size, symmetric=symmetric)
    assert torch.equal(weight, kept)
    groups = [(start, min(start + group_size, n_cols)) for start in range(0, n_cols, group_size)]
    assert qweight.shape == (n_rows, n_cols) and qweight.bits == bits and qweight.group_size == group_size
    assert qweight.scales.dtype == weight.dtype and qweight.scales.shape == (n_rows, len(groups))
    assert symmetric == (qweight.zeros is None)
    codes, wanted, steps = codes_of(qweight), weight.double(), by_columns(qweight.scales, qweight)
    assert codes.min() >= symmetric and (symmetric or qweight.zeros.max() <= 15)
    found = qweight.dequantise(torch.float64)
    largest = torch.finfo(weight.dtype).max  # whether it is kept below that in float64 too is left open
    assert torch.allclose(found.clamp(-largest, largest), exact(qweight).clamp(-largest, largest), rtol=1e-6, atol=0)
    assert ((found - wanted).abs() <= steps / 2 * (1 + 1e-4)).all()
    assert (found[wanted == 0] == 0).all() and qweight.dequantise().isfinite().all()
    for number, (start, end) in enumerate(groups):
        low, high = wanted[:, start:end].amin(1).clamp(max=0), wanted[:, start:end].amax(1).clamp(min=0)
        needed = torch.maximum(-low, high) / (2 ** (bits - 1) - 1) if symmetric else (high - low) / 15
        kind = torch.finfo(weight.dtype)
        assert (qweight.scales[:, number].double() <= 1.01 * needed + kind.smallest_normal * kind.eps).all()
    return qweight


@every_mode
@every_dtype
@pytest.mark.parametrize("group_size", [128, 32, 7, 100, 1, 5000])
def test_no_weight_moves_by_more_than_half_a_scale(group_size, dtype, bits, symmetric):
    """The last group is shorter, or a group is wider than the row."""
    weight = draw(5, 300, dtype=dtype)
    weight[0] = 0
    weight[1] = weight[1].abs() + 1  # 0 is covered all the same
    weight[2] = -weight[2].abs() - 1
    weight[3, 17] = 3e4
    weight[4] = 0.7
    check_rounding(weight, bits, group_size, symmetric)


@every_mode
@every_dtype
def test_a_group_of_zeros_comes_back_as_zeros(dtype, bits, symmetric):
    weight = draw(3, 96, dtype=dtype)
    weight[:, 32:64] = 0
    for group_size in (32, 96):
        found = quantise(weight, bits, group_size, symmetric=symmetric).dequantise()
        assert (found[:, 32:64] == 0).all() and found[:, :32].any()
    x = draw(2, 96, dtype=HALF)
    y = quantised_linear(x, quantise(torch.zeros(40, 96, device=DEVICE), bits, 32, symmetric=symmetric))
    assert (y == 0).all()


@every_mode
@pytest.mark.parametrize("value", [-0.3, 0.3])
def test_equal_weights_stay_equal(value, bits, symmetric):
    qweight = check_rounding(torch.full((3, 100), value, device=DEVICE), bits, 32, symmetric)
    found = qweight.dequantise()
    assert (found == found[0, 0]).all() and abs(found[0, 0] - value) < 1e-6


@every_mode
@every_dtype
def test_numbers_below_the_smallest_normal_one(dtype, bits, symmetric):
    kind = torch.finfo(dtype)
    step = kind.smallest_normal * kind.eps
    steps = torch.tensor([[1, 0, 0, 0], [190, 1, -190, 95], [1, 2, 3, -100], [10, -9, 8, 5], [-23, -22, -11, -1]])
    weight = (steps.double() * step).to(DEVICE, dtype)
    check_rounding(weight, bits, 4, symmetric)
    check_rounding(draw(4, 50, dtype=torch.float64, scale=kind.smallest_normal).to(dtype), bits, 50, symmetric)


@every_mode
@every_dtype
def test_the_largest_numbers(dtype, bits, symmetric):
    """A scale that is rounded up times the last code must not be infinite."""
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[1, -1, 0, 0.5], [1, 0, 0.1, 0.9], [-1, 0, -0.1, -0.9]]).double() * largest
    check_rounding(weight.to(DEVICE, dtype), bits, 4, symmetric)


@every_mode
def test_any_strides_and_no_graph(bits, symmetric):
    weight = draw(40, 70)
    wanted = quantise(weight, bits, 32, symmetric=symmetric)
    same = {
        "transposed": weight.T.contiguous().T,
        "every second": torch.stack([weight, weight], 2).flatten(1)[:, ::2],
        "negated": torch._neg_view(-weight),
        "learns": weight.clone().requires_grad_(),
    }
    for name, other in same.items():
        found = quantise(other, bits, 32, symmetric=symmetric)
        for one, two in ((found.codes, wanted.codes), (found.scales, wanted.scales), (found.zeros, wanted.zeros)):
            assert (one is None and two is None) or (torch.equal(one, two) and not one.requires_grad), name
    expanded = quantise(weight[:1].expand(5, 70), bits, 32, symmetric=symmetric)
    assert torch.equal(codes_of(expanded), codes_of(wanted)[:1].expand(5, -1))
    assert not quantise(torch._efficientzerotensor((3, 4), device=DEVICE), bits).dequantise().any()


def test_bytes():
    for bits, symmetric in MODES.values():
        qweight = quantise(draw(16, 256, dtype=HALF), bits, 64, symmetric=symmetric)
        assert qweight.nbytes == 16 * 256 * bits // 8 + 16 * 4 * (2 + (not symmetric))


@every_mode
def test_a_group_of_the_whole_row_however_long_the_row(bits, symmetric):
    weight, x = draw(3, 40), draw(2, 40, dtype=HALF)
    wanted = quantise(weight, bits, 40, symmetric=symmetric)
    for group_size in (41, 10**15):
        found = quantise(weight, bits, group_size, symmetric=symmetric)
        assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scales, wanted.scales)
        assert torch.equal(quantised_linear(x, found), quantised_linear(x, wanted))
        assert torch.equal(found.dequantise(), wanted.dequantise())


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (0, 0)])
@every_mode
def test_no_rows_or_no_columns(shape, bits, symmetric):
    qweight = quantise(torch.zeros(shape, device=DEVICE), bits, symmetric=symmetric)
    assert qweight.shape == shape and qweight.dequantise().shape == shape
    x, bias = draw(2, shape[1], dtype=HALF), draw(shape[0], dtype=HALF)
    assert torch.equal(quantised_linear(x, qweight, bias), bias.expand(2, shape[0]))
    assert torch.equal(quantised_linear(x, qweight), torch.zeros(2, shape[0], dtype=HALF, device=DEVICE))


W = torch.zeros(3, 4, device=DEVICE)
UNQUANTISABLE = {
    "no tensor": (([[1.0]], 8), {}, TypeError, "weight must be a torch.Tensor, got list"),
    "integers": ((W.long(), 8), {}, TypeError, "weight has dtype torch.int64"),
    "float64": ((W.double(), 8), {}, TypeError, "weight has dtype torch.float64.*float16"),
    "1-D": ((W[0], 8), {}, ValueError, "weight has 1 dim"),
    "3-D": ((W[None], 8), {}, ValueError, "weight has 3 dim"),
    "NaN": ((torch.full_like(W, NAN), 8), {}, ValueError, "weight has .*NaN"),
    "infinite": ((W - INF, 4), {}, ValueError, "weight has infinite"),
    "elsewhere": ((W.to("meta"), 4), {}, ValueError, "weight is on meta"),
    "sparse": ((W.to_sparse(), 4), {}, ValueError, "weight has layout torch.sparse"),
    "3 bits": ((W, 3), {}, ValueError, "bits is 3; taken: 4 or 8"),
    "a truth of bits": ((W, True), {}, TypeError, "bits must be an int, got True"),
    "words": ((W, "4"), {}, TypeError, "bits must be an int, got '4'"),
    "no group": ((W, 4, 0), {}, ValueError, "group_size is 0"),
    "too many columns": ((torch.zeros((), device=DEVICE).expand(1, 2**27), 4), {}, ValueError, "134217728 columns"),
    "less than a group": ((W, 4, -1), {}, ValueError, "group_size is -1"),
    "a group of a truth": ((W, 4, True), {}, TypeError, "group_size must be an int, got True"),
    "a group and a half": ((W, 4, 1.5), {}, TypeError, "group_size must be an int, got 1.5"),
    "neither": ((W, 4), {"symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
    "nothing": ((W, 4), {"symmetric": None}, TypeError, "symmetric must be True or False, got None"),
    "8 bits with zero points": ((W, 8), {"symmetric": False}, ValueError, "symmetric is False.*8 bits"),
}


@pytest.mark.parametrize("name", UNQUANTISABLE)
def test_what_cannot_be_quantised_is_refused_in_words(name):
    arguments, options, error, says = UNQUANTISABLE[name]
    with pytest.raises(error, match=says):
        quantise(*arguments, **options)


# --- the product -----------------------------------------------------------------------------------------------------


def agrees(got, x, qweight, bias=None):
    """Against the dequantised weight in float64; results that cancel are known as well as their terms add up."""
    weight, x = qweight.dequantise(torch.float64), x.double()
    want, terms = x @ weight.T, (x.square() @ weight.T.square()).sqrt()
    want = want if bias is None else want + bias.double()
    terms = terms.max().item() if terms.numel() else 0.0
    _, reason = difference(got, want, got.dtype, max(qweight.shape[1], 1), terms=terms if math.isfinite(terms) else 0.0)
    assert not reason, reason


def problem(M, N, K, bits=4, group_size=128, symmetric=True, bias=False, dtype=HALF, scales=None):
    qweight = quantise(draw(N, K, dtype=scales or dtype), bits, group_size, symmetric=symmetric)
    return draw(M, K, dtype=dtype), qweight, draw(N, dtype=dtype) if bias else None


def by(use_dot, x, qweight, bias=None, split=None):
    """The product by one of the two kernels, with so many pieces of the rows if told."""
    planned = week.plan(x, qweight, use_dot=use_dot)
    kernel, grid, *others = planned
    assert kernel is (week.dot_kernel if use_dot else week.gemv_kernel)
    with poisoned():
        return week.launch(x, qweight, bias, (kernel, (*grid[:-1], split or grid[-1]), *others))


SHAPES = {  # M, N, K, group size, bias
    "one of everything": (1, 1, 1, 128, True),
    "one weight a row": (3, 130, 1, 128, False),
    "one row": (2, 1, 1000, 128, True),
    "31 of 31": (16, 31, 31, 32, False),
    "130 of 130": (3, 130, 130, 64, True),
    "a long row": (1, 31, 4096, 128, False),
    "a long row, few rows": (4, 70, 4100, 128, True),
    "a group a row": (5, 65, 300, 10_000, False),
    "groups of 32": (2, 40, 500, 32, True),
    "groups of 100": (2, 40, 510, 100, False),
    "groups of 7": (1, 65, 130, 7, True),
    "groups of 16": (9, 20, 70, 16, False),
    "groups of 1": (2, 20, 70, 1, True),
}


@pytest.mark.versions
@every_mode
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", HALVES[: 1 + (DEVICE == "cuda")], ids=str)
def test_as_the_dequantised_product(name, bits, symmetric, dtype):
    M, N, K, group_size, has_bias = SHAPES[name]
    inputs = problem(M, N, K, bits, group_size, symmetric, has_bias, dtype)
    kept = [t.clone() for t in (inputs[0], inputs[1].codes, inputs[1].scales)]
    with poisoned():
        agrees(quantised_linear(*inputs), *inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, (inputs[0], inputs[1].codes, inputs[1].scales), strict=True))


@pytest.mark.versions
@pytest.mark.parametrize("M", range(1, 17))
def test_any_number_of_rows_by_either_kernel(M):
    bits, symmetric = list(MODES.values())[M % 3]
    x, qweight, bias = problem(M, 37, 270, bits, (32, 64, 128)[M % 3], symmetric, bias=True)
    for use_dot in (False, True):
        agrees(by(use_dot, x, qweight, bias), x, qweight, bias)


@pytest.mark.parametrize("group_size", [48, 80, 96, 160, 640])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_are_no_power_of_two(bits, group_size):
    for M in (2, 9):
        x, qweight, _ = problem(M, 20, group_size + 50, bits, group_size, symmetric=bits == 8)
        agrees(quantised_linear(x, qweight), x, qweight)


@on_cpu
@every_mode
@pytest.mark.parametrize("use_dot", [False, True])
def test_sums_in_float32(use_dot, bits, symmetric):
    """Rows of x in float32 leave nothing to hide behind; rows cut into one piece, two, and one a step."""
    x, qweight, bias = problem(2, 50, 1100, bits, 128, symmetric, bias=True, dtype=FULL)
    for split, given in ((1, bias), (2, None)):
        agrees(by(use_dot, x, qweight, given, split), x, qweight, given)


@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("split", [1, 3, 15])
def test_rows_in_pieces(split, use_dot):
    """More pieces than steps, too: then some are empty."""
    x, qweight, bias = problem(2, 40, 2500, 8, 64, bias=True)
    planned = week.plan(x, qweight, use_dot=use_dot)
    assert planned[1][-1] > 1
    agrees(by(use_dot, x, qweight, bias, split), x, qweight, bias)


@pytest.mark.versions
@pytest.mark.parametrize("dtype", HALVES[: 1 + (DEVICE == "cuda")], ids=str)
@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_in_every_column(bits, zeros, use_dot, dtype):
    """Sixteen ones in otherwise empty rows pick sixteen columns, exactly."""
    codes = torch.arange(33 * 32, device=DEVICE).view(33, 32) * 7 % 2**bits
    qweight = by_hand(codes, bits, 32, dtype, zeros)
    for start in (0, 16):
        x = torch.zeros(16, 32, dtype=dtype, device=DEVICE)
        x[:, start : start + 16].fill_diagonal_(1)
        assert torch.equal(by(use_dot, x, qweight).double(), exact(qweight)[:, start : start + 16].T)


@every_mode
def test_within_the_step_of_the_full_product(bits, symmetric):
    """What quantising costs: at most half a scale for every weight, and nothing beside it."""
    weight = draw(60, 700, dtype=HALF)
    for group_size in (100, 128):
        qweight = quantise(weight, bits, group_size, symmetric=symmetric)
        steps = by_columns(qweight.scales, qweight)
        for M in (1, 2):
            x = draw(M, 700, dtype=HALF)
            error = (quantised_linear(x, qweight).double() - x.double() @ weight.double().T).abs()
            bound = x.double().abs() @ steps.T / 2
            assert (error <= 1.001 * bound + 0.1).all()
            assert error.norm() < bound.norm() / 4  # errors of both signs
            assert error.norm() > bound.norm() / 1000


@half_dtypes
@pytest.mark.parametrize("scales", EVERY, ids=str)
def test_scales_of_another_dtype(scales, dtype):
    for M, group_size in ((1, 32), (2, 32), (2, 7)):
        x, qweight, bias = problem(M, 40, 130, 4, group_size, False, True, dtype, scales)
        assert qweight.scales.dtype == scales
        got = quantised_linear(x, qweight, bias)
        assert got.dtype == dtype
        agrees(got, x, qweight, bias)


@half_dtypes
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,), (2, 0, 3), (1, 2, 1, 4)], ids=str)
def test_leading_dimensions(lead, dtype):
    x, (_, qweight, bias) = draw(*lead, 70, dtype=dtype), problem(1, 20, 70, bias=True, dtype=dtype)
    got = quantised_linear(x, qweight, bias)
    assert got.shape == (*lead, 20) and got.dtype == dtype
    agrees(got.view(-1, 20), x.reshape(-1, 70), qweight, bias)


ARRIVES = {
    "transposed": lambda d: d(70, 3).T,
    "every second column": lambda d: d(3, 140)[:, ::2],
    "every second row": lambda d: d(6, 70)[::2],
    "a row, repeated": lambda d: d(70).expand(3, 70),
    "a number, repeated": lambda d: d(1).expand(3, 70),
    "part of a row": lambda d: d(3, 71)[:, 1:],
    "starts off the 16-byte grid": lambda d: d(211)[1:].view(3, 70),
    "dimensions swapped": lambda d: d(2, 3, 70).transpose(0, 1),
    "negated": lambda d: torch._neg_view(d(3, 70)),
    "zeros without memory": lambda d: torch._efficientzerotensor((3, 70), dtype=HALF, device=DEVICE),
}


@pytest.mark.parametrize("name", ARRIVES)
def test_any_strides_of_x(name):
    x = ARRIVES[name](lambda *shape: draw(*shape, dtype=HALF))
    kept = x.clone()
    for group_size in (32, 7):
        _, qweight, _ = problem(1, 20, 70, 4, group_size)
        agrees(quantised_linear(x, qweight).view(-1, 20), x.reshape(-1, 70), qweight)
    assert torch.equal(x, kept)


def test_any_strides_of_the_bias():
    x, qweight, _ = problem(2, 20, 70)
    for bias in (draw(40, dtype=HALF)[::2], draw(1, dtype=HALF).expand(20), torch._neg_view(draw(20, dtype=HALF))):
        agrees(quantised_linear(x, qweight, bias), x, qweight, bias)


@every_mode
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_infinity_and_nan_come_through(value, bits, symmetric):
    """Infinite or NaN as the dequantised product, and only in their own row."""
    for M in (1, 3):
        x, qweight, _ = problem(M, 70, 200, bits, 64, symmetric=symmetric)
        x[0, 150] = value
        got, want = quantised_linear(x, qweight), F.linear(x.double(), qweight.dequantise(torch.float64))
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got.isposinf(), want.isposinf())
        assert got[1:].isfinite().all()


def test_a_result_that_is_too_large_is_infinite():
    x, qweight, _ = problem(2, 20, 70)
    x = x.clamp(-3, 3) * 20_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = quantised_linear(x, qweight)
    want = F.linear(x.double(), qweight.dequantise(torch.float64))
    assert got.isinf().any() and torch.equal(got.isinf(), want.to(HALF).isinf()) and not got.isnan().any()


@pytest.mark.parametrize("use_dot", [False, True])
def test_nothing_is_read_or_written_outside(use_dot):
    """Codes, scales and rows that end inside a tile have NaN, or the largest codes, behind them."""
    x, qweight, _ = problem(3, 33, 100, 4, 32, False)

    def inside(t, mark):
        around = torch.full((t.numel() + 4096,), mark, dtype=t.dtype, device=t.device)
        around[2048 : 2048 + t.numel()] = t.flatten()
        return around[2048 : 2048 + t.numel()].view(t.shape)

    codes, scales, zeros = inside(qweight.codes, -1), inside(qweight.scales, NAN), inside(qweight.zeros, 255)
    same = QuantisedWeight(codes, scales, zeros, qweight.shape, qweight.bits, qweight.group_size)
    assert torch.equal(by(use_dot, inside(x, NAN), same), by(use_dot, x, qweight))


def test_the_same_bits_every_time():
    for M in (1, 3):
        x, qweight, bias = problem(M, 40, 1500, 4, 128, False, True)
        assert torch.equal(quantised_linear(x, qweight, bias), quantised_linear(x, qweight, bias))


def test_no_gradient_is_wanted_or_given():
    x, qweight, bias = problem(2, 20, 70, bias=True)
    wanted = quantised_linear(x, qweight, bias)
    x.requires_grad_(), bias.requires_grad_()
    for name, arguments in {"x": (x, qweight, bias.detach()), "bias": (x.detach(), qweight, bias)}.items():
        with pytest.raises(ValueError, match=rf"{name} requires a gradient.*no_grad"):
            quantised_linear(*arguments)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = quantised_linear(x, qweight, bias)
        assert torch.equal(got, wanted) and not got.requires_grad


@half_dtypes
def test_under_autocast(dtype):
    x, qweight, bias = problem(2, 20, 70, bias=True, dtype=FULL)
    with torch.autocast(DEVICE, dtype):
        got = quantised_linear(x, qweight, bias)
        other = quantised_linear(x.to(HALF), qweight)
        with pytest.raises(TypeError, match=r"x has dtype torch\.int64"):
            quantised_linear(x.long(), qweight)
    assert got.dtype == other.dtype == dtype
    agrees(got, x.to(dtype), qweight, bias.to(dtype))


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    step = lambda x, qweight, bias: quantised_linear(x * 2, qweight, bias) + 1
    inputs = problem(2, 20, 70, bias=True)
    with torch.no_grad():
        assert torch.equal(torch.compile(step, backend="eager")(*inputs), step(*inputs))


# --- wrong requests --------------------------------------------------------------------------------------------------

X, B = torch.zeros(2, 40, dtype=HALF, device=DEVICE), torch.zeros(3, dtype=HALF, device=DEVICE)
QW = quantise(torch.ones(3, 40, device=DEVICE), 4)
AWAY = QuantisedWeight(QW.codes.to("meta"), QW.scales.to("meta"), None, QW.shape, QW.bits, QW.group_size)
WRONG = {
    "no tensor": (([1.0], QW), TypeError, "x must be a torch.Tensor, got list"),
    "float32": ((X.float(), QW), TypeError, "x has dtype torch.float32.*float16, torch.bfloat16"),
    "integers": ((X.long(), QW), TypeError, "x has dtype torch.int64"),
    "0-d": ((X[0, 0], QW), ValueError, r"x has shape \(\).*40"),
    "other columns": ((X[:, :39], QW), ValueError, r"x has shape \(2, 39\).*\(\.\.\., 40\).*3 x 40"),
    "17 rows": ((X[:1].expand(17, 40), QW), ValueError, r"x has 17 rows.*1 to 16.*F\.linear.*dequantise"),
    "18 rows in texts": ((X[:1].expand(3, 6, 40), QW), ValueError, "x has 18 rows"),
    "elsewhere": ((X.to("meta"), QW), ValueError, "x is on meta"),
    "sparse": ((X.to_sparse(), QW), ValueError, "x has layout torch.sparse"),
    "a plain weight": ((X, torch.zeros(3, 40)), TypeError, "qweight must be a QuantisedWeight.*Tensor"),
    "no weight": ((X, None), TypeError, "qweight must be a QuantisedWeight.*NoneType"),
    "a weight elsewhere": ((X, AWAY), ValueError, "qweight is on meta.*as x"),
    "no bias": ((X, QW, 1.0), TypeError, "bias must be a torch.Tensor, got float"),
    "a short bias": ((X, QW, B[:2]), ValueError, "bias has 2 elements; taken: 3"),
    "a matrix of biases": ((X, QW, B[None]), ValueError, "bias has 2 dim"),
    "a bias of float32": ((X, QW, B.float()), TypeError, "bias has dtype torch.float32"),
    "a bias of another half": ((X, QW, B.bfloat16()), TypeError, "bias has dtype torch.bfloat16.*float16, as x"),
    "a bias elsewhere": ((X, QW, B.to("meta")), ValueError, "bias is on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_in_words(monkeypatch, name):
    arguments, error, says = WRONG[name]
    monkeypatch.setattr(week, "launch", lambda *args: pytest.fail("launched"))
    with pytest.raises(error, match=says):
        quantised_linear(*arguments)


# --- the plan --------------------------------------------------------------------------------------------------------


def unreal(N, K, bits, group_size=128, zeros=False, dtype=HALF):
    """A quantised weight without memory."""
    empty = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device="meta")
    groups = -(-K // group_size)
    given = empty(N, groups, dtype=torch.uint8) if zeros else None
    words = empty(-(-N // 8), -(-K * bits // 512), 8, 32, dtype=torch.int16)
    return QuantisedWeight(words, empty(N, groups, dtype=dtype), given, (N, K), bits, group_size)


def on_a(capability, patch):
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_a_plan_has_sizes_that_kernels_take():
    """Powers of two, tensor cores' smallest tiles, groups that fill steps or steps that fill groups, all columns."""
    groups, wrong = (1, 7, 16, 32, 48, 64, 96, 100, 128, 160, 256, 512, 1536, 10**9), []
    shapes = itertools.product(range(1, 17), (1, 4096, 128_256), (1, 100, 4096, 14_336))
    with as_on_a_gpu(week) as patch:
        on_a((9, 0), patch)
        for (M, N, K), bits, group_size in itertools.product(shapes, (4, 8), groups):
            x, qweight = torch.empty(M, K, dtype=HALF, device="meta"), unreal(N, K, bits, group_size)
            kernel, grid, group, sizes, options = week.plan(x, qweight)
            width, step = 128 // bits, 512 // bits
            good = group == group_size or group_size >= K <= group
            good &= 1 <= grid[-1] <= min(-(-K // step), 65535)
            powers = [size for name, size in (sizes | options).items() if name not in ("EVEN", "SHARED")]
            if kernel is week.dot_kernel:
                groups, across = sizes["GROUPS"], sizes["GROUPS"] * sizes["ROWS"]
                good &= sizes["ROWS"] >= M and 8 <= across <= 64 and sizes["EVEN"] == (K % step == 0)
                good &= group % width == 0 and (step == groups * group or (groups == 1 and group % step == 0))
                good &= grid[0] * sizes["BLOCK_N"] >= N and sizes["BLOCK_N"] >= 16
            else:
                good &= grid[1] == M and sizes["SHARED"] == (group % width == 0)
                good &= grid[0] * sizes["BLOCK_E"] * 8 >= N
            good &= all(size == triton.next_power_of_2(size) for size in powers)
            if not good:
                wrong.append(f"M {M}, N {N}, K {K}, {bits} bits, groups of {group_size}: {grid} {sizes} {options}")
    assert not wrong, f"{len(wrong)}, as\n" + "\n".join(wrong[:5])


def test_which_kernel():
    """One row of bfloat16 on a T4 has no tensor cores to go to, nor have groups that cut a chunk."""
    for capability, dtype, M, N, bits, group_size, wanted in (
        ((9, 0), BRAIN, 1, 4096, 8, 128, week.gemv_kernel),
        ((9, 0), BRAIN, 1, 4096, 4, 128, week.gemv_kernel),
        ((9, 0), BRAIN, 1, 128_256, 4, 128, week.dot_kernel),
        ((9, 0), BRAIN, 2, 4096, 8, 128, week.dot_kernel),
        ((9, 0), BRAIN, 16, 4096, 4, 7, week.gemv_kernel),
        ((7, 5), HALF, 2, 4096, 4, 128, week.dot_kernel),
        ((7, 5), BRAIN, 2, 4096, 4, 128, week.gemv_kernel),
    ):
        with as_on_a_gpu(week) as patch:
            on_a(capability, patch)
            x, qweight = torch.empty(M, 4096, dtype=dtype, device="meta"), unreal(N, 4096, bits, group_size)
            assert week.plan(x, qweight)[0] is wanted, (capability, dtype, M, N, bits, group_size)


def test_a_forward_mode_tangent_is_not_lost():
    x, qweight, bias = problem(2, 20, 70, bias=True)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(ValueError, match="x carries a forward-mode tangent"):
            quantised_linear(torch.autograd.forward_ad.make_dual(x, x), qweight)
        with pytest.raises(ValueError, match="bias carries a forward-mode tangent"):
            quantised_linear(x, qweight, torch.autograd.forward_ad.make_dual(bias, bias))


@pytest.mark.parametrize("name", ["codes", "scales", "zeros"])
def test_a_weight_put_together_anew_is_looked_at(name):
    x, qweight, _ = problem(1, 24, 300, 4, 32, symmetric=False)
    part = getattr(qweight, name)
    turned = part.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=f"qweight has {name} with strides"):
        quantised_linear(x, dataclasses.replace(qweight, **{name: turned}))
    with pytest.raises(ValueError, match=rf"qweight is on meta \({name}\)"):
        quantised_linear(x, dataclasses.replace(qweight, **{name: part.to("meta")}))


# --- what is moved ---------------------------------------------------------------------------------------------------


@on_cpu
@every_mode
def test_no_dequantised_weight_is_written(bits, symmetric):
    for M in (1, 4):
        x, qweight, bias = problem(M, 64, 4096, bits, 64, symmetric, bias=True)
        assert memory.peak_bytes(quantised_linear, x, qweight, bias) < qweight.codes.nbytes / 2


@on_cpu
@every_mode
def test_bytes_moved(bits, symmetric):
    """The codes once for all rows of x, or once for each; a scale each step, or each chunk, a zero each chunk."""
    N, K, M = 128, 512, 2
    x, qweight, bias = problem(M, N, K, bits, 128, symmetric, bias=True)
    chunks = N * K * bits // 128
    for use_dot, times in ((True, 1), (False, M)):
        beside = 2 * (chunks // 4 if use_dot else chunks) + (0 if symmetric else chunks)
        kernel, grid, *others = week.plan(x, qweight, use_dot=use_dot)
        moved = memory.traffic(week.launch, x, qweight, bias, (kernel, (*grid[:-1], 1), *others))
        weights = times * (qweight.codes.nbytes + bias.nbytes + beside)
        each, rest = divmod(moved.read - weights, grid[0] * x.nbytes)  # in a program, eight rows ask for x at most
        assert rest == 0 and 1 <= each <= (1 if use_dot else 8) and moved.written == M * N * 2


# --- offsets past 2^31 -----------------------------------------------------------------------------------------------


def _far_down():
    """Both kernels at rows 2^26 and on of a matrix of 2^30 rows, of 32 words each, in memory hardly touched."""
    from triton.runtime.interpreter import InterpreterBuilder

    N, M, first, width = 2**30, 3, 2**26, 64
    program_id = InterpreterBuilder.create_get_program_id

    def later(self, axis):
        found = program_id(self, axis)
        if axis == 0:
            found.data = found.data + first // width
        return found

    few, x = quantise(draw(width, 64, dtype=HALF), 8, 16), draw(M, 64, dtype=HALF)
    codes, scales = torch.empty(2**31 + 2**12, dtype=torch.int16), torch.empty(2**28 + 2**12, dtype=HALF)
    codes[first * 32 : (first + width) * 32] = few.codes.flatten()
    scales[first * 4 : (first + width) * 4] = few.scales.flatten()
    InterpreterBuilder.create_get_program_id = later
    for kernel in (week.gemv_kernel, week.dot_kernel):
        out = torch.empty(2**31 + 2**28, dtype=HALF)
        given = (x, codes, scales, None, None, out)
        if kernel is week.gemv_kernel:
            kernel[(1, M, 1)](*given, N, 64, 1, 4, 16, BITS=8, SHARED=True, BLOCK_E=8, BLOCK_S=1)
        else:
            kernel[(1, 1)](*given, M, N, 64, 1, 4, 16, BITS=8, GROUPS=4, ROWS=4, EVEN=True, BLOCK_N=width)
        agrees(torch.stack([out[m * N + first : m * N + first + width] for m in range(M)]), x, few)
        del out
    InterpreterBuilder.create_get_program_id = program_id
    del codes, scales
    total, parts, out = 2**30 + 64, torch.empty(2**31 + 2**12, dtype=HALF), torch.empty(64, dtype=HALF)
    for part in range(3):
        parts[part * total : part * total + 64] = part + 1.0
    week.add_parts_kernel[(1,)](parts, None, out, total, total, 3, BLOCK=64)
    assert (out == 6).all()


def _far_apart():
    _far_down()
    touched_little()


def test_offsets_past_2_to_the_31():
    elsewhere(_far_apart, timeout=100, TRITON_INTERPRET="1")


# --- what the compiler makes of it -----------------------------------------------------------------------------------


def type_of(value):
    narrow = {torch.int16: "*i16:16", torch.uint8: "*u8:16"}
    return narrow.get(getattr(value, "dtype", None)) or as_type(value)


def compile_jobs():
    """What `plan` gives a GPU with 4,096 columns, in groups of 128 unless told; the code serves any number of rows."""
    done = set()
    for target, dtype, bits, zeros, M, N, *group in [
        *(("sm_75", HALF, bits, False, M, 4096) for bits, M in ((4, 1), (8, 1), (8, 16))),
        *(("sm_80", BRAIN, bits, bits == 4, M, 4096) for bits, M in ((4, 1), (8, 1), (4, 2))),
        *(("sm_90", BRAIN, bits, False, M, 4096) for bits, M in ((4, 1), (8, 1), (8, 8), (4, 16))),
        ("sm_75", HALF, 4, True, 1, 128_256), ("sm_90", HALF, 4, False, 1, 128_256),
        ("sm_75", HALF, 4, True, 12, 128_256, 64), ("sm_90", HALF, 4, True, 8, 128_256, 32),
    ]:  # fmt: skip
        launches, qweight = [], unreal(N, 4096, bits, *(group or [128]), zeros, dtype)
        x = torch.empty(M, 4096, dtype=dtype, device="meta")
        with as_on_a_gpu(week, 40 if target == "sm_75" else 132) as patch:
            on_a(divmod(int(target[3:]), 10), patch)
            for name in ("gemv_kernel", "dot_kernel", "add_parts_kernel"):
                patch.setattr(week, name, Recorder(getattr(week, name), launches))
            week.launch(x, qweight, None, week.plan(x, qweight))
        kernel, _, given, sizes = launches[0]
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages") if name in sizes}
        types = {name: type_of(value) for name, value in given.items()} | sizes
        label = f"{'dot' if 'ROWS' in sizes else 'gemv'}, {bits} bits, {M} x {N}, {dtype}"
        if (key := (target, str(types), str(options))) not in done:
            done.add(key)
            yield label, kernel, types, target, options


@pytest.mark.versions
def test_compiled_code():
    """16 bytes at a time, no spills; tensor cores in the one kernel, none in the other."""
    jobs, wrong = list(compile_jobs()), []
    assert {label.split(",")[0] for label, *_ in jobs} == {"dot", "gemv"}
    for (label, _, _, target, _), made in zip(jobs, compile_many(jobs), strict=True):
        cores = made.count("HMMA") + made.count("HGMMA")
        good = made.count("LDG") <= 2 * made.count("LDG", "128") and not made.spill_bytes
        if label.startswith("gemv"):
            good &= cores == 0 and made.shared_bytes <= 16 * 1024
        else:
            good &= cores > 0 and made.shared_bytes <= (64 if target == "sm_75" else 160) * 1024
        if not good:
            wrong.append(f"{label}: {made.summary()}")
    assert not wrong, "\n".join(wrong)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@half_dtypes
@every_mode
@pytest.mark.parametrize("N, K", [(128_256, 4096), (14_336, 4096), (4096, 14_336)])
def test_gpu_sizes_of_models(N, K, bits, symmetric, dtype):
    needs_memory(24)
    qweight = quantise(draw(N, K, dtype=dtype), bits, symmetric=symmetric)
    bias = draw(N, dtype=dtype)
    for M in (1, 5):
        x = draw(M, K, dtype=dtype)
        with poisoned():
            agrees(quantised_linear(x, qweight, bias), x, qweight, bias)


@gpu
@half_dtypes
@every_mode
def test_gpu_any_number_of_rows(bits, symmetric, dtype):
    for group_size in (128, 32, 100, 4096):
        qweight = quantise(draw(4096, 4096, dtype=dtype), bits, group_size, symmetric=symmetric)
        for M in range(1, 17):
            x = draw(M, 4096, dtype=dtype)
            for use_dot in (False, True)[: 1 + (group_size != 100)]:
                agrees(by(use_dot, x, qweight), x, qweight)


@gpu
def test_gpu_the_bits_are_the_same_every_time():
    for M in (1, 16):
        x, qweight, bias = problem(M, 4096, 4096, bias=True)
        first = quantised_linear(x, qweight, bias)
        assert all(torch.equal(quantised_linear(x, qweight, bias), first) for _ in range(5))


@gpu
def test_gpu_peak_memory():
    for M, bits in ((1, 4), (1, 8), (16, 4)):
        x, qweight, _ = problem(M, 14_336, 4096, bits)
        assert memory.peak_bytes(quantised_linear, x, qweight) < 14_336 * 4096 / 10


@gpu
@pytest.mark.parametrize("use_dot", [False, True])
def test_gpu_more_than_2_to_the_31_words(use_dot):
    needs_memory(24)
    N, few = 2**20 + 64, 64
    part = quantise(draw(few, 8192, dtype=HALF), 4)
    codes, scales = (
        torch.zeros(N * len(t) // few, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in (part.codes, part.scales)
    )
    codes[-few // 8 :], scales[-few:] = part.codes, part.scales
    assert codes.numel() > 2**31
    x = draw(2, 8192, dtype=HALF)
    got = by(use_dot, x, QuantisedWeight(codes, scales, None, (N, 8192), 4, 128))
    agrees(got[:, -few:], x, part)
    assert not got[:, :-few].any()


@gpu
def test_gpu_devices():
    x, qweight, bias = problem(2, 20, 70, bias=True)
    away = QuantisedWeight(qweight.codes.cpu(), qweight.scales.cpu(), None, qweight.shape, 4, 128)
    for arguments, says in (
        ((x.cpu(), qweight), "x is on cpu.*cuda"),
        ((x, away), "qweight is on cpu.*cuda"),
        ((x, qweight, bias.cpu()), "bias is on cpu.*cuda"),
    ):
        with pytest.raises(ValueError, match=says):
            quantised_linear(*arguments)
    with pytest.raises(ValueError, match=r"weight is on cpu.*cuda"):
        quantise(torch.zeros(2, 3), 4)
    if torch.cuda.device_count() > 1:  # and one that is not the current
        away = quantise(draw(20, 70).to("cuda:1"), 4)
        x = x.to("cuda:1")
        agrees(quantised_linear(x, away), x, away)


@gpu
def test_gpu_in_a_cuda_graph():
    for M in (1, 4):
        x, qweight, bias = problem(M, 4096, 4096, bias=True)
        quantised_linear(x, qweight, bias)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = quantised_linear(x, qweight, bias)
        for _ in range(2):
            x.normal_()
            graph.replay()
            agrees(out, x, qweight, bias)
