"""Counts what a compiled program does: HBM traffic, collectives."""

import collections
import math
import re

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\{[^}]*?\}|(\w+)\[([\d,]*)\]")
_MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_COLLECTIVE = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter|ragged-all-to-all)"
    r"(?:-start)?\("
)


def collectives(text: str) -> dict[str, int]:
    return dict(collections.Counter(_COLLECTIVE.findall(text)))


def hbm_bytes(text: str) -> int:
    """Bytes that a TPU program reads from HBM and writes to it.

    Of each instruction, the operands and results that have no on-chip memory space, S(n), in their
    layout; of an asynchronous copy or slice only its HBM side. A fusion that slices an operand
    reads the slice. Bodies of loops count once for each trip.
    """
    computations, entry = _parse(text)
    return _traffic(computations, entry)


def _traffic(computations: dict, name: str) -> int:
    instructions = computations[name]
    types = {i.name: i.type for i in instructions}
    total = 0
    for i in instructions:
        if i.opcode in _MOVES_NOTHING or i.opcode.endswith("-done"):
            continue
        if i.opcode == "custom-call" and 'custom_call_target="ConcatBitcast"' in i.line:
            continue
        if i.opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.line)
            body = re.search(r"body=%([\w.\-]+)", i.line).group(1)
            total += (int(trips.group(1)) if trips else 1) * _traffic(computations, body)
        elif i.opcode == "copy-start":
            total += _hbm(i.type)
        elif i.opcode == "slice-start":  # ((source), slice, flag)
            total += _sizes(i.type)[1][0]
        else:
            total += _hbm(i.type)
            called = re.search(r"calls=%([\w.\-]+)", i.line) if i.opcode == "fusion" else None
            for index, operand in enumerate(i.operands):
                full = _hbm(types.get(operand, ""))
                if full and called:
                    full = min(full, _read_of_parameter(computations[called.group(1)], index))
                total += full
    return total


def _read_of_parameter(fused: list, index: int) -> float:
    """Bytes of a fusion's operand that it reads: those of its slices, where it only slices it."""
    name = next(
        i.name for i in fused if i.opcode == "parameter" and f"parameter({index})" in i.line
    )
    users = [i for i in fused if name in i.operands]
    if users and all(i.opcode in ("slice", "dynamic-slice") for i in users):
        return sum(size for i in users for size, _ in _sizes(i.type))
    return math.inf


def _sizes(type_text: str) -> list[tuple[int, bool]]:
    """Bytes of each array of a type, and whether it lies in HBM."""
    sizes = []
    for match in _ARRAY.finditer(type_text):
        dtype, shape = match.group(1) or match.group(3), match.group(2) or match.group(4)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype).group())
        count = math.prod(int(d) for d in shape.split(",")) if shape else 1
        sizes.append((count * bits // 8, "S(" not in match.group()))
    return sizes


def _hbm(type_text: str) -> int:
    return sum(size for size, in_hbm in _sizes(type_text) if in_hbm)


class _Instruction:
    def __init__(self, line: str):
        self.line = line
        name, rest = line.split(" = ", 1)
        self.name = name.removeprefix("ROOT ").lstrip("%")
        self.type, rest = _first_word(rest)
        self.opcode, rest = rest.split("(", 1)
        self.operands = re.findall(r"%([\w.\-]+)", _first_word("(" + rest)[0])


def _first_word(text: str) -> tuple[str, str]:
    """Up to the first blank outside parentheses and braces."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if (char == " " or char == ",") and depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if header:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif " = " in line and current and line.startswith("  "):
            computations[current].append(_Instruction(line.strip()))
        elif line.startswith("}"):
            current = ""
    return computations, entry
