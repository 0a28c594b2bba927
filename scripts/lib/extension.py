# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile csrc into the extension module _ternary_C.abi3.so.

The same rules are in csrc/quantization/ternary/ternary.cmake for vLLM's own build.
Objects are kept in build/obj and compiled again only when their source, a header they
include, a flag or a compiler changed. Equal inputs give equal bytes, wherever the
project lies: no path, date or random name enters the result.
"""

import hashlib
import json
import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from lib.errors import BuildError
from lib.sources import sha256_file
from lib.status import progress
from lib.toolchain import Cxx, Nvcc, Torch, output_of

MODULE = "_ternary_C"
LIBRARY = f"{MODULE}.abi3.so"
DEFAULT_CUDA_ARCHS = ("8.0", "8.6", "8.9", "9.0a", "10.0", "12.0")
# Kernels that use instructions of one architecture only are in files of its name.
HOPPER_PREFIX, HOPPER_ARCH = "sm90_", "9.0a"
# What one compiler process may take at its peak, in bytes.
MEMORY_PER_JOB = 2 << 30

DEFINITIONS = (
    "-DNDEBUG",
    "-DPy_LIMITED_API=0x03080000",
    "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
    f"-DTORCH_EXTENSION_NAME={MODULE}",
)
COMPAT = Path(__file__).with_name("manylinux_compat.cpp")
VERSION_SCRIPT = f"{{ global: PyInit_{MODULE}; local: *; }};\n"


@dataclass(frozen=True)
class Compilers:
    """`nvcc` is None for the CPU extension; `include` is the folder of Python.h."""

    cxx: Cxx
    torch: Torch
    include: Path
    nvcc: Nvcc | None = None


@dataclass(frozen=True)
class Unit:
    """One source: its name in csrc, and the command but for `-o` and `-MF`."""

    name: str
    source: Path
    command: tuple[str, ...]
    key: str


@dataclass(frozen=True)
class Built:
    """The library, and how many of its objects had to be compiled."""

    path: Path
    objects: int
    compiled: int


# What the kernels' instructions need: bfloat16 products, asynchronous copies.
OLDEST_ARCH = 8


def parse_archs(text: str) -> tuple[str, ...]:
    """Architectures like "8.0 9.0a 12.0", separated by blanks, commas or semicolons."""
    archs = tuple(text.replace(",", " ").replace(";", " ").split())
    for arch in archs:
        if not re.fullmatch(r"\d{1,2}\.\d[af]?", arch):
            raise BuildError(
                f"CUDA_ARCHS: {arch!r} is no architecture; write them like 8.0 or 9.0a"
            )
        if int(arch.partition(".")[0]) < OLDEST_ARCH:
            raise BuildError(
                f"CUDA_ARCHS: {arch} is too old; the kernels need {OLDEST_ARCH}.0 "
                "or newer"
            )
    if not archs:
        raise BuildError("CUDA_ARCHS is empty; leave it away for the default ones")
    return archs


def sources(csrc: Path, cuda: bool) -> list[Path]:
    """The files to compile, by the rules of ternary.cmake."""
    ternary = csrc / "quantization" / "ternary"
    found = [ternary / "torch_bindings.cpp", *(csrc / "cpu" / "ternary").glob("*.cpp")]
    if cuda:
        found += ternary.glob("*.cu")
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise BuildError(f"{', '.join(missing)} is missing")
    return sorted(found)


def build(
    csrc: Path,
    objects: Path,
    compilers: Compilers,
    archs: tuple[str, ...] = (),
    jobs: int | None = None,
) -> Built:
    """Compile and link. `archs` is empty for the CPU extension.

    Raises BuildError with the command and the compiler's messages if a file does not
    compile.
    """
    objects.mkdir(parents=True, exist_ok=True)
    units = [
        make_unit(csrc, path, compilers, archs) for path in sources(csrc, bool(archs))
    ]
    units.append(make_unit(COMPAT.parent, COMPAT, compilers, archs))
    # The largest first, so that no long one runs alone at the end.
    stale = [unit for unit in units if not _is_current(unit, objects)]
    stale.sort(key=lambda unit: (unit.source.suffix != ".cu", -_size(unit)))
    if stale:
        _compile_all(stale, objects, csrc, jobs or default_jobs())
    library = objects / f"{'cuda' if archs else 'cpu'}-{LIBRARY}"
    _link(library, [_object(unit, objects) for unit in units], objects, compilers)
    return Built(library, len(units), len(stale))


def parse_jobs(text: str | None) -> int | None:
    """The number of compilers at once; None stands for `default_jobs`."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(
            f"JOBS={text}: give a whole number from 1 on, or leave it out for as many "
            "compilers as cores and memory allow"
        )
    return int(text)


def default_jobs() -> int:
    """As many compilers at once as cores and free memory allow."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if match:
        available = int(match[1]) << 10
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, available // MEMORY_PER_JOB))


def make_unit(
    csrc: Path, source: Path, compilers: Compilers, archs: tuple[str, ...]
) -> Unit:
    name = source.relative_to(csrc).as_posix()
    torch = compilers.torch.root
    includes = [f"-I{csrc}"]
    for folder in ("include", "include/torch/csrc/api/include"):
        includes += ["-isystem", f"{torch / folder}"]
    includes += ["-isystem", f"{compilers.include}"]
    definitions = [*DEFINITIONS, *(["-DUSE_CUDA"] if archs else [])]
    prefixes = {csrc.parent: "", torch: "torch", compilers.include: "python"}
    if compilers.nvcc:
        prefixes[compilers.nvcc.root] = "cuda"
    host = ["-fPIC", "-fvisibility=hidden", f"-frandom-seed={name}"]
    host += [f"-ffile-prefix-map={path}={to}" for path, to in prefixes.items()]
    tools = [compilers.cxx.version, compilers.torch.version]
    if source.suffix == ".cu":
        assert compilers.nvcc is not None
        tools.append(compilers.nvcc.version)
        command = [str(compilers.nvcc.path), "-ccbin", compilers.cxx.path]
        command += [f"-Xcompiler={flag}" for flag in host]
        # nvcc names entities of anonymous namespaces by a hash of the source's path.
        command += ["-Xcudafe", f"--orig_src_path_name={name}"]
        command += [f"--frandom-seed={name}", "--expt-relaxed-constexpr"]
        # Two architectures at once: a file of many kernels is else one long tail.
        command += ["--threads=2", "--compress-mode=size"]
        hopper_only = source.name.startswith(HOPPER_PREFIX)
        for arch in (HOPPER_ARCH,) if hopper_only else archs:
            number = arch.replace(".", "")
            command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    else:
        command = [compilers.cxx.path, "-Wall", *host]
        if compilers.nvcc:
            includes += ["-isystem", f"{compilers.nvcc.root / 'include'}"]
    command += ["-std=c++20", "-O3", *definitions, *includes, "-c", str(source)]
    key = hashlib.sha256("\0".join([*command, *tools]).encode()).hexdigest()
    return Unit(name, source, tuple(command), key[:16])


def _object(unit: Unit, objects: Path) -> Path:
    return objects / f"{unit.source.stem}-{unit.key}.o"


def _record(unit: Unit, objects: Path) -> Path:
    return objects / f"{unit.source.stem}-{unit.key}.json"


def _is_current(unit: Unit, objects: Path) -> bool:
    """Whether the object was made from the files as they are now."""
    try:
        record = json.loads(_record(unit, objects).read_text())
        return _object(unit, objects).is_file() and all(
            sha256_file(Path(path)) == digest for path, digest in record.items()
        )
    except (OSError, ValueError):
        return False


def _compile_all(units: list[Unit], objects: Path, csrc: Path, jobs: int) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_compile, unit, objects, csrc, stop) for unit in units]
        with progress(total=len(units), desc="compile", unit=" files") as bar:
            try:
                for done in as_completed(running):
                    done.result()
                    bar.update()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def _compile(unit: Unit, objects: Path, csrc: Path, stop: threading.Event) -> None:
    if stop.is_set():
        return
    target, record = _object(unit, objects), _record(unit, objects)
    record.unlink(missing_ok=True)
    depfile = target.with_suffix(".d")
    command = [*unit.command, "-MMD", "-MF", str(depfile), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"csrc/{unit.name} does not compile:\n$ {' '.join(command)}\n"
            + output_of(done)
        )
    files = depfile.read_text().replace("\\\n", " ").partition(":")[2].split()
    # Headers of torch, CUDA and Python are held by the tools' versions in the key.
    inside = {unit.source, *(f for f in map(Path, files) if f.is_relative_to(csrc))}
    digests = {str(path): sha256_file(path) for path in sorted(inside)}
    record.write_text(json.dumps(digests, indent=1) + "\n")


def _link(
    library: Path, inputs: list[Path], objects: Path, compilers: Compilers
) -> None:
    script = objects / "exports.map"
    script.write_text(VERSION_SCRIPT)
    command = [compilers.cxx.path, "-shared", "-s", "-o", str(library)]
    command += [str(path) for path in inputs]
    # libtorch must be in NEEDED although no symbol says so: the extension's
    # initializers run when it is loaded.
    command += [f"-L{compilers.torch.root / 'lib'}", "-Wl,--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    if compilers.nvcc:
        # Shared, as in vLLM's other extensions: the one that torch has loaded. The
        # static one would need dlopen and pthread symbols of a newer glibc.
        command.append(str(compilers.nvcc.runtime()))
    command += [f"-Wl,--version-script={script}", "-Wl,--build-id=none"]
    command += ["-Wl,--hash-style=gnu", "-Wl,-z,relro", "-Wl,-z,noexecstack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{LIBRARY} does not link:\n{output_of(done)}")


def _size(unit: Unit) -> int:
    return unit.source.stat().st_size
