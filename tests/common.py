"""What the tests of all weeks share: inputs, marks, stand-ins that write launches down, and other processes."""

import contextlib
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from shared.cells import ROOT
from shared.machine import interpreting, machine
from shared.sources import origin

DEVICE, DTYPES = machine().device, machine().dtypes
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}  # Triton's

on_cpu = pytest.mark.skipif(not interpreting(), reason="looks into Triton's interpreter")
gpu = pytest.mark.gpu
quiet = [  # of the interpreter's NumPy: inf - inf is meant in these tests
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


LAYOUTS = {  # of a matrix (m, n): as it may arrive as an input, or as a gradient
    "contiguous": lambda m, n: draw(m, n),
    "of a sum": lambda m, n: draw(1).reshape(()).expand(m, n),
    "a row, repeated": lambda m, n: draw(n).expand(m, n),
    "a column, repeated": lambda m, n: draw(m, 1).expand(m, n),
    "transposed": lambda m, n: draw(n, m).T,
    "every second column": lambda m, n: draw(m, 2 * n)[:, ::2],
    "every second row": lambda m, n: draw(2 * m, n)[::2],
    "rows with a gap of one": lambda m, n: draw(m, n + 1)[:, :n],
    "rows with a gap of 16 bytes": lambda m, n: draw(m, n + 4)[:, :n],
    "starts off the 16-byte grid": lambda m, n: draw(m * n + 1)[1:].view(m, n),
}


# --- what a GPU would be given ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_on_a_gpu(week, multiprocessors=132):
    """The plans of `week` choose as on a GPU with so many multiprocessors. Gives the patch, for more of the kind."""
    with pytest.MonkeyPatch.context() as patch:
        limits = types.SimpleNamespace(multi_processor_count=multiprocessors)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: limits)
        patch.setattr(week, "interpreting", lambda: False)
        yield patch


class Recorder:
    """Stands in for a kernel and appends its launches to a list: (kernel, grid, arguments by name, options)."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches
        self.names = list(inspect.signature(origin(kernel)[0]).parameters)

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append(
            (self.kernel, grid, dict(zip(self.names, args, strict=False)), options)
        )


def as_type(value):
    """An argument's type as Triton specialises it, in the words of `shared.compiled`."""
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}:16"
    if value is None or isinstance(value, float):
        return None if value is None else "fp32"
    return "i32:1" if value == 1 else "i32:16" if value % 16 == 0 else "i32"


# --- other processes, and much memory --------------------------------------------------------------------------------


def start_elsewhere(task, timeout, **environment):
    """Run a function of a test file in another Python, which can crash or be stopped without taking pytest along.

    Returns at once; what it returns waits for the end, `timeout` seconds at most, and fails if the task did.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", f"import {task.__module__}; {task.__module__}.{task.__name__}()"]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=environment, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True
    )

    def wait():
        try:
            error = process.communicate(timeout=timeout)[1]
        finally:
            process.kill()
        assert process.returncode == 0, f"status {process.returncode}\n{error[-4000:]}"

    return wait


def elsewhere(task, timeout, **environment):
    """The same, and wait for it."""
    start_elsewhere(task, timeout, **environment)()


def touched_little():
    """This process has reserved much memory, and used little of it."""
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # ru_maxrss is the parent's, too
    assert peak < 2**20, f"this was to touch less than 1 GiB, not {peak} KiB"


def needs_memory(gib):
    if machine().memory_bytes < gib * 2**30:
        pytest.skip(f"needs {gib} GiB")
    torch.cuda.empty_cache()
