"""Wrong answers to the exercises of week 6: RoPE."""

REPAIR = """
@triton.jit
def repair_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, n_positions, head_dim, BLOCK_R: tl.constexpr):
    row = tl.program_id(0)
    position = row % n_positions
    half = head_dim // 2
    cols = tl.arange(0, BLOCK_R)
    mask = cols < half
    x1 = tl.load(x_ptr + row * head_dim + cols, mask=mask)
    x2 = tl.load(x_ptr + row * head_dim + half + cols, mask=mask)
    c = tl.load(cos_ptr + position * head_dim + cols, mask=mask)
    s = tl.load(sin_ptr + position * head_dim + cols, mask=mask)
    y1 = x1 * c - x2 * s
    y2 = x2 * c + x1 * s
    tl.store(y_ptr + row * head_dim + cols, y1, mask=mask)
    tl.store(y_ptr + row * head_dim + half + cols, y2, mask=mask)
"""

NEIGHBOURS = """
@triton.jit
def neighbours_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, n_positions, head_dim, BLOCK_R: tl.constexpr):
    row = tl.program_id(0)
    position = row % n_positions
    cols = 2 * tl.arange(0, BLOCK_R)
    mask = cols < head_dim
    x1 = tl.load(x_ptr + row * head_dim + cols, mask=mask)
    x2 = tl.load(x_ptr + row * head_dim + cols + 1, mask=mask)
    c = tl.load(cos_ptr + position * head_dim + cols, mask=mask)
    s = tl.load(sin_ptr + position * head_dim + cols, mask=mask)
    tl.store(y_ptr + row * head_dim + cols, x1 * c - x2 * s, mask=mask)
    tl.store(y_ptr + row * head_dim + cols + 1, x2 * c + x1 * s, mask=mask)


def rope_of_neighbours(x, cos, sin):
    y = torch.empty_like(x)
    grid, block = (x.shape[:3].numel(),), triton.next_power_of_2(x.shape[3] // 2)
    neighbours_kernel[grid](x, cos, sin, y, x.shape[2], x.shape[3], BLOCK_R=block)
    return y
"""

REORDERED = """
def rope_of_neighbours(x, cos, sin):
    x, cos, sin = (torch.cat((t[..., ::2], t[..., 1::2]), dim=-1) for t in (x, cos, sin))
    return torch.stack(first_rope(x, cos, sin).chunk(2, dim=-1), dim=-1).flatten(-2)
"""

MOVED = """
def moved(key, offset):
    positions = torch.tensor([offset], device=key.device).expand(key.shape[2])
    return first_rope(key, *rope_tables(positions, key.shape[3]))
"""

SINGLE_ANGLES = """
def moved(key, offset):
    half = key.shape[3] // 2
    angles = offset * 10000.0 ** -(torch.arange(half, device=key.device) / half)
    angles = torch.cat((angles, angles)).expand(key.shape[2], -1).contiguous()
    return first_rope(key, angles.cos(), angles.sin())
"""

ANSWERS = {
    "repair-check": {
        "the other line first": (
            REPAIR.replace("    y1 = x1 * c - x2 * s\n", "")
            .replace("    y2 = x2 * c + x1 * s\n", "    x2 = x2 * c + x1 * s\n    x1 = x1 * c - x2 * s\n")
            .replace("cols, y1,", "cols, x1,")
            .replace("cols, y2,", "cols, x2,"),
            r"First: a quarter turn,.*Hint: only in 8 of 16 columns, the first is 0",
        ),
        "turned the other way": (
            REPAIR.replace("c - x2", "c + x2").replace("c + x1", "c - x1"),
            r"First: a quarter turn,.*Hint: its sign is the wrong way round",
        ),
        "cosine and sine swapped": (
            REPAIR.replace("x1 * c - x2 * s", "x1 * s - x2 * c").replace("x2 * c + x1 * s", "x2 * s + x1 * c"),
            r"First: the first token,.*Hint: it would be right with cos and sin swapped",
        ),
    },
    "neighbours-check": {
        "the halves as before": (
            "def rope_of_neighbours(x, cos, sin):\n    return first_rope(x, cos, sin)\n",
            r"fails 5 of 7 .*: a quarter turn; four tokens; two texts; far into the text; a block that is not full\.",
        ),
        "the mask of the halves": (
            NEIGHBOURS.replace("cols < head_dim", "cols < head_dim // 2"),
            r"Hint: NaN only from column 8 on.*not written",
        ),
        "put into another order and back": (
            REORDERED,
            r"It writes 3\.0 times the tensor\. Can you do it in one kernel",
        ),
    },
    "move-check": {
        "turned the other way": (
            MOVED.replace("[offset]", "[-offset]"),
            r"First: one pair, a quarter back,.*Hint: its sign is the wrong way round",
        ),
        "turned by the whole new position": (
            MOVED.replace(".expand(", " + torch.arange(").replace("shape[2])\n", "shape[2], device=key.device)\n"),
            r"fails 6 of 6 cases .*; offset 0; offset 1;",
        ),
        "angles in float32": (
            SINGLE_ANGLES,
            r"fails \d of 6 cases .*: (offset -1; )?offset -4,096[.;]",
        ),
        "by the formula": (
            "def moved(key, offset):\n    positions = torch.full((key.shape[2],), offset, device=key.device)\n"
            "    return rope_unfused(key, key[:, :0], *rope_tables(positions, key.shape[3]))[0]\n",
            r"It writes \d\.\d times the tensor\. Can you do it in one kernel",
        ),
    },
}
