# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The repack from the pinned wheel to dist/: sources, compiler, wheel, manifest."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import abi, extension, series, sources, toolchain, wheel
from lib.errors import BuildError
from lib.project import Project, digest_files


@dataclass(frozen=True)
class Options:
    """`archs` concerns CUDA only; `wheel` is a local copy of the pinned wheel."""

    device: str = "cuda"
    archs: tuple[str, ...] = extension.DEFAULT_CUDA_ARCHS
    wheel: Path | None = None
    offline: bool = False
    jobs: int | None = None
    torch_cpu_index: str = ""


def find_compilers(project: Project, options: Options) -> extension.Compilers:
    env = project.build / "env"
    cuda = options.device == "cuda"
    return extension.Compilers(
        toolchain.find_cxx(),
        toolchain.find_torch(
            env,
            project.sources.torch,
            offline=options.offline,
            cpu_index=options.torch_cpu_index,
        ),
        toolchain.python_include(),
        toolchain.find_nvcc(env, offline=options.offline) if cuda else None,
    )


def repack(project: Project, options: Options) -> Path:
    """Build dist/<wheel> and check it; return its path."""
    if platform.machine() != "x86_64":
        raise BuildError(
            f"the pinned wheels are for x86_64, this machine is {platform.machine()}; "
            "use BUILD=source"
        )
    source = project.sources[options.device]
    if options.wheel:
        path = options.wheel
        wheel.check_input(path, source, project.vllm_version)
    else:
        path = sources.fetch(source, offline=options.offline)
    # Before the compiler runs: does the series apply?
    wheel.contents(project, path, b"")
    compilers = find_compilers(project, options)
    archs = options.archs if options.device == "cuda" else ()
    built = extension.build(
        project.root / "csrc", project.build / "obj", compilers, archs, options.jobs
    )
    needs = abi.check_library(built.path, wheel.platform_tag(Path(source.file)))
    library = built.path.read_bytes()
    files = wheel.contents(project, path, library)
    manifest = make_manifest(project, options, compilers, built.path, needs)
    target = project.dist / wheel.output_name(Path(source.file), project.local_version)
    wheel.repack(path, target, project.local_version, files, manifest)
    wheel.check_output(target)
    return target


def make_manifest(
    project: Project,
    options: Options,
    compilers: extension.Compilers,
    library: Path,
    needs: dict[str, str],
) -> dict[str, Any]:
    """What the wheel was made of: no date, no path, so that it is reproducible."""
    source = project.sources[options.device]
    patches = project.series.patches
    nvcc = compilers.nvcc
    return {
        "format": 1,
        "version": project.local_version,
        "vllm": project.vllm_version,
        "device": options.device,
        "build": "repack",
        "upstream": {
            "wheel": {"file": source.file, "sha256": source.sha256},
            "sdist": {
                "file": project.sources[sources.SDIST].file,
                "sha256": project.sources[sources.SDIST].sha256,
            },
        },
        "series": {
            "sha256": project.series.digest,
            "patches": [p.name for p in patches if series.shipped(p)],
            "build_only": [p.name for p in patches if not series.shipped(p)],
        },
        "overlay": {
            "sha256": digest_files(project.overlay()),
            "files": len(project.overlay()),
        },
        "csrc": {"sha256": digest_files(project.csrc()), "files": len(project.csrc())},
        "extension": {
            "sha256": sources.sha256_file(library),
            "cuda_architectures": list(options.archs) if nvcc else [],
            "compiler": {
                "cxx": compilers.cxx.version,
                "nvcc": nvcc.version if nvcc else None,
                "torch_headers": compilers.torch.version,
            },
            "newest_symbols": needs,
        },
    }
