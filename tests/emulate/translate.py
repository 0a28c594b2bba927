# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From preprocessed CUDA to C++ for the emulator.

Three things of a .cu file are not C++: inline PTX, which becomes calls of the functions
in ptx.h; launches `kernel<<<...>>>(...)`; and shared variables. All else is left as it
is, and lines keep their numbers.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
MARKER = re.compile(r'^# (\d+) "([^"]*)".*$', re.M)
ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
LAUNCH = re.compile(r"([\w:]+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\s*\(", re.S)
SHARED = re.compile(
    r"(extern\s+)?__shared__\s+(?:__attribute__\s*\(\(aligned\((\d+)\)\)\)\s*)?"
    r"([\w:]+)\s+(\w+)\s*\[([^\]]*)\]\s*;"
)


def translate(text: str, csrc: Path) -> str:
    """Only what comes from files below `csrc` is changed."""
    out = []
    numbers = itertools.count()  # of this text, which then is always the same
    for is_ours, part in _parts(text, csrc):
        out.append(_translate_part(part, numbers) if is_ours else part)
    return "".join(out)


def _parts(text: str, csrc: Path) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each from one file."""
    begin, is_ours = 0, False
    for match in MARKER.finditer(text):
        ours = Path(match[2]).is_relative_to(csrc)
        if ours != is_ours:
            yield is_ours, text[begin : match.start()]
            begin, is_ours = match.start(), ours
    yield is_ours, text[begin:]


def _translate_part(text: str, numbers: Iterator[int]) -> str:
    out, at = [], 0
    while match := ASM.search(text, at):
        end = _closing(text, match.end() - 1)
        statement = text[match.start() : end]
        code = _asm(text[match.end() : end - 1], next(numbers))
        out += [text[at : match.start()], code, "\n" * statement.count("\n")]
        at = end
    text = "".join(out) + text[at:]
    text = LAUNCH.sub(r"::emu::Launch(\2)(\1, ", text)
    return SHARED.sub(_shared, text)


def _shared(match: re.Match) -> str:
    extern, align, kind, name, count = match.groups()
    if extern:
        return f"{kind}* const {name} = ::emu::block_dynamic();"
    array = f"{name}_array"
    return (
        f"using {array} = {kind}[{count}]; static const char {name}_key = 0; "
        f"{array}& {name} = *static_cast<{array}*>(::emu::block_static("
        f"&{name}_key, sizeof({array}), {align or 16}));"
    )


def _closing(text: str, at: int) -> int:
    """The place behind the bracket that closes the one at `at`."""
    depth = 0
    while True:
        if text[at] == '"':
            match = STRING.match(text, at)
            assert match
            at = match.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that lie in no brackets and no string."""
    parts, depth, begin, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == '"':
            match = STRING.match(text, at)
            assert match
            at = match.end()
            continue
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[at], 0)
        if depth == 0 and text[at] == separator:
            parts.append(text[begin:at].strip())
            begin = at + 1
        at += 1
    return [*parts, text[begin:].strip()]


def _asm(body: str, number: int) -> str:
    """One asm statement: template, outputs, inputs, clobbers."""
    body = re.sub(r"^#.*$", "", body, flags=re.M)
    template, *lists = _split(body, ":")
    ptx = "".join(ast.literal_eval(s) for s in STRING.findall(template))
    operands = []
    for entry in itertools.chain(*(_split(part, ",") for part in lists[:2])):
        if entry:
            operands.append("(" + entry.partition("(")[2].rpartition(")")[0] + ")")
    return "{ " + " ".join(_statements(ptx, operands, number)) + " }"


def _statements(ptx: str, operands: list[str], number: int) -> Iterator[str]:
    registers: set[str] = set()
    rest = ptx.strip()
    while rest:
        if rest[0] in "{}":
            yield rest[0]
            rest = rest[1:].strip()
        elif match := re.match(r"(\w+):", rest):
            yield f"ptx_{match[1]}_{number}:;"
            rest = rest[match.end() :].strip()
        else:
            one, _, rest = rest.partition(";")
            rest = rest.strip()
            yield _instruction(one.strip(), operands, registers, number)


def _instruction(
    text: str, operands: list[str], registers: set[str], number: int
) -> str:
    if match := re.fullmatch(r"\.reg\s+\.(pred|b32)\s+(\w+(?:,\s*\w+)*)", text):
        names = re.findall(r"\w+", match[2])
        registers.update(names)
        declared = ", ".join(f"ptx_{name} = 0" for name in names)
        return f"{'bool' if match[1] == 'pred' else 'uint32_t'} {declared};"
    guard = ""
    if match := re.match(r"@(!?)(\w+)\s+", text):
        guard = f"if ({match[1]}ptx_{match[2]}) "
        text = text[match.end() :]
    opcode, _, arguments = text.partition(" ")
    if opcode == "bra":
        return f"{guard}goto ptx_{arguments.strip()}_{number};"

    def operand(word: str) -> str:
        word = word.strip()
        if word.startswith("{"):
            return (
                f"::emu::ptx::list({', '.join(map(operand, _split(word[1:-1], ',')))})"
            )
        if word.startswith("["):
            return ", ".join(map(operand, _split(word[1:-1], ",")))
        word = word.removeprefix("_|")
        if word.startswith("%%"):
            return f"::emu::ptx::{word[2:]}()"
        if word.startswith("%"):
            return operands[int(word[1:])]
        return f"ptx_{word}" if word in registers else word

    # `_` is a result that nobody wants.
    given = [w for w in _split(arguments, ",") if w not in ("", "_")]
    name = re.sub(r"\.|::", "_", opcode)
    return f"{guard}::emu::ptx::{name}({', '.join(map(operand, given))});"
