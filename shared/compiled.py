"""What did the compiler make of it? PTX and SASS of a Triton kernel for a named GPU, without that GPU.

Triton compiles for any NVIDIA GPU, and its wheel holds the assembler and the disassemblers (ptxas, nvdisasm,
cuobjdump) that this needs. What comes back is a `shared.sass.Compiled`.
"""

import contextlib
import inspect
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from shared.cells import in_subprocess
from shared.progress import progress, step
from shared.sass import Compiled
from shared.sources import origin

__all__ = ["Compiled", "compile_for", "compile_many"]


def compile_for(kernel, signature: dict, target: str, *, tensor_cores: bool = True, **options) -> Compiled:
    """Compile one kernel.

    kernel: a `@triton.jit` function. signature: for each parameter its type, for a constexpr its value; types are
    "*fp16:16", "i32", "fp32", "tensordesc<fp16[128,64]>" and so on, where ":16" promises divisibility by 16 and ":1"
    that the value is 1; a pointer that is not given is None. target: "sm_75" (T4), "sm_80" (A100), "sm_90" (H200).
    tensor_cores: on sm_75, the lowering of `shared.turing` rather than stock Triton's. options: Triton's, as
    num_warps=8, num_stages=3. ValueError for names that do not fit the kernel, RuntimeError with the compiler's words
    when it fails.
    """
    label = getattr(origin(kernel)[0], "__name__", "kernel")
    return compile_many([(label, kernel, signature, target, {"tensor_cores": tensor_cores, **options})])[0]


def compile_many(jobs: Iterable[tuple]) -> list[Compiled]:
    """Compile several kernels at once: jobs are (label, kernel, signature, target, options) as for `compile_for`."""
    plain, kernels = [], {}  # each kernel goes over once, and its number in the jobs
    for label, kernel, signature, target, options in jobs:
        parameters = inspect.signature(origin(kernel)[0]).parameters
        needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
        if wrong := sorted((needed - signature.keys()) | (signature.keys() - parameters.keys())):
            raise ValueError(f"{label}: the signature names the kernel's parameters; missing or unknown: {wrong}")
        if not re.fullmatch(r"sm_\d+", target):
            raise ValueError(f"{label}: target is of the form 'sm_75', got {target!r}")
        number = list(kernels).index(id(kernel)) if id(kernel) in kernels else len(kernels)
        kernels[id(kernel)] = kernel
        plain.append((label, number, signature, target, options))
    results, batch = [], 4 * (os.cpu_count() or 1)
    with progress("kernels compiled", len(plain)):
        for start in range(0, len(plain), batch):
            made = in_subprocess(_compile_all, list(kernels.values()), plain[start : start + batch], interpret=False)
            results += made
            step(len(made))
    failures = [result for result in results if isinstance(result, str)]
    if failures:
        raise RuntimeError("\n".join(failures))
    return results


def _compile_all(kernels: list, jobs: list) -> list[Compiled | str]:
    """In a process whose Triton compiles: a worker for each core, since Triton's settings belong to a process."""
    os.environ.pop("TRITON_OVERRIDE_ARCH", None)
    _compile.kernels = kernels  # forked workers inherit them: Triton's kernels cannot be pickled
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), get_context("fork")) as pool:
        return list(pool.map(_compile, jobs))


def _compile(job: tuple) -> Compiled | str:
    import triton
    from triton.backends.compiler import GPUTarget

    from shared import turing

    label, number, signature, target, options = job
    kernel, options, gpu = _compile.kernels[number], dict(options), GPUTarget("cuda", int(target[3:]), 32)
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn  # inside an autotuner
    turing.enable() if options.pop("tensor_cores", True) and gpu.arch == 75 else turing.disable()
    try:
        source = triton.compiler.ASTSource(kernel, *_specialise(kernel, signature))
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log := io.StringIO()):
            made = triton.compile(source, target=gpu, options=options)
    except Exception as error:  # in words: some of Triton's exceptions do not survive the way between processes
        return f"{label} for {target}: {type(error).__name__}: {error}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, sass = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    registers, stack = re.search(rf"Function {made.metadata.name}:\s+REG:(\d+) STACK:(\d+)", usage).groups()
    if int(stack) and not log.getvalue():  # from the cache: ptxas runs again
        backend, stages = triton.compiler.make_backend(gpu), {}
        backend.add_stages(stages, backend.parse_options(options), source.language)
        with contextlib.redirect_stdout(log):
            stages["cubin"](made.asm["ptx"], {})
    # The stack holds spilled registers, or only the kernel's own arrays: ptxas says which.
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue()))) if int(stack) else 0
    return Compiled(target, made.asm["ptx"], sass, int(registers), made.metadata.shared, spilled)


def _specialise(kernel, signature: dict) -> tuple[dict, dict, dict]:
    """Triton's own (types, constants, attributes) from a signature."""
    types, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = signature.get(parameter.name, parameter.default)
        kind, _, hint = value.partition(":") if isinstance(value, str) else ("", "", "")
        if parameter.is_constexpr or hint == "1" or value is None:
            types[parameter.name] = "constexpr"
            constants[parameter.name] = 1 if hint == "1" else value
        elif kind and hint in ("", "16"):
            types[parameter.name] = kind
            attributes |= {(parameter.num,): [["tt.divisibility", 16]]} if hint else {}
        else:
            raise ValueError(f"{parameter.name} is no constexpr: it takes a type such as 'i32:16', got {value!r}")
    return types, constants, attributes


def _tool(name: str, *arguments: str) -> str:
    """What one of the programs in Triton's wheel prints."""
    import triton

    command = [getattr(triton.knobs.nvidia, name).path, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
