"""Where are we running, and what are this machine's limits?

``setup()`` is the first call of every notebook. It decides between two modes:

* **GPU**: kernels are compiled, times are measured and recorded.
* **no GPU**: kernels run in Triton's interpreter on small inputs; times are recalled from a recording.

Nothing here imports Triton, because the interpreter is chosen by an environment variable that Triton
reads once, when it is imported.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch


@dataclass(frozen=True)
class Datasheet:
    """What NVIDIA promises for one GPU: memory in GB/s, arithmetic in TFLOPS (dense), sizes in GiB and KiB."""

    name: str
    capability: int  # 75 for compute capability 7.5, the number in sm_75
    memory_gbps: float
    fp32_tflops: float
    fp16_tensor_tflops: float
    memory_gib: int
    shared_kib: int  # shared memory that one block may use


# NVIDIA's datasheets and whitepapers of each GPU (SXM variants of A100, H100 and H200); shared memory a block
# from the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
DATASHEETS = {
    sheet.name: sheet
    for sheet in (
        Datasheet("Tesla T4", 75, 320, 8.1, 65, 16, 64),
        Datasheet("NVIDIA L4", 89, 300, 30.3, 121, 24, 99),
        Datasheet("NVIDIA A100-SXM4-40GB", 80, 1555, 19.5, 312, 40, 163),
        Datasheet("NVIDIA A100", 80, 2039, 19.5, 312, 80, 163),
        Datasheet("NVIDIA H100", 90, 3350, 67, 989, 80, 227),
        Datasheet("NVIDIA H200", 90, 4800, 67, 989, 141, 227),
    )
}


def datasheet(gpu: str) -> Datasheet | None:
    """The datasheet for a GPU by the name that its driver gives, such as "NVIDIA H100 80GB HBM3", or None."""
    others = r"\b(?!.*(PCI|NVL|MIG|40GB))"  # weaker cards, or parts of one, under the same name
    return next((sheet for name, sheet in DATASHEETS.items() if re.match(name + others, gpu, re.I)), None)


@dataclass(frozen=True)
class Machine:
    """The machine that a notebook runs on. ``device`` is where its tensors live: ``"cuda"`` or ``"cpu"``."""

    name: str
    device: str
    capability: int | None = None  # 75, 80, 90 … None without a GPU
    memory_bytes: int = 0
    l2_bytes: int = 0

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes to check kernels in: bfloat16 on a GPU only, since Triton 3.6's interpreter rounds it wrongly."""
        return (torch.float32, torch.float16) + ((torch.bfloat16,) if self.has_gpu else ())

    @property
    def slug(self) -> str:
        """The name as a file name: ``NVIDIA H200`` becomes ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def datasheet(self) -> Datasheet | None:
        """The datasheet of this GPU, or None."""
        return datasheet(self.name)


def interpreting() -> bool:
    """True when Triton runs kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def machine() -> Machine:
    """The machine at hand. With ``TRITON_INTERPRET=1`` a GPU is left alone."""
    if interpreting() or not torch.cuda.is_available():
        return Machine("no GPU", "cpu")
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(gpu.name, "cuda", 10 * gpu.major + gpu.minor, gpu.total_memory, gpu.L2_cache_size)


def week_folder() -> Path:
    """The folder of the week whose notebook is running: the working directory."""
    return Path.cwd()


def versions() -> dict[str, str]:
    """Versions of PyTorch and Triton, and today's date, as every recorded row carries them."""
    return {
        "torch": torch.__version__.split("+")[0],
        "triton": importlib.metadata.version("triton"),
        "date": datetime.date.today().isoformat(),
    }


def setup() -> Machine:
    """Choose the mode, say where we are, and return the :class:`Machine`.

    Must run before Triton is imported; raises RuntimeError when it is too late. On a GPU of compute
    capability 7.5 (T4) it also gives ``tl.dot`` its tensor cores back, see :mod:`shared.turing`.
    """
    if not torch.cuda.is_available() and not interpreting():
        if "triton.language" in sys.modules:
            raise RuntimeError("Triton was imported before setup(): restart the kernel and run the cells from the top.")
        os.environ["TRITON_INTERPRET"] = "1"
    here = machine()
    now = versions()
    print(f"{here.name} · torch {now['torch']} · triton {now['triton']} · {now['date']}")
    if here.has_gpu:
        print("Kernels are compiled for this GPU; times are measured here.")
    else:
        print("Kernels run in Triton's interpreter on small inputs; times are recalled from a recording.")
    recordings = sorted(path.stem for path in week_folder().glob("results/*.csv"))
    print("Recorded so far: " + (", ".join(recordings) or "nothing yet"))
    if here.capability == 75:
        from shared import turing  # here, not above: turing imports Triton

        try:
            turing.enable()
            print("This GPU's tensor cores are switched on for tl.dot (shared.turing).")
        except RuntimeError as error:  # a Triton without the hook: everything else still works
            print(error)
    return here
