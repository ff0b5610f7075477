"""What a wrong output looks like: the marks that common slips leave, in words that help to find the slip.

A hint is only given when all wrong elements bear it out: where they lie (a tail without its mask), or what they are
(a factor, a sign, a constant, the transpose, the operands swapped).
"""

from __future__ import annotations

import itertools

import torch


def _near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two outputs agree to 1/200 of an element or of their median: bfloat16 rounds to 1/256."""
    size = want.abs()
    return got.shape == want.shape and bool(((got - want).abs() <= 5e-3 * (size + size.median())).all())


def place(wrong: torch.Tensor) -> str:
    """Where the True elements lie, if it is only in some rows, columns or a tail of them; "" otherwise."""
    if wrong.ndim == 0:
        return ""
    for dim, name in ((-1, "column"), (-2, "row")) if wrong.ndim > 1 else ((-1, "element"),):
        others = [d for d in range(wrong.ndim) if d != dim % wrong.ndim]
        found = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        size = wrong.shape[dim]
        if not found or len(found) == size:
            continue
        if len(found) == 1:
            return f"only in {name} {found[0]} of 0 to {size - 1}"
        if found == list(range(found[0], size)):
            return f"only from {name} {found[0]} on" + " (a tail without its mask?)" * (found[0] > size / 2)
        return f"only in {len(found)} of {size} {name}s, the first is {found[0]}"
    return ""


def _what(got: torch.Tensor, want: torch.Tensor) -> str:
    """What a finite output is instead of the expected one, if that is simple; "" otherwise."""
    if got.numel() < 2 or not want.any() or _near(got, want):  # an error so small tells nothing
        return ""
    if not got.any():
        return "all of it is 0"
    if want.ndim > 1 and want.shape[-1] == want.shape[-2] and _near(got, want.mT):
        return "it is the transpose of what is expected: are rows and columns mixed up?"
    factor = ((got * want).sum() / want.square().sum()).item()
    if abs(factor + 1) < 1e-3 and _near(got, -want):
        return "its sign is the wrong way round"
    if abs(factor - 1) > 1e-3 and _near(got, factor * want):
        return f"all of it is {factor:.4g} times what is expected: is a factor missing, or applied twice?"
    shift = (got - want).mean()
    if _near(got - shift, want):
        return f"all of it is too {'large' if shift > 0 else 'small'} by the same {abs(shift):.4g}"
    return ""


def hint(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor) -> str:
    """A remark on a wrong float64 output of the right shape, "" when nothing stands out.

    ``wrong`` says which elements are. NaN comes first: it is what new memory is filled with, and what a sum becomes
    when one of its terms was never loaded.
    """
    nan = got.isnan() & ~want.isnan()
    if nan.any():
        where = "everywhere" if nan.all() else place(nan) or f"in {int(nan.sum())} elements"
        cause = "not written (new memory is NaN before a call), or a masked element took part, or an overflow"
        return f"NaN {where}: {cause}"
    return (_what(got, want) if got.isfinite().all() and want.isfinite().all() else "") or place(wrong)


def swapped(reference, inputs: dict, got: torch.Tensor) -> str:
    """Which two tensors of ``inputs``, swapped, make the reference agree with ``got``: a remark, or ""."""
    tensors = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    for a, b in itertools.combinations(tensors, 2):
        if inputs[a].shape == inputs[b].shape:
            try:
                want, other = (
                    out[0] if isinstance(out, tuple) else out
                    for out in (reference(**inputs), reference(**{**inputs, a: inputs[b], b: inputs[a]}))
                )
            except Exception:  # the reference does not take them so, and the verdict stands without a hint
                continue
            if _near(got.double(), other.double()) and not _near(got.double(), want.double()):
                return f"it would be right with {a} and {b} swapped"
    return ""
