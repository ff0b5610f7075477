"""Wrong answers to the exercises of week 4: matmul."""

REPAIR = """
@triton.jit
def repair_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(0, K // BLOCK + 1):
        ka, kb = step * BLOCK + tl.arange(0, BLOCK)[None, :], step * BLOCK + tl.arange(0, BLOCK)[:, None]
        a = tl.load(a_ptr + m * K + ka, mask=(m < M) & (ka < K), other=0.0)
        b = tl.load(b_ptr + kb * N + n, mask=(kb < K) & (n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + m * N + n, acc, mask=(m < M) & (n < N))
"""

EPILOGUE = (
    REPAIR.replace("repair_kernel(a_ptr, b_ptr,", "linear_relu_kernel(a_ptr, b_ptr, bias_ptr,")
    .replace("    tl.store(", "    acc += tl.load(bias_ptr + n, mask=n < N, other=0.0)\n    tl.store(")
    .replace("n, acc,", "n, tl.maximum(acc, 0.0),")
    + """

def linear_relu(a, b, bias):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device)
    linear_relu_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 64))](a, b, bias, c, M, N, K, BLOCK=64)
    return c
"""
)

FORMULA = """
def bytes_read(M, N, K, BLOCK_M, BLOCK_N, itemsize):
    return """

ANSWERS = {
    "repair-check": {
        "one row of tiles for all": (
            REPAIR.replace("n = tl.program_id(1) * BLOCK +", "n = 0 * BLOCK +"),
            r"fails \d of \d cases .*: M and N do not fit\. .*Hint: NaN only from column 64 on",
        ),
        "the operands swapped": (
            REPAIR.replace("tl.dot(a, b,", "tl.dot(b, a,"),
            r"fails \d of \d cases.*First: one block.*Hint: it would be right with a and b swapped",
        ),
        "at least one step": (
            REPAIR.replace("K // BLOCK + 1", "max(K // BLOCK, 1)"),
            r"fails \d of \d cases .*: K does not fit\. First",
        ),
        "steps of BLOCK, multiplied by BLOCK again": (
            REPAIR.replace("range(0, K // BLOCK + 1)", "range(0, K, BLOCK)"),
            r"fails \d of \d cases .*: blocks fit; M and N do not fit; K does not fit\. First",
        ),
    },
    "epilogue-check": {
        "the bias by rows": (
            EPILOGUE.replace("bias_ptr + n, mask=n < N", "bias_ptr + m, mask=m < N"),
            r"First: A is 0,.*Hint: it is the transpose of what is expected",
        ),
        "the bias in every step": (
            EPILOGUE.replace("    acc += tl.load(", "        acc += tl.load("),
            r"fails \d of \d cases .*: A is 0; one block; blocks fit; M and N do not fit; K does not fit\. First",
        ),
        "ReLU before the bias": (
            EPILOGUE.replace("    acc += tl.load(", "    acc = tl.maximum(acc, 0.0) + tl.load(").replace(
                "n, tl.maximum(acc, 0.0),", "n, acc,"
            ),
            r"First: A is 0,.* an element is -\S+, expected 0 .*Hint: only in \d+ of 64 columns",
        ),
        "as operators of their own": (
            REPAIR + "\ndef linear_relu(a, b, bias):\n    return torch.relu(repaired_matmul(a, b) + bias)\n",
            r"It writes 3\.0 times C\. Do bias and ReLU in the kernel",
        ),
    },
    "tile-check": {
        "each matrix once": (
            FORMULA + "(M * K + K * N) * itemsize\n",
            r"Not right yet: .*Hint: the first four differ in the tile alone",
        ),
        "numbers, not bytes": (
            FORMULA + "(M // BLOCK_M) * (N // BLOCK_N) * (BLOCK_M + BLOCK_N) * K\n",
            r"Not right yet: .*Hint: the last two differ in itemsize alone",
        ),
        "A once for every row of tiles": (
            FORMULA + "(M * K * (M // BLOCK_M) + K * N * (N // BLOCK_N)) * itemsize\n",
            r"Not right yet: .*Hint: how many tiles of C need the same row of A",
        ),
    },
}
