"""Clear errors for requests that a kernel cannot serve, raised before anything is launched."""

from __future__ import annotations

import numbers

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shared.machine import interpreting

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_tensor(name: str, value, *, dtypes=FLOATS, ndim: tuple[int, int] | None = None, like=None) -> None:
    """Raise unless ``value`` is a dense tensor that the kernels of this process can take.

    ``dtypes`` lists the dtypes taken, ``ndim`` the smallest and largest number of dimensions, and ``like``
    is an optional pair ``(name, tensor)`` whose dtype and device ``value`` must share.

    TypeError: not a tensor, or another dtype. ValueError: layout, number of dimensions, device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        taken = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {value.dtype}; taken: {taken}")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor; taken: dense tensors (torch.strided)")
    if is_traceable_wrapper_subclass(value):
        raise TypeError(f"{name} is a {type(value).__name__}, which has no memory of its own; taken: plain tensors")
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; taken: dense tensors (torch.strided)")
    if ndim is not None and not ndim[0] <= value.ndim <= ndim[1]:
        raise ValueError(f"{name} has {value.ndim} dimensions {tuple(value.shape)}; taken: {ndim[0]} to {ndim[1]}")
    if interpreting() and value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}; Triton's interpreter (TRITON_INTERPRET=1) takes: cpu")
    if not interpreting() and value.device.type != "cuda":
        raise ValueError(f"{name} is on {value.device}; a compiled kernel takes: cuda")
    if like is not None:
        other_name, other = like
        if value.dtype != other.dtype:
            raise TypeError(f"{name} has dtype {value.dtype}; taken: {other.dtype}, as {other_name}")
        if value.device != other.device:
            raise ValueError(f"{name} is on {value.device}; taken: {other.device}, as {other_name}")


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a kernel can read it: PyTorch may only have marked it as negated, or as zeros that no memory holds."""
    x = x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x


def autocast_dtype(x) -> torch.dtype | None:
    """The dtype that torch.autocast asks for on the device of ``x``; None without it, or if ``x`` is no tensor."""
    if not isinstance(x, torch.Tensor) or x.device.type not in ("cpu", "cuda"):
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def as_autocast(first, *others) -> tuple:
    """All arguments, tensors of FLOATS among them in the dtype that autocast asks for on the device of ``first``."""
    wanted = autocast_dtype(first)
    cast = lambda t: t.to(wanted) if wanted and isinstance(t, torch.Tensor) and t.dtype in FLOATS else t
    return tuple(map(cast, (first, *others)))


def describable(matrix: torch.Tensor) -> bool:
    """Whether a tensor descriptor can see a matrix: rows of neighbours, each on the grid of 16 bytes."""
    on_grid = matrix.stride(0) * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and on_grid


def check_int(name: str, value) -> None:
    """TypeError unless ``value`` is a whole number, Python's or NumPy's; True and False are none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")


def check_dim(name: str, dim, ndim: int) -> int:
    """``dim`` counted from the front, for a tensor of ``ndim`` dimensions. TypeError or ValueError if it is none."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name} must be an int, got {type(dim).__name__}")
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ValueError(f"{name} is {dim}; a tensor of {ndim} dimensions takes {-max(ndim, 1)} to {max(ndim, 1) - 1}")
    return dim % max(ndim, 1)
