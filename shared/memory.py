"""How much memory? Peak bytes, bytes held for the backward, and bytes moved: none of them needs a GPU.

* peak: on a GPU PyTorch's allocator counts; on a CPU every new tensor storage is followed until it is freed;
* held: what autograd saves, seen through ``saved_tensors_hooks``, each storage counted once;
* moved: eager operators by the sizes of their inputs and outputs (a view moves nothing), Triton kernels by the
  unmasked elements that pass through the interpreter's loads, stores and atomics.

"Moved" is what a program asks the memory system for. Caches may serve part of it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shared import cells
from shared.machine import interpreting, machine

ONLY_WRITTEN = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")  # in place
PICKING = ("gather", "nll_loss_forward", "nll_loss_backward")  # of the largest input, one number for each index
RESHAPED = ("t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_", "resize_", "set_")  # nothing moves


@dataclass
class Traffic:
    """Bytes that one call reads from and writes to memory."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """What reading or writing the tensors moves: a dimension of stride 0 repeats what was there already."""
    distinct = lambda t: math.prod(n if stride or not n else 1 for n, stride in zip(t.shape, t.stride(), strict=True))
    return sum(distinct(tensor) * tensor.itemsize for tensor in tensors)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Tally(TorchDispatchMode):
    """Adds up what eager operators move, and follows how many bytes are allocated."""

    def __init__(self):
        super().__init__()
        self.traffic, self.alive, self.peak, self.known = Traffic(), 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        name, mutates = func._schema.name.split("::")[-1], func._schema.is_mutable
        given = {_storage(tensor) for tensor in inputs}
        is_view = not mutates and outputs and all(_storage(tensor) in given for tensor in outputs)
        if not is_view and name not in RESHAPED and not name.startswith(("empty", "new_empty")):
            if name.endswith("_like") or name.startswith("new_"):
                inputs = []
            if name in PICKING:
                largest = max(inputs, key=torch.numel)
                inputs = [tensor for tensor in inputs if tensor is not largest]
                self.traffic.read += max(inputs, key=torch.numel).numel() * largest.itemsize
            written_to = {argument.name for argument in func._schema.arguments if argument.is_out}
            filled = inputs[:1] if name in ONLY_WRITTEN else _tensors([(kwargs or {}).get(key) for key in written_to])
            self.traffic.read += _bytes([tensor for tensor in inputs if not any(tensor is other for other in filled)])
            self.traffic.written += _bytes(outputs)
        for tensor in outputs:
            if _storage(tensor) not in given:
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed():
            self.known.discard(key)
            self.alive -= size

        weakref.finalize(storage, freed)


@contextlib.contextmanager
def _watch_kernels(traffic: Traffic):
    """Count the interpreter's memory accesses into ``traffic``; keep its own tensor work out of the tally."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    saved = {name: getattr(builder, name) for name in names}
    launch = executor.__call__

    def load(self, ptrs, mask, *rest, **options):
        out = saved["create_masked_load"](self, ptrs, mask, *rest, **options)
        traffic.read += int(np.count_nonzero(mask.data)) * out.data.itemsize
        return out

    def store(self, ptrs, value, mask, *rest):
        traffic.written += int(np.count_nonzero(mask.data)) * value.data.itemsize
        return saved["create_masked_store"](self, ptrs, value, mask, *rest)

    def atomic(self, op, ptr, value, mask, *rest):
        swap(int(np.count_nonzero(mask.data)) * value.data.itemsize)
        return saved["create_atomic_rmw"](self, op, ptr, value, mask, *rest)

    def compare_and_swap(self, ptr, expected, value, *rest):
        swap(value.data.nbytes)
        return saved["create_atomic_cas"](self, ptr, expected, value, *rest)

    def swap(moved: int) -> None:
        traffic.read += moved
        traffic.written += moved

    def call(self, *args, **kwargs):
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    for name, method in zip(names, (load, store, atomic, compare_and_swap), strict=True):
        setattr(builder, name, method)
    executor.__call__ = call
    try:
        yield
    finally:
        executor.__call__ = launch
        for name, method in saved.items():
            setattr(builder, name, method)


@contextlib.contextmanager
def _tidy_kernels():
    """Collect garbage after each launch: the interpreter leaves its arguments in cycles, and they would count."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    launch = executor.__call__

    def call(self, *args, **kwargs):
        launch(self, *args, **kwargs)
        gc.collect(1)  # they are young: the old generation would take its time

    executor.__call__ = call
    try:
        yield
    finally:
        executor.__call__ = launch


def _count(function, args: tuple, kwargs: dict) -> Traffic:
    with _Tally() as tally, _watch_kernels(tally.traffic):
        function(*args, **kwargs)
    return tally.traffic


def traffic(function, *args, **kwargs) -> Traffic:
    """Bytes that ``function(*args, **kwargs)`` moves, counted exactly, kernels and eager operators alike.

    On a GPU the same call is counted in a second process whose kernels run in the interpreter, on copies of the
    tensors: keep them small there.
    """
    if interpreting():
        return _count(function, args, kwargs)
    copy = lambda tensor: tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    args, kwargs = tree_map_only(torch.Tensor, copy, (args, kwargs))
    return cells.in_subprocess(_count, function, args, kwargs, interpret=True)


def peak_bytes(function, *args, **kwargs) -> int:
    """The most bytes allocated at once during ``function(*args, **kwargs)``, above what was there before.

    The function runs twice; the first time is a warm-up. The result is kept alive until the second run ends.
    """
    result = function(*args, **kwargs)
    del result
    if machine().has_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with _Tally() as tally, _tidy_kernels():
        result = function(*args, **kwargs)
    del result
    return tally.peak


def held_bytes(function, *args, **kwargs) -> int:
    """Bytes that autograd holds between forward and backward of ``function``: activations only.

    Left out, since they exist anyway: the storage of the inputs, and of parameters (leaves that require a gradient).
    At least one input must require a gradient, else nothing is saved and the answer is 0.
    """
    inputs = {_storage(tensor) for tensor in _tensors((args, kwargs))}
    held: dict[int, torch.UntypedStorage] = {}  # kept, so that no storage is freed and its address used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if _storage(tensor) not in inputs and not (owner.is_leaf and owner.requires_grad):
            held[_storage(tensor)] = tensor.untyped_storage()
        return tensor.detach()  # not the tensor itself: a saved output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*args, **kwargs)
    del result
    return sum(storage.nbytes() for storage in held.values())
