# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The strict patch applier: `git` makes the patches and is the reference."""

import random
import subprocess
from pathlib import Path

import pytest

from lib import series
from lib.errors import BuildError

HEADER = (
    "From: A. Writer <writer@example.org>\nSubject: [PATCH 1/2] Do it\n\nBecause.\n"
)
LINES = [f"line {i}\n" for i in range(1, 31)]


def git_diff(folder: Path, old: bytes, new: bytes, name: str = "vllm/x.py") -> str:
    for side, data in (("a", old), ("b", new)):
        path = folder / side / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    done = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", f"a/{name}", f"b/{name}"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    return done.stdout.decode()


def make_patch(folder: Path, diff: str, name: str = "0001-x.patch") -> series.Patch:
    path = folder / name
    path.write_text(HEADER + "---\n" + diff)
    return series.read_patch(path)


def replaced(*changes: tuple[int, str]) -> bytes:
    lines = list(LINES)
    for line, text in changes:
        lines[line - 1] = text
    return "".join(lines).encode()


@pytest.fixture
def patch(tmp_path: Path) -> series.Patch:
    new = replaced((5, "five\n"), (20, "twenty\nand more\n"))
    return make_patch(tmp_path, git_diff(tmp_path, "".join(LINES).encode(), new))


def test_header(patch: series.Patch):
    assert patch.author_name == "A. Writer"
    assert patch.author_email == "writer@example.org"
    assert patch.message == "Do it\n\nBecause.\n"


def test_header_of_git_format_patch(tmp_path: Path):
    text = (
        "From 0123456789abcdef0123456789abcdef01234567 Mon Sep 17 00:00:00 2001\n"
        "From: =?UTF-8?q?J=C3=BCrgen?= <j@example.org>\n"
        "Date: Mon, 1 Jan 2024 00:00:00 +0000\n"
        "Subject: [PATCH] A subject that goes on\n in a second line\n\n"
        "Body one.\n\nBody two.\n---\n vllm/x.py | 2 +-\n\n"
        "diff --git a/vllm/x.py b/vllm/x.py\nindex 1..2 100644\n"
        "--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1 +1 @@\n-old\n+new\n-- \n2.39.5\n"
    )
    (tmp_path / "p.patch").write_text(text)
    patch = series.read_patch(tmp_path / "p.patch")
    assert patch.author_name == "Jürgen"
    assert patch.subject == "A subject that goes on in a second line"
    assert patch.body == "Body one.\n\nBody two."
    files = series.apply_series([patch], lambda _: b"old\n", "t")
    assert files == {"vllm/x.py": b"new\n"}


@pytest.mark.parametrize("seed", range(40))
def test_equals_git(tmp_path: Path, seed: int):
    """Random edits, with and without a newline at the end: diff and apply give them."""
    rng = random.Random(seed)
    old = [f"{rng.choice('abc')}{rng.choice(['', chr(13), ' '])}\n" for _ in range(60)]
    new = list(old)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(new))
        new[at : at + rng.randint(0, 3)] = ["new\n"] * rng.randint(0, 3)
    old_bytes, new_bytes = "".join(old).encode(), "".join(new).encode()
    if seed % 3 == 1:
        old_bytes = old_bytes.removesuffix(b"\n")
    if seed % 3 == 2:
        new_bytes += b"no newline"
    if old_bytes == new_bytes:
        new_bytes += b"tail\n"
    patch = make_patch(tmp_path, git_diff(tmp_path, old_bytes, new_bytes))
    files = series.apply_series([patch], lambda _: old_bytes, "t")
    assert files == {"vllm/x.py": new_bytes}


def failure(patch: series.Patch, data: bytes | None) -> series.PatchFailure:
    with pytest.raises(series.PatchFailure) as caught:
        series.apply_series([patch], lambda _: data, "a tree")
    return caught.value


def test_no_offset(patch: series.Patch):
    error = failure(patch, b"one more\n" + "".join(LINES).encode())
    first, second = error.mismatches
    assert "stand at line 3; offsets are not accepted" in first.reason
    assert first.hunk == "hunk 1 of 2 (@@ -2,7 +2,7 @@)"
    assert second.hunk.startswith("hunk 2 of 2")


def test_no_fuzz_and_report(patch: series.Patch):
    error = failure(patch, replaced((8, "other\n")))
    (bad,) = error.mismatches
    assert (bad.patch, bad.path, bad.line) == ("0001-x.patch", "vllm/x.py", 2)
    text = str(error)
    assert "0001-x.patch: vllm/x.py: hunk 1 of 2 (@@ -2,7 +2,7 @@)" in text
    assert "  !      8 | line 8" in text
    assert "  !      8 | other" in text
    assert "         5 | line 5" in text
    assert "nothing was changed" in text


def test_file_too_short(patch: series.Patch):
    error = failure(patch, b"".join(line.encode() for line in LINES[:10]))
    assert "the file ends before this line" in str(error)


def test_missing_file(patch: series.Patch):
    assert "there is no such file" in str(failure(patch, None))


def test_later_patch_sees_earlier_one(tmp_path: Path):
    first = "".join(LINES).encode()
    second = replaced((5, "five\n"))
    third = replaced((5, "5\n"))
    one = make_patch(tmp_path, git_diff(tmp_path, first, second))
    two = make_patch(tmp_path, git_diff(tmp_path, second, third), "0002-y.patch")
    assert series.apply_series([one, two], lambda _: first, "t")["vllm/x.py"] == third
    with pytest.raises(series.PatchFailure, match="0002-y.patch"):
        series.apply_series([two, one], lambda _: first, "t")


def test_wrong_new_line_number(tmp_path: Path, patch: series.Patch):
    text = (tmp_path / patch.name).read_text().replace("+2,7", "+3,7")
    (tmp_path / patch.name).write_text(text)
    error = failure(series.read_patch(tmp_path / patch.name), "".join(LINES).encode())
    assert "begin at line 2, not at 3" in str(error)


def test_less_context_is_refused(tmp_path: Path):
    old = "".join(LINES).encode()
    for side, data in (("a", old), ("b", replaced((15, "x\n")))):
        (tmp_path / side).mkdir()
        (tmp_path / side / "x").write_bytes(data)
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "-U1", "a/x", "b/x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    with pytest.raises(BuildError, match="1 lines of context before"):
        make_patch(tmp_path, diff)
    # Context before is there, context after is not.
    hunk = "@@ -12,4 +12,4 @@\n line 12\n line 13\n line 14\n-line 15\n+x\n"
    patch = make_patch(tmp_path, "--- a/x\n+++ b/x\n" + hunk)
    assert "0 lines of context after" in str(failure(patch, old))


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+x\n", "holds no diff|new file"),
        (
            "diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n"
            "@@ -0,0 +1 @@\n+x\n",
            "overlay/",
        ),
        (
            "diff --git a/x b/x\ndeleted file mode 100644\n--- a/x\n+++ /dev/null\n"
            "@@ -1 +0,0 @@\n-x\n",
            "deletes a file",
        ),
        (
            "diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/y\n",
            "renames a file",
        ),
        ("--- a/x\n+++ b/y\n@@ -1 +1 @@\n-x\n+y\n", "same path"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-x\n+y\n", "leaves the source tree"),
        ("diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "mode"),
        ("diff --git a/x b/x\nGIT binary patch\n", "binary"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-x\n+y\n", "2 old and 2 new lines"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n x\n", "changes nothing"),
        ("--- a/x\n+++ b/x\n", "no hunk"),
        ("", "holds no diff"),
    ],
)
def test_malformed(tmp_path: Path, diff: str, message: str):
    with pytest.raises(BuildError, match=message):
        make_patch(tmp_path, diff)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("Subject: x\n\n", "From: Name"),
        ("From: A <a@example.org>\n\n", "Subject:"),
        ("", "From: Name"),
    ],
)
def test_bad_header(tmp_path: Path, header: str, message: str):
    path = tmp_path / "p.patch"
    path.write_text(header + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n")
    with pytest.raises(BuildError, match=message):
        series.read_patch(path)


def test_series_and_files_one_to_one(tmp_path: Path, patch: series.Patch):
    (tmp_path / "series").write_text(
        "# order\n0001-x.patch\n0001-x.patch  # twice\n0009-gone.patch\n"
    )
    (tmp_path / "0002-extra.patch").write_text("x")
    problems = "\n".join(series.check_names(tmp_path))
    assert "0001-x.patch: named twice" in problems
    assert "0009-gone.patch: named in series" in problems
    assert "0002-extra.patch: a patch file that series does not name" in problems
    with pytest.raises(BuildError):
        series.read_series(tmp_path)


def test_digest_follows_order_and_bytes(tmp_path: Path, patch: series.Patch):
    def digest(patches):
        return series.Series(tmp_path, patches).digest

    other = make_patch(
        tmp_path,
        "--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1 +1 @@\n-x\n+y\n",
        "0002-y.patch",
    )
    digests = {digest([patch]), digest([patch, other]), digest([other, patch])}
    assert len(digests) == 3


def test_shipped_part(tmp_path: Path, patch: series.Patch):
    assert series.shipped(patch) == patch
    build = make_patch(
        tmp_path, "--- a/setup.py\n+++ b/setup.py\n@@ -1 +1 @@\n-x\n+y\n"
    )
    assert series.shipped(build) is None
