"""What listings of compiled kernels tell: spilled registers in loops, and how far loads run ahead.

Loops are innermost loops: those over tokens, which run every few tokens. The others run once a program or once an item.
"""

from __future__ import annotations

import re


def spills_in_loops(listing: str) -> int:
    """The number of instructions in a listing of `nvdisasm -c` that access the stack within an innermost loop."""
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    spills: list[int] = []
    for number, line in enumerate(listing.splitlines()):
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = number
        elif jump := re.search(r"\bBRA\b.*`\((\.L\w+)\)", line):
            jumps.append((number, jump[1]))
        elif re.search(r"\b(LDL|STL)\b", line):
            spills.append(number)
    ends: dict[int, int] = {}  # the end of each loop by its begin: backward jumps
    for number, target in jumps:
        if (begin := labels[target]) < number:
            ends[begin] = max(number, ends.get(begin, 0))
    innermost = [loop for loop in ends.items() if not any(loop[0] < begin < loop[1] for begin in ends)]
    return sum(any(begin < number < end for begin, end in innermost) for number in spills)


def waits_in_loops(ptx: str) -> list[int]:
    """For each innermost loop that copies asynchronously: the groups of copies that it leaves in flight.

    That is the largest N of its `cp.async.wait_group N`, 0 if it has none. With 0 each iteration waits for the copies
    of the iteration before, a whole memory latency.
    """
    waits: dict[str, list[int]] = {}
    copying: set[str] = set()
    for label, block in _blocks(ptx):
        # LLVM names the innermost loop of each block; the first block of a loop says that it is it.
        within = re.search(r"//\s+in Loop: Header=(\w+)", block)
        loop = label if "Loop Header" in block else within[1] if within else ""
        if "This Inner Loop Header" in block:
            waits[loop] = []
        if loop in waits:
            waits[loop] += map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", block))
        if re.search(r"cp\.async\.c[ag]", block):
            copying.add(loop)
    return [max(found, default=0) for loop, found in waits.items() if loop in copying]


def num_buffers(ttgir: str) -> int:
    """The fewest tiles of keys or values that have room in shared memory at the same time; 0 if they have none there.

    Tiles [tokens, D] of a pipelined loop lie in one allocation [buffers, tokens, D].
    """
    allocated = re.findall(r"ttg\.local_alloc :.*?memdesc<(\d+)x\d+x\d+x\w+,.*?mutable", ttgir)
    return min(map(int, allocated), default=0)


def _blocks(ptx: str) -> list[tuple[str, str]]:
    """The basic blocks of a listing, with their labels; those that no jump reaches have none."""
    parts = re.split(r"^(?:\$L__(BB\w+):|// %bb\.\d+:)", ptx, flags=re.MULTILINE)
    return [(label or "", block) for label, block in zip(parts[1::2], parts[2::2], strict=True)]
