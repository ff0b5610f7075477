"""Compiled kernels and their SASS, the machine code of NVIDIA's GPUs, as `nvdisasm -c` prints it.

Counts are static: how often an instruction stands in the code, not how often it runs.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;|^(\.L\w+):", re.MULTILINE)
_LABEL = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Compiled:
    """A kernel as one GPU would run it: registers and spills of a thread, shared memory of a block."""

    target: str
    ptx: str
    sass: str
    registers: int
    shared_bytes: int
    spill_bytes: int  # what ptxas stores to memory for want of registers; a stack frame alone is no spill

    def count(self, opcode: str, *modifiers: str) -> int:
        """How many SASS instructions start with `opcode` and have the modifiers: count("HMMA"), count("LDG", "128")."""
        names = mnemonics(parse(self.sass)[0])
        return sum(name.startswith(opcode) and {*modifiers} <= {*name.split(".")} for name in names)

    def loops(self) -> list[list[str]]:
        """The instructions of each innermost loop, the longest loop first."""
        return innermost_loops(self.sass)

    def summary(self) -> dict:
        """One row of a table."""
        return {
            "target": self.target,
            "tensor core (HMMA/HGMMA/IMMA)": sum(map(self.count, ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "UTC"))),
            "FFMA": self.count("FFMA"),
            "128-bit loads": self.count("LDG", "128"),  # with LDGSTS, which loads straight into shared memory
            "128-bit stores": self.count("STG", "128"),
            "TMA copies": self.count("UTMALDG") + self.count("UTMASTG"),  # of whole tiles
            "registers": self.registers,
            "spills (bytes)": self.spill_bytes,
            "shared (KiB)": self.shared_bytes / 1024,
        }


def parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """(instructions in order of address, for each label the number of the instruction that it stands before)."""
    instructions, labels = [], {}
    for instruction, label in _LINE.findall(sass):
        if label:
            labels[label] = len(instructions)
        else:
            instructions.append(instruction)
    return instructions, labels


def mnemonics(instructions: list[str]) -> list[str]:
    """The instructions' names with modifiers ("LDG.E.128"), without predicate and operands."""
    return [re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0] for instruction in instructions]


def innermost_loops(sass: str) -> list[list[str]]:
    """The instructions of each loop that holds no other loop, in order of address, the longest loop first.

    A loop is what can reach a backward edge of the control flow without passing the edge's target (Aho, Lam, Sethi and
    Ullman, "Compilers", 9.6: natural loops), so code that the assembler moved out of line counts where it belongs. The
    short loops in which Hopper waits for a copy (SYNCS), and the trap after a kernel's end, are not counted as loops.
    """
    instructions, labels = parse(sass)
    names = mnemonics(instructions)
    starts = {0, *labels.values()} | {i + 1 for i, name in enumerate(names) if re.match("BRA|EXIT|RET|BRX|JMP", name)}
    starts = sorted(start for start in starts if start < len(instructions))
    ends = dict(zip(starts, [*starts[1:], len(instructions)], strict=True))
    following = {start: _successors(instructions[end - 1], end, labels) & ends.keys() for start, end in ends.items()}

    loops, edges = [], _back_edges(following)
    for head in sorted({head for _, head in edges}):
        body, waiting = {head}, [tail for tail, target in edges if target == head]
        while waiting:
            block = waiting.pop()
            if block not in body:
                body.add(block)
                waiting += [before for before, after in following.items() if block in after]
        numbers = [i for start in sorted(body) for i in range(start, ends[start])]
        waits = len(numbers) < 9 and any("SYNCS" in names[i] for i in numbers)
        if len(numbers) > 1 and not waits:
            loops.append((body, numbers))
    inner = [numbers for body, numbers in loops if not any(other < body for other, _ in loops)]
    return [[instructions[i] for i in numbers] for numbers in sorted(inner, key=len, reverse=True)]


def _successors(last: str, end: int, labels: dict[str, int]) -> set[int]:
    """Where control can go after the instruction that ends a block, as numbers of instructions."""
    if re.match(r"(EXIT|RET|BRX|JMP)\b", last):
        return set()
    target = _LABEL.search(last) if re.match(r"(@!?U?P\w+\s+)?BRA", last) else None
    always = target and re.match(r"BRA(\.U)?\s+`", last)
    return ({labels[target[1]]} if target else set()) | (set() if always else {end})


def _back_edges(following: dict[int, set[int]]) -> list[tuple[int, int]]:
    """The edges that lead back to a block on the path by which a depth-first walk came."""
    edges, seen = [], set()
    for first in following:
        path = [] if first in seen else [(first, sorted(following[first]))]
        seen.add(first)
        while path:
            block, ahead = path[-1]
            if not ahead:
                path.pop()
                continue
            after = ahead.pop()
            if any(after == before for before, _ in path):
                edges.append((block, after))
            elif after not in seen:
                seen.add(after)
                path.append((after, sorted(following[after])))
    return edges
