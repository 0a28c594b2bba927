# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the compilers and headers a build needs, or install them into build/env.

Nothing needs root or a GPU: what the system lacks comes from the package index that
the user's pip is configured for, into folders of the project's own.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lib.errors import BuildError
from lib.pypa import Version

# The first torch whose stable ABI has all that the extension uses.
MINIMUM_TORCH = Version("2.11")
CUDA_MAJOR = 13
# All five at one release: the newest nvvm beside an older ptxas makes PTX of a version
# that ptxas refuses.
CUDA_RELEASE = "13.0.*"
CUDA_PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)


@dataclass(frozen=True)
class Cxx:
    """The host compiler: `version` is the first line of its --version."""

    path: str
    version: str


@dataclass(frozen=True)
class Torch:
    """torch's headers and libraries: `root` is the package's folder."""

    root: Path
    version: str


@dataclass(frozen=True)
class Nvcc:
    path: Path
    version: str

    @property
    def root(self) -> Path:
        return self.path.parent.parent

    def runtime(self) -> Path:
        """The CUDA runtime's shared library, to link with."""
        name = f"libcudart.so.{CUDA_MAJOR}"
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
            if (self.root / folder / name).exists():
                return self.root / folder / name
        raise BuildError(f"{name} is not below {self.root}, where nvcc belongs to")


def find_cxx() -> Cxx:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if not path:
        raise BuildError(
            f"no C++ compiler: {name} was not found. Install g++ 11 or newer, or name "
            "one in CXX="
        )
    remedy = "Install g++ 11 or newer, or name it in CXX="
    try:
        version = _output([path, "--version"]).splitlines()
    except BuildError as error:
        raise BuildError(f"{name} is no C++ compiler: {error}\n{remedy}") from None
    if not version:
        raise BuildError(
            f"{name} is no C++ compiler: `{path} --version` prints nothing. {remedy}"
        )
    return Cxx(path, version[0])


def python_include() -> Path:
    """The folder of Python.h of the running interpreter."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python.h is not in {include}. Install the headers of this Python (on "
            "Debian python3-dev), or make .venv with another one: make PYTHON=..."
        )
    return include


def find_torch(
    env: Path, version: str, *, offline: bool = False, cpu_index: str = ""
) -> Torch:
    """The running interpreter's torch if it is of `version`, else one below `env`.

    Only headers and link libraries are used, torch is not imported; a CPU build
    serves CUDA too. `cpu_index` is asked when the configured indexes have none.
    """
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        found = importlib.metadata.version("torch")
        if Version(found).public == version:
            return Torch(Path(spec.submodule_search_locations[0]), found)
    if Version(version) < MINIMUM_TORCH:
        raise BuildError(f"torch {version} in sources.toml: {MINIMUM_TORCH} is needed")
    target = env / f"torch-{version}"
    if not target.is_dir():
        attempts = [[f"torch=={version}+cpu"]]
        if cpu_index:
            attempts.append([f"torch=={version}+cpu", "--extra-index-url", cpu_index])
        attempts.append([f"torch=={version}"])
        _pip_install(target, attempts, f"torch {version}", offline)
    (metadata,) = target.glob("torch-*.dist-info")
    return Torch(target / "torch", metadata.name.split("-")[1].removesuffix(".dist"))


def find_nvcc(env: Path, *, offline: bool = False) -> Nvcc:
    """The system's nvcc if it is of CUDA 13, else the index's compiler packages.

    NVCC= or CUDA_HOME= name one; that one must be of CUDA 13.
    """
    if named := os.environ.get("NVCC"):
        return _require_nvcc(Path(named), "NVCC")
    if home := os.environ.get("CUDA_HOME"):
        return _require_nvcc(Path(home, "bin", "nvcc"), "CUDA_HOME")
    for candidate in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and (nvcc := _probe_nvcc(Path(candidate))):
            return nvcc
    target = env / f"cuda-{CUDA_RELEASE.removesuffix('.*')}"
    if not target.is_dir():
        wanted = [f"{package}=={CUDA_RELEASE}" for package in CUDA_PACKAGES]
        _pip_install(target, [wanted], f"the compiler of CUDA {CUDA_RELEASE}", offline)
    packaged = target / "nvidia" / f"cu{CUDA_MAJOR}" / "bin" / "nvcc"
    return _require_nvcc(packaged, "the package nvidia-cuda-nvcc")


def _require_nvcc(path: Path, source: str) -> Nvcc:
    nvcc = _probe_nvcc(path)
    if nvcc is None:
        raise BuildError(f"{source}: {path} is no nvcc of CUDA {CUDA_MAJOR}")
    return nvcc


def _probe_nvcc(path: Path) -> Nvcc | None:
    """The nvcc at `path` if it runs and is of CUDA 13; a wrapper is looked through."""
    if not path.is_file():
        return None
    try:
        text = _output([str(path), "--version"])
        # A distribution may put a wrapper script into PATH: ask where it belongs.
        plan = _output([str(path), "--dryrun", "-c", "-x", "cu", "/dev/null"])
    except BuildError:
        return None
    match = re.search(r"release (\d+)\.\d+, (V[\d.]+)", text)
    if not match or int(match[1]) != CUDA_MAJOR:
        return None
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    root = Path(top[1]).resolve() if top else path.resolve().parent.parent
    return Nvcc(root / "bin" / "nvcc", match[2])


def _pip_install(
    target: Path, attempts: list[list[str]], what: str, offline: bool
) -> None:
    """Install into `target` with the first of `attempts` that works; all or nothing."""
    if offline:
        raise BuildError(
            f"{what} is needed and not there yet, and --offline forbids to download "
            "it. Run once without."
        )
    print(f"installing {what} into {target}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    errors = []
    for arguments in attempts:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
            command += ["--target", f"{scratch}/new", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                Path(scratch, "new").rename(target)
                return
            errors.append(
                f"$ pip install {' '.join(arguments)}\n{_errors(done.stderr)}"
            )
    raise BuildError(
        f"{what} cannot be installed from the package index that pip is configured "
        "for (`pip config list`):\n" + "\n".join(errors)
    )


def _errors(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("ERROR")]
    return "\n".join(lines or text.splitlines()[-3:])


def _output(command: list[str]) -> str:
    """The stdout and stderr of a command. Raises BuildError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed:\n{output_of(done)}")
    return done.stdout + done.stderr


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that failed printed, or its exit status if that is nothing."""
    text = "\n".join(x for x in (done.stdout.strip(), done.stderr.strip()) if x)
    return text or f"(no output; exit status {done.returncode})"
