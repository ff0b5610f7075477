"""Is it right? Kernels against a float64 reference, with a tolerance that is derived and not guessed.

Two numbers are compared with their limits, because each sees what the other cannot:

* every element: one rounding to the output dtype, plus the error of a float32 sum of ``reduction`` terms;
* the whole output: its least-squares scale against the reference. Rounding errors average out there, so
  this catches a kernel that is wrong by one part in a thousand in bfloat16, where single elements cannot.

Source of the bounds: N. Higham, "Accuracy and Stability of Numerical Algorithms", chapters 3 and 4 (the
statistical sqrt(n) form for sums), with six standard deviations for the scale.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass, field

import pandas as pd
import torch

from shared.hints import hint, swapped
from shared.machine import machine
from shared.progress import progress, step

SINGLE = torch.finfo(torch.float32).eps / 2
NARROW = 4  # a case that misses its tolerance by less is drawn twice more, and wrong when one of these misses, too


class CheckFailed(AssertionError):
    """A kernel disagrees with its reference."""


class Draw:
    """Draws fresh normal inputs: ``draw(64, 1000)`` is a (64, 1000) tensor of ``dtype`` on ``device``."""

    def __init__(self, dtype: torch.dtype, device: str):
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)


@contextlib.contextmanager
def poisoned():
    """Fill every new ``torch.empty`` with NaN (the largest integer), so that an unwritten element shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # this is what switches PyTorch's own filling on
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def difference(got, want, dtype: torch.dtype, reduction: int, roundings: int = 1, terms: float = 0.0):
    """``(share, reason)``: the worst error as a share of its tolerance, and what is wrong ("" when share <= 1).

    ``got`` is the kernel's output, ``want`` the float64 reference, ``reduction`` the number of terms that each
    element sums in float32, ``roundings`` how often a value is rounded to ``dtype`` on its way (a backward that
    starts from a saved rounded output: 2), ``terms`` the size of terms that cancel in the result, if larger than it.
    """
    if got.shape != want.shape:
        return math.inf, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype != dtype:
        return math.inf, f"dtype {got.dtype}, expected {dtype}"
    got, want = got.detach().double(), want.detach().double()
    odd = (got.isnan() != want.isnan()) | (got.isinf() != want.isinf()) | (got.isinf() & (got != want))
    if odd.any():
        words = f"{int(odd.sum())} of {odd.numel()} elements are NaN or infinite where the other is not"
        return math.inf, _with(words, hint(got, want, odd))
    whole, finite = (got, want), want.isfinite()
    got, want = got[finite], want[finite]
    if want.numel() == 0:
        return 0.0, ""
    kind = torch.finfo(dtype)
    unit, largest = kind.eps / 2, want.abs().max().clamp(min=terms)
    sums = 4 * SINGLE * math.sqrt(reduction)
    tolerance = 1.01 * roundings * unit * want.abs() + (2 * (roundings - 1) * unit + sums) * largest
    tolerance += kind.smallest_normal * kind.eps  # one step among the subnormal numbers
    excess = (got - want).abs() / tolerance
    element = excess.max().item()
    scale, square = 0.0, want.square().sum()
    if largest == want.abs().max() > 0:  # without cancellation
        value, times = want.float().unique(return_counts=True)  # equal values are rounded alike, others independently
        spread = (times * value.double().square()).square().sum().sqrt() / square
        allowed = 6 * (2 * roundings - 1) * unit * spread + sums + kind.smallest_normal * kind.eps / largest
        scale = (((got * want).sum() / square - 1).abs() / allowed).item()
    if element > 1:
        at, wrong = int(excess.argmax()), torch.zeros_like(finite).masked_scatter(finite, excess > 1)
        words = f"an element is {got[at]:.6g}, expected {want[at]:.6g} ({element:.3g} times the tolerance)"
        return element, _with(words, hint(*whole, wrong) if element > NARROW else "")
    if scale > 1:
        return scale, f"the whole output is scaled by {(got * want).sum() / square:.6f}"
    return max(element, scale), ""


def _with(words: str, remark: str) -> str:
    """A reason, and a hint when there is one."""
    return f"{words}. Hint: {remark}" if remark else words


@dataclass
class Report:
    """All cases of one check: ``rows`` holds a dict a case and dtype, ``seed`` repeats the random inputs."""

    name: str
    seed: int
    rows: list[dict] = field(default_factory=list)

    @property
    def failures(self) -> list[dict]:
        return [row for row in self.rows if row["reason"]]

    @property
    def verdict(self) -> str:
        good, total = len(self.rows) - len(self.failures), len(self.rows)
        if total == 0:
            return f"WRONG: {self.name} was checked on no case at all"
        if self.failures:
            first, names = self.failures[0], list(dict.fromkeys(row["case"] for row in self.failures))
            where = f"{first['case']}, {first['dtype']}, {first['what']}: {first['reason']}"
            which = "; ".join(names[:6] + ["…"] * (len(names) > 6))
            count = f"{total - good} of {total} cases (seed {self.seed})"
            return f"WRONG: {self.name} fails {count}: {which}. First: {where}"
        worst = max(row["share"] for row in self.rows)
        found = f"{good} of {total} cases (worst error {worst:.2f} of its tolerance)"
        return f"Right: {self.name} agrees with float64 in {found}"

    def table(self) -> pd.DataFrame:
        """A row a case, a column a dtype; each number is the worst error as a share of its tolerance."""
        table = pd.DataFrame(self.rows).pivot(index="case", columns="dtype", values="share")
        return table.loc[list(dict.fromkeys(row["case"] for row in self.rows))].round(2)


def _gradient(out: torch.Tensor, draw: Draw, turn: int) -> torch.Tensor:
    """A random gradient for ``out``: contiguous, expanded over the leading dimensions, or every second column."""
    if turn % 3 == 1 and out.ndim > 1:
        return draw(out.shape[-1]).expand(out.shape)
    if turn % 3 == 2 and out.ndim > 0:
        return draw(*out.shape[:-1], 2 * out.shape[-1])[..., ::2]
    return draw(*out.shape)


def _run_case(
    function, reference, inputs: dict, draw: Draw, turn: int, backward, reduction, roundings, output_roundings, terms
):
    """Worst ``(what, share, reason)`` over the outputs, the gradients and the untouched inputs of one case."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    learn = {n: t.detach().requires_grad_() for n, t in tensors.items() if backward and t.is_floating_point()}
    exact = {n: t.detach().double().requires_grad_() for n, t in learn.items()}
    upcast = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    before = {n: t.detach().clone() for n, t in tensors.items()}
    with poisoned():
        got = function(**{**inputs, **learn})
    want = reference(**{**inputs, **upcast, **exact})
    got, want = (tuple(out) if isinstance(out, (tuple, list)) else (out,) for out in (got, want))
    found = []
    if len(got) != len(want):
        missing = " (is a `return` missing?)" if got == (None,) else ""
        return "outputs", math.inf, f"there are {len(got)}, expected {len(want)}{missing}"
    for index, (mine, other) in enumerate(zip(got, want, strict=True)):
        if not isinstance(mine, torch.Tensor):
            return f"output {index}", math.inf, f"a {type(mine).__name__}, expected a tensor (is a `return` missing?)"
        share, reason = difference(mine, other, draw.dtype, reduction, output_roundings)
        if reason and index == 0:
            reason = _with(reason, swapped(reference, {**inputs, **upcast}, mine))
        found.append((f"output {index}", share, reason))
    if learn and not any(reason for *_, reason in found):
        upstream = [_gradient(out, draw, turn) for out in got]
        kept = [g.clone() for g in upstream]
        with poisoned():
            mine = torch.autograd.grad(got, list(learn.values()), upstream)
        other = torch.autograd.grad(want, list(exact.values()), [g.double() for g in upstream])
        size = terms(want[0], upstream[0].double()).max().item() if terms and want[0].numel() else 0.0
        for name, a, b in zip(learn, mine, other, strict=True):
            found.append((f"gradient of {name}", *difference(a, b, draw.dtype, reduction, roundings, size)))
        if not all(torch.equal(g, k) for g, k in zip(upstream, kept, strict=True)):
            found.append(("incoming gradient", math.inf, "was overwritten"))
    for name, old in before.items():
        if not torch.equal(tensors[name].nan_to_num(), old.nan_to_num()):
            found.append((f"input {name}", math.inf, "was overwritten"))
    return max(found, key=lambda entry: entry[1])


def _draw_case(function, reference, make, dtype, turn, backward, tolerances):
    """Draw the inputs of a case anew and run it: ``(what, share, reason)`` as :func:`_run_case`."""
    draw = Draw(dtype, machine().device)
    inputs = make(draw)
    reduction, *others = tolerances
    try:
        length = reduction(**inputs) if callable(reduction) else reduction
        return _run_case(function, reference, inputs, draw, turn, backward, length, *others)
    except NotImplementedError:
        raise
    except Exception as error:  # a case that crashes is a wrong case, and the others still run
        return "run", math.inf, f"{type(error).__name__}: {error}"


def compare_all(
    function, reference, cases: dict, *, dtypes, reduction,
    roundings=2, output_roundings=1, terms=None, backward=True, seed=None,
) -> Report:  # fmt: skip
    """Run every case in every dtype; see :func:`check`, which also prints and raises."""
    seed = torch.seed() % 2**32 if seed is None else seed
    torch.manual_seed(seed)
    report = Report(getattr(function, "__name__", "the kernel"), seed)
    tolerances = reduction, roundings, output_roundings, terms
    turns = [(turn + shift, case, dtype) for turn, case in enumerate(cases) for shift, dtype in enumerate(dtypes)]
    with progress("cases", len(turns)):
        for turn, case, dtype in turns:
            for attempt in range(3):
                what, share, reason = _draw_case(function, reference, cases[case], dtype, turn, backward, tolerances)
                if share > NARROW or (attempt > 0) == bool(reason):  # right at once, or wrong, or wrong a second time
                    break
            kind = str(dtype).removeprefix("torch.")
            report.rows.append({"case": case, "dtype": kind, "what": what, "share": share, "reason": reason})
            step()
    return report


def check(function, reference, cases: dict, **options) -> pd.DataFrame:
    """Compare ``function`` with ``reference`` on fresh random inputs; print the verdict, return the table.

    ``cases`` maps a label to a function of a :class:`Draw` that returns the keyword arguments of one call, for
    example ``{"transposed": lambda draw: {"x": draw(300, 64).T}}``. The reference gets the same arguments in
    float64. Options: ``dtypes``; ``reduction`` (terms summed per element, a number or a function of the
    arguments); ``roundings`` of the gradients (2 unless told) and ``output_roundings`` (1; 2 for a function that rounds
    in between, as attention does its weights); ``terms`` (a function of the output and its gradient:
    the terms that cancel in the input's gradient, where they do); ``backward`` (compare gradients too; True);
    ``seed`` (to repeat a failure). New memory is filled with NaN before each call, and inputs and incoming
    gradients must come back unchanged. The bounds are statistical, and a single draw can be ill-conditioned: a case
    that misses narrowly is wrong when one of two more draws misses, too. Raises :class:`CheckFailed` naming the first
    case that is wrong.
    """
    report = compare_all(function, reference, cases, **options)
    print(report.verdict)
    if report.failures or not report.rows:
        raise CheckFailed(report.verdict)
    return report.table()


def exercise(function, reference, cases: dict, **options) -> bool:
    """Check a reader's function: say "solved", "not solved yet" (it raises NotImplementedError) or what is wrong."""
    try:
        report = compare_all(function, reference, cases, **options)
    except NotImplementedError:
        print("Not solved yet: replace the line that raises NotImplementedError, then run this cell again.")
        return False
    print(report.verdict.replace("Right:", "Solved:").replace("WRONG:", "Not right yet:"))
    return bool(report.rows) and not report.failures
