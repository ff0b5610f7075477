"""The prose never contradicts the recordings: every measured claim in Markdown, and what the recording must show.

Whoever edits such a sentence has to edit its claim here. Words mean, unless a claim says more: *level* within 3 %,
*about level* and *within a few percent* within 5 %, *a little ahead* up to 10 %.
"""

import re
from functools import cache

import nbformat
import numpy as np
import pytest

from shared.cells import ROOT, find, weeks
from shared.machine import datasheet
from shared.results import OURS, PREFERRED, ratios, recording

SIZES = ["dtype", "bits", "direction", "mask", "shape", "n_cols", "D", "S", "M", "N", "K", "H", "V", "T", "F"]
SIZES += ["chunk", "words"]  # all that tells workloads apart
USUAL = [1024, 2048, 4096, 8192, 16384]  # week 2's lengths without the awkward one
LONG = [32768, 65536, 131072]  # week 1's rows that several programs share
WHOLE = ["Llama 3 8B", "Llama 3 8B interleaved", "Llama 2 7B", "Llama 3.2 1B"]  # week 6's heads that turn whole
HALF_SPLIT = ["Llama 3 8B", "Llama 2 7B", "Llama 3.2 1B"]
FLASH2, CUDNN, COMPILED = "SDPA, FlashAttention-2", "SDPA, cuDNN", "torch.compile of the formula"
BITS16 = "F.linear, 16 bits"
BACK = "forward and backward"
LEVEL, FEW_PERCENT = (0.97, 1.03), (0.95, 1.05)


@cache
def recorded(week):
    return recording(find(week).parent, PREFERRED)


def pick(rows, experiment="speed", **where):
    """The rows of an experiment at the sizes asked for (a value or a list for each), and the sizes' columns."""
    rows = rows[rows["experiment"] == experiment].dropna(axis="columns", how="all")
    for name, wanted in where.items():
        rows = rows[rows[name].isin(wanted if isinstance(wanted, list) else [wanted])]
    assert len(rows), f"nothing recorded of {experiment} at {where}"
    return rows, [name for name in SIZES if name in rows]


def wide(rows, value="ms", experiment="speed", **where):
    """A row a workload, a column a provider."""
    rows, sizes = pick(rows, experiment, **where)
    return rows.pivot(index=sizes, columns="provider", values=value).astype(float)


def over(rows, fast, slow, experiment="speed", value="ms", **where):
    """How many times as long (or as large) a slow provider is as a fast one, at each size that both have."""
    found = wide(rows, value, experiment, **where)
    return (found[slow] / found[fast]).dropna()


def across(rows, name, one, other, provider=OURS, **where):
    """How many times as long a provider takes where ``name`` is one as where it is the other."""
    one, other = (wide(rows, **where, **{name: value})[provider].to_numpy() for value in (one, other))
    return one / other


def gain(rows, rival=None, experiment="speed", **where):
    """How many times as fast as a rival this kernel is, at each size; unless named, the rival is the fastest."""
    if rival:
        return over(rows, OURS, rival, experiment, **where)
    rows, sizes = pick(rows, experiment, **where)
    return ratios(rows, sizes).set_index(sizes)["ratio"]


def share(rows, provider=OURS, experiment="speed", **where):
    """A provider's bandwidth as a share of a copy's, at each size."""
    rows, sizes = pick(rows, experiment, **where)
    rows = rows[rows["provider"] == provider].set_index(sizes)
    return rows["gbps"] / rows["copy_gbps"]


def bars(rows, experiment, value="ms", **where):
    """One number a provider."""
    return pick(rows, experiment, **where)[0].set_index("provider")[value].astype(float)


def steps(rows, fast, slow):  # week 3's and week 4's ladders
    return over(rows, fast, slow, "rungs").item()


def between(values, low, high=float("inf")):
    values = np.atleast_1d(np.asarray(values, dtype=float))
    return len(values) > 0 and bool(((values >= low) & (values <= high)).all())


def overlap(rows, rival, **where):
    """Do the spreads (20 % to 80 % of the turns) of this kernel and a rival overlap, at each size?"""
    low, high = (wide(rows, value, **where) for value in ("ms_p20", "ms_p80"))
    return (low[OURS] <= high[rival]) & (low[rival] <= high[OURS])


def apart(rows, rival, **where):
    """Is this kernel's spread below the rival's, at each size?"""
    return wide(rows, "ms_p80", **where)[OURS] < wide(rows, "ms_p20", **where)[rival]


# Week 2: the speed at 12,345 numbers a row as a share of that at 8,192 and 16,384, of every fused kernel.
def off_grid(rows):
    even = wide(rows, n_cols=[8192, 16384]).groupby(["dtype", "direction"]).mean()
    return (even / wide(rows, n_cols=12345).droplevel("n_cols")).drop(columns="unfused")


# Week 3: stock Triton's time over that of shared/turing.py.
def lowered(week, **where):
    return over(recorded(week), "with shared.turing", "stock Triton", "lowered as for a T4", **where)


# Week 7: what a launch takes whatever the vocabulary, from the line through the smallest and the largest.
def launch_ms(rows):
    times = pick(rows, direction="loss", dtype="bfloat16", provider=OURS)[0].set_index("V")["ms"]
    return times[32000] - (times[256000] - times[32000]) / (256000 - 32000) * 32000


# Week 8: milliseconds in all of one part of the work, by the rows of a chunk; a chunk's time and extra memory.
def part(rows, provider):
    return wide(rows, "all_ms", "where")[provider]


def more(rows, chunk):
    return [part(rows, name)[chunk] - part(rows, name)[4096] for name in ("dW, cuBLAS adds", "dW, added")]


def chunks(rows, V):
    return pick(rows, "trade", V=V)[0].set_index("chunk")[["ms", "extra_mib"]].astype(float)


def big8(rows, value="ms"):
    return bars(rows, "speed", value, V=128256)


def all_parts(rows):
    return sum(part(rows, name)[1024] for name in ("loss", "logits", "dX", "dW, added"))


# Week 9: parts of the large layer, large tensors of T times F numbers of 2 bytes, GiB of 32 layers.
def elementwise(rows):
    times = bars(rows, "parts")
    return times.filter(like="elementwise").sum() / times.sum()


def held(rows, T=8192):
    found = pick(rows, direction="forward", T=T)[0].set_index("provider")
    return found["held_mib"].astype(float) * 2**20 / (2 * found["T"] * found["F"]).astype(float)


def scatter(rows):
    found = pick(rows, T=8192)[0]
    return ((found["ms_p80"] - found["ms_p20"]) / 2 / found["ms"]).median()


def saved(rows, way, T=8192):
    times = bars(rows, "epilogue", T=T)
    return times["two products, then elementwise"] - times[way]


CLAIMS = [
    # file, phrase, what the recording must show (of a week's rows; the README's claims ask for the week themselves)
    ("README", "becomes about 16 times as fast as with stock Triton",
     lambda _: between(lowered(4, M=4096), 14.4, 17.6)),
    ("README", "forward) more than 150 times.", lambda _: between(lowered(3, direction="forward"), 150)),
    # ── week 1
    (1, "as fast as PyTorch's best, or faster, at every row length that we timed", lambda r: between(gain(r), 0.97)),
    (1, "so the best can lie above the copy's line",
     lambda r: wide(r, "gbps", "backward").max().max() > pick(r)[0]["copy_gbps"].max()),
    (1, "one kernel walks twice, and the clock agrees", lambda r: between(gain(r, "unfused"), 4)),
    (1, "PyTorch's best copies at full speed too, and there is nothing left to win",
     lambda r: between(gain(r, n_cols=[256, 1024]), *LEVEL)
     and between(share(r, n_cols=[256, 1024]) / gain(r, n_cols=[256, 1024]), 0.97)),
    (1, "(32,768 and more) stay about an eighth below a copy's speed",
     lambda r: between(1 - share(r, dtype="bfloat16", n_cols=LONG), 0.09, 0.16)),
    (1, "A row of 12,345 loses even more",
     lambda r: between(share(r, dtype="bfloat16", n_cols=12345), 0.7, share(r, dtype="bfloat16", n_cols=LONG).min())),
    (1, "In float32 there is time for that; in bfloat16 there is not",
     lambda r: between(share(r, dtype="float32", n_cols=12345), 0.95)),
    (1, "is as fast as this kernel up to 16,384, to within a few percent",
     lambda r: between(gain(r, "torch.compile", "backward", n_cols=[1024, 4096]), *FEW_PERCENT)
     and between(gain(r, "torch.compile", "backward", n_cols=16384, dtype="float32"), *FEW_PERCENT)),
    (1, "some 5 % faster in bfloat16 at that length",
     lambda r: between(gain(r, "torch.compile", "backward", n_cols=16384, dtype="bfloat16"), 0.93, 0.97)),
    (1, "only beyond does it fall behind", lambda r: between(gain(r, "torch.compile", "backward", n_cols=65536), 1.2)),
    (1, "operators is larger than the four times that the bytes promise", lambda r: between(gain(r, "unfused"), 4.2)),
    (1, "and PyTorch's reductions do not reach a copy's speed",
     lambda r: between(4 * share(r, "unfused"), 0, 0.9)),
    # ── week 2
    (2, "writes it once, for rows of the usual lengths nearly as fast as a copy",
     lambda r: between(share(r, direction="forward", n_cols=USUAL), 0.9)),
    (2, "PyTorch's own kernel reaches less than half of a copy's speed",
     lambda r: between(share(r, "F.rms_norm", direction="backward"), 0, 0.5)),
    (2, "reaches most of it, again for rows of the usual lengths",
     lambda r: between(share(r, direction="backward", n_cols=USUAL), 0.75)),
    (2, "with a trip to the cache that all multiprocessors share, and come last",
     lambda r: bars(r, "rungs").idxmax() == "atomics"),
    (2, "a norm is a copy with a little arithmetic, and all good kernels do it about equally well",
     lambda r: between(gain(r, direction="forward", n_cols=USUAL), 0.95, 1.1)),
    (2, "What it does not flatter: forward, nothing much is left to win",
     lambda r: between(share(r, direction="forward", n_cols=USUAL), 0.9)),
    (2, "most of them come within a few percent of ours",
     lambda r: np.mean([gain(r, name, direction="forward") < 1.05 for name in ("torch.compile", "Liger")]) > 0.6),
    (2, "at some sizes one of them is level with ours, or a hair faster",
     lambda r: between(gain(r, direction="forward").min(), 0.97, 1.01)),
    (2, "Reading the row twice pays a few percent at some lengths and nothing at others",
     lambda r: between(gain(r, experiment="reads").max(), 1.015, 1.06)
     and between(gain(r, experiment="reads").min(), 0.97, 1.01)),
    (2, "every fused kernel loses at least a fifth of its speed", lambda r: between(off_grid(r), 0, 0.8)),
    (2, "and ours about a third in float32 and half in bfloat16",
     lambda r: between(off_grid(r)[OURS]["float32"], 0.6, 0.74) and between(off_grid(r)[OURS]["bfloat16"], 0.4, 0.57)),
    (2, "among the usual lengths, the gain over the fastest rival is largest for rows of 8,192 and 16,384",
     lambda r: all(gain(r, **which, n_cols=[8192, 16384]).min() > gain(r, **which, n_cols=[1024, 2048, 4096]).max()
                   for which in ({"direction": "backward", "dtype": dtype} for dtype in ("bfloat16", "float32")))),
    (2, "What still separates us from a copy's speed there",
     lambda r: between(share(r, direction="backward"), 0, 0.97)),
    # ── week 3
    (3, "and it is faster as well, forward and backward", lambda r: between(gain(r, "unfused"), 1.2)),
    (3, "reaches a little more than four fifths of cuDNN's speed",
     lambda r: between(steps(r, CUDNN, "Step 4, descriptors"), 1 / 0.88, 1 / 0.8)),
    (3, "is already more than four times as fast as the operators, and ahead of FlashAttention-2",
     lambda r: between([steps(r, "Step 2", "unfused") / 4, steps(r, "Step 2", FLASH2) / 1.1], 1)),
    (3, "With pointers, Step 4 pays for its generality here",
     lambda r: between(steps(r, "Step 2", "Step 4, pointers"), 1.1)),
    (3, "Descriptors win that back and more",
     lambda r: between(steps(r, "Step 4, descriptors", "Step 2"), 1.1)),
    (3, "the specialists of Step 6 (*this kernel*) take the last step", lambda r: bars(r, "rungs").idxmin() == OURS),
    (3, "Forward with heads of 128, this kernel is a little faster than anything else at nearly all lengths",
     lambda r: gain(r, direction="forward", D=128).gt(1).sum() >= 10
     and between(gain(r, direction="forward", D=128), 0.9, 1.1)),
    (3, "it is level with cuDNN without a mask, a few percent ahead of it for long causal texts",
     lambda r: between(gain(r, CUDNN, direction="forward", D=64, mask="full"), 0.97, 1.03)
     and between(gain(r, CUDNN, direction="forward", D=64, mask="causal", S=[4096, 8192, 16384]), 1.01, 1.1)),
    (3, "and behind it for the shortest ones, where its programs have too few blocks each",
     lambda r: between(gain(r, CUDNN, direction="forward", D=64, mask="causal", S=512), 0.7, 0.99)),
    (3, "Backward, cuDNN is ahead in most places",
     lambda r: (gain(r, CUDNN, direction="backward") < 0.99).mean() > 2 / 3),
    (3, "both of our directions are well ahead of it", lambda r: between(gain(r, FLASH2), 1.25)),
    (3, "Without a mask, its line lies on cuDNN's",
     lambda r: between(over(r, CUDNN, COMPILED, mask="full"), 0.93, 1.07)
     and between(over(r, CUDNN, COMPILED, mask="full").median(), 0.99, 1.01)),
    (3, "With the causal mask it does not, and fuses what it can",
     lambda r: between(over(r, CUDNN, COMPILED, mask="causal"), 1.3)),
    (3, "twice the length is four times the memory on the upper line, and twice on the lower",
     lambda r: between(wide(r, "peak_mib", "memory").pct_change().dropna() + 1, [1.95, 3.7], [2.05, 4.05])),
    (3, "is far ahead of FlashAttention-2 and behind cuDNN",
     lambda r: between(steps(r, "Step 4, descriptors", FLASH2), 1.4)
     and between(steps(r, "Step 4, descriptors", CUDNN), 0, 0.97)),
    (3, "is a little ahead of cuDNN with heads of 128 (for the shortest causal texts about level)",
     lambda r: between(gain(r, CUDNN, direction="forward", D=128, S=[1024, 2048, 4096, 8192, 16384]), 1, 1.1)
     and between(gain(r, CUDNN, direction="forward", D=128, S=512, mask="full"), 1, 1.1)
     and between(gain(r, CUDNN, direction="forward", D=128, S=512, mask="causal"), *FEW_PERCENT)),
    (3, "with heads of 64 level without a mask, a little ahead for long causal texts and behind for the shortest",
     lambda r: between(gain(r, CUDNN, direction="forward", D=64, mask="full"), 0.97, 1.03)
     and between(gain(r, CUDNN, direction="forward", D=64, mask="causal", S=[4096, 8192, 16384]), 1.01, 1.1)
     and between(gain(r, CUDNN, direction="forward", D=64, mask="causal", S=512), 0.7, 0.99)),
    (3, "cuDNN wins nearly everywhere, by the least where texts are short",
     lambda r: (gain(r, CUDNN, direction="backward") < 1).mean() > 0.8
     and bool((gain(r, CUDNN, direction="backward").unstack("S").idxmax(axis=1) == 512).all())),
    # ── week 4
    (4, "keeps up with NVIDIA's own library on large matrices",
     lambda r: between(gain(r, M=[4096, 8192, 16384]), 0.97)),
    (4, "Tiles and the tensor cores together (rung 2) are worth hundreds of times",
     lambda r: between(steps(r, "2 tiles", "1 row times column"), 200, 1000)),
    (4, "The order of tiles (rung 3) buys hardly anything",
     lambda r: between(steps(r, "3 grouped order", "2 tiles"), 0.97, 1.07)),
    (4, "Fetching ahead (rung 4) about doubles the speed",
     lambda r: between(steps(r, "4 fetching ahead", "3 grouped order"), 1.8, 2.25)),
    (4, "within a few percent, a little behind it on small ones and a little ahead on the largest",
     lambda r: between(gain(r), *FEW_PERCENT) and between(gain(r, M=[512, 1024]), 0.95, 1)
     and between(gain(r, M=[8192, 16384]), 1, 1.05)),
    (4, "In all of these cuBLAS is ahead", lambda r: between(gain(r, experiment="other shapes"), 0, 0.98)),
    (4, "is level with cuBLAS to within a few percent, a little ahead on the largest; on skinny ones",
     lambda r: between(gain(r), *FEW_PERCENT) and between(gain(r, M=[8192, 16384]), 1, 1.05)),
    (4, "and in exact float32, cuBLAS wins", lambda r: between(gain(r, experiment="other shapes"), 0, 0.98)),
    # ── week 5
    (5, "on a large matrix the same GPU is done nearly two, or more than three times as fast",
     lambda r: between(gain(r, BITS16, N=128256, M=1, bits=8), 1.7, 2)
     and between(gain(r, BITS16, N=128256, M=1, bits=4), 3)),
    (5, "on a large matrix they help even for one row",
     lambda r: bars(r, "kernels", N=128256, M=1).idxmin() == "dot (Step 6)"),
    (5, "the lines stay flat while the batch grows",
     lambda r: all(between(across(r, "M", 8, 1, name, N=128256), *FEW_PERCENT) for name in (OURS, BITS16))),
    (5, "everything takes about 10 to 30 microseconds, where the bytes alone would take 2 to 7",
     lambda r: between(pick(r, N=4096)[0]["ms"], 0.0095, 0.0315)),
    (5, "which makes 256 programs with 256 threads each, is done sooner",
     lambda r: bars(r, "kernels", N=4096, M=1).idxmin() == "one row (Step 5)"),
    (5, "On the large one, the instructions decide, and there the tensor cores save most of them",
     lambda r: bars(r, "kernels", N=128256, M=1).idxmin() == "dot (Step 6)"),
    (5, "Split-K more than halves the time for 16 rows of the small matrix, until the adding costs more",
     lambda r: bars(r, "kernels", M=16)["split in 1"] > 2 * bars(r, "kernels", M=16).min()
     and bars(r, "kernels", M=16)["split in 32"] > 1.1 * bars(r, "kernels", M=16).min()),
    (5, "a large matrix is done more than three times as fast",
     lambda r: between(gain(r, BITS16, N=128256, M=1, bits=4), 3)),
    (5, "four bits gain less than a third over eight",
     lambda r: between(across(r, "bits", 8, 4, N=4096), 1, 4 / 3)),
    (5, "up to 4 rows PyTorch's own 4-bit kernel is as fast or faster",
     lambda r: between(gain(r, "torch int4", N=4096, bits=4, M=[1, 2, 4]), 0.7, 1.03)
     and between(gain(r, "torch int4", N=4096, bits=4, M=2), 0.7, 0.97)),
    (5, "At 16 rows the work for each row of $x$ begins to show",
     lambda r: between(across(r, "M", 16, 1, N=128256), 1.04)),
    (5, "on the largest matrix 4 bits are little more than twice as fast as 16, not three times",
     lambda r: between(gain(r, BITS16, N=128256, M=16, bits=4), 2, 2.4)),
    # ── week 6
    (6, "is about as fast as a copy (for every model that we timed but one)",
     lambda r: between([*share(r, shape=WHOLE), *share(r, experiment="backward", shape=WHOLE)], 0.95, 1.1)),
    (6, "it takes five times as long as it must, and it will do worse than that",
     lambda r: between(gain(r, "unfused"), 5) and between(gain(r, "unfused", "backward"), 5)),
    (6, "a little above 1 where PyTorch's copy is not the fastest there can be",
     lambda r: between(share(r).max(), 1, 1.1)),
    (6, "that is not free, as the bars above show",
     lambda r: between(over(r, "bfloat16 tables", "float32 tables", "tables"), 1.05)),
    (6, "the gain is larger than the five times that the bytes promise", lambda r: between(gain(r, "unfused"), 5.5)),
    (6, "because they do not even reach a copy's bandwidth with the bytes that they do move",
     lambda r: between(5 * share(r, "unfused", shape=HALF_SPLIT), 0, 0.9)),
    (6, "Tables in the dtype of the queries hardly cost",
     lambda r: between(share(r, "bfloat16 tables", "tables"), 0.93)),
    (6, "Computing the angles instead is slower, since every head computes them again",
     lambda r: between(over(r, "bfloat16 tables", "angles in the kernel", "tables"), 1.1)),
    (6, "forward and half-split, where whole heads turn, there is little to win over `torch.compile`",
     lambda r: between(gain(r, "torch.compile", shape=HALF_SPLIT), 0.97, 1.1)),
    (6, "there the compiler's kernel loses about a fifth",
     lambda r: between(1 / gain(r, "torch.compile", shape="Llama 3 8B interleaved"), 0.75, 0.85)),
    (6, "the kernel stays about an eighth below a copy",
     lambda r: between(1 - share(r, shape="Phi-2"), 0.09, 0.16)
     and between(1 - share(r, experiment="backward", shape="Phi-2"), 0.09, 0.16)),
    (6, "Backward is another story.", lambda r: between(gain(r, "torch.compile", "backward"), 2)),
    (6, "it writes the gradients in another order of memory than `query` and `key` have",
     lambda r: set(pick(r, "backward", provider="torch.compile")[0]["order_kept"]) == {"no"}
     and set(pick(r, "backward", provider=OURS)[0]["order_kept"]) == {"yes"}),
    # ── week 7
    (7, "The gigabyte for the gradient is never allocated",
     lambda r: between(wide(r, "peak_mib", direction="loss and gradient")[OURS], 0, 1)),
    (7, "The longest bars are the least interesting",
     lambda r: (wide(r, direction="loss and gradient").idxmax(axis="columns") == "unfused").all()),
    (7, "A program with 32 warps (1,024 threads) has a multiprocessor to itself",
     lambda r: between(bars(r, "warps").drop("32 warps") / bars(r, "warps")["32 warps"], 1.05)),
    (7, "One copy is the logits themselves. We add nothing to it",
     lambda r: between(wide(r, "peak_mib", direction="loss and gradient")[OURS], 0, 1)),
    (7, "The gain against the fused rivals is real, and much smaller than against the operators",
     lambda r: between(gain(r), 1.3) and between(gain(r, "unfused") / gain(r), 2)),
    (7, "What still separates us from a copy's speed?",
     lambda r: between(share(r, direction="loss and gradient"), 0, 0.9)),
    (7, "which take some hundredths of a millisecond whatever the vocabulary",
     lambda r: between(launch_ms(r), 0.015, 0.09)),
    (7, "At 50,257 the rows that begin off the grid",
     lambda r: share(r, dtype="bfloat16", direction="loss and gradient").idxmin()[-1] == 50257),
    (7, "in float16 the price of not losing small gradients is one more read",
     lambda r: between(across(r, "dtype", "float16", "bfloat16", direction="loss and gradient"), 1.1, 1.5)),
    # ── week 8
    (8, "see where the time goes, and get nearly all of it back",
     lambda r: between(gain(r), 0.95)),
    (8, "In week 4 an H200 reached about three quarters of that on large matrices",
     lambda _: between(wide(recorded(4), "tflops", M=[4096, 8192, 16384]).max(axis="columns").median()
                       / datasheet("NVIDIA H200").fp16_tensor_tflops, 0.7, 0.8)),
    (8, "With few rows a chunk the tiles are short, and the waiting shows",
     lambda r: between((part(r, "dW, cuBLAS adds") / part(r, "dW, written"))[[512, 4096]], [1.08, 0], [2, 1.04])),
    (8, "The loss takes little, and about as much in any chunk",
     lambda r: between(part(r, "loss") / part(r, "logits"), 0, 0.2)
     and between(part(r, "loss") / part(r, "loss").mean(), 0.85, 1.15)),
    (8, "hardly mind chunks of 512 rows",
     lambda r: between([part(r, name)[512] / part(r, name)[4096] for name in ("logits", "dX")], 0.9, 1.07)),
    (8, "it takes about one millisecond more, down to 512 about three",
     lambda r: between(more(r, 1024), 0.6, 1.4) and between(more(r, 512), 2.4, 3.7)),
    (8, "Letting the memory add saves a little of that",
     lambda r: between((1 - part(r, "dW, added") / part(r, "dW, cuBLAS adds"))[[512, 1024]].mean(), 0.005, 0.06)),
    (8, "The parts add up to less than the whole above", lambda r: all_parts(r) < 0.97 * big8(r)[OURS]),
    (8, "Where most words are rare, small chunks cost hardly a digit",
     lambda r: between(over(r, "8,192 rows", "512 rows", "digits", "error", words="at random"), 0.9, 1.3)),
    (8, "the error of 1,024 rows a chunk is about twice that of all at once",
     lambda r: between(over(r, "8,192 rows", "1,024 rows", "digits", "error", words="as in texts"), 1.8, 2.2)),
    (8, "to within what the times scatter, a few percent, with an eighth of its extra memory",
     lambda r: overlap(r, "torch.compile", V=128256).all() and between(gain(r, "torch.compile", V=128256), *FEW_PERCENT)
     and between(big8(r, "extra_mib")["torch.compile"] / big8(r, "extra_mib")[OURS], 7.8, 8.2)),
    (8, "at 256 rows our time is about Liger's, and our memory too",
     lambda r: between(chunks(r, 128256)["ms"][256] / big8(r)["Liger"], 0.93, 1.07)
     and between(chunks(r, 128256)["extra_mib"][256] / big8(r, "extra_mib")["Liger"], 0.97, 1.03)),
    (8, "The small layer fits into one chunk, and there nothing is traded at all",
     lambda r: between(gain(r, "torch.compile", V=32000), 1)
     and between(bars(r, "speed", "extra_mib", V=32000)[[OURS, "torch.compile"]].diff().dropna(), -1, 1)),
    (8, "so there one chunk is the best in both", lambda r: (chunks(r, 32000).idxmin() == 4096).all()),
    # ── week 9
    (9, "The products take nearly all the time, and there is little to win",
     lambda r: between(elementwise(r), 0, 0.07) and between(gain(r, direction=BACK), 0.97, 1.06)),
    (9, "what the layer keeps in memory for the way back can be halved",
     lambda r: between(held(r)[OURS] / held(r)["eager"], 0.49, 0.51)),
    (9, "and the same work takes a few percent more or less from turn to turn",
     lambda r: between(scatter(r), 0.015, 0.05)),
    (9, "(They add up to less than the whole layer takes.",
     lambda r: bars(r, "parts").sum() < 0.97 * wide(r, T=8192, direction=BACK)[OURS].item()),
    (9, "and `torch.compile` has part of it already",
     lambda r: between(over(r, "torch.compile", "eager", T=8192, direction=BACK), 1.005, 1.08)),
    (9, "there the gain is largest: most of the elementwise part",
     lambda r: between(saved(r, "fused, nothing kept") / bars(r, "parts")["elementwise, forward"], 0.6, 1.3)
     and all("no gradient" in gain(r, T=T).idxmax() for T in (4096, 8192))),
    (9, "have to be written all the same, and less is saved",
     lambda r: saved(r, "fused, gate and up kept") < 0.9 * saved(r, "fused, nothing kept")),
    (9, "*one* product instead of two fills the GPU more evenly",
     lambda r: between(saved(r, "one product, then elementwise", 4096) / bars(r, "epilogue", T=4096).max(), 0.02)),
    (9, "`torch.compile` and Liger keep three large tensors, we two",
     lambda r: between(held(r)[["torch.compile", "Liger", OURS]] - [3, 3, 2], -0.01, 0.01)),
    (9, "for 8,192 tokens that makes 14 GiB instead of 21, or 28 in eager PyTorch",
     lambda r: (bars(r, "speed", "held_mib", T=8192, direction="forward") / 32).round().to_dict()
     == {OURS: 14, "torch.compile": 21, "Liger": 21, "eager": 28}),
    (9, "The peak of a single forward pass is the same for all three",
     lambda r: between(wide(r, "peak_mib", direction="forward").drop(columns="eager").nunique(axis="columns"), 1, 1)),
    (9, "two large tensors where eager PyTorch keeps four, and `torch.compile` three",
     lambda r: between(held(r)[[OURS, "eager", "torch.compile"]] - [2, 4, 3], -0.01, 0.01)),
    (9, "In memory the gain is a factor; in time it is percents",
     lambda r: between(gain(r), 0.97, 1.2) and between(held(r)["torch.compile"] / held(r)[OURS], 1.4)),
    (9, "On the large layer a few percent are gained without gradients",
     lambda r: between(gain(r, T=8192, direction="no gradient"), 1.02, 1.08)),
    (9, "are level with the best rival, within what the times scatter",
     lambda r: between(gain(r, T=8192, direction=["forward", BACK]), 0.96, 1.04)
     and all(overlap(r, name, T=8192, direction=["forward", BACK]).all() for name in ("torch.compile", "Liger"))),
    (9, "On the small one the gain is clear in all three",
     lambda r: all(apart(r, name, T=4096).all() for name in ("eager", "torch.compile", "Liger"))),
]  # fmt: skip

OTHER = {  # numbers that no recording has to bear out, by their reason
    "datasheet": [
        ("README", "320 GB/s; 65 TFLOPS, float16 only | 300 GB/s; 121 TFLOPS | 2,039 GB/s; 312 TFLOPS"),
        ("README", "3,350, 4,800 GB/s; 989 TFLOPS"),
        (4, "which could do 8.1 TFLOPS at best"),
        (5, "At the H200's 4.8 TB/s"),
    ],
    "hardware": [
        ("README", "8 to 16 times as fast as the ordinary units"),
        (3, "8 to 16 times as fast"),
        (3, "at $D = 128$ the products take twice as long as the exponential"),
        (3, "wastes a third of its time"),
        (3, "units with an eighth of the speed"),
        (4, "8 to 16 times the rate"),
        (4, "an H200 has 60 MiB of L2 cache"),
        (4, "(A T4 has 4 MiB.)"),
        (4, "the dotted one, eight times lower"),
        (5, "16 GB: all the memory of a T4"),
        (7, "A T4's cache has 4 MiB"),
    ],
    "by hand": [
        (1, "Five separate operators walk eight times"),
        (1, "four times less"),
        (1, "Five operators walk eight times"),
        (2, "Eighteen times the tensor"),
        (3, "(2 MB at 4,096 tokens"),
        (3, "the usual count is 2.5 times the forward's"),
        (3, "the dashed line is at 16 GiB"),
        (4, "uses each number 128 times"),
        (4, "both matrices together are 16 MiB"),
        (5, "3.9 times less memory"),
        (5, "it has twice or four times the bytes to fetch"),
        (5, "each weight is multiplied 16 times"),
        (5, "The plain way moved 4.7 and 8.9 MB"),
        (5, "eighteen times closer together"),
        (5, "In 4 bits it fits three times over"),
        (6, "move five times as many bytes"),
        (6, "a hundred times slower"),
        (6, "the kernel could reach only half of a copy's speed"),
        (6, "the kernel would stop at half of a copy's speed"),
        (6, "an error of up to 0.4 %"),
        (7, "33 MiB"),
        (8, "two gigabytes"),
        (8, "more than 512 times smaller"),
        (9, "$F$ about three times $H$"),
        (9, "5 to 9 % of the time at the most"),
    ],
    "a size that we chose": [
        (1, "Each size has 1 GiB"),
        (2, "a plain copy of 1 GiB"),
        (3, "drawn four times as large"),
        (3, "and for one twice as long"),
        (8, "as many as fill 256 MiB"),
        (8, "wherever 512 MiB suffice"),
    ],
    "a manner of speaking": [
        (1, "a `ratio` of 1.2 means a fifth faster"),
        (2, "a `ratio` of 1.2 means a fifth faster"),
        (6, "a `ratio` of 1.2 means a fifth faster"),
        (8, "2 %, 20 %, 200 %?"),
        (8, "$dW$ three times: only written"),
        (9, "(1.01 is one percent faster)"),
    ],
    "the student's report": [
        ("README", "Softmax rose from 55 to 230 GB/s. Cross-entropy took 15.90 ms where PyTorch took 24.03."),
        ("README", "needed a tenth of the memory"),
        ("README", "about 25 times slower than PyTorch, and the matrix product stayed at about 1 TFLOPS"),
        (3, "25 times slower than PyTorch"),
        (4, "a speed that would not rise above about 1 TFLOPS"),
        (4, "The T4's flat 1 TFLOPS"),
        (7, "15.90 ms for their kernel, 24.03 ms for PyTorch's"),
        (8, "measured ten times less memory on a T4"),
    ],
    "a trial, apart from the recording": [
        (5, "In trials on an H200, the best kernel for rows that lie by themselves took a third longer"),
        (7, "0.75 ms at best, backwards 0.70"),
        (9, "two `tl.dot` in one loop took 3.2 ms where this kernel took 2.4"),
    ],
    "on a processor: disk, run time, or an error that a cell prints": [
        ("README", "PyTorch then comes without CUDA (2.4 GB of disk instead of more than 5)"),
        ("README", "about 8 minutes on 2 cores"),
        ("README", "A notebook takes up to a minute without a GPU, and one to two minutes with one"),
        (1, "it takes some ten seconds"),
        (5, "An error of 10 % of a product"),
        (8, "After 32 chunks the error is four times that of a single rounding"),
    ],
}  # fmt: skip

# A number with a measured unit, "times", or a part of a speed, time or memory, in digits or in words. (What is given
# in KiB is a size of the hardware or of a row.)
WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|fifteen|sixteen|eighteen|twenty|thirty|fifty|hundreds?|few"
UNITS = r"ms|[µu]s|(?:milli|micro)?seconds?|minutes?|[GT]B/s|TFLOPS|%|percent|[MGT]i?B|gigabytes?|times"
PARTS = "hal(?:f|ves)|(?:third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
NUMBER = re.compile(
    rf"(?:\d(?:[\d,.]*\d)?|\b(?:{WORDS}))(?: of a)? ?(?:{UNITS})(?![\w$])"
    rf"|\b(?:{PARTS}) (?:of (?:[\w']+ ){{0,2}}(?:copy|speed|time|memory|m[a-z]+seconds?)|below|longer|faster|slower)\b"
    r"|\b(?:twice (?:as (?:fast|slow|long)|that)|(?:halv|doubl|tripl)e[sd] the|be halved)\b",
    re.I,
)


@cache
def text(file):
    """The prose of a week or of the README, spaces and line ends made alike; the README's table has its own test."""
    if isinstance(file, int):
        cells = nbformat.read(find(file), as_version=4).cells
        found = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        found = (ROOT / f"{file}.md").read_text(encoding="utf-8")
    found = re.sub(r"```.*?```|<!-- table -->.*?<!-- /table -->", "", found, flags=re.S)
    return " ".join(found.split())


def spans(file, phrase):
    return [match.span() for match in re.finditer(re.escape(phrase), text(file))]


@pytest.mark.parametrize(("file", "phrase", "holds"), CLAIMS, ids=[f"{file}: {phrase}" for file, phrase, _ in CLAIMS])
def test_the_recording_bears_out(file, phrase, holds):
    assert 4 <= len(phrase.split()) <= 20
    assert len(spans(file, phrase)) == 1, "this claim stands there no more, or twice: mend it here, too"
    assert holds(recorded(file) if isinstance(file, int) else None), "the recording says otherwise"


@pytest.mark.parametrize("file", ["README", *range(1, len(weeks()) + 1)])
def test_every_number_is_a_claim_or_has_a_reason(file):
    explained = [phrase for known in OTHER.values() for where, phrase in known if where == file]
    assert [phrase for phrase in explained if not spans(file, phrase)] == [], "these stand there no more"
    claimed = [phrase for where, phrase, _ in CLAIMS if where == file]
    known = [span for phrase in claimed + explained for span in spans(file, phrase)]
    new = [
        text(file)[max(match.start() - 40, 0) : match.end() + 20]
        for match in NUMBER.finditer(text(file))
        if not any(start <= match.start() and match.end() <= end for start, end in known)
    ]
    assert new == [], "new numbers: claim them, or say in OTHER where they come from"
