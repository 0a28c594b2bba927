# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The published files a build starts from: pinned, cached, verified before use."""

import hashlib
import os
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from lib.errors import BuildError

SDIST = "sdist"
WHEELS = ("cuda", "cpu")


@dataclass(frozen=True)
class Source:
    """One published file: `kind` is "sdist", "cuda" or "cpu"; `size` in bytes."""

    kind: str
    project: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Sources:
    repository: str
    torch: str
    files: dict[str, Source]

    def __getitem__(self, kind: str) -> Source:
        return self.files[kind]


def read_sources(path: Path) -> Sources:
    """Read a sources.toml. Raises BuildError naming the key that is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BuildError(
            f"{path} is missing: it pins the files of this version"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    files = {}
    for kind in (SDIST, *WHEELS):
        entry = table.get(kind)
        if not isinstance(entry, dict):
            raise BuildError(f"{path}: the table [{kind}] is missing")
        for key, wanted in (("project", str), ("file", str), ("size", int)):
            if not isinstance(entry.get(key), wanted):
                raise BuildError(f"{path}: [{kind}] {key} must be a {wanted.__name__}")
        digest = str(entry.get("sha256", ""))
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise BuildError(f"{path}: [{kind}] sha256 must be 64 hexadecimal digits")
        files[kind] = Source(
            kind, entry["project"], entry["file"], entry["size"], digest
        )
    if not isinstance(table.get("torch"), str):
        raise BuildError(f'{path}: torch must be a version, like "2.13.0"')
    return Sources(str(table.get("repository", "")), table["torch"], files)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-ternary"


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(source: Source) -> Path | None:
    """The path of the file in the cache, not yet verified; None if it is not there."""
    path = cache_folder() / source.file
    return path if path.is_file() else None


def check(source: Source, path: Path) -> None:
    """Raise BuildError unless the file is the pinned one. Deletes nothing."""
    found = sha256_file(path)
    if found != source.sha256:
        raise BuildError(
            f"{path}: wrong SHA-256\n  expected {source.sha256} ({source.size} bytes)\n"
            f"  found    {found} ({path.stat().st_size} bytes)\n"
            "The file was left as it is. Move it away and run again to download it, or "
            "find out who changed it."
        )


def fetch(source: Source, *, offline: bool = False) -> Path:
    """The verified file in the cache, downloaded if it is not there yet.

    Raises BuildError when it cannot be had, or its hash is wrong.
    """
    path = cache_folder() / source.file
    if path.is_file():
        check(source, path)
        return path
    if offline:
        raise BuildError(
            f"{source.file} is not in the cache ({path.parent}), and --offline forbids "
            "to download it. Run once without, or copy the file there."
        )
    from lib import index  # with packages that only a download needs

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    config = index.read_pip_config()
    with index.open_session(config) as session:
        link = index.find_file(
            session, config, source.project, source.file, source.sha256
        )
        index.download(session, link, part, source.size)
    found = sha256_file(part)
    if found != source.sha256:
        # Kept under another name: for a look at it, and so that the next run neither
        # resumes nor trusts it.
        bad = path.with_name(f"{path.name}.{found[:12]}.wrong")
        part.rename(bad)
        raise BuildError(
            f"{link.redacted}: wrong SHA-256\n  expected {source.sha256} "
            f"({source.size} bytes)\n  found    {found} ({bad.stat().st_size} bytes)\n"
            f"What arrived is in {bad}; it is not used. Ask whoever runs that index."
        )
    part.rename(path)
    return path


def read_sdist(path: Path) -> dict[str, bytes]:
    """The files of an sdist, by their path below its top folder.

    One pass, all in memory: a single member of a .tar.gz costs as much as all.
    """
    files: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                files[member.name.partition("/")[2]] = file.read()
    return files
