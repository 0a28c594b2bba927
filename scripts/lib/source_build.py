# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's own build, run on the patched source tree.

The whole build takes hours and fetches its own dependencies (oneDNN or CUTLASS and
others) from their repositories; vLLM's variables for local copies of them, such as
FETCHCONTENT_SOURCE_DIR_ONEDNN and VLLM_CUTLASS_SRC_DIR, are passed on. With
`only_extension` vLLM's CMake project is configured as it is, and of all its targets
only _ternary_C is compiled, which needs none of those dependencies: where no local copy
is named, an empty project stands in.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from lib import build as repack_build
from lib import extension, toolchain, tree, wheel
from lib.build import Options
from lib.errors import BuildError
from lib.project import Project

# vLLM's CMake files refuse older ones for other kernels than the ternary ones.
MINIMUM_GXX = {"cpu": Version("12.3"), "cuda": Version("13")}
TARGET = extension.MODULE
# Variables of vLLM's CMake files for local copies, and the project that stands in.
STUBS = {
    "cpu": {"FETCHCONTENT_SOURCE_DIR_ONEDNN": "add_library(dnnl INTERFACE)\n"},
    "cuda": dict.fromkeys(
        (
            "VLLM_CUTLASS_SRC_DIR",
            "TRITON_KERNELS_SRC_DIR",
            "DEEPGEMM_SRC_DIR",
            "DEEPSELECT_SRC_DIR",
            "FMHA_SM100_SRC_DIR",
            "FLASH_MLA_SRC_DIR",
            "FLASH_KDA_SRC_DIR",
            "QUTLASS_SRC_DIR",
            "TML_FA4_SRC_DIR",
            "VLLM_FLASH_ATTN_SRC_DIR",
        ),
        "",
    ),
}


def build(
    project: Project, options: Options, source: str, *, only_extension: bool
) -> Path:
    """Build the wheel, or with `only_extension` the extension; return its path."""
    result = tree.update(project, source, offline=options.offline)
    environment = _environment(project, options)
    _install_requirements(project, options)
    if only_extension:
        return _build_extension(project, options, environment)
    scratch = project.build / f"wheel-{options.device}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation"]
    command += ["--no-deps", "--verbose", "--wheel-dir", str(scratch)]
    _run([*command, str(result.path)], environment, "vLLM's build")
    (built,) = scratch.glob("vllm-*.whl")
    version = environment["VLLM_VERSION_OVERRIDE"]
    compilers = repack_build.find_compilers(project, options)
    with wheel.unpacked_member(built, f"vllm/{extension.LIBRARY}") as library:
        manifest = repack_build.make_manifest(project, options, compilers, library, {})
    manifest |= {"build": "source", "upstream": {"source": source or "sdist"}}
    target = project.dist / built.name
    wheel.repack(built, target, version, wheel.Contents({}, {}), manifest)
    wheel.check_output(target)
    return target


def _environment(project: Project, options: Options) -> dict[str, str]:
    version = project.local_version
    if options.device == "cpu":
        version += ".cpu"  # by this word vLLM knows at run time that it has no GPU
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": options.device,
        "VLLM_VERSION_OVERRIDE": version,
        "MAX_JOBS": str(options.jobs or extension.default_jobs()),
    }
    # cmake and ninja are installed beside the running Python.
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if options.device == "cuda":
        nvcc = toolchain.find_nvcc(project.build / "env", offline=options.offline)
        # CMake goes by the first nvcc in PATH, and by CUDA_PATH.
        environment["CUDA_HOME"] = environment["CUDA_PATH"] = str(nvcc.root)
        environment["PATH"] = f"{nvcc.path.parent}:{environment['PATH']}"
        environment["TORCH_CUDA_ARCH_LIST"] = ";".join(options.archs)
    return environment


def _install_requirements(project: Project, options: Options) -> None:
    """What vLLM's build imports, into the running Python's virtual environment."""
    name = f"requirements/build/{options.device}.txt"
    needed = ("torch", "ninja", "cmake", "setuptools_scm", "setuptools_rust", "jinja2")
    if all(importlib.util.find_spec(module) for module in needed):
        return
    if sys.prefix == sys.base_prefix:
        raise BuildError(
            f"BUILD=source installs {name} of vLLM, and {sys.executable} is not in a "
            "virtual environment; run it through make, which makes .venv"
        )
    if options.offline:
        raise BuildError(f"{name} of vLLM is not installed, and --offline is given")
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    command += ["-r", str(project.tree / name)]
    if options.device == "cpu" and options.torch_cpu_index:
        command += ["--extra-index-url", options.torch_cpu_index]
    _run(command, dict(os.environ), f"installing {name}")


def _build_extension(
    project: Project, options: Options, environment: dict[str, str]
) -> Path:
    folder = project.build / f"cmake-{options.device}"
    stubs = project.build / "stubs"
    arguments = [
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DVLLM_TARGET_DEVICE={options.device}",
        f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}",
        f"-DVLLM_PYTHON_PATH={':'.join(path for path in sys.path if path)}",
        f"-DFETCHCONTENT_BASE_DIR={project.build / 'deps'}",
    ]
    _stand_in(stubs, environment, options.device)
    if options.device == "cuda":
        toolkit = Path(environment["CUDA_HOME"])
        arguments.append(f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}")
        arguments += _stand_in_libraries(stubs, toolkit)
    arguments += _accept_compiler(stubs, options.device)
    configure = ["cmake", "-S", str(project.tree), "-B", str(folder), "-G", "Ninja"]
    _run([*configure, *arguments], environment, "CMake's configure step")
    jobs = environment["MAX_JOBS"]
    compile_ = ["cmake", "--build", str(folder), "--target", TARGET, f"-j{jobs}"]
    _run(compile_, environment, f"compiling {TARGET}")
    (library,) = folder.glob(f"{TARGET}*.so")
    return library


def _stand_in(stubs: Path, environment: dict[str, str], device: str) -> None:
    """Empty projects for dependencies that the extension does not use."""
    for variable, text in STUBS[device].items():
        folder = stubs / variable.lower()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "CMakeLists.txt").write_text(text)
        # vLLM's CMake file for FlashMLA reads this one.
        interface = folder / "flash_mla" / "flash_mla_interface.py"
        interface.parent.mkdir(exist_ok=True)
        interface.touch()
        environment.setdefault(variable, str(folder))


def _stand_in_libraries(stubs: Path, toolkit: Path) -> list[str]:
    """CMake arguments for the toolkit's libraries that vLLM's CMake file looks for.

    The extension calls nothing in them; a compiler-only toolkit lacks them.
    """
    arguments = []
    for variable, name, soname in (
        ("CUDA_cuda_driver_LIBRARY", "libcuda.so", "libcuda.so.1"),
        ("CUDA_nvrtc_LIBRARY", "libnvrtc.so", "libnvrtc.so.13"),
    ):
        if not any(toolkit.glob(f"**/{name}")):
            command = [toolchain.find_cxx().path, "-shared", "-x", "c", "/dev/null"]
            command += [f"-Wl,-soname,{soname}", "-o", str(stubs / name)]
            subprocess.run(command, check=True)
            arguments.append(f"-D{variable}={stubs / name}")
    return arguments


def _accept_compiler(stubs: Path, device: str) -> list[str]:
    """CMake arguments by which an older g++ may compile the extension alone."""
    minimum = MINIMUM_GXX[device]
    cxx = toolchain.find_cxx()
    words = [word for word in cxx.version.split() if word[:1].isdigit()]
    if not words or "g++" not in cxx.version or Version(words[-1]) >= minimum:
        return []
    print(
        f"note: vLLM's {device} kernels need g++ {minimum}, this is {words[-1]}; it "
        "serves for the ternary extension only",
        file=sys.stderr,
    )
    file = stubs / "compiler.cmake"
    file.write_text(f"set(CMAKE_CXX_COMPILER_VERSION {minimum})\n")
    return [f"-DCMAKE_PROJECT_vllm_extensions_INCLUDE={file}"]


def _run(command: list[str], environment: dict[str, str], what: str) -> None:
    """Run a command that prints its own progress."""
    print(f"$ {' '.join(command)}", file=sys.stderr)
    try:
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    except FileNotFoundError:
        raise BuildError(f"{what} failed: {command[0]} was not found") from None
    if done.returncode:
        raise BuildError(f"{what} failed with status {done.returncode}; see above")
