"""Tensor cores for GPUs of compute capability 7.5 (T4), which stock Triton leaves idle.

Triton lets a program replace stages of its compiler (`triton.knobs.runtime.add_stages_inspection_hook`). While this is
enabled, kernels whose dots are all of float16 into float32 are lowered by `shared.lowering` when they are compiled for
7.5; other kernels, and other GPUs, get stock Triton. On a newer GPU `TRITON_OVERRIDE_ARCH=sm75` makes Triton lower as
for a T4, and this with it.
"""

import contextlib
import inspect

import triton
from triton.compiler import compiler
from triton.runtime import jit

from shared.lowering import replace_stages

KEY = "course-turing-1"  # tells entries in Triton's caches apart: change it with the lowering


class _Hook:
    """What Triton calls to have the stages of its compiler replaced; inert once `on` is False."""

    def __init__(self, previous):
        self.previous, self.on = previous, True

    def __call__(self, *arguments):
        if not arguments:  # Triton 3.7 and later ask what to add to their keys, on disk and in memory
            keys = self.previous() if self.previous else ("", "")
            return tuple(key + KEY for key in keys) if self.on else keys
        if self.previous:
            self.previous(*arguments)
        backend, stages, options, _, capability = arguments
        if self.on and capability == 75 and "ttir" in stages:  # not for kernels in Gluon, which has no such stage
            replace_stages(backend, stages, options)


_hook: _Hook | None = None


def enable() -> None:
    """Use the tensor cores of capability 7.5 from now on, in kernels that were compiled before too.

    A hook that someone else has set keeps working. RuntimeError when this Triton has no such hook.
    """
    global _hook
    if not hasattr(triton.knobs.runtime, "add_stages_inspection_hook"):
        raise RuntimeError(
            f"Triton {triton.__version__} does not let a program replace stages of its compiler (it has no "
            "add_stages_inspection_hook), so tl.dot stays without tensor cores on compute capability 7.5. "
            "Triton 3.6 to 3.9 are known to work."
        )
    _complete_cache_keys()
    if not enabled():
        disable()
        _hook = _Hook(triton.knobs.runtime.add_stages_inspection_hook)
        triton.knobs.runtime.add_stages_inspection_hook = _hook


def disable() -> None:
    """Back to stock Triton, in kernels that were compiled before too."""
    global _hook
    if _hook is not None:
        _hook.on = False
        if enabled():
            triton.knobs.runtime.add_stages_inspection_hook = _hook.previous
        _hook = None


def enabled() -> bool:
    """Whether kernels for capability 7.5 are lowered here now."""
    return _hook is not None and triton.knobs.runtime.add_stages_inspection_hook is _hook


@contextlib.contextmanager
def stock():
    """Within it, stock Triton."""
    before = enabled()
    disable()
    try:
        yield
    finally:
        if before:
            enable()


def _complete_cache_keys() -> None:
    """Have Triton 3.6 tell the two lowerings apart in its caches; later versions ask the hook for keys."""
    if hasattr(jit, "_course_keys") or "add_stages_inspection_hook()" in inspect.getsource(compiler.compile):
        return
    on_disk, in_memory = compiler.get_cache_key, jit.compute_cache_key

    def key() -> str:
        return "" if _hook is None else KEY if enabled() else KEY + " beneath another hook"

    def disk_key(src, backend, options, env_vars):
        return on_disk(src, backend, options, env_vars) + (key() if options.arch == "sm75" else "")

    def memory_key(known, specialization, options):
        return in_memory(known, [*specialization, key()] if key() else specialization, options)

    compiler.get_cache_key = jit.get_cache_key = disk_key
    jit.compute_cache_key, jit._course_keys = memory_key, True
