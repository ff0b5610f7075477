"""What is read off compiled code: on kernels and on listings whose contents are known."""

import pytest
import triton
import triton.language as tl
from dot_kernels import matmul_signature, pointer_matmul

from shared.compiled import compile_for, compile_many
from shared.sass import Compiled, innermost_loops, mnemonics, parse

pytestmark = pytest.mark.versions

LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   MOV R4, R5 ;
.L_x_1:
        /*0030*/                   LDG.E.128.CONSTANT R8, [R2.64] ;
        /*0040*/              @!P1 LDG.E.64 R8, [R2.64] ;
        /*0050*/              @!P2 BRA `(.L_x_4) ;
.L_x_2:
        /*0060*/         @!PT LDS RZ, [RZ] ;
        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;
        /*0080*/                   FFMA.FTZ R1, R2, R3, R1 ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/              @UP0 STG.E.128 [R2.64], R8 ;
        /*00b0*/              @!P6 BRA `(.L_x_0) ;
.L_x_3:
        /*00c0*/                   EXIT ;
.L_x_4:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R4 ;
        /*00e0*/              @!P0 BRA `(.L_x_4) ;
        /*00f0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*0100*/                   BRA `(.L_x_5);
"""


@triton.jit
def scaled_copy(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr, SQUARE: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, (x * x if SQUARE else x) * scale, mask=at < n)


@triton.jit
def talkative(x_ptr, BLOCK: tl.constexpr):
    tl.device_print("x", tl.load(x_ptr + tl.arange(0, BLOCK)))


COPY = {"x_ptr": "*fp16:16", "y_ptr": "*fp16:16", "n": "i32:16", "scale": "fp32", "BLOCK": 1024}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    unaligned, matmul = COPY | {"x_ptr": "*fp16"}, matmul_signature()
    jobs = {
        "copy": (scaled_copy, COPY, "sm_75", {}),
        "unaligned": (scaled_copy, unaligned, "sm_75", {}),
        "talkative": (talkative, {"x_ptr": "*fp32:16", "BLOCK": 128}, "sm_75", {}),
        "sm_75": (pointer_matmul, matmul, "sm_75", {"num_warps": 8, "tensor_cores": False}),
        "sm_80": (pointer_matmul, matmul, "sm_80", {"num_warps": 8}),
        "sm_90": (pointer_matmul, matmul, "sm_90", {"num_warps": 8, "num_stages": 3}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRITON_OVERRIDE_ARCH", "sm86")  # is for launches, not for what a target was named for
        return dict(zip(jobs, compile_many((label, *job) for label, job in jobs.items()), strict=True))


def test_a_listing_is_read():
    instructions, labels = parse(LISTING)
    assert len(instructions) == 17
    assert instructions[labels[".L_x_2"]].startswith("@!PT LDS")
    assert mnemonics(instructions)[3:5] == ["LDG.E.128.CONSTANT", "LDG.E.64"]
    listing = Compiled("sm_90", "", LISTING, 32, 1024, 0)
    assert [listing.count("LDG"), listing.count("LDG", "128"), listing.count("STG", "128")] == [2, 1, 1]
    assert [listing.count("FFMA"), listing.count("HMMA"), listing.count("HGMMA")] == [1, 0, 1]
    assert listing.summary()["tensor core (HMMA/HGMMA/IMMA)"] == 1


def test_the_innermost_loop_is_found():
    """Not the outer loop, not the waiting (which lies behind the end and jumps back), not the trap at the end."""
    (loop,) = innermost_loops(LISTING)
    assert [name.split(".")[0] for name in mnemonics(loop)] == [
        "LDG", "LDG", "BRA", "LDS", "HGMMA", "FFMA", "BRA", "SYNCS", "BRA", "BRA",
    ]  # fmt: skip


def test_wide_loads_depend_on_alignment(made):
    assert made["copy"].count("LDG", "128") == made["copy"].count("STG", "128") == 1
    assert made["unaligned"].count("LDG", "128") == 0 < made["unaligned"].count("LDG")
    assert made["copy"].loops() == []


def test_a_stack_frame_is_no_spill(made):
    assert made["talkative"].count("STL") > 0  # what it prints is handed over on the stack
    assert made["talkative"].spill_bytes == 0
    assert made["sm_75"].spill_bytes > 0  # 128x128 sums of 8 warps without tensor cores do not fit its registers


def test_each_gpu_gets_its_own_code(made):
    assert "HMMA.1688" not in made["sm_75"].sass and made["sm_75"].count("FFMA") > 0
    assert made["sm_80"].count("HMMA") > 0 and made["sm_80"].count("LDGSTS") > 0
    assert made["sm_90"].count("HGMMA") > 0
    assert ".target sm_90a" in made["sm_90"].ptx
    assert made["sm_90"].shared_bytes == 3 * (128 * 32 + 32 * 128) * 2
    rows = [made[target].summary() for target in ("sm_75", "sm_80", "sm_90")]
    assert [row["tensor core (HMMA/HGMMA/IMMA)"] > 0 for row in rows] == [False, True, True]
    assert all(0 < row["registers"] <= 255 for row in rows)


def test_a_signature_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"\['scale', 'stride'\]"):
        compile_for(scaled_copy, {key: COPY[key] for key in COPY if key != "scale"} | {"stride": "i32"}, "sm_75")
    with pytest.raises(ValueError, match="cuda:75"):
        compile_for(scaled_copy, COPY, "cuda:75")


def test_the_compilers_words_arrive():
    jobs = [("first", scaled_copy, COPY | {"BLOCK": 1000}, "sm_75", {}), ("second", scaled_copy, COPY, "sm_75", {})]
    jobs.append(("third", scaled_copy, COPY | {"n": 5}, "sm_80", {}))
    with pytest.raises(RuntimeError, match=r"(?s)first for sm_75.*power of 2.*third for sm_80.*n is no constexpr"):
        compile_many(jobs)
