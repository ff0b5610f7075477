"""Kernels with `tl.dot` for the tests of the compiler, and what to ask Triton about them in a process of its own."""

import os

import triton
import triton.language as tl


@triton.jit
def pointer_matmul(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   ACCUMULATOR: tl.constexpr = tl.float32, STAGES: tl.constexpr = None):  # fmt: skip
    """c = a @ b, one tile a program, every edge masked."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACCUMULATOR)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (depth[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(depth[:, None] < K - k) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, out_dtype=ACCUMULATOR)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def two_kinds(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    """A float16 dot and a float32 dot in one kernel."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(c_ptr + at, tl.dot(a.to(tl.float32), b.to(tl.float32), tl.dot(a, b)))


def matmul_signature(kind: str = "fp16", out: str = "fp16", block: tuple = (128, 128, 32), **more) -> dict:
    """A signature of `pointer_matmul` for contiguous operands whose sizes are multiples of 16."""
    pointers = {"a_ptr": f"*{kind}:16", "b_ptr": f"*{kind}:16", "c_ptr": f"*{out}:16"}
    strides = {f"stride_{name}": "i32:16" for name in ("am", "bk", "cm")}
    strides |= {f"stride_{name}": "i32:1" for name in ("ak", "bn", "cn")}
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))
    return pointers | {"M": "i32:16", "N": "i32:16", "K": "i32:16"} | strides | blocks | more


class Driver:
    """As much of a GPU's driver as compiling by `kernel.warmup` needs."""

    def __init__(self, capability: int):
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        self.get_current_target = lambda: self.target
        self.get_current_device = lambda: self.target.arch  # Triton keeps what it compiled by device
        self.get_current_stream = lambda device: 0


def warm_up(kernel, capability: int, **options):
    """`pointer_matmul` in float16, as a launch on a GPU of this capability would compile and keep it."""
    import torch
    from triton.runtime.jit import MockTensor

    triton.runtime.driver.set_active(Driver(capability))
    tensor, sizes = MockTensor(torch.float16), (64,) * 3 + (64, 1) * 3
    return kernel.warmup(tensor, tensor, tensor, *sizes, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, grid=(1,), **options)


def compile_here(kernel, signature: dict, capability: int, **options) -> str:
    """PTX from this process's Triton as it is set now, or the compiler's complaint; never from the cache."""
    from shared.compiled import _specialise

    triton.knobs.compilation.always_compile = True
    source = triton.compiler.ASTSource(kernel, *_specialise(kernel, signature))
    try:
        return triton.compile(source, target=Driver(capability).target, options=options).asm["ptx"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        triton.knobs.compilation.always_compile = False


def switching(matmul) -> list[tuple]:
    """(what is on, PTX, hash, number of the compiled kernel) as the lowering is switched in one process."""
    from shared import turing

    seen, kernels = [], []

    def note(what):
        made = warm_up(matmul, 75, num_stages=4)
        if not any(made is kernel for kernel in kernels):
            kernels.append(made)
        number = next(i for i, kernel in enumerate(kernels) if made is kernel)
        seen.append((what, made.asm["ptx"], made.hash, number))

    note("stock")
    turing.enable()
    note("repaired")
    with turing.stock():
        note("stock")
    note("repaired")
    turing.disable()
    note("stock")
    matmul.device_caches.clear()  # as in another process: only the cache on disk is left
    note("stock")
    turing.enable()
    note("repaired")
    turing.disable()
    return seen


def both_ways(jobs: list[tuple]) -> list[tuple[str, str]]:
    """(stock, repaired) PTX of jobs (kernel, signature, capability, options)."""
    from shared import turing

    pairs = []
    for kernel, signature, capability, options in jobs:
        turing.disable()
        stock = compile_here(kernel, signature, capability, **options)
        turing.enable()
        pairs.append((stock, compile_here(kernel, signature, capability, **options)))
    turing.disable()
    return pairs


def with_another_hook(matmul) -> dict:
    """How the lowering gets on with a hook that was there before."""
    from shared import turing

    calls = []

    def theirs(*arguments):
        calls.append(len(arguments))
        return None if arguments else ("their key", "their hash")

    triton.knobs.runtime.add_stages_inspection_hook = theirs
    turing.enable()
    ptx = compile_here(matmul, matmul_signature(block=(64, 64, 32)), 75)
    turing.disable()
    return {"calls": calls, "ptx": ptx, "restored": triton.knobs.runtime.add_stages_inspection_hook is theirs}


def overridden(matmul) -> list[str]:
    """PTX, stock and repaired, of a GPU of capability 9.0 that is told to take itself for a T4."""
    from shared import turing

    os.environ["TRITON_OVERRIDE_ARCH"] = "sm75"
    stock = warm_up(matmul, 90).asm["ptx"]
    turing.enable()
    repaired = warm_up(matmul, 90).asm["ptx"]
    turing.disable()
    del os.environ["TRITON_OVERRIDE_ARCH"]
    return [stock, repaired]
