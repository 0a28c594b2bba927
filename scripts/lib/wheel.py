# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Repack the official wheel: patched files, new modules, the extension, a new version.

The series is applied to the wheel's own files, never to the sdist's in their place:
a wheel may differ from the sdist. All that is not changed is copied byte by byte.
"""

import base64
import csv
import hashlib
import io
import json
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from lib import series, sources
from lib.errors import BuildError
from lib.extension import LIBRARY
from lib.project import Project
from lib.pypa import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from lib.status import progress
from lib.zipcopy import ZipCopier

MANIFEST = "ternary.json"
VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True)
class Contents:
    """What a repack changes: path in the wheel -> bytes, and the manifest."""

    changed: dict[str, bytes]
    added: dict[str, bytes]


def check_input(path: Path, source: sources.Source, version: str) -> None:
    """Raise BuildError unless `path` is the pinned wheel `source` of `version`."""
    if path.is_dir():
        raise BuildError(f"{path}: is a folder; give the file {source.file}")
    if not path.is_file():
        raise BuildError(
            f"{path}: no such file; give {source.file}, or leave WHEEL= out: it is "
            "then downloaded into the cache"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            info = _dist_info(archive)
            metadata = _metadata(archive.read(f"{info}/METADATA"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise BuildError(f"{path}: not a wheel: {error}") from None
    name, found = str(metadata["Name"]), str(metadata["Version"])
    if (canonicalize_name(name), found) != (canonicalize_name(source.project), version):
        raise BuildError(
            f"{path}: is {name} {found}, but the patches are for {source.project} "
            f"{version}. Give the wheel {source.file}, or leave --wheel away to "
            "download it."
        )
    sources.check(source, path)


def contents(project: Project, wheel: Path, library: bytes) -> Contents:
    """The wheel's changed and new files.

    Raises PatchFailure if the series does not apply to the wheel's files, and
    BuildError if a new file exists already.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

        def read(path: str) -> bytes | None:
            return archive.read(path) if path in names else None

        patches = [part for p in project.series.patches if (part := series.shipped(p))]
        changed = series.apply_series(patches, read, f"the wheel {wheel.name}")
        version = changed.get(VERSION_FILE) or archive.read(VERSION_FILE)
    new = {path: file.read_bytes() for path, file in project.overlay().items()}
    new[f"vllm/{LIBRARY}"] = library
    if taken := sorted(names & set(new)):
        raise BuildError(
            f"{wheel.name} has {', '.join(taken)} already; overlay/ holds new files "
            "only"
        )
    old_version, new_version = project.vllm_version, project.local_version
    changed[VERSION_FILE] = set_version(version, old_version, new_version)
    return Contents(changed, new)


def set_version(text: bytes, old: str, new: str) -> bytes:
    """The file _version.py with another version, as setuptools-scm would write it."""
    local = new.partition("+")[2]
    numbers = ", ".join(old.split("."))
    result = text.decode()
    for before, after in (
        (f"version = '{old}'\n", f"version = '{new}'\n"),
        (f"version_tuple = ({numbers})\n", f"version_tuple = ({numbers}, '{local}')\n"),
    ):
        if result.count(before) != 1:
            raise BuildError(f"{VERSION_FILE}: expected one line ending {before!r}")
        result = result.replace(before, after)
    return result.encode()


def output_name(wheel: Path, version: str) -> str:
    """The file name with another version: vllm-0.32.0+ternary.1-cp38-abi3-....whl."""
    name, _, tags = wheel.name.split("-", 2)
    return f"{name}-{version}-{tags}"


def platform_tag(wheel: Path) -> str:
    try:
        tags = parse_wheel_filename(wheel.name)[3]
    except InvalidWheelFilename as error:
        raise BuildError(f"{wheel.name}: {error}") from None
    return sorted(tag.platform for tag in tags)[0]


def repack(
    wheel: Path,
    target: Path,
    version: str,
    files: Contents,
    manifest: Mapping[str, Any],
) -> None:
    """Write `target`, complete or not at all.

    The unchanged members keep their order, bytes and dates; new ones have the date of
    the wheel's METADATA and follow before the .dist-info folder.
    """
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        old_info = _dist_info(archive)
        new_info = f"{old_info.split('-')[0]}-{version}.dist-info"
        date = archive.getinfo(f"{old_info}/METADATA").date_time
        hashes = _read_record(archive.read(f"{old_info}/RECORD"))
        record: list[tuple[str, str, str]] = []

        def entry(name: str, mode: int = 0o644) -> zipfile.ZipInfo:
            info = zipfile.ZipInfo(name, date)
            info.external_attr = (stat.S_IFREG | mode) << 16
            return info

        members = [info for info in archive.infolist() if not info.is_dir()]
        package = [m for m in members if not m.filename.startswith(f"{old_info}/")]
        dist_info = [m for m in members if m.filename.startswith(f"{old_info}/")]
        with ZipCopier(part, archive) as output:

            def add(name: str, data: bytes, mode: int = 0o644) -> None:
                output.add(entry(name, mode), data)
                record.append((name, record_hash(data), str(len(data))))

            for member in progress(package, desc="repack", unit=" files"):
                name = member.filename
                if name in files.changed:
                    mode = (member.external_attr >> 16) & 0o777 or 0o644
                    add(name, files.changed[name], mode)
                else:
                    output.copy(member)
                    record.append((name, *hashes[name]))
            for name in sorted(files.added):
                library = name.endswith(".so")
                add(name, files.added[name], 0o755 if library else 0o644)
            for member in dist_info:
                name = member.filename.replace(old_info, new_info, 1)
                data = archive.read(member)
                if name == f"{new_info}/METADATA":
                    data = _set_metadata_version(data, version)
                if name != f"{new_info}/RECORD":
                    add(name, data)
            text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
            add(f"{new_info}/{MANIFEST}", text.encode())
            record.append((f"{new_info}/RECORD", "", ""))
            output.add(entry(f"{new_info}/RECORD"), _write_record(record))
            output.close()
    part.replace(target)


def check_output(path: Path) -> dict[str, Any]:
    """Check a wheel against its own RECORD and name; return its manifest.

    Raises BuildError naming every file that is wrong.
    """
    problems = []
    with zipfile.ZipFile(path) as archive:
        info = _dist_info(archive)
        record = _read_record(archive.read(f"{info}/RECORD"))
        names = [m.filename for m in archive.infolist() if not m.is_dir()]
        if sorted(names) != sorted(record):
            problems.append(f"files and RECORD differ: {set(names) ^ set(record)}")
        for name in progress(names, desc=f"check {path.name}", unit=" files"):
            expected, size = record.get(name, ("", ""))
            if not expected:
                continue
            with archive.open(name) as file:
                digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore
            found = "sha256=" + _urlsafe(digest)
            if found != expected or str(archive.getinfo(name).file_size) != size:
                problems.append(f"{name}: RECORD says {expected}, found {found}")
        metadata = _metadata(archive.read(f"{info}/METADATA"))
        manifest = json.loads(archive.read(f"{info}/{MANIFEST}"))
        version_file = archive.read(VERSION_FILE).decode()
    name, version = parse_wheel_filename(path.name)[:2]
    if (canonicalize_name(str(metadata["Name"])), metadata["Version"]) != (
        name,
        str(version),
    ):
        problems.append(f"METADATA says {metadata['Name']} {metadata['Version']}")
    if f"version = '{version}'\n" not in version_file:
        problems.append(f"{VERSION_FILE} does not say {version}")
    if problems:
        raise BuildError(f"{path}:\n  " + "\n  ".join(problems))
    return manifest


@contextmanager
def unpacked_member(path: Path, name: str) -> Iterator[Path]:
    """One file of a wheel, in a temporary folder."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        yield Path(archive.extract(name, folder))


def record_hash(data: bytes) -> str:
    return "sha256=" + _urlsafe(hashlib.sha256(data).digest())


def _urlsafe(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _dist_info(archive: zipfile.ZipFile) -> str:
    found = {
        name.split("/")[0]
        for name in archive.namelist()
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
    }
    if len(found) != 1:
        raise zipfile.BadZipFile(f"{len(found)} folders *.dist-info with METADATA")
    return found.pop()


def _metadata(data: bytes):
    return HeaderParser().parsestr(data.decode())


def _set_metadata_version(data: bytes, version: str) -> bytes:
    head, separator, body = data.partition(b"\n\n")
    new, count = re.subn(
        rb"^Version: .*$", b"Version: " + version.encode(), head, flags=re.MULTILINE
    )
    if count != 1:
        raise BuildError(f"METADATA has {count} lines 'Version:'")
    return new + separator + body


def _read_record(data: bytes) -> dict[str, tuple[str, str]]:
    rows = csv.reader(io.StringIO(data.decode()))
    return {row[0]: (row[1], row[2]) for row in rows if row}


def _write_record(record: list[tuple[str, str, str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(record)
    return text.getvalue().encode()
