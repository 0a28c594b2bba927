# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`make verify`: what it finds, and that it changes nothing."""

import pytest
from small_project import FILES, fresh, patch_text, write

from lib import sources
from lib.errors import BuildError
from lib.project import Project
from lib.verify import verify


def run(project: Project) -> list[str]:
    return verify(fresh(project), offline=True)


def test_all_well(project: Project):
    lines = run(project)
    assert len(lines) == 4 and all(": OK" in line for line in lines)
    assert "3 files changed, 2 new ones overwrite nothing" in lines[1]
    assert "2 files changed, 1 concern only a build" in lines[2]
    assert not project.build.exists()


def test_wheel_not_in_the_cache(project: Project):
    (sources.cache_folder() / FILES["cuda"][1]).unlink()
    assert "cuda wheel: not checked" in "\n".join(run(project))


def test_series_and_files(project: Project):
    (project.patches / "0009-extra.patch").write_text("")
    (project.patches / "0001-one.patch").unlink()
    with pytest.raises(BuildError) as caught:
        run(project)
    assert "0009-extra.patch: a patch file that series does not name" in str(
        caught.value
    )
    assert "0001-one.patch is missing" in str(caught.value)


def test_patch_with_an_offset(project: Project):
    text = patch_text("vllm/one.py", 4, "x").replace("-2,7 +2,7", "-3,7 +3,7")
    text = text.replace("@@ -3,7", "@@ -4,7").replace("+3,7", "+4,7")
    (project.patches / "0001-one.patch").write_text(text)
    with pytest.raises(BuildError) as caught:
        run(project)
    message = str(caught.value)
    assert "0001-one.patch: vllm/one.py: hunk 1 of 1 (@@ -4,7 +4,7 @@)" in message
    assert "stand at line 2; offsets are not accepted" in message
    # The sdist and both wheels are reported.
    assert message.count("0001-one.patch: vllm/one.py") == 3


def test_patch_that_fits_the_sdist_only(project: Project):
    """A wheel's file may differ from the sdist's."""
    write(
        project.patches / "0004-egg.patch",
        "From: A <a@example.org>\nSubject: x\n\n--- a/vllm/_version.py\n"
        "+++ b/vllm/_version.py\n@@ -1,4 +1,4 @@\n version: str\n \n"
        "-__version__ = version = '1.2.3'\n+__version__ = version = 'x'\n"
        " __version_tuple__ = version_tuple = (1, 2, 3)\n",
    )
    with (project.patches / "series").open("a") as file:
        file.write("0004-egg.patch\n")
    run(project)


def test_overlay_overwrites(project: Project):
    write(project.root / "overlay/vllm/two.py", "")
    with pytest.raises(BuildError, match=r"vllm/two\.py: exists upstream"):
        run(project)


@pytest.mark.parametrize("kind", list(FILES))
def test_wrong_hash(project: Project, kind: str):
    path = sources.cache_folder() / FILES[kind][1]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BuildError) as caught:
        run(project)
    message = str(caught.value)
    assert f"{path}: wrong SHA-256" in message
    assert project.sources[kind].sha256 in message
    assert sources.sha256_file(path) in message
    assert path.is_file()


def test_missing_series(project: Project):
    (project.patches / "series").unlink()
    with pytest.raises(BuildError, match=r"series is missing"):
        run(project)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[cpu]", "[other]", r"the table \[cpu\] is missing"),
        ("size = ", 'size = "x"\nother = ', r"\[sdist\] size must be a int"),
        ('sha256 = "', 'sha256 = "X', r"\[sdist\] sha256 must be 64 hex"),
        ("torch =", "other =", "torch must be a version"),
        ("[sdist]", "[sdist", "sources.toml"),
    ],
)
def test_malformed_sources(project: Project, old: str, new: str, message: str):
    path = project.patches / "sources.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BuildError, match=message):
        run(project)
