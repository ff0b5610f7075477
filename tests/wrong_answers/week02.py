"""Wrong answers to the exercises of week 2: RMSNorm's backward, LayerNorm and its backward."""

REPAIR = """
@triton.jit
def repair_kernel(x_ptr, weight_ptr, dy_ptr, dx_ptr, eps, N_COLS: tl.constexpr):
    cols = tl.program_id(0) * N_COLS + tl.arange(0, N_COLS)
    x, dy = tl.load(x_ptr + cols), tl.load(dy_ptr + cols)
    g = dy * tl.load(weight_ptr + tl.arange(0, N_COLS))
    r = tl.rsqrt(tl.sum(x * x, axis=0) / N_COLS + eps)
    c = tl.sum(x * r * g, axis=0) / N_COLS
    tl.store(dx_ptr + cols, (g - x * r * c) * r)
"""

LAYER_NORM = """
@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, n_cols, eps, BLOCK_N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / n_cols
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / n_cols
    w, b = tl.load(weight_ptr + cols, mask=mask, other=0.0), tl.load(bias_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * n_cols + cols, centred * tl.rsqrt(variance + eps) * w + b, mask=mask)


def layer_norm(x, weight, bias, eps=1e-5):
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    layer_norm_kernel[(x.shape[0],)](x, weight, bias, y, x.shape[1], eps, BLOCK_N=block)
    return y
"""

BACKWARD = """
@triton.jit
def layer_norm_backward_kernel(x_ptr, weight_ptr, dy_ptr, dx_ptr, n_cols, eps, BLOCK_N: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_N)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * n_cols + cols, mask=mask, other=0.0)
    g = dy * tl.load(weight_ptr + cols, mask=mask, other=0.0)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / n_cols, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=0) / n_cols + eps)
    x_hat = centred * r
    g_mean = tl.sum(g, axis=0) / n_cols
    c = tl.sum(x_hat * g, axis=0) / n_cols
    tl.store(dx_ptr + row * n_cols + cols, (g - g_mean - x_hat * c) * r, mask=mask)


def layer_norm_backward(x, weight, dy, eps=1e-5):
    dx = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    layer_norm_backward_kernel[(x.shape[0],)](x, weight, dy, dx, x.shape[1], eps, BLOCK_N=block)
    return dx
"""

ANSWERS = {
    "repair-check": {
        "the weight outside the sum": (
            REPAIR.replace("r * g,", "r * dy,").replace(
                "r * c)", "r * c * tl.load(weight_ptr + tl.arange(0, N_COLS)))"
            ),
            r"fails \d of \d cases \(seed \d+\): different weights\.",
        ),
        "the weight in the sum only": (
            REPAIR.replace("(g - ", "(dy - "),
            r"fails \d of \d cases \(seed \d+\): weights of three; different weights\.",
        ),
        "one r lost": (
            REPAIR.replace("(g - x * r * c)", "(g - x * c)"),
            r"fails \d of \d cases \(seed \d+\): weights of one;",
        ),
    },
    "layer-norm-check": {
        "eps fixed": (
            LAYER_NORM.replace("rsqrt(variance + eps)", "rsqrt(variance + 1e-5)"),
            r"fails \d of \d cases .*: another eps\. First",
        ),
        "lanes outside are not 0": (
            LAYER_NORM.replace("tl.where(mask, x - mean, 0.0)", "x - mean"),
            r"fails \d of \d cases \(seed \d+\): a block not full; a mean of 20\.",
        ),
        "a difference of squares": (
            LAYER_NORM.replace("(centred * centred, axis=0) / n_cols", "(x * x, axis=0) / n_cols - mean * mean"),
            r"fails \d of \d cases \(seed \d+\): a mean of 20\.",
        ),
        "eps outside the root": (
            LAYER_NORM.replace("tl.rsqrt(variance + eps)", "(1.0 / (tl.sqrt(variance) + eps))"),
            r"fails .* small numbers",
        ),
    },
    "layer-norm-backward-check": {
        "the gradient keeps its mean": (
            BACKWARD.replace("(g - g_mean - ", "(g - "),
            r"fails \d of \d cases \(seed \d+\): a full block;",
        ),
        "lanes outside are not 0": (
            BACKWARD.replace("tl.where(mask, x - tl.sum(x, axis=0) / n_cols, 0.0)", "x - tl.sum(x, axis=0) / n_cols"),
            r"fails \d of \d cases \(seed \d+\): a block not full; a mean of 20\.",
        ),
        "g in a kernel of its own": (
            BACKWARD.replace("dy * tl.load(weight_ptr + cols, mask=mask, other=0.0)", "dy").replace(
                "x, weight, dy, dx,", "x, weight, dy * weight, dx,"
            ),
            r"It reads 3\.\d+ times the tensor .*: right, but 3 and 1 are enough\.",
        ),
    },
}
