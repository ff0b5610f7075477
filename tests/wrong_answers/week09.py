"""Wrong answers to the exercises of week 9: SwiGLU MLP."""

REPAIR = """
@triton.jit
def repair_kernel(gate_ptr, up_ptr, grad_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0)
    grad = tl.load(grad_ptr + at, mask=at < n, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(gate_ptr + at, grad * up * share * (1.0 + gate * (1.0 - share)), mask=at < n)
    tl.store(up_ptr + at, grad * gate * share, mask=at < n)
"""
AGAIN = """    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0)
    tl.store(up_ptr"""
IN_PLACE = """

def repaired(gate, up, grad):
    repair_kernel[(triton.cdiv(gate.numel(), 256),)](gate, up, grad, gate.numel(), BLOCK=256)
    return gate, up
"""

PAIR = """
@triton.jit
def pair_kernel(pair_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    gate = tl.load(pair_ptr + row * 2 * F + cols, mask=cols < F, other=0.0)
    up = tl.load(pair_ptr + row * 2 * F + F + cols, mask=cols < F, other=0.0)
    tl.store(out_ptr + row * F + cols, gate * tl.sigmoid(gate) * up, mask=cols < F)


def swiglu_of_pair(pair):
    T, F = pair.shape[0], pair.shape[1] // 2
    out = torch.empty(T, F, dtype=pair.dtype, device=pair.device)
    pair_kernel[(T,)](pair, out, F, BLOCK=triton.next_power_of_2(F))
    return out
"""
COPIES = """
@triton.jit
def halves_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, gate * tl.sigmoid(gate) * up, mask=at < n)


def swiglu_of_pair(pair):
    gate, up = (half.contiguous() for half in pair.chunk(2, dim=1))
    out = torch.empty_like(gate)
    halves_kernel[(triton.cdiv(out.numel(), 256),)](gate, up, out, out.numel(), BLOCK=256)
    return out
"""

LIMITED = """
@triton.jit
def limited_kernel(gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, limit, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0)
    grad = tl.load(grad_ptr + at, mask=at < n, other=0.0)
    limited = tl.minimum(gate, limit)
    share = tl.sigmoid(limited)
    slope = tl.where(gate <= limit, share * (1.0 + limited * (1.0 - share)), 0.0)
    tl.store(grad_gate_ptr + at, grad * up * slope, mask=at < n)
    tl.store(grad_up_ptr + at, grad * limited * share, mask=at < n)


def limited_gradients(gate, up, grad, limit):
    grads = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), 256),)
    limited_kernel[grid](gate, up, grad, *grads, limit, gate.numel(), BLOCK=256)
    return grads
"""

ANSWERS = {
    "repair-check": {
        "the other gradient comes too early": (
            REPAIR.replace("    tl.store(up_ptr", AGAIN),
            r"fails 2 of 2 cases .* output 1:",
        ),
        "the copies thrown away": (REPAIR + IN_PLACE, r"input gate: was overwritten"),
    },
    "pair-check": {
        "rows F apart": (
            PAIR.replace("row * 2 * F", "row * F"),
            r"Hint: only from row 1 on",
        ),
        "a block of 256 for any F": (
            PAIR.replace("triton.next_power_of_2(F)", "256"),
            r"fails 1 of 3 cases \(seed \d+\): a wide row\..* Hint: NaN only from column 256 on",
        ),
        "the halves copied first": (COPIES, r"It moves 7\.0 large tensors: right, but three are enough"),
    },
    "clamp-check": {
        "the gradient goes on behind the limit": (
            LIMITED.replace(
                "tl.where(gate <= limit, share * (1.0 + limited * (1.0 - share)), 0.0)",
                "share * (1.0 + limited * (1.0 - share))",
            ),
            r"fails 2 of 3 cases \(seed \d+\): full blocks; a block not full\. First: .* output 0:",
        ),
        "up gets no gradient behind the limit either": (
            LIMITED.replace("grad * limited * share", "tl.where(gate <= limit, grad * limited * share, 0.0)"),
            r"fails 2 of 3 cases \(seed \d+\): full blocks; a block not full\. First: .* output 1:",
        ),
        "the two gradients in the wrong order": (
            LIMITED.replace("return grads", "return grads[1], grads[0]"),
            r"fails 3 of 3 cases \(seed \d+\): full blocks; a block not full; no limit\.",
        ),
    },
}
