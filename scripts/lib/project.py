# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The project's folders, its versions, and the files it adds to vLLM."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lib.errors import BuildError
from lib.series import Series, read_series
from lib.sources import Sources, read_sources

_IGNORED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@dataclass(frozen=True)
class Project:
    """`root` is the repository; `build` and `dist` may lie elsewhere in tests."""

    root: Path = Path(__file__).resolve().parents[2]

    @cached_property
    def vllm_version(self) -> str:
        path = self.root / "VLLM_VERSION"
        version = path.read_text(encoding="utf-8").strip()
        if not version:
            raise BuildError(f"{path} is empty; it names the vLLM version, like 0.32.0")
        return version

    @cached_property
    def build_number(self) -> str:
        """The <n> of the local version: the project's own version."""
        table = tomllib.loads((self.root / "pyproject.toml").read_text("utf-8"))
        return str(table["project"]["version"])

    @property
    def local_version(self) -> str:
        return f"{self.vllm_version}+ternary.{self.build_number}"

    @property
    def patches(self) -> Path:
        return self.root / "patches" / self.vllm_version

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    @property
    def tree(self) -> Path:
        return self.build / f"vllm-{self.vllm_version}"

    @cached_property
    def series(self) -> Series:
        return read_series(self.patches)

    @cached_property
    def sources(self) -> Sources:
        return read_sources(self.patches / "sources.toml")

    def overlay(self) -> dict[str, Path]:
        """New Python files: path in vLLM's source tree -> file here."""
        return list_files(self.root / "overlay")

    def csrc(self) -> dict[str, Path]:
        """New native files: path in vLLM's source tree -> file here."""
        files = list_files(self.root / "csrc")
        return {f"csrc/{path}": file for path, file in files.items()}


def list_files(folder: Path) -> dict[str, Path]:
    """All files below `folder` by relative path, sorted, without caches."""
    if not folder.is_dir():
        return {}
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix != ".pyc"
        and not _IGNORED.intersection(path.relative_to(folder).parts)
    }


def digest_files(files: Mapping[str, Path | bytes]) -> str:
    """SHA-256 over sorted paths and contents."""
    total = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        data = content.read_bytes() if isinstance(content, Path) else content
        total.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()
