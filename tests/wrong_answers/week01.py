"""Wrong answers to the exercises of week 1: softmax, log-softmax and softmax with a temperature."""

REPAIR = """
@triton.jit
def repair_kernel(x_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    offsets = tl.program_id(0) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf"))
    powers = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + offsets, powers / tl.sum(powers, axis=0), mask=mask)
"""

LOG_SOFTMAX = """
@triton.jit
def log_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    offsets = tl.program_id(0) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf"))
    shifted = x - tl.max(x, axis=0)
    y = shifted - tl.log(tl.sum(tl.exp(shifted), axis=0))
    tl.store(y_ptr + offsets, y, mask=mask)


def log_softmax(x):
    y = torch.empty_like(x)
    log_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK_N=triton.next_power_of_2(x.shape[1]))
    return y
"""

TEMPERATURE = """
@triton.jit
def temperature_kernel(x_ptr, y_ptr, n_cols, t, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    offsets = tl.program_id(0) * n_cols + cols
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf")) / t
    powers = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + offsets, powers / tl.sum(powers, axis=0), mask=mask)


def softmax_with_temperature(x, temperature):
    y = torch.empty_like(x)
    grid, block = (x.shape[0],), triton.next_power_of_2(x.shape[1])
    temperature_kernel[grid](x, y, x.shape[1], temperature, BLOCK_N=block)
    return y
"""

ANSWERS = {
    "repair-check": {
        "the first score taken off, and not the largest": (
            REPAIR.replace("tl.max(x, axis=0)", "tl.sum(tl.where(cols == 0, x, 0.0), axis=0)"),
            r"fails \d of \d cases .*: scores far apart\. First",
        ),
        "the padding is the largest of negative scores": (
            REPAIR.replace('float("-inf")', "0.0").replace("tl.sum(powers", "tl.sum(tl.where(mask, powers, 0.0)"),
            r"fails \d of \d cases \(seed \d+\): very negative scores\. .*Hint: NaN everywhere",
        ),
        "large scores are capped": (
            REPAIR.replace("x - tl.max(x, axis=0)", "tl.minimum(x, 80.0)"),
            r"fails \d of \d cases \(seed \d+\): large scores; very negative scores",
        ),
        "the largest score is not subtracted in the sum": (
            REPAIR.replace("tl.sum(powers,", "tl.sum(tl.exp(x),"),
            r"fails \d of \d cases \(seed \d+\): a full block;",
        ),
    },
    "log-softmax-check": {
        "the logarithm of the softmax": (
            LOG_SOFTMAX.replace(
                "y = shifted - tl.log(tl.sum(tl.exp(shifted), axis=0))", "powers = tl.exp(shifted)"
            ).replace("offsets, y,", "offsets, tl.log(powers / tl.sum(powers, axis=0)),"),
            r"fails \d of \d cases \(seed \d+\): scores far apart; far apart\. .*NaN or infinite",
        ),
        "the padding takes part in the sum": (
            LOG_SOFTMAX.replace('float("-inf")', "0.0"),
            r"fails [234] of 6 cases \(seed \d+\): a block not full; very negative scores",
        ),
        "two kernels": (
            LOG_SOFTMAX.replace("x - tl.max(x, axis=0)", "x").replace("](x,", "](x - x.amax(1, keepdim=True),"),
            r"It moves 2\.5\d* times 2MN\. Right, but one read and one write are enough\.",
        ),
    },
    "temperature-check": {
        "the shares are divided": (
            TEMPERATURE.replace(" / t\n", "\n").replace("axis=0), mask", "axis=0) / t, mask"),
            r"fails \d of \d cases \(seed \d+\): t = 0\.25; t = 3\.0;",
        ),
        "the largest score is not divided": (
            TEMPERATURE.replace(" / t\n", "\n").replace("tl.exp(x - ", "tl.exp(x / t - "),
            r"fails \d of \d cases \(seed \d+\): t = 0\.25, large scores.*Hint: NaN",
        ),
        "divided by PyTorch, in a kernel of its own": (
            TEMPERATURE.replace(" / t\n", "\n").replace("](x,", "](x / temperature,"),
            r"It moves 2 times 2MN\. Right, but one read",
        ),
    },
}
