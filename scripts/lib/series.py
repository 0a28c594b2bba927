# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read a patch series and apply it strictly.

Strict means: a hunk's lines must stand at exactly the line numbers it names (no
offset), all its context must be there (no fuzz), and a patch only changes files that
exist upstream. New files belong in `overlay/` or `csrc/`. Patches are applied in
memory: files are written when the whole series has applied, so that a failure leaves a
tree as it was.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.header import decode_header, make_header
from email.utils import parseaddr
from pathlib import Path

from lib.errors import BuildError

# A file's bytes by its path in the source tree; None if there is no such file.
Reader = Callable[[str], bytes | None]

CONTEXT = 3
SERIES_FILE = "series"
# Paths that a wheel ships; every other path of the sdist is only used in a build.
SHIPPED_PREFIX = "vllm/"

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_HEADER = re.compile(r"^(From|Author|Subject|Date|X-[\w-]+|Forwarded|Origin): *(.*)$")
_EXTENDED = {
    b"rename from": "renames a file",
    b"copy from": "copies a file",
    b"new file mode": "makes a new file (new files belong in overlay/ or csrc/)",
    b"deleted file mode": "deletes a file",
    b"old mode": "changes a file's mode",
    b"GIT binary patch": "is binary",
    b"Binary files": "is binary",
}


@dataclass(frozen=True)
class Hunk:
    """One hunk: `lines` are (tag, text); tag ' ', '-' or '+', text with its newline."""

    number: int
    header: str
    old_start: int
    new_start: int
    lines: tuple[tuple[str, bytes], ...]

    @property
    def before(self) -> list[bytes]:
        return [text for tag, text in self.lines if tag != "+"]

    @property
    def after(self) -> list[bytes]:
        return [text for tag, text in self.lines if tag != "-"]

    def context(self) -> tuple[int, int]:
        """Number of context lines at the hunk's beginning and end."""
        tags = [tag for tag, _ in self.lines]
        changed = [i for i, tag in enumerate(tags) if tag != " "]
        return changed[0], len(tags) - 1 - changed[-1]


@dataclass(frozen=True)
class FileDiff:
    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch file: `author` is "Name <address>", `body` the text below."""

    name: str
    author: str
    subject: str
    body: str
    files: tuple[FileDiff, ...]
    digest: str

    @property
    def author_name(self) -> str:
        return parseaddr(self.author)[0] or parseaddr(self.author)[1]

    @property
    def author_email(self) -> str:
        return parseaddr(self.author)[1]

    @property
    def message(self) -> str:
        return f"{self.subject}\n\n{self.body}\n" if self.body else f"{self.subject}\n"


@dataclass(frozen=True)
class Mismatch:
    """Where a patch does not apply: what it expects and what is there."""

    patch: str
    path: str
    reason: str
    hunk: str = ""
    line: int = 0
    expected: tuple[bytes, ...] = ()
    found: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        where = f"{self.patch}: {self.path}"
        if self.hunk:
            where += f": {self.hunk}"
        text = [f"{where}: {self.reason}"]
        if self.hunk:
            text += ["  expected:", *self._numbered(self.expected, self.found)]
            text += ["  found:", *self._numbered(self.found, self.expected)]
        return "\n".join(text)

    def _numbered(
        self, lines: tuple[bytes, ...], other: tuple[bytes, ...]
    ) -> list[str]:
        if not lines:
            return ["    (nothing: the file ends before this line)"]
        shown = []
        for i, line in enumerate(lines):
            mark = " " if i < len(other) and other[i] == line else "!"
            content = line.decode("utf-8", "backslashreplace")
            tail = "" if content.endswith("\n") else " (no newline at end of file)"
            shown.append(
                f"  {mark} {self.line + i:6d} | {content.rstrip(chr(10))}{tail}"
            )
        return shown


class PatchFailure(BuildError):
    """One or more patches do not apply; `mismatches` says where."""

    def __init__(self, mismatches: Iterable[Mismatch], target: str):
        self.mismatches = tuple(mismatches)
        self.target = target
        super().__init__(
            f"the series does not apply to {target}; nothing was changed.\n"
            + "\n".join(str(m) for m in self.mismatches)
        )


@dataclass
class Series:
    """The patches of one vLLM version in their order."""

    folder: Path
    patches: list[Patch] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """SHA-256 over the names and bytes of the patches in order."""
        total = hashlib.sha256()
        for patch in self.patches:
            total.update(f"{patch.name}\0{patch.digest}\n".encode())
        return total.hexdigest()

    def paths(self) -> list[str]:
        return sorted({diff.path for patch in self.patches for diff in patch.files})


def read_names(folder: Path) -> list[str]:
    """Patch names of the `series` file in order; `#` begins a comment."""
    path = folder / SERIES_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(
            f"{path} is missing: it names the patches of this version in their order, "
            "one a line"
        ) from None
    names = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    return [name for name in names if name]


def check_names(folder: Path) -> list[str]:
    """What is wrong between the `series` file and the patch files, one text each."""
    names = read_names(folder)
    problems = [f"{name}: named twice in {SERIES_FILE}" for name in _repeated(names)]
    files = {path.name for path in folder.glob("*.patch")}
    for name in sorted(set(names) - files):
        problems.append(
            f"{name}: named in {SERIES_FILE}, but {folder / name} is missing"
        )
    for name in sorted(files - set(names)):
        problems.append(f"{name}: a patch file that {SERIES_FILE} does not name")
    return problems


def read_series(folder: Path) -> Series:
    """Read `folder`/series and the patches it names.

    Raises BuildError when series and files differ, or a patch is malformed.
    """
    if problems := check_names(folder):
        raise BuildError(f"{folder}: " + "\n".join(problems))
    return Series(folder, [read_patch(folder / name) for name in read_names(folder)])


def read_patch(path: Path) -> Patch:
    data = path.read_bytes()
    lines = _split_newlines(data)
    start = next(
        (
            i
            for i, line in enumerate(lines)
            if line.startswith((b"diff --git ", b"--- a/"))
        ),
        None,
    )
    if start is None:
        raise BuildError(f"{path.name}: holds no diff")
    author, subject, body = _read_header(path.name, lines[:start])
    files = _read_diffs(path.name, lines[start:])
    return Patch(
        path.name, author, subject, body, files, hashlib.sha256(data).hexdigest()
    )


def _read_header(name: str, lines: list[bytes]) -> tuple[str, str, str]:
    """Author, subject and body, from `git format-patch` or quilt style headers."""
    text = b"".join(lines).decode("utf-8").splitlines()
    if text and re.match(r"^From [0-9a-f]{7,40} ", text[0]):
        text = text[1:]
    fields: dict[str, str] = {}
    last = ""
    rest = len(text)
    for i, line in enumerate(text):
        if match := _HEADER.match(line):
            last = match[1]
            fields[last] = match[2]
        elif line[:1] in (" ", "\t") and last:
            fields[last] += " " + line.strip()
        else:
            rest = i
            break
    body: list[str] = []
    for line in text[rest:]:
        if line == "---":
            break
        body.append(line)
    author = _decode(fields.get("From") or fields.get("Author", ""))
    subject = re.sub(r"^\[PATCH[^\]]*\]\s*", "", _decode(fields.get("Subject", "")))
    if not parseaddr(author)[1]:
        raise BuildError(f"{name}: the header has no line 'From: Name <address>'")
    if not subject:
        raise BuildError(f"{name}: the header has no line 'Subject: ...'")
    return author, subject, "\n".join(body).strip()


def _read_diffs(name: str, lines: list[bytes]) -> tuple[FileDiff, ...]:
    diffs: dict[str, list[Hunk]] = {}
    path = ""
    old = b""
    i = 0
    while i < len(lines):
        line = lines[i]
        for start, what in _EXTENDED.items():
            if line.startswith(start):
                raise BuildError(
                    f"{name}: {_text(line)}: the patch {what}; a patch may only change "
                    "lines of files that exist upstream"
                )
        if line.startswith(b"--- "):
            old = line[4:].split(b"\t")[0].strip()
        elif line.startswith(b"+++ "):
            path = _diff_path(name, old, line[4:].split(b"\t")[0].strip())
            if path in diffs:
                raise BuildError(f"{name}: {path} appears twice; put it in one diff")
            diffs[path] = []
        elif line.startswith(b"@@"):
            if not path:
                raise BuildError(f"{name}: a hunk stands before any file name")
            hunk, i = _read_hunk(name, path, len(diffs[path]) + 1, lines, i)
            diffs[path].append(hunk)
            continue
        elif line.rstrip() == b"--":
            break  # the signature of git format-patch
        i += 1
    empty = [path for path, hunks in diffs.items() if not hunks]
    if empty or not diffs:
        raise BuildError(f"{name}: {', '.join(empty) or 'the patch'} has no hunk")
    return tuple(FileDiff(path, tuple(hunks)) for path, hunks in diffs.items())


def _diff_path(name: str, old: bytes, new: bytes) -> str:
    if b"/dev/null" in (old, new):
        what = "makes a new file" if old == b"/dev/null" else "deletes a file"
        raise BuildError(
            f"{name}: {_text(new if old == b'/dev/null' else old)}: the patch {what}; "
            "new files belong in overlay/ or csrc/, and upstream files stay"
        )
    if old[:2] != b"a/" or new[:2] != b"b/" or old[2:] != new[2:]:
        raise BuildError(
            f"{name}: '--- {_text(old)}' and '+++ {_text(new)}' must be the same path "
            "under a/ and b/; a patch renames nothing"
        )
    path = _text(new[2:])
    if ".." in Path(path).parts or path.startswith("/"):
        raise BuildError(f"{name}: {path}: the path leaves the source tree")
    return path


def _read_hunk(
    name: str, path: str, number: int, lines: list[bytes], i: int
) -> tuple[Hunk, int]:
    """The hunk that begins at lines[i], and the index of the line after it."""
    header = lines[i]
    match = _HUNK.match(header)
    label = f"{name}: {path}: hunk {number}"
    if not match:
        raise BuildError(f"{label}: malformed header {_text(header)!r}")
    old_start, old_len, new_start, new_len = (
        int(group) if group is not None else 1 for group in match.groups()
    )
    body: list[tuple[str, bytes]] = []
    i += 1
    while old_len > 0 or new_len > 0 or (i < len(lines) and lines[i][:1] == b"\\"):
        line = lines[i] if i < len(lines) else b""
        tag = line[:1].decode("latin-1")
        if tag == "\\" and body:
            body[-1] = (body[-1][0], body[-1][1].removesuffix(b"\n"))
        elif line == b"\n":  # an editor ate the blank of an empty context line
            tag, line = " ", b" \n"
        if tag not in (" ", "-", "+", "\\"):
            raise BuildError(
                f"{label}: {old_len} old and {new_len} new lines are missing of those "
                f"that the header {_text(header.split(b' @@')[0])} @@ counts"
            )
        if tag != "\\":
            body.append((tag, line[1:]))
            old_len -= tag != "+"
            new_len -= tag != "-"
        i += 1
    if old_len or new_len:
        raise BuildError(f"{label}: has more lines than its header counts")
    if all(tag == " " for tag, _ in body):
        raise BuildError(f"{label}: changes nothing")
    shown = _text(header).split(" @@")[0] + " @@"
    hunk = Hunk(number, shown, old_start, new_start, tuple(body))
    lead, _ = hunk.context()
    if lead < CONTEXT and old_start != 1:
        raise BuildError(
            f"{label} {shown}: has {lead} lines of context before the change; "
            f"{CONTEXT} are required, so that it cannot apply elsewhere"
        )
    return hunk, i


def apply_patch(patch: Patch, read: Reader) -> tuple[dict[str, bytes], list[Mismatch]]:
    """Apply one patch in memory.

    `read` returns a file's bytes, or None where there is no such file. Returns the
    changed files, and the places where the patch does not apply; with any of these the
    changed files are incomplete and must not be used.
    """
    changed: dict[str, bytes] = {}
    mismatches: list[Mismatch] = []
    for diff in patch.files:
        data = read(diff.path)
        if data is None:
            mismatches.append(Mismatch(patch.name, diff.path, "there is no such file"))
            continue
        new, bad = _apply_diff(patch.name, diff, data)
        mismatches += bad
        changed[diff.path] = new
    return changed, mismatches


def _apply_diff(name: str, diff: FileDiff, data: bytes) -> tuple[bytes, list[Mismatch]]:
    source = _split_newlines(data)
    result: list[bytes] = []
    mismatches: list[Mismatch] = []
    at = 0
    for hunk in diff.hunks:
        before = hunk.before
        start = hunk.old_start - 1 if before else hunk.old_start
        new_line = len(result) + start - at + 1
        reason = ""
        found = source[start : start + len(before)]
        if start < at:
            reason = f"overlaps hunk {hunk.number - 1}"
        elif found != before:
            reason = f"does not apply at line {hunk.old_start}" + _elsewhere(
                source, before, start
            )
        elif not mismatches and new_line != hunk.new_start + (not hunk.after):
            reason = (
                f"its new lines begin at line {new_line}, not at {hunk.new_start} as "
                "its header says"
            )
        elif hunk.context()[1] < CONTEXT and start + len(before) != len(source):
            reason = (
                f"has {hunk.context()[1]} lines of context after the change; {CONTEXT} "
                "are required where the file goes on"
            )
        if reason:
            label = f"hunk {hunk.number} of {len(diff.hunks)} ({hunk.header})"
            mismatches.append(
                Mismatch(
                    name,
                    diff.path,
                    reason,
                    label,
                    start + 1,
                    tuple(before),
                    tuple(found),
                )
            )
            continue
        result += source[at:start] + hunk.after
        at = start + len(before)
    return b"".join(result + source[at:]), mismatches


def _elsewhere(source: list[bytes], before: list[bytes], start: int) -> str:
    """Where the expected lines stand instead, for whoever refreshes the patch."""
    places = [
        i + 1
        for i in range(len(source) - len(before) + 1)
        if i != start and source[i : i + len(before)] == before
    ]
    if not places:
        return ""
    at = ", ".join(str(place) for place in places[:3])
    return f" (these lines stand at line {at}; offsets are not accepted)"


def apply_each(
    patches: Iterable[Patch], read: Reader, target: str
) -> list[tuple[Patch, dict[str, bytes]]]:
    """Apply patches on top of one another in memory; return what each one changes.

    Raises PatchFailure with every place of the first patch that does not apply, and of
    the later ones (which then see the files without it).
    """
    state: dict[str, bytes] = {}
    applied: list[tuple[Patch, dict[str, bytes]]] = []
    mismatches: list[Mismatch] = []

    def current(path: str) -> bytes | None:
        return state[path] if path in state else read(path)

    for patch in patches:
        changed, bad = apply_patch(patch, current)
        mismatches += bad
        if not bad:
            state.update(changed)
            applied.append((patch, changed))
    if mismatches:
        raise PatchFailure(mismatches, target)
    return applied


def apply_series(
    patches: Iterable[Patch], read: Reader, target: str
) -> dict[str, bytes]:
    """The files that a series changes; otherwise like apply_each."""
    state: dict[str, bytes] = {}
    for _, changed in apply_each(patches, read, target):
        state.update(changed)
    return state


def shipped(patch: Patch) -> Patch | None:
    """The part of a patch that concerns files a wheel ships; None if there is none."""
    files = tuple(diff for diff in patch.files if is_shipped(diff.path))
    if not files:
        return None
    return Patch(
        patch.name, patch.author, patch.subject, patch.body, files, patch.digest
    )


def is_shipped(path: str) -> bool:
    return path.startswith(SHIPPED_PREFIX)


def directory_reader(root: Path) -> Reader:
    """Reader of the files below `root` for apply_series."""

    def read(path: str) -> bytes | None:
        full = root / path
        return full.read_bytes() if full.is_file() else None

    return read


def _split_newlines(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _decode(value: str) -> str:
    return str(make_header(decode_header(value)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").rstrip("\n")
