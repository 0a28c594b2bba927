# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import sys
from pathlib import Path

import pytest

from lib.project import Project

# The tests' own helper (small_project.py) lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

from small_project import FILES, VERSION, patch_text, write, write_sources  # noqa: E402


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own; the folder need not exist."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-ternary"


@pytest.fixture
def project(tmp_path: Path, cache: Path) -> Project:
    """The small project, its published files in the cache."""
    cache.mkdir(parents=True)
    for _, name, data in FILES.values():
        (cache / name).write_bytes(data)
    root = tmp_path / "project"
    patches = root / "patches" / VERSION
    patches.mkdir(parents=True)
    write_sources(patches, FILES)
    (root / "VLLM_VERSION").write_text(f"{VERSION}\n")
    (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "7"\n')
    texts = {
        "0001-one.patch": patch_text("vllm/one.py", 4, "first"),
        "0002-two.patch": patch_text("vllm/two.py", 9, "second", "B <b@example.org>"),
        "0003-build.patch": patch_text("CMakeLists.txt", 12, "third"),
    }
    for name, text in texts.items():
        (patches / name).write_text(text)
    (patches / "series").write_text("".join(f"{name}\n" for name in texts))
    write(root / "overlay" / "vllm" / "new" / "module.py", "NEW = 1\n")
    write(root / "csrc" / "cpu" / "ternary" / "gemm.cpp", "int gemm;\n")
    return Project(root)
