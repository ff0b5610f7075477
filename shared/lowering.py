"""How a kernel of float16 dots is lowered for compute capability 7.5 with tensor cores: two stages of Triton, replaced.

Stock Triton turns `tl.dot` into scalar multiply-adds there: the pass that picks tensor-core instructions skips
everything below 8.0, although 7.5 has `mma.sync` m16n8k8 for float16. Therefore

- ttgir: the passes run as for capability 8.0, so that they choose tensor-core layouts, but without software
  pipelining, whose `cp.async` 7.5 lacks (LLVM aborts the process when it meets one);
- ptx: each m16n8k16 that comes out is written as two m16n8k8. Its registers are those of the two halves of K, in
  order (PTX ISA, "Matrix Fragments for mma.m16n8k8" and "... mma.m16n8k16").

These tensor cores take float16, neither bfloat16 nor TF32, so a kernel is lowered this way only when all its dots
multiply float16 and add up in float32.
"""

import dataclasses
import re
import tempfile

import triton
from triton._C.libtriton import ir

_MMA = "mma.sync.aligned.%s.row.col.f32.f16.f16.f32"
_LARGE, _SMALL = _MMA % "m16n8k16", _MMA % "m16n8k8"


def replace_stages(backend, stages: dict, options) -> None:
    """Replace the stages in `stages` (name -> function of a module and metadata) for one kernel to be compiled.

    What the kernel holds is known when the stages run: without float16 dots they do as before. RuntimeError, from a
    stage, when Triton made something of a dot that is not known here.
    """
    stock_ttgir, stock_ptx = stages["ttgir"], stages["ptx"]
    chosen = False

    def ttgir(module, metadata):
        nonlocal chosen
        chosen = _only_float16_dots(module)
        if not chosen:
            return stock_ttgir(module, metadata)
        module = _without_pipelined_loops(module)
        module = backend.make_ttgir(module, metadata, dataclasses.replace(options, num_stages=1), 80)
        _refuse(re.findall(r"\bttn?g\.(?:async_|warp_group_dot|tc_gen5)\w*", str(module)))
        return module

    def ptx(module, metadata):
        text = stock_ptx(module, metadata)
        return _halve_k(text) if chosen else text

    stages["ttgir"], stages["ptx"] = ttgir, ptx


def _only_float16_dots(module) -> bool:
    """Whether a kernel, as Triton's IR, has dots and all of them multiply float16 and add up in float32."""
    dots = []

    def look(operation):
        if operation.get_name() in ("tt.dot", "tt.dot_scaled"):
            types = [str(operation.get_operand(i).get_type()) for i in range(3)]
            dots.append([re.sub(".*x|>.*", "", kind) for kind in types] == ["f16", "f16", "f32"])

    module.walk(look)
    return bool(dots) and all(dots)


def _without_pipelined_loops(module):
    """The module without the stages that single loops ask for by `tl.range(..., num_stages=...)`."""
    text = str(module)
    plain = re.sub(r"\btt\.num_stages = \d+ : i32", "tt.num_stages = 1 : i32", text)
    if plain == text:
        return module
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(plain)
        file.flush()
        context = module.context
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


def _halve_k(ptx: str) -> str:
    """PTX with each m16n8k16 as two m16n8k8."""

    def halves(match):
        d, a, b, c = (re.split(r"\s*,\s*", group.strip()) for group in match.groups())
        if (len(a), len(b)) != (4, 2) or {*d} & {*a, *b}:  # the first half must leave the second its operands
            _refuse([match[0]])
        joined = [f"{{{', '.join(registers)}}}" for registers in (d, a[:2], b[:1], c, d, a[2:], b[1:], d)]
        return f"{_SMALL} {', '.join(joined[:4])};\n\t{_SMALL} {', '.join(joined[4:])};"

    fragments = r"\s*,\s*".join(4 * [r"\{([^{}]*)\}"])
    ptx = re.sub(rf"{re.escape(_LARGE)}\s*{fragments}\s*;", halves, ptx)
    _refuse([form for form in re.findall(r"\b(?:w?g?mma|tcgen05|cp\.async)\.[\w.:]+", ptx) if form != _SMALL])
    return ptx


def _refuse(foreign: list[str]) -> None:
    """RuntimeError if Triton made something of a float16 dot that is not known here."""
    if foreign:
        raise RuntimeError(
            f"Triton {triton.__version__} made {foreign[0]!r} of a kernel with float16 dots; the course's lowering for "
            "compute capability 7.5 does not know it. shared.turing.disable() brings back stock Triton, which does "
            "without tensor cores there."
        )
