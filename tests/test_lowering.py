"""The rewritten PTX, carried out on a CPU: no GPU is needed to see that two halves make the whole."""

import re

import numpy as np
import pytest

from shared import lowering

pytestmark = pytest.mark.versions

LARGE = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
LANE, PAIR = np.arange(32)[:, None], np.arange(2)[None, :]


@pytest.mark.parametrize(
    "form",
    [
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "wgmma.mma_async.sync.aligned",
        "cp.async.cg.shared.global",
    ],
)
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
