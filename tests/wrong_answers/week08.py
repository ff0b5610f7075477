"""Wrong answers to the exercises of week 8: fused linear and cross-entropy."""

REPAIR = """
def repaired(input, linear_weight, target, chunk_size=8):
    total, counted = 0.0, 0
    for start in range(0, len(input), chunk_size):
        rows, classes = input[start : start + chunk_size], target[start : start + chunk_size]
        loss = F.cross_entropy(rows @ linear_weight.T, classes, reduction="sum", ignore_index=-100)
        total += loss
        counted += (classes != -100).sum()
    return total / counted
"""

SLICES = """
def loss_in_slices(input, linear_weight, target, slice_size=64):
    largest = torch.full((len(input),), -torch.inf, device=input.device)
    total, x_target = torch.zeros_like(largest), torch.zeros_like(largest)
    for start in range(0, len(linear_weight), slice_size):
        logits = input @ linear_weight[start : start + slice_size].T
        new = torch.maximum(largest, logits.amax(-1))
        total = total * (largest - new).exp() + (logits - new[:, None]).exp().sum(-1)
        largest = new
        here = (target >= start) & (target < start + logits.shape[1])
        x_target[here] = logits[here, target[here] - start]
    return largest + total.log() - x_target
"""
SLICE = "input @ linear_weight[start : start + slice_size].T"

PADDING = """
def without_padding(input, linear_weight, target):
    counts = target != -100
    return linear_cross_entropy(input[counts], linear_weight, target[counts])
"""
NOTHING = """    if not counts.any():
        return (0 * input).sum() + (0 * linear_weight).sum()
"""

ANSWERS = {
    "repair-check": {
        "the mean of the chunks' means": (
            REPAIR.replace('"sum"', '"mean"').replace("(classes != -100).sum()", "1"),
            r"fails 2 of 4 cases \(seed \d+\): the last chunk shorter; some ignored\.",
        ),
        "the first word taken for padding": (
            REPAIR.replace("classes != -100", "classes > 0"),
            r"fails \d of 4 cases \(seed \d+\): (?:.*; )?two words only\.",
        ),
        "a number instead of a tensor": (
            REPAIR.replace("total += loss", "total += loss.item()"),
            r"does not require grad",
        ),
    },
    "slices-check": {
        "what is left behind the last whole slice dropped": (
            SLICES.replace("len(linear_weight), slice", "len(linear_weight) - slice_size + 1, slice"),
            r"fails 1 of 3 cases \(seed \d+\): the last slice shorter\.",
        ),
        "the largest of the slice, not of the row": (
            SLICES.replace("logits.amax(-1)", "logits.amax()"),
            r"fails 1 of 3 cases \(seed \d+\): large logits\..* NaN or infinite where",
        ),
        "all logits, and then slices of them": (
            SLICES.replace("logits = " + SLICE, "logits = (input @ linear_weight.T)[:, start : start + slice_size]"),
            r"Peak 2\.\d+ times the whole logits: too much",
        ),
    },
    "padding-check": {
        "0 when no row counts": (
            PADDING.replace("    return", NOTHING + "    return"),
            r"fails 1 of 5 cases \(seed \d+\): all ignored\.",
        ),
        "padding taken to be at the end": (
            PADDING.replace("[counts]", "[: counts.sum()]"),
            r"fails 3 of 5 cases \(seed \d+\): a quarter ignored; two words only; half ignored\.",
        ),
        "rows of 0 go through the products too": (
            PADDING.replace("input[counts]", "input * counts[:, None]").replace("target[counts]", "target"),
            r"3\.00 products, as before: nothing is saved",
        ),
    },
}
