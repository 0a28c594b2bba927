# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check patches, overlay and pinned files against one another, changing nothing."""

import zipfile
from pathlib import Path

from lib import series, sources, tree
from lib.errors import BuildError
from lib.project import Project


def wheel_reader(archive: zipfile.ZipFile) -> series.Reader:
    """Reader of a wheel's files for the series."""
    names = set(archive.namelist())
    return lambda path: archive.read(path) if path in names else None


def shipped_patches(patches: series.Series) -> list[series.Patch]:
    """The parts of the series that concern files a wheel ships."""
    return [part for patch in patches.patches if (part := series.shipped(patch))]


def verify(project: Project, *, offline: bool) -> list[str]:
    """Return one line for each thing that was checked.

    Raises BuildError naming everything that is wrong.
    """
    done: list[str] = []
    problems: list[str] = []

    def attempt(what: str, check) -> None:
        try:
            note = check()
        except BuildError as error:
            problems.append(f"{what}: {error}")
        else:
            done.append(f"{what}: {note or 'OK'}")

    attempt("series names every patch, and no other", lambda: _names(project))
    if problems:  # without a series there is nothing to apply
        raise BuildError("\n".join(problems))
    attempt("series applies to the sdist", lambda: _sdist(project, offline))
    for kind in sources.WHEELS:
        attempt(
            f"series applies to the {kind} wheel", lambda k=kind: _wheel(project, k)
        )
    if problems:
        raise BuildError("\n".join(problems))
    return done


def _names(project: Project) -> str:
    return f"OK ({len(project.series.patches)} patches)"


def _sdist(project: Project, offline: bool) -> str:
    base = tree.pristine(project, offline=offline)
    changed = series.apply_series(
        project.series.patches, base.read, f"the source of {base.label}"
    )
    tree.check_new_files(project, base.read)
    new = len(project.overlay()) + len(project.csrc())
    return f"OK ({len(changed)} files changed, {new} new ones overwrite nothing)"


def _wheel(project: Project, kind: str) -> str:
    source = project.sources[kind]
    path: Path | None = sources.cached(source)
    if path is None:
        return f"not checked, {source.file} is not in the cache"
    sources.check(source, path)
    with zipfile.ZipFile(path) as archive:
        read = wheel_reader(archive)
        patches = shipped_patches(project.series)
        changed = series.apply_series(patches, read, f"the wheel {path.name}")
        tree.check_new_files(project, read)
    build_only = sum(not series.is_shipped(p) for p in project.series.paths())
    return f"OK ({len(changed)} files changed, {build_only} concern only a build)"
