"""Wrong answers to the exercises of week 3: attention, attention in a window, and two halves put together."""

REPAIR = """
@triton.jit
def repair_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, S, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    tiles = tl.cdiv(S, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64) * S * D
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, D)
    at = head + rows[:, None] * D + cols[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < S, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + head + keys[:, None] * D + cols[None, :], mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + head + keys[:, None] * D + cols[None, :], mask=keys[:, None] < S, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        s = tl.where(keys[None, :] < S, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    tl.store(out_ptr + at, acc / total[:, None], mask=rows[:, None] < S)
"""

WINDOW = (
    REPAIR.replace("repair_kernel", "window_kernel")
    .replace("S, scale,", "S, window, scale,")
    .replace("    tiles =", "    row = tl.program_id(0) % tl.cdiv(S, BLOCK_M) * BLOCK_M\n    tiles =")
    .replace('float("-inf"), tl.float32', "-3e38, tl.float32")
    .replace("range(0, S,", "range(tl.maximum(row - window + 1, 0) // BLOCK_N * BLOCK_N, tl.minimum(row + BLOCK_M, S),")
    .replace("keys[None, :] < S, s,", "(distance >= 0) & (distance < window), s,")
    .replace("        s = tl.where", "        distance = rows[:, None] - keys[None, :]\n        s = tl.where")
    + """

def windowed_attention(query, key, value, window):
    B, H, S, D = query.shape
    out = torch.empty_like(query)
    grid, blocks = (triton.cdiv(S, 64) * B * H,), {"D": D, "BLOCK_M": 64, "BLOCK_N": 64}
    window_kernel[grid](query, key, value, out, S, window, D**-0.5 / math.log(2), **blocks)
    return out
"""
)

MERGED = """
def merged(out_1, lse_1, out_2, lse_2):
    top = torch.maximum(lse_1, lse_2)
    sum_1, sum_2 = torch.exp2(lse_1 - top), torch.exp2(lse_2 - top)
    share_1 = (sum_1 / (sum_1 + sum_2))[..., None]
    return out_1 * share_1 + out_2 * (1 - share_1)
"""

ANSWERS = {
    "repair-check": {
        "the new part shrinks too": (
            REPAIR.replace("acc * shrink[:, None],", "acc,").replace(
                '"ieee")\n        top', '"ieee") * shrink[:, None]\n        top'
            ),
            r"fails \d of \d cases \(seed \d+\): 64 tokens; .*Hint: all of it is 0",
        ),
        "shrinks when top is the new one already": (
            REPAIR.replace("acc * shrink[:, None]", "acc").replace(
                "top = new_top\n", "top = new_top\n        acc = acc * tl.exp2(top - new_top)[:, None]\n"
            ),
            r"fails [12] of 4 cases \(seed \d+\): (65 tokens; )?300 tokens\.",
        ),
        "a larger block instead": (
            REPAIR.replace("acc * shrink[:, None]", "acc")
            + """

def repaired_attention(query, key, value):
    B, H, S, D = query.shape
    out = torch.empty_like(query)
    blocks = {"D": D, "BLOCK_M": 64, "BLOCK_N": 256}
    repair_kernel[(triton.cdiv(S, 64) * B * H,)](query, key, value, out, S, D**-0.5 / math.log(2), **blocks)
    return out
""",
            r"fails \d of \d cases \(seed \d+\): 300 tokens\.",
        ),
    },
    "window-check": {
        "one token too many": (
            WINDOW.replace("distance < window", "distance <= window"),
            r"fails \d of \d cases \(seed \d+\): 64 tokens, window 10; 200 tokens, window 64; 200 tokens, window 1;",
        ),
        "top starts at minus infinity": (
            WINDOW.replace("-3e38", 'float("-inf")'),
            r"fails \d of \d cases \(seed \d+\): 200 tokens, window 64\. .*Hint: NaN",
        ),
        "goes on to the last key": (
            WINDOW.replace("tl.minimum(row + BLOCK_M, S)", "S"),
            r"Not right yet: right numbers, but a longer text must not take more walks",
        ),
    },
    "merge-check": {
        "powers of e": (
            MERGED.replace("exp2", "exp"),
            r"merged fails \d of \d cases \(seed \d+\): 64 tokens; 101 tokens; two texts; large scores",
        ),
        "nothing subtracted": (
            MERGED.replace(" - top", ""),
            r"merged fails \d of \d cases \(seed \d+\): large scores\. .*Hint: NaN",
        ),
        "a share for each column": (
            MERGED.replace("[..., None]", ""),
            r"merged fails .*RuntimeError: The size of tensor a \(32\) must match",
        ),
    },
}
