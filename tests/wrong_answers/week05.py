"""Wrong answers to the exercises of week 5: quantised GEMV."""

REPAIR = """
@triton.jit
def repair_kernel(x_ptr, bytes_ptr, scale_ptr, out_ptr, n_bytes, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    mask = i < n_bytes
    pairs = tl.load(bytes_ptr + row * n_bytes + i, mask=mask, other=0)
    low, high = pairs & 15, (pairs >> 4) & 15
    x_low = tl.load(x_ptr + 2 * i, mask=mask, other=0.0).to(tl.float32)
    x_high = tl.load(x_ptr + 2 * i + 1, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(x_low * (low.to(tl.float32) - 8.0) + x_high * (high.to(tl.float32) - 8.0), axis=0)
    tl.store(out_ptr + row, y * tl.load(scale_ptr + row))
"""

ROWWISE = """
@triton.jit
def rowwise_kernel(x_ptr, codes_ptr, scale_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * n_cols + cols, mask=cols < n_cols, other=0).to(tl.float32)
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + row, tl.sum(x * codes, axis=0) * tl.load(scale_ptr + row))


def rowwise(x, codes, scale):
    out = torch.empty(len(codes), device=x.device)
    block = triton.next_power_of_2(codes.shape[1])
    rowwise_kernel[(len(codes),)](x, codes, scale, out, codes.shape[1], BLOCK=block)
    return out
"""

TWO = """
@triton.jit
def two_kernel(x_ptr, codes_ptr, scale_ptr, out_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * n_cols + cols, mask=cols < n_cols, other=0).to(tl.float32)
    scale = tl.load(scale_ptr + row)
    for reader in tl.static_range(2):
        x = tl.load(x_ptr + reader * n_cols + cols, mask=cols < n_cols, other=0.0)
        tl.store(out_ptr + reader * n_rows + row, tl.sum(x * codes, axis=0) * scale)


def two_readers(x, codes, scale):
    out = torch.empty(2, len(codes), device=x.device)
    block = triton.next_power_of_2(codes.shape[1])
    two_kernel[(len(codes),)](x, codes, scale, out, *codes.shape, BLOCK=block)
    return out
"""

ANSWERS = {
    "repair-check": {
        "the signed byte made a signed int": (
            REPAIR.replace("other=0)", "other=0).to(tl.int32)").replace("(pairs >> 4) & 15", "pairs >> 4"),
            r"fails \d of 5 cases .*: only odd columns count; a full block; a block not full[.;]",
        ),
        "8 added to all high nibbles": (
            REPAIR.replace("(pairs >> 4) & 15", "(pairs >> 4) + 8"),
            r"fails 4 of 5 cases .*: only odd columns count; a full block; a block not full; one byte\.",
        ),
        "the high nibble first": (
            REPAIR.replace("low, high", "high, low"),
            r"fails \d of 5 cases .*: only even columns count; only odd columns count; a full block;",
        ),
    },
    "rowwise-check": {
        "no scale": (
            ROWWISE.replace(" * tl.load(scale_ptr + row)", ""),
            r"First: all scales are 2,.*Hint: all of it is 0\.5 times what is expected",
        ),
        "the first scale for all": (
            ROWWISE.replace("scale_ptr + row", "scale_ptr"),
            r"fails 3 of 4 cases .*: a full block; .*Hint: only from element 1 on",
        ),
        "a block of 128 and no loop": (
            ROWWISE.replace("triton.next_power_of_2(codes.shape[1])", "128"),
            r"fails 2 of 4 cases .*: a full block; a block not full\. First",
        ),
        "the result in the dtype of the model": (
            ROWWISE.replace("device=x.device", "device=x.device, dtype=torch.float16"),
            r"dtype torch\.float16, expected torch\.float32",
        ),
    },
    "two-check": {
        "one after the other": (
            ROWWISE + "two_readers = lambda x, codes, scale: torch.stack([rowwise(y, codes, scale) for y in x])\n",
            r"It reads the codes 2\.0 times: once is enough",
        ),
        "the codes made float first": (
            TWO.replace("(x, codes, scale, out,", "(x, codes.float(), scale, out,"),
            r"It reads the codes 5\.0 times: once is enough",
        ),
        "the result as (N, 2)": (
            TWO.replace("out_ptr + reader * n_rows + row", "out_ptr + row * 2 + reader"),
            r"First: two rows of weights,.*Hint: it is the transpose of what is expected",
        ),
        "the first reader's x for both": (
            TWO.replace("x_ptr + reader * n_cols + cols", "x_ptr + cols"),
            r"fails 4 of 4 cases.*Hint: only in row 1 of 0 to 1",
        ),
    },
}
