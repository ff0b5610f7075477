"""Wrong answers to the exercises of week 7: fused cross-entropy."""

REPAIR = """
@triton.jit
def repair_kernel(logits_ptr, target_ptr, loss_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    ptrs, target = logits_ptr + row * n_cols + cols, tl.load(target_ptr + row)
    x = tl.load(ptrs, mask=cols < n_cols, other=float("-inf"))
    x_target = tl.load(logits_ptr + row * n_cols + target)
    largest = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - largest), axis=0)
    gradient = (tl.exp(x - largest) / total - tl.where(cols == target, 1.0, 0.0)) / n_rows
    tl.store(ptrs, gradient, mask=cols < n_cols)
    tl.store(loss_ptr + row, largest + tl.log(total) - x_target)
"""
READ = "    x_target = tl.load(logits_ptr + row * n_cols + target)\n"
WRITE = "    tl.store(ptrs, gradient, mask=cols < n_cols)\n"
IN_PLACE = """

def repaired(logits, target):
    loss = torch.empty(len(logits), device=logits.device)
    block = triton.next_power_of_2(logits.shape[1])
    repair_kernel[(len(logits),)](logits, target, loss, *logits.shape, BLOCK=block)
    return loss, logits
"""

CORRECT = """
@triton.jit
def correct_kernel(logits_ptr, target_ptr, loss_ptr, correct_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
    x_target = tl.load(logits_ptr + row * n_cols + tl.load(target_ptr + row))
    largest = tl.max(x, axis=0)
    lse = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    tl.store(loss_ptr + row, lse - x_target)
    tl.store(correct_ptr + row, tl.where(x_target == largest, 1.0, 0.0))


def loss_and_correct(logits, target):
    loss, correct = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    block = triton.next_power_of_2(logits.shape[1])
    correct_kernel[(len(logits),)](logits, target, loss, correct, logits.shape[1], BLOCK=block)
    return loss, correct
"""

Z_LOSS = """
@triton.jit
def z_kernel(logits_ptr, target_ptr, loss_ptr, c, n_rows, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    ptrs, target = logits_ptr + row * n_cols + cols, tl.load(target_ptr + row)
    x = tl.load(ptrs, mask=cols < n_cols, other=float("-inf"))
    x_target = tl.load(logits_ptr + row * n_cols + target)
    largest = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - largest), axis=0)
    lse = largest + tl.log(total)
    tl.store(loss_ptr + row, lse - x_target + c * lse * lse)
    gradient = tl.exp(x - lse) * (1.0 + 2.0 * c * lse) - tl.where(cols == target, 1.0, 0.0)
    tl.store(ptrs, gradient, mask=cols < n_cols)


def z_loss(logits, target, c):
    logits, loss = logits.clone(), torch.empty(len(logits), device=logits.device)
    block = triton.next_power_of_2(logits.shape[1])
    z_kernel[(len(logits),)](logits, target, loss, c, *logits.shape, BLOCK=block)
    return loss, logits
"""

ANSWERS = {
    "repair-check": {
        "read before the write, but behind the sums": (
            REPAIR.replace(READ, "").replace(WRITE, READ + WRITE),
            r"reads a logit after the last `tl\.max` or `tl\.sum`",
        ),
        "the row forgotten while moving the line": (
            REPAIR.replace("row * n_cols + target", "target"),
            r"output 0: .* Hint: only from element 1 on",
        ),
        "the copy thrown away": (REPAIR + IN_PLACE, r"input logits: was overwritten"),
    },
    "correct-check": {
        "padded with 0": (
            CORRECT.replace('float("-inf")', "0.0"),
            r"fails 2 of 4 cases \(seed \d+\): a block not full; a long row\.",
        ),
        "the largest logit not taken off": (
            CORRECT.replace(
                "largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))", "tl.log(tl.sum(tl.exp(x), axis=0))"
            ),
            r"fails 1 of 4 cases \(seed \d+\): logits of 1,000\..* NaN or infinite where",
        ),
        "a second walk by PyTorch": (
            CORRECT.replace("return loss, correct", "return loss, (logits.argmax(-1) == target).float()"),
            r"It reads 2\.\d\d times the logits: one kernel can do with once",
        ),
    },
    "z-loss-check": {
        "the gradient of the mean": (
            Z_LOSS.replace("tl.store(ptrs, gradient,", "tl.store(ptrs, gradient / n_rows,"),
            r"output 1: .* Hint: all of it is 0\.125 times what is expected",
        ),
        "the largest logit not taken off": (
            Z_LOSS.replace("x - largest", "x").replace("largest + ", ""),
            r"fails 1 of 4 cases \(seed \d+\): large logits\..* NaN or infinite where",
        ),
        "the derivative of a square without its 2": (
            Z_LOSS.replace("2.0 * c * lse)", "c * lse)"),
            r"fails [34] of 4 cases .* output 1:",
        ),
    },
}
