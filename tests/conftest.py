"""Without a GPU: kernels run in Triton's interpreter, and tests that need a GPU are skipped."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is imported


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that PyTorch can use"))
