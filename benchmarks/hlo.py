"""What a program does, by its jaxpr or its HLO: operations, HBM traffic, collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
# `%name (...) -> ... {` begins a computation; `%name = type opcode(operands), attributes` is one
# instruction of it; `dtype[shape]{layout}` an array.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_UPDATE = "dynamic-update-slice"
_IS_NO_WORK = re.compile(r'custom_call_target="(ConcatBitcast|AllocateBuffer)"')
_MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


def matrix_flops(jaxpr: Any) -> float:
    """2 m n k of every matrix product in a program, each as often as its loops run.

    XLA's own count takes the body of a loop once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
            continue
        inner = [matrix_flops(sub) for sub in _programs_in(equation.params)]
        match equation.primitive.name:
            case "scan":
                total += equation.params["length"] * sum(inner)
            case "cond":
                total += max(inner)
            case _:
                total += sum(inner)
    return total


def _programs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def flops(compiled: Any) -> float:
    """XLA's count of operations, with the matrix products of loops as often as these run."""
    return compiled.cost_analysis()["flops"] + repeated_flops(compiled.as_text())


def repeated_flops(text: str) -> float:
    """2 m n k of the matrix products of a program's loops, but for each loop's first trip.

    That is what XLA's own count leaves out. On a TPU a matrix product is a convolution, a batch
    axis of it being spatial.
    """
    total = 0.0
    for i, times, types in _executed(text):
        if i.opcode in ("dot", "convolution"):
            depth = _depth(i, _shape(types[i.operands[0]]))
            total += (times - 1) * 2.0 * depth * math.prod(_shape(i.type))
    return total


def _depth(product: "_Instruction", left: list[int]) -> int:
    """How many numbers are summed for one of a matrix product."""
    if product.opcode == "convolution":
        (labels,) = re.findall(r"dim_labels=(\w+)_", product.rest)
        return left[labels.index("f")]
    (axes,) = re.findall(r"lhs_contracting_dims=\{([\d,]+)\}", product.rest)
    return math.prod(left[int(axis)] for axis in axes.split(","))


def collectives(text: str) -> dict[str, int]:
    """By kind, how many a program has, however often each runs."""
    return dict(Counter(_COLLECTIVE.findall(text)))


def collective_traffic(text: str) -> dict[str, tuple[int, int]]:
    """By kind: how many run on a device, loops counted as often as they run, and their bytes.

    Bytes are those of the operands or of the results, whichever is more. The TPU compiler repeats
    one that overlaps with other work in several fusions, under one channel: it counts once.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    channels: set[str] = set()
    for i, times, types in _executed(text):
        kind = i.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        given, made = sum(_size_of(types.get(name, "")) for name in i.operands), _size_of(i.type)
        # What starts asynchronously has its operands among its results.
        if i.opcode != kind and kind != "all-reduce":
            made -= given
        channel = re.search(r"channel_id=(\d+)", i.rest)
        if channel is None or channel[1] not in channels:
            counts[kind] += times
            sizes[kind] += times * max(given, made)
        if channel is not None:
            channels.add(channel[1])
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def _executed(text: str) -> "Iterator[tuple[_Instruction, int, dict[str, str]]]":
    """Every instruction, how often it runs, and the types of those of its computation."""
    computations, entry = _parse(text)

    def visit(name: str, times: int) -> "Iterator[tuple[_Instruction, int, dict[str, str]]]":
        types = {i.name: i.type for i in computations.get(name, ())}
        for i in computations.get(name, ()):
            yield i, times, types
            trips = _trips(computations, i) if i.opcode == "while" else 1
            for called in i.called("calls", "body", "to_apply", "branch_computations"):
                yield from visit(called, times * trips)

    return visit(entry, 1)


def hbm_bytes(text: str) -> int:
    """Bytes that a TPU program reads from HBM and writes to it.

    Of each instruction, the operands and results that have no on-chip memory space, S(n), in their
    layout; of an asynchronous copy or slice only its HBM side. A fusion that slices an operand
    reads the slice, and one that updates a slice in place writes the slice. Bodies of loops count
    once for each trip.
    """
    computations, entry = _parse(text)
    return _traffic(computations, entry)


def _traffic(computations: "Computations", name: str) -> int:
    instructions = computations[name]
    types = {i.name: i.type for i in instructions}
    total = 0
    for i in instructions:
        if i.opcode in _MOVES_NOTHING or i.opcode.endswith("-done"):
            continue
        if i.opcode == "custom-call" and _IS_NO_WORK.search(i.rest):
            continue
        if i.opcode == "while":
            (body,) = i.called("body")
            total += _trips(computations, i) * _traffic(computations, body)
        elif i.opcode == "copy-start":
            total += _hbm(i.type)
        elif i.opcode == "slice-start":  # ((source), slice, flag)
            total += _sizes(i.type)[1][0]
        elif i.opcode == "fusion":
            fused = computations[next(i.called("calls"))]
            total += _written_by(fused)
            for index, operand in enumerate(i.operands):
                if full := _hbm(types.get(operand, "")):
                    total += min(full, _read_of_parameter(fused, index))
        else:
            total += _hbm(i.type) + sum(_hbm(types.get(operand, "")) for operand in i.operands)
    return total


def _written_by(fused: "list[_Instruction]") -> int:
    """Bytes of a fusion's results, or of the slices that it updates."""
    by_name = {i.name: i for i in fused}
    root = fused[-1]
    roots = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(
        min(_hbm(i.type), _size_of(by_name[i.operands[1]].type))
        if i.opcode == _UPDATE
        else _hbm(i.type)
        for i in roots
    )


def _read_of_parameter(fused: "list[_Instruction]", index: int) -> float:
    """Bytes of a fusion's operand that it reads: those of its slices, where it only slices it."""
    name = next(i.name for i in fused if i.opcode == "parameter" and i.rest.startswith(f"{index})"))
    users = [i for i in fused if name in i.operands]
    slices = [i for i in users if i.opcode in ("slice", "dynamic-slice")]
    updates = [i for i in users if i.opcode == _UPDATE and i.operands.index(name) == 0]
    if users and len(slices) + len(updates) == len(users):
        return sum(_size_of(i.type) for i in slices)
    return math.inf


def _size_of(type_text: str) -> int:
    return sum(size for size, _ in _sizes(type_text))


def _trips(computations: "Computations", loop: "_Instruction") -> int:
    """How often a loop runs, where XLA says so or its condition is "counter < constant"."""
    if (known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)) is not None:
        return int(known[1])
    (condition,) = loop.called("condition")
    constants = {}
    for i in computations[condition]:
        if i.opcode == "constant" and i.type.startswith("s32[]"):
            constants[i.name] = int(i.rest.split(")")[0])
        if i.opcode == "compare" and "direction=LT" in i.rest:
            return constants.get(i.operands[1], 1)
    return 1


def _sizes(type_text: str) -> list[tuple[int, bool]]:
    """Bytes of each array of a type, and whether it lies in HBM."""
    sizes = []
    for dtype, shape, layout in _ARRAY.findall(type_text):
        digits = re.search(r"\d+", dtype)  # a token has none, and no bits
        bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
        count = math.prod(int(d) for d in shape.split(",")) if shape else 1
        sizes.append((count * bits // 8, "S(" not in layout))
    return sizes


def _shape(type_text: str) -> list[int]:
    return [int(d) for d in _ARRAY.findall(type_text)[0][1].split(",")]


def _hbm(type_text: str) -> int:
    return sum(size for size, in_hbm in _sizes(type_text) if in_hbm)


class _Instruction:
    def __init__(self, name: str, type_text: str, opcode: str, rest: str) -> None:
        self.name, self.type, self.opcode = name, type_text, opcode
        self.rest = rest  # behind "opcode("
        self.operands = re.findall(r"%([\w.\-]+)", _up_to_closing(rest))

    def called(self, *attributes: str) -> Iterator[str]:
        """The computations that these attributes name."""
        names = rf"(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%?[\w.\-]+)"
        for value in re.findall(names, self.rest):
            yield from re.findall(r"[\w.\-]+", value)


Computations = dict[str, list[_Instruction]]


def _up_to_closing(text: str) -> str:
    """Up to the parenthesis that closes one before `text`."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return text[:i]
    return text


def _parse(text: str) -> tuple[Computations, str]:
    """The instructions of every computation, and which of these runs."""
    computations: Computations = {}
    entry = current = ""
    for line in text.splitlines():
        if (header := _COMPUTATION.match(line)) is not None:
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif current and (found := _INSTRUCTION.match(line)) is not None:
            computations[current].append(_Instruction(*found.groups()))
    return computations, entry
