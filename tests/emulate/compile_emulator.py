# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile csrc's device sources for the emulator, with the host compiler.

Objects are kept in build/emulate by the hash of what the compiler reads.
"""

import hashlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from translate import translate

from lib.extension import default_jobs
from lib.toolchain import find_cxx

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
CSRC = PROJECT / "csrc" / "quantization" / "ternary"
OBJECTS = PROJECT / "build" / "emulate"
# One library per architecture: 8.0 stands for all before 9.0. Sources that ask which
# it is are compiled for both; the others need not be.
ARCHS = (800, 900)

COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
# Device code reads floats as integers; it fuses nothing that it does not say.
KERNELS = ("-O0", "-fno-strict-aliasing", "-ffp-contract=off")
# Misaligned vectors and indices beyond an array end in SIGILL.
KERNELS += ("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")
# longjmp between stacks is what fibers are.
FIBERS = ("-O2", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE")


def sources() -> list[tuple[Path, int]]:
    """What to compile, and for which architecture: 0 for all."""
    units = []
    for path in sorted(CSRC.glob("*.cu")):
        if path.name.startswith("sm90_"):
            units.append((path, 900))
        elif re.fullmatch(r"mma_.*_(half|bfloat16)\.cu", path.name):
            units += [(path, arch) for arch in ARCHS]
        elif not path.name.endswith("bindings.cu"):
            units.append((path, 0))
    units += [(HERE / "entry.cpp", arch) for arch in ARCHS]
    emulator = [path for path in HERE.glob("*.cpp") if path.name != "entry.cpp"]
    return units + [(path, 0) for path in sorted(emulator)]


def build(archs: tuple[int, ...] = ARCHS) -> dict[int, Path]:
    """The libraries by architecture."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    units = [unit for unit in sources() if unit[1] in (0, *archs)]
    units.sort(key=lambda unit: -_weight(unit[0]))
    with ThreadPoolExecutor(default_jobs()) as pool:
        objects = list(pool.map(lambda unit: _compile(*unit), units))
    libraries = {}
    for arch in archs:
        mine = [o for o, unit in zip(objects, units) if unit[1] in (0, arch)]
        library = OBJECTS / f"emulator-{arch}.so"
        link = [find_cxx().path, "-shared", "-Wl,-Bsymbolic", "-o", str(library)]
        _run([*link, *map(str, mine)])
        libraries[arch] = library
    return libraries


def _weight(path: Path) -> int:
    """About how long a source takes to compile: the number of its kernels."""
    return 1 + path.read_text().count("<half") * 8 + path.stat().st_size // 1000


def _compile(path: Path, arch: int) -> Path:
    cxx = find_cxx()
    command = [cxx.path, *COMMON, *(FIBERS if path.suffix == ".cpp" else KERNELS)]
    command.append(f"-D__CUDA_ARCH__={arch or 900}")
    includes = [f"-I{folder}" for folder in (HERE / "include", HERE, CSRC)]
    first = ["-include", str(HERE / "ptx.h")] if path.suffix == ".cu" else []
    text = _run([*command, *includes, *first, "-E", "-x", "c++", str(path)])
    if path.suffix == ".cu":
        text = translate(text, CSRC)
    # Folders that only say where the project lies make no difference.
    text = text.replace(str(PROJECT), PROJECT.name)
    key = hashlib.sha256("\0".join([cxx.version, *command, text]).encode()).hexdigest()
    target = OBJECTS / f"{path.stem}-{key[:20]}.o"
    if not target.exists():
        source = target.with_suffix(".ii")
        source.write_text(text)
        part = target.with_suffix(".part")
        _run([*command, "-x", "c++-cpp-output", "-c", str(source), "-o", str(part)])
        source.unlink()
        part.rename(target)
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build())
