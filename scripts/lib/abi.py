# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check that a shared library loads where its wheel's tags promise."""

import re
import subprocess
from pathlib import Path

from lib.errors import BuildError

# What each manylinux tag's oldest systems provide besides glibc itself
# (manylinux_X_Y: glibc X.Y).
_GCC_SYMBOLS = {
    (2, 17): {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)},
    (2, 28): {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)},
    (2, 34): {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0, 0)},
}
_NEEDED = re.compile(
    r"lib(torch|torch_cpu|c10)\.so|libcudart\.so\.13|"
    r"lib(stdc\+\+\.so\.6|(m|c)\.so\.6|gcc_s\.so\.1|(pthread|dl)\.so\.\d|rt\.so\.1)|"
    r"ld-linux-x86-64\.so\.2"
)
# Undefined symbols without a version that the process provides: Python's limited
# API, torch's stable ABI, the CUDA runtime.
_UNVERSIONED = re.compile(r"_?Py|(aoti_)?torch_|(__)?cuda")


def check_library(path: Path, platform_tag: str) -> dict[str, str]:
    """Return the newest version needed of each symbol family, like {"GLIBC": "2.17"}.

    Raises BuildError when the library needs a newer symbol than `platform_tag`
    (manylinux_X_Y_x86_64) allows, a library that nothing provides, a search path of
    the build machine, or a C++ symbol of torch, which is outside its stable ABI.
    """
    problems = _check_dynamic(path)
    newest: dict[str, tuple[int, ...]] = {}
    limits = _limits(platform_tag)
    for symbol, family, version in _undefined(path):
        if family:
            newest[family] = max(newest.get(family, ()), version)
            limit = limits.get(family)
            if limit is None or version > limit:
                problems.append(
                    f"{symbol} needs {family}_{_dotted(version)}, newer than "
                    f"{platform_tag} allows"
                    + (f" ({family}_{_dotted(limit)})" if limit else "")
                )
        elif not _UNVERSIONED.match(symbol):
            problems.append(f"{symbol} is undefined, and not of torch's stable ABI")
    if problems:
        raise BuildError(
            f"{path.name} would not load everywhere its wheel's tag promises:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nAvoid the symbols in csrc, define them in "
            "scripts/lib/manylinux_compat.cpp, or build in a manylinux_2_28 image."
        )
    return {family: _dotted(version) for family, version in sorted(newest.items())}


def _limits(platform_tag: str) -> dict[str, tuple[int, ...]]:
    match = re.match(r"manylinux_(\d+)_(\d+)_", platform_tag)
    if not match:
        raise BuildError(f"{platform_tag} is not a tag manylinux_X_Y_<machine>")
    glibc = (int(match[1]), int(match[2]))
    known = [tag for tag in _GCC_SYMBOLS if tag <= glibc]
    if not known:
        raise BuildError(f"{platform_tag}: older than manylinux_2_17")
    return {"GLIBC": glibc, **_GCC_SYMBOLS[max(known)]}


def _check_dynamic(path: Path) -> list[str]:
    problems = []
    for key, value in re.findall(
        r"^\s+(NEEDED|RPATH|RUNPATH)\s+(\S+)$", _objdump("-p", path), re.MULTILINE
    ):
        if key != "NEEDED":
            problems.append(f"has {key} {value}, a path of the build machine")
        elif not _NEEDED.fullmatch(value):
            problems.append(f"needs {value}, which neither torch nor the system has")
    return problems


def _undefined(path: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Undefined symbols as (name, version family or "", version); no weak ones."""
    found = []
    pattern = re.compile(r"\*UND\*\s+\S+\s+(?:\(?(\w+?)_([\d.]+)\)?\s+|Base\s+)?(\S+)$")
    for line in _objdump("-T", path).splitlines():
        weak = line[18:19] == "w"
        if (match := pattern.search(line)) and not (weak and not match[1]):
            family, version, symbol = match.groups()
            numbers = tuple(map(int, version.split("."))) if version else ()
            found.append((symbol, family or "", numbers))
    return found


def _objdump(option: str, path: Path) -> str:
    try:
        done = subprocess.run(
            ["objdump", option, str(path)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BuildError("objdump was not found; install binutils") from None
    if done.returncode:
        raise BuildError(f"{path}: {done.stderr.strip()}")
    return done.stdout


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
