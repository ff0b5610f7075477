"""The tensor cores of a T4, from compiled code: no T4 and no other GPU is needed."""

import re
import types

import numpy as np
import pytest
import triton
from dot_kernels import (
    both_ways,
    compile_here,
    matmul_signature,
    overridden,
    pointer_matmul,
    switching,
    two_kinds,
    with_another_hook,
)

from shared import lowering, turing
from shared.cells import in_subprocess
from shared.compiled import compile_many

SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
LARGE = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
STOCK_DOTS = {  # that a T4's tensor cores cannot take, or that have no reason to change
    "bf16": matmul_signature("bf16", "fp32", (32, 32, 32)),
    "tf32": matmul_signature("fp32", "fp32", (32, 32, 32)),
    "int8": matmul_signature("i8", "i32", (32, 32, 32), ACCUMULATOR=triton.language.int32),
    "fp8": matmul_signature("fp8e5", "fp32", (32, 32, 32)),
    "fp16 accumulator": matmul_signature("fp16", "fp16", (32, 32, 32), ACCUMULATOR=triton.language.float16),
}
STAGES = [({}, {"num_stages": n}) for n in range(1, 6)] + [({"STAGES": n}, {"num_stages": 2}) for n in (1, 3, 5)]


def _ask(kernels: list) -> dict:
    """All that these tests want to know from one process, since to start one takes seconds."""
    matmul, two = kernels
    other = [(matmul, matmul_signature(block=(64, 64, 32)), gpu, {}) for gpu in (80, 90)]
    stock = [(matmul, signature, 75, {}) for signature in STOCK_DOTS.values()]
    mixed = {"a_ptr": "*fp16:16", "b_ptr": "*fp16:16", "c_ptr": "*fp32:16", "SIZE": 32}
    staged = []
    turing.enable()
    for constants, options in STAGES:
        signature = matmul_signature(block=(32, 32, 32), **constants)
        staged.append(compile_here(matmul, signature, 75, **options))
    turing.disable()
    return {
        "switching": switching(matmul),
        "other GPUs": both_ways(other),
        "other dots": dict(zip([*STOCK_DOTS, "mixed"], both_ways([*stock, (two, mixed, 75, {})]), strict=True)),
        "stages": staged,
        "overridden": overridden(matmul),
        "another hook": with_another_hook(matmul),
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return in_subprocess(_ask, [pointer_matmul, two_kinds], interpret=False)


@pytest.fixture(scope="module")
def matmuls():
    jobs = [(f"{warps} warps", pointer_matmul, matmul_signature(), "sm_75", {"num_warps": warps}) for warps in (4, 8)]
    jobs.append(("stock", pointer_matmul, matmul_signature(), "sm_75", {"num_warps": 8, "tensor_cores": False}))
    return dict(zip((4, 8, "stock"), compile_many(jobs), strict=True))


@pytest.mark.parametrize("warps", [4, 8])
def test_a_matmul_for_a_t4_uses_its_tensor_cores(matmuls, warps):
    made = matmuls[warps]
    main_loop = made.loops()[0]
    assert sum("HMMA.1688.F32" in line for line in main_loop) == made.count("HMMA") == 512 // warps
    assert not any("FFMA" in line for line in main_loop)
    assert made.spill_bytes == 0
    assert 0 < made.shared_bytes <= 64 * 1024


def test_stock_triton_does_not(matmuls):
    made = matmuls["stock"]
    assert made.count("HMMA") == 0
    assert sum("FFMA" in line for line in made.loops()[0]) == 128 * 128 * 32 / (8 * 32)


def test_switching_takes_effect_at_once_and_mixes_no_cache_up(answers):
    seen = answers["switching"]
    for what, ptx, _, _ in seen:
        assert (SMALL in ptx) == (what == "repaired")
        assert LARGE not in ptx
    hashes = {what: {entry for name, _, entry, _ in seen if name == what} for what in ("stock", "repaired")}
    assert all(len(entries) == 1 for entries in hashes.values())
    assert hashes["stock"] != hashes["repaired"]
    in_memory = [{identity for name, _, _, identity in seen[:5] if name == what} for what in ("stock", "repaired")]
    assert [len(identities) for identities in in_memory] == [1, 1], "compiled again instead of remembered"


def test_other_gpus_are_left_alone(answers):
    for (stock, repaired), form in zip(answers["other GPUs"], ("mma.sync", "wgmma"), strict=True):
        assert form in stock
        assert stock == repaired


@pytest.mark.parametrize("kind", [*STOCK_DOTS, "mixed"])
def test_other_dots_are_left_alone(answers, kind):
    stock, repaired = answers["other dots"][kind]
    assert stock == repaired
    assert "mma" not in stock
    if kind == "int8":  # which stock Triton 3.6 to 3.9 cannot lower for a T4
        pytest.skip(stock) if "Error" in stock else None
    assert ".target sm_75" in stock


def test_any_number_of_stages_compiles(answers):
    for ptx in answers["stages"]:
        assert SMALL in ptx
        assert "cp.async" not in ptx


def test_a_newer_gpu_can_run_a_t4s_code(answers):
    stock, repaired = answers["overridden"]
    assert ".target sm_90a" in stock and "mma" not in stock
    assert ".target sm_90a" in repaired and set(re.findall(r"\b\w*mma\.\S+", repaired)) == {SMALL}


def test_another_hook_keeps_working(answers):
    found = answers["another hook"]
    assert found["restored"]
    assert 5 in found["calls"]
    assert SMALL in found["ptx"]


def test_a_triton_without_the_hook_is_told(monkeypatch):
    monkeypatch.setattr(triton.knobs, "runtime", types.SimpleNamespace())
    with pytest.raises(RuntimeError, match="does not let a program replace stages"):
        turing.enable()
    assert not turing.enabled()


@pytest.mark.parametrize("form", ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "wgmma.mma_async.sync.aligned",
                                  "cp.async.cg.shared.global", "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"])  # fmt: skip
def test_an_unknown_instruction_is_refused(form):
    with pytest.raises(RuntimeError, match=re.escape(form)):
        lowering._halve_k(f"{form} {{%r1, %r2, %r3, %r4}}, {{%r5, %r6, %r7, %r8}}, {{%r9, %r10}}, {{%r1, %r2}};")


def test_operands_that_the_first_half_would_overwrite_are_refused():
    with pytest.raises(RuntimeError):
        lowering._halve_k(f"{LARGE} {{%r1,%r2,%r3,%r4}}, {{%r5,%r6,%r7,%r1}}, {{%r9,%r10}}, {{%r1,%r2,%r3,%r4}};")


@pytest.mark.parametrize("sum_register", ["%r11", "%r1"])
def test_two_halves_are_the_whole(sum_register):
    """Both texts, carried out lane by lane as the PTX manual lays the fragments out, on a random product."""
    a, b, c = (np.random.default_rng(7).integers(-8, 8, shape) for shape in ((16, 16), (16, 8), (16, 8)))
    first = int(sum_register[2:])
    text = f"{LARGE} {{ %r1, %r2, %r3, %r4 }}, {{ %r5, %r6, %r7, %r8 }}, {{ %r9, %r10 }}, {{ "
    text += ", ".join(f"%r{first + i}" for i in range(4)) + " };"
    registers = {f"%r{5 + i}": a[rows, columns] for i, (rows, columns) in enumerate(_fragment_a(16))}
    registers |= {f"%r{9 + i}": b[rows, columns] for i, (rows, columns) in enumerate(_fragment_b(16))}
    registers |= {f"%r{first + i}": c[rows, columns] for i, (rows, columns) in enumerate(_fragment_c())}
    for ptx in (text, lowering._halve_k(text)):
        result = np.zeros((16, 8), int)
        for i, (rows, columns) in enumerate(_fragment_c()):
            result[rows, columns] = _carry_out(ptx, dict(registers))[f"%r{1 + i}"]
        assert (result == a @ b + c).all()
    assert LARGE not in ptx


LANE, PAIR = np.arange(32)[:, None], np.arange(2)[None, :]


def _fragment_a(k):  # (rows, columns) that the two halves of each register hold, in all 32 lanes
    return [(LANE // 4 + 8 * (i % 2), LANE % 4 * 2 + PAIR + 8 * (i // 2)) for i in range(k // 4)]


def _fragment_b(k):
    return [(LANE % 4 * 2 + PAIR + 8 * i, LANE // 4 + 0 * PAIR) for i in range(k // 8)]


def _fragment_c():  # registers of 32 bits hold one element each
    return [((LANE // 4 + 8 * (i // 2))[:, 0], (LANE % 4 * 2 + i % 2)[:, 0]) for i in range(4)]


def _carry_out(ptx, registers):
    for k, operands in re.findall(r"m16n8k(\d+)\S*\s+([^;]*);", ptx):
        d, a, b, c = (re.findall(r"%r\d+", group) for group in re.findall(r"\{([^}]*)\}", operands))
        matrices = []
        for names, places, shape in ((a, _fragment_a(int(k)), (16, int(k))), (b, _fragment_b(int(k)), (int(k), 8)),
                                     (c, _fragment_c(), (16, 8))):  # fmt: skip
            matrices.append(np.full(shape, 10**6))
            for name, place in zip(names, places, strict=True):
                matrices[-1][place] = registers[name]
        product = matrices[0] @ matrices[1] + matrices[2]
        registers |= {name: product[place] for name, place in zip(d, _fragment_c(), strict=True)}
    return registers
