# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compiling: what is compiled again, equal bytes, symbol versions, messages."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
from small_project import write

from lib import abi, extension, toolchain
from lib.errors import BuildError
from lib.project import Project

TAG = "manylinux_2_28_x86_64"
BINDINGS = """\
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include "cpu/ternary/answer.h"
STABLE_TORCH_LIBRARY_FRAGMENT(small_test, ops) { ops.def("answer() -> int"); }
PyMODINIT_FUNC PyInit__ternary_C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ternary_C"};
  return answer() == 42 ? PyModule_Create(&module) : nullptr;
}
"""
ANSWER = """\
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>
#include "answer.h"
int answer() {
  auto shared = std::make_shared<std::vector<int>>(42, 1);
  auto copy = shared;
  std::ostringstream text;
  text << copy->size() << __FILE__;
  if (text.str().empty()) throw std::runtime_error(std::move(text).str());
  return int(shared->size());
}
"""
KERNEL = """\
namespace {
template <typename T> __global__ void fill(T* out) { out[threadIdx.x] = T(1); }
}
#include <cstdio>
int launch(float* out) {
  fill<float><<<1, 32>>>(out);
  fill<double><<<1, 32>>>((double*)out);
  return std::puts(__FILE__);
}
"""


@pytest.fixture(scope="session")
def environment() -> Path:
    """The real project's build/env: what a build installed there is used again."""
    return Project().build / "env"


@pytest.fixture(scope="session")
def compilers(environment: Path) -> extension.Compilers:
    return extension.Compilers(
        toolchain.find_cxx(),
        toolchain.find_torch(environment, Project().sources.torch),
        toolchain.python_include(),
    )


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    return make_csrc(tmp_path / "first")


def make_csrc(root: Path) -> Path:
    csrc = root / "csrc"
    write(csrc / "quantization" / "ternary" / "torch_bindings.cpp", BINDINGS)
    write(csrc / "cpu" / "ternary" / "answer.cpp", ANSWER)
    write(csrc / "cpu" / "ternary" / "answer.h", "int answer();\n")
    write(csrc / "cpu" / "ternary" / "other.cpp", "int other = 1;\n")
    return csrc


def test_build_and_rebuild(csrc: Path, compilers: extension.Compilers, tmp_path: Path):
    objects = tmp_path / "obj"

    def build() -> int:
        return extension.build(csrc, objects, compilers).compiled

    assert build() == 4
    library = objects / "cpu-_ternary_C.abi3.so"
    first = library.read_bytes()
    newest = abi.check_library(library, TAG)
    assert newest["GLIBC"] <= "2.28"
    assert build() == 0
    # Contents count, not times.
    (csrc / "cpu" / "ternary" / "answer.cpp").touch()
    assert build() == 0
    write(csrc / "cpu" / "ternary" / "answer.h", "// new\nint answer();\n")
    assert build() == 2
    write(csrc / "cpu" / "ternary" / "other.cpp", "int other = 2;\n")
    assert build() == 1
    write(csrc / "cpu" / "ternary" / "other.cpp", "int other = 1;\n")
    write(csrc / "cpu" / "ternary" / "answer.h", "int answer();\n")
    assert build() == 3
    assert library.read_bytes() == first
    # Only the entry point is exported.
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__ternary_C"]


def test_equal_bytes_elsewhere(
    csrc: Path, compilers: extension.Compilers, tmp_path: Path
):
    one = extension.build(csrc, tmp_path / "one", compilers, jobs=1).path.read_bytes()
    other = make_csrc(tmp_path / "a" / "longer" / "path")
    two = extension.build(other, tmp_path / "two", compilers, jobs=2).path.read_bytes()
    assert one == two
    assert str(tmp_path).encode() not in one


def test_cuda(compilers: extension.Compilers, environment: Path, tmp_path: Path):
    """nvcc, of the system or of the index: equal bytes in another folder."""
    nvcc = toolchain.find_nvcc(environment)
    cuda = extension.Compilers(compilers.cxx, compilers.torch, compilers.include, nvcc)
    built = []
    for folder in ("one", "an/other"):
        csrc = make_csrc(tmp_path / folder)
        write(csrc / "quantization" / "ternary" / "kernel.cu", KERNEL)
        write(
            csrc / "quantization" / "ternary" / "sm90_kernel.cu", "__device__ int x;\n"
        )
        objects = tmp_path / folder / "obj"
        built.append(extension.build(csrc, objects, cuda, ("8.0", "9.0a")))
    assert built[0].objects == 6
    assert built[0].path.read_bytes() == built[1].path.read_bytes()
    abi.check_library(built[0].path, TAG)


def test_architectures_of_a_file(compilers: extension.Compilers, csrc: Path):
    nvcc = toolchain.Nvcc(Path("/cuda/bin/nvcc"), "V13.0.0")
    cuda = extension.Compilers(compilers.cxx, compilers.torch, compilers.include, nvcc)

    def archs(name: str) -> list[str]:
        path = csrc / "quantization" / "ternary" / name
        command = extension.make_unit(csrc, path, cuda, ("8.0", "12.0")).command
        return [word for word in command if word.startswith("arch=")]

    assert archs("mma.cu") == [
        "arch=compute_80,code=sm_80",
        "arch=compute_120,code=sm_120",
    ]
    assert archs("sm90_mma.cu") == ["arch=compute_90a,code=sm_90a"]


def test_compile_error(csrc: Path, compilers: extension.Compilers, tmp_path: Path):
    write(csrc / "cpu" / "ternary" / "other.cpp", "int other = missing;\n")
    with pytest.raises(BuildError) as caught:
        extension.build(csrc, tmp_path / "obj", compilers)
    message = str(caught.value)
    assert "csrc/cpu/ternary/other.cpp does not compile" in message
    assert "missing" in message
    write(csrc / "cpu" / "ternary" / "other.cpp", "int other = 1;\n")
    extension.build(csrc, tmp_path / "obj", compilers)


def test_no_bindings(csrc: Path, compilers: extension.Compilers, tmp_path: Path):
    (csrc / "quantization" / "ternary" / "torch_bindings.cpp").unlink()
    with pytest.raises(BuildError, match=r"torch_bindings\.cpp is missing"):
        extension.build(csrc, tmp_path / "obj", compilers)


@pytest.mark.parametrize("text", ["8.0 8.6,9.0a;12.0", "8.0;8.6;9.0a;12.0"])
def test_parse_archs(text: str):
    assert extension.parse_archs(text) == ("8.0", "8.6", "9.0a", "12.0")


@pytest.mark.parametrize(("text", "bad"), [("sm_80", "sm_80"), ("8.0 90", "90")])
def test_bad_archs(text: str, bad: str):
    with pytest.raises(BuildError, match=f"'{bad}' is no architecture"):
        extension.parse_archs(text)
    with pytest.raises(BuildError, match="is empty"):
        extension.parse_archs(" ")


def test_architectures_that_the_kernels_cannot_run_on() -> None:
    with pytest.raises(BuildError, match=r"7\.5 is too old"):
        extension.parse_archs("8.0 7.5")


def library(tmp_path: Path, source: str, *flags: str) -> Path:
    write(tmp_path / "x.cpp", source)
    path = tmp_path / "x.so"
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", "-o", path,
         tmp_path / "x.cpp", *flags],
        check=True,
    )  # fmt: skip
    return path


def test_symbol_newer_than_the_tag(tmp_path: Path):
    path = library(
        tmp_path,
        'extern "C" double f(double x);\n'
        '__asm__(".symver f, exp@GLIBC_2.29");\n'
        'extern "C" double g(double x) { return f(x); }\n',
        "-lm",
    )
    with pytest.raises(
        BuildError, match=r"exp needs GLIBC_2\.29, newer than manylinux"
    ):
        abi.check_library(path, TAG)
    assert abi.check_library(path, "manylinux_2_34_x86_64")["GLIBC"] == "2.29"


def test_search_path_of_the_build_machine(tmp_path: Path):
    path = library(tmp_path, "int x;\n", "-Wl,-rpath,/home/me/torch/lib")
    with pytest.raises(BuildError, match="RUNPATH /home/me/torch/lib, a path of the"):
        abi.check_library(path, TAG)


def test_symbol_outside_the_stable_abi(tmp_path: Path):
    source = "namespace at { int f(); }\nint g() { return at::f(); }\n"
    with pytest.raises(BuildError, match="_ZN2at1fEv is undefined, and not of torch's"):
        abi.check_library(library(tmp_path, source), TAG)


def test_library_that_nothing_provides(tmp_path: Path):
    path = library(tmp_path, "int x;\n", "-Wl,--no-as-needed", "-lgomp")
    with pytest.raises(BuildError, match=r"needs libgomp\.so\.1"):
        abi.check_library(path, TAG)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler was not found"):
        toolchain.find_cxx()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo not for you; exit 3", "failed:\nnot for you\n"),
        ("exit 3", r"failed:\n\(no output; exit status 3\)\n"),
        ("exit 0", "prints nothing"),
    ],
)
def test_what_is_no_compiler(
    body: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    other = tmp_path / "cc"
    write(other, f"#!/bin/sh\n{body}\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    with pytest.raises(BuildError, match=said) as caught:
        toolchain.find_cxx()
    assert "is no C++ compiler" in str(caught.value)
    assert "g++ 11 or newer" in str(caught.value)


def test_a_compiler_that_fails_in_silence(
    compilers: extension.Compilers, csrc: Path, tmp_path: Path
):
    silent = dataclasses.replace(
        compilers, cxx=toolchain.Cxx("/bin/false", "false 1.0")
    )
    with pytest.raises(BuildError, match=r"\(no output; exit status 1\)"):
        extension.build(csrc, tmp_path / "obj", silent, jobs=1)


def test_nvcc_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    other = tmp_path / "nvcc"
    write(other, "#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    other.chmod(0o755)
    monkeypatch.setenv("NVCC", str(other))
    with pytest.raises(BuildError, match="is no nvcc of CUDA 13"):
        toolchain.find_nvcc(tmp_path)


def test_offline_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_probe_nvcc", lambda path: None)
    with pytest.raises(BuildError, match=r"CUDA 13\.0\.\* is needed .* --offline"):
        toolchain.find_nvcc(tmp_path, offline=True)
