#!/usr/bin/env python3
"""What the machine code of our kernels says without a GPU: instructions for each byte that moves to
or from device memory, the width of those moves, and local memory.

    tools/machine_code.py --nvdisasm FILE CUBINS/*.cubin

A kernel is read where most of its bytes move: in its innermost loop with the most of them, or from
its beginning to its end if it has none. A multiprocessor issues 4 instructions of 32 threads a
cycle; at a copy's bandwidth it moves `BYTES_A_CYCLE` bytes meanwhile. The expected share is the
smaller of 1 and how far the instructions fit in that time. Exits with 1 if a kernel in bf16 that
moves memory is expected below `LEAST`, or a kernel uses local memory.
"""

import argparse
import re
import subprocess
import sys

# An H200: 4.25 TB/s over 132 multiprocessors at 1.755 GHz, as measured (docs/gpu).
BYTES_A_CYCLE = 4.25e12 / 132 / 1.755e9
INSTRUCTIONS_A_CYCLE = 4
# Least expected share of a copy's bandwidth for kernels that move memory, in bf16.
LEAST = 0.85
# Kernels that compute more than they move (products of heads, draws, tables), or that are launched
# once a step or on a few numbers a token.
COMPUTE = re.compile(
    r"attention|dropout|random_normal|rope_table|embedding_join|_total$|column_sum$|cross_entropy_(loss|rescale)$"
)
# Sources that are known to be slower, and why.
KNOWN = {
    "cap_30": "tanh of every logit",
    "transpose": "64-bit divisions of indices, in rows that cannot move in packs",
}
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")


def bytes_of(opcode):
    parts = opcode.split(".")
    # LD and ST are of addresses that the compiler cannot tell apart from shared memory's.
    if parts[0] not in ("LDG", "STG", "LD", "ST"):
        return 0
    return next((WIDTHS[part] for part in parts if part in WIDTHS), 4)


def kernels_of(text):
    """Each kernel's instructions (opcode, target) and the places of its labels."""
    name, code, labels = None, [], {}
    for line in text.splitlines():
        if line.startswith(".text."):
            if name:
                yield name, code, labels
            name, code, labels = line.split(".text.")[1].rstrip(":"), [], {}
        label = LABEL.match(line)
        if label:
            labels[label.group(1)] = len(code)
        instruction = INSTRUCTION.match(line)
        if instruction and name:
            opcode, rest = instruction.group(2), instruction.group(3)
            target = TARGET.search(rest)
            if opcode != "NOP":
                code.append((opcode, target.group(1) if target else None))
    if name:
        yield name, code, labels


def where_bytes_move(code, labels):
    """The range of instructions that moves most bytes, and is repeated most."""
    ends = [at for at, (opcode, _) in enumerate(code) if opcode.startswith("EXIT")]
    whole = (0, (ends[-1] if ends else len(code) - 1) + 1)
    loops = []
    for at, (opcode, target) in enumerate(code):
        begin = labels.get(target)
        if opcode.startswith("BRA") and begin is not None and begin < at:
            loops.append((begin, at + 1))
    # An outer loop counts as its inner one does where that moves most of its bytes.
    def holds(outer, inner):
        return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]

    loops = [loop for loop in loops if moved(code, loop) > 0]
    loops = [loop for loop in loops if not any(holds(loop, inner) and 2 * moved(code, inner) > moved(code, loop) for inner in loops)]
    return max(loops, key=lambda loop: moved(code, loop), default=whole)


def moved(code, part):
    return sum(bytes_of(opcode) for opcode, _ in code[part[0] : part[1]])


def row_of(name, code, labels):
    part = where_bytes_move(code, labels)
    inside = code[part[0] : part[1]]
    count = moved(code, part)
    widest = max((bytes_of(opcode) for opcode, _ in inside), default=0)
    local = any(opcode.split(".")[0] in ("LDL", "STL") for opcode, _ in code)
    budget = count * 32 / BYTES_A_CYCLE * INSTRUCTIONS_A_CYCLE
    return {
        "kernel": name,
        "where": "loop" if part[1] - part[0] < len(code) and part[0] > 0 else "whole",
        "instructions": len(inside),
        "bytes": count,
        "widest": widest,
        "share": min(1.0, budget / len(inside)) if count else None,
        "local": local,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("cubins", nargs="+")
    options = parser.parse_args()
    print("| source | kernel | instructions | bytes | widest | expected share of a copy |")
    print("|---|---|---|---|---|---|")
    wrong = []
    for path in options.cubins:
        source = path.split("/")[-1].removesuffix(".cubin")
        text = subprocess.run([options.nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout
        for name, code, labels in kernels_of(text):
            row = row_of(name, code, labels)
            memory_bound = not COMPUTE.search(name)
            share = "" if row["share"] is None or not memory_bound else f"{row['share']:.2f}"
            print(f"| {source} | {name} | {row['instructions']} ({row['where']}) | {row['bytes']} | {row['widest']} | {share} |")
            if row["local"]:
                wrong.append(f"{source}: {name} uses local memory")
            known = any(word in source for word in KNOWN)
            if memory_bound and not known and "-bf16-" in source and row["share"] is not None and row["share"] < LEAST:
                wrong.append(f"{source}: {name} is expected at {share} of a copy's bandwidth; valid: {LEAST} or more")
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
