"""The counts of bytes on kernels and operators whose bytes are known by hand."""

import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl

from shared import memory
from shared.machine import interpreting, machine
from shared.memory import Traffic, held_bytes, peak_bytes, traffic

interpreter_only = pytest.mark.skipif(not interpreting(), reason="a GPU counts in a second process with this same code")
DEVICE = machine().device


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


@triton.jit
def atomic_add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def atomic_cas_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_cas(x_ptr + at, tl.full((BLOCK,), 0, tl.int32), tl.full((BLOCK,), 1, tl.int32))


@triton.jit
def descriptor_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [n_rows, n_cols], [n_cols, 1], [BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n_rows, n_cols], [n_cols, 1], [BLOCK, BLOCK])
    first = tl.program_id(0) * BLOCK
    y.store([first, 0], x.load([first, 0]))


def copy(x):
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


def unmasked(x):
    unmasked_kernel[(1,)](x, torch.empty_like(x), BLOCK=64)


def row_sum(x):
    y = torch.empty(len(x), device=x.device)
    row_sum_kernel[(len(x),)](x, y, x.shape[1], BLOCK=32)
    return y


def atomic_add(x):
    atomic_add_kernel[(1,)](x, torch.empty_like(x), x.numel(), BLOCK=64)


def atomic_cas(x):
    atomic_cas_kernel[(1,)](x, BLOCK=64)


def by_descriptor(x):
    y = torch.empty_like(x)
    descriptor_kernel[(triton.cdiv(len(x), 16),)](x, y, *x.shape, BLOCK=16)
    return y


def kernel_and_backward(x):
    x.detach().zero_()
    return torch.autograd.grad(x.square(), x, copy(x.detach()))


KERNELS = {  # function, input, bytes read, bytes written
    "masked copy": (copy, torch.ones(100), 400, 400),
    "half precision": (copy, torch.ones(100, dtype=torch.bfloat16), 200, 200),
    "unmasked copy": (unmasked, torch.ones(64), 256, 256),
    "row sum": (row_sum, torch.ones(7, 30, dtype=torch.float16), 420, 28),
    "atomic add": (atomic_add, torch.ones(50), 400, 200),
    "atomic compare": (atomic_cas, torch.zeros(64, dtype=torch.int32), 256, 256),
    "tensor descriptor": (by_descriptor, torch.ones(20, 12), 960, 960),
}


@interpreter_only
@pytest.mark.parametrize(("kernel", "x", "read", "written"), KERNELS.values(), ids=KERNELS)
def test_a_kernels_traffic(kernel, x, read, written):
    assert traffic(kernel, x) == Traffic(read, written)


EAGER = {  # on x of (10, 10): 400 bytes in float32. function, bytes read, bytes written
    "one operator": (torch.exp, 400, 400),
    "two operators": (lambda x: (x + 1).exp(), 800, 800),
    "two operands": (lambda x: x * x.T, 800, 400),
    "matmul": (lambda x: x @ x[:, :5], 600, 200),
    "reduction": (lambda x: x.sum(1), 400, 40),
    "conversion": (lambda x: x.half(), 400, 200),
    "views": (lambda x: (x.T, x.view(-1), x[::2].detach().unsqueeze(0), x.to(x.dtype), x.expand(3, 10, 10)), 0, 0),
    "views in place": (lambda x: x.t_().unsqueeze_(0), 0, 0),
    "a view's elements only": (lambda x: x[:, ::2] * 1, 200, 200),
    "copy of a view": (lambda x: x.T.contiguous(), 400, 400),
    "broadcast": (lambda x: x + x[:1], 440, 400),
    "expanded": (lambda x: x + x[:1].expand(10, 10), 440, 400),
    "expanded and copied": (lambda x: x[:1].expand(10, 10).clone(), 40, 400),
    "in place": (lambda x: x.add_(1), 400, 400),
    "in place, two operands": (lambda x: x.mul_(x.sum(1, keepdim=True)), 840, 440),
    "overwriting": (lambda x: (x.zero_(), x.fill_(1)), 0, 800),
    "copy_": (lambda x: x.copy_(x.T.contiguous()), 800, 800),
    "part of a tensor": (lambda x: x[:2].copy_(x[2:4]), 80, 80),
    "out=": (lambda x: torch.add(x, x.T, out=torch.empty(10, 10)), 800, 400),
    "empty": (lambda x: (torch.empty(9), torch.empty_like(x), x.new_empty(9)), 0, 0),
    "filled": (lambda x: (torch.zeros(10, 10), torch.zeros_like(x), x.new_ones(10, 10)), 0, 1200),
}


@interpreter_only
@pytest.mark.parametrize(("function", "read", "written"), EAGER.values(), ids=EAGER)
def test_eager_traffic(function, read, written):
    assert traffic(function, torch.randn(10, 10)) == Traffic(read, written)


@interpreter_only
def test_traffic_of_a_backward():
    x = torch.randn(10, 10, requires_grad=True)
    # sin reads and writes n; sum reads n; its gradient is one number, expanded; cos reads and writes n, the product
    # reads n and the one number, and writes n
    read, written = 4 * 400 + 4, 3 * 400 + 4 + 4
    assert traffic(lambda: torch.autograd.grad(x.sin().sum(), x)) == Traffic(read, written)


@interpreter_only
def test_a_gpu_counts_in_a_second_process_and_finds_the_same(monkeypatch):
    x = torch.randn(10, 10, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "interpreting", lambda: False)
        there = traffic(kernel_and_backward, x)
    assert x.count_nonzero() > 0  # the other process has a copy
    assert traffic(kernel_and_backward, x) == there


@interpreter_only
def test_counting_ends_even_when_the_function_fails():
    with pytest.raises(TypeError):
        traffic(lambda x: copy(None), torch.ones(9))
    counted = traffic(copy, torch.ones(100))
    copy(torch.ones(100))
    assert counted == Traffic(400, 400)


N = 1024  # on a GPU the allocator counts in blocks of 512 bytes
BYTES = 4 * N
PEAKS = {  # function, most tensors of x's size alive at once, above x
    "a view": (lambda x: x.view(2, -1).T, 0),
    "one operator": (lambda x: x + 1, 1),
    "three operators, two alive": (lambda x: ((x + 1) * 2).exp(), 2),
    "named and kept": (lambda x: (y := x + 1, z := y * 2, z.exp())[2], 3),
    "in place": (lambda x: (x + 1).mul_(2).exp_(), 1),
    "freed before the next": (lambda x: [(x + i).sum() for i in range(3)] and None, 1),
    "a view keeps its storage": (lambda x: [(x + 1)[:1], x + 2], 2),
    "a kernel": (copy, 1),
    "forward and backward": (lambda x: torch.autograd.grad(x.requires_grad_().exp(), x, x.detach()), 2),
}


@pytest.mark.parametrize(("function", "tensors"), PEAKS.values(), ids=PEAKS)
def test_peak(function, tensors):
    x = torch.randn(N, device=DEVICE)
    assert peak_bytes(function, x) // BYTES == tensors  # a sum's few bytes aside


class SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x + 1, x + 2)
        return x + 3

    @staticmethod
    def backward(ctx, g):
        return g


LAYER = torch.nn.Linear(N, N, device=DEVICE)
HELD = {  # function, tensors of x's size held, beside x itself
    "the output": (torch.exp, 1),
    "the input": (torch.sin, 0),
    "nothing": (lambda x: x + 1, 0),
    "two outputs": (lambda x: x.exp().exp(), 2),
    "an output that is the next one's input": (lambda x: x.exp().sin(), 1),
    "one twice": (lambda x: (y := x + 1, y * y)[1], 1),
    "two views of one": (lambda x: (y := x + 1, a := y[::2], b := y[1::2], a * b)[3], 1),
    "a view of the input": (lambda x: x.view(2, -1).sin(), 0),
    "saved by hand": (SavesAll.apply, 2),
    "a mask of bytes": (lambda x: torch.where(x > 0, x, 2 * x), 0.25),
    "parameters": (lambda x: LAYER(x).exp(), 1),
}


@pytest.mark.parametrize(("function", "tensors"), HELD.values(), ids=HELD)
def test_held(function, tensors):
    assert held_bytes(function, torch.randn(N, device=DEVICE, requires_grad=True)) == tensors * BYTES


def test_nothing_is_held_without_a_gradient():
    assert held_bytes(torch.exp, torch.randn(N, device=DEVICE)) == 0


def test_measuring_what_is_held_frees_it_again():
    def function(x):
        y = x.exp()
        seen.append(weakref.ref(y))
        return y

    seen = []
    held_bytes(function, torch.randn(N, device=DEVICE, requires_grad=True))
    gc.collect()
    assert seen[0]() is None
