"""The tensor cores of a T4, from compiled code: no T4 and no other GPU is needed."""

import re
import types

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

from shared import turing
from shared.cells import in_subprocess
from shared.compiled import compile_many

pytestmark = pytest.mark.versions

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
def empty_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def answers(empty_cache):
    return in_subprocess(_ask, [pointer_matmul, two_kinds], interpret=False)


@pytest.fixture(scope="module")
def matmuls(empty_cache):
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
    assert [number for *_, number in seen[:5]] == [0, 1, 0, 1, 0], "compiled again instead of remembered"


def test_other_gpus_are_left_alone(answers):
    for (stock, repaired), form in zip(answers["other GPUs"], ("mma.sync", "wgmma"), strict=True):
        assert form in stock
        assert stock == repaired


@pytest.mark.parametrize("kind", [*STOCK_DOTS, "mixed"])
def test_other_dots_are_left_alone(answers, kind):
    stock, repaired = answers["other dots"][kind]
    assert stock == repaired
    assert "mma" not in stock
    assert ".target sm_75" in stock or kind == "int8"  # for which stock Triton 3.6 to 3.9 fails on a T4 anyway


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
