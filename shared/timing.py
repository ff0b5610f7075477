"""How fast? Providers timed side by side on the GPU, in one run, on the same inputs.

Method: providers take turns, in an order drawn anew each time (so that a drift of the clocks hits all alike, and
nobody always follows one that has let the GPU cool down); before each call the L2 cache is overwritten and the GPU is
kept busy for a moment, so that Python's launch overhead stays out of every provider's time; CUDA events around the
call; the median, with the 20th and 80th percentile, of 10 to 100 turns.
"""

from __future__ import annotations

import importlib
import random
import warnings
from functools import cache

import pandas as pd
import torch

from shared.machine import machine
from shared.progress import step


def fits(nbytes: int, share: float = 0.8) -> bool:
    """True when ``nbytes`` fit into ``share`` of this GPU's memory; use it to choose sizes."""
    return nbytes <= share * machine().memory_bytes


def rival(library: str, module: str, name: str):
    """``name`` of a module of a library that may be missing ("Liger", "liger_kernel.ops.rope", …); None if it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a library remarks on being imported is not about the lesson
            return getattr(importlib.import_module(module), name)
    except ImportError:
        if machine().has_gpu:
            print(f"{library} is not installed here, and left out")
        return None


def compare(
    providers: dict, *, bytes_moved: int | None = None, flops: int | None = None, budget_ms: float = 300
) -> list[dict]:
    """Time each of ``providers`` (name -> function without arguments); one dict a provider.

    Keys: ``provider``, ``ms``, ``ms_p20``, ``ms_p80`` (milliseconds), and ``gbps`` (10^9 bytes a second, from
    ``bytes_moved``, the bytes that the operation must move) or ``tflops`` (from ``flops``). ``budget_ms`` of GPU
    time are shared among the providers. One that runs out of memory is left out, by name.
    """
    _need_gpu()
    flush = torch.empty(4 * machine().l2_bytes, dtype=torch.uint8, device="cuda")
    running, once = {}, 0.0
    for name, function in providers.items():
        try:
            function()  # compiles, and makes libraries allocate their workspaces
            start, end = _launch(function, flush)
            torch.cuda.synchronize()
            once += start.elapsed_time(end)
            running[name] = function
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory, left out")
            torch.cuda.empty_cache()
    turns = int(min(max(budget_ms / max(once, 1e-3), 10), 100))
    events = {name: [] for name in running}
    for _ in range(turns):
        for name in random.sample(list(running), len(running)):
            events[name].append(_launch(running[name], flush))
    torch.cuda.synchronize()
    rows = []
    for name, pairs in events.items():
        ms = pd.Series([start.elapsed_time(end) for start, end in pairs])
        row = {"provider": name, "ms": ms.median(), "ms_p20": ms.quantile(0.2), "ms_p80": ms.quantile(0.8)}
        if bytes_moved is not None:
            row["gbps"] = bytes_moved / row["ms"] / 1e6
        if flops is not None:
            row["tflops"] = flops / row["ms"] / 1e9
        rows.append(row)
    step()
    return rows


def _need_gpu() -> None:
    if not machine().has_gpu:
        raise RuntimeError("Times need a GPU; without one, recall a recording (shared.results).")


def _launch(function, flush: torch.Tensor):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which Python prepares the launch
    start.record()
    function()
    end.record()
    return start, end


@cache
def copy_bandwidth() -> float:
    """This GPU's measured copy bandwidth in GB/s: bytes read plus written, 1 GiB each way (less on a small GPU)."""
    _need_gpu()
    count = min(2**30, machine().memory_bytes // 8)
    source = torch.randint(256, (count,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return compare({"copy": lambda: target.copy_(source)}, bytes_moved=2 * count)[0]["gbps"]


@cache
def matmul_rate(dtype: torch.dtype = torch.float16) -> float:
    """This GPU's measured matrix rate in TFLOPS: the best of ``torch.matmul`` at 2048, 4096 and 8192 cubed."""
    _need_gpu()
    best = 0.0
    for n in (2048, 4096, 8192):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        best = max(best, compare({"matmul": lambda a=a, b=b: a @ b}, flops=2 * n**3)[0]["tflops"])
    return best
