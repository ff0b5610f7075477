"""Without a GPU: kernels run in Triton's interpreter, tests that need a GPU are skipped, others share the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch, here and in notebooks, reads it once, when it is imported

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is imported

from tiny import course, in_process, on, recorded  # noqa: E402, F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """How many processes run tests, a file each: a GPU serves one, and what takes its time wants it alone."""
    return 0 if HAS_GPU else min(len(os.sched_getaffinity(0)), 4)


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that PyTorch can use"))
