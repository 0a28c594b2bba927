# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The patched source tree: a git repository with one commit per layer.

The layers are the pristine source, each patch, the overlay and csrc. Each layer's
digest covers all layers below it; the digests and commits lie in the repository's
`.git/layers.json`. An update keeps the commits up to the first layer whose digest
changed and makes the rest anew. Dates are fixed: equal inputs give equal commits.
"""

import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import git

from lib import series, sources
from lib.errors import BuildError
from lib.project import Project, digest_files, list_files
from lib.status import progress

STATE = "layers.json"
UPDATING = "layers.updating"
NAME, EMAIL = "vllm-ternary", "vllm-ternary@users.noreply.invalid"
# First second of the commits; each layer is one second later, so that logs sort.
EPOCH = 946684800  # 2000-01-01


@dataclass(frozen=True)
class Layer:
    """One commit: `write` puts its files into the tree it is given, and lists them."""

    digest: str
    message: str
    write: Callable[[Path], list[str]]
    author: tuple[str, str] = (NAME, EMAIL)


@dataclass(frozen=True)
class Pristine:
    """Upstream's source: what it is called, its digest, its files, how to write it."""

    label: str
    digest: str
    read: series.Reader
    write: Callable[[Path], list[str]]


@dataclass(frozen=True)
class Result:
    """What an update did: commits in the tree, and how many of them are new."""

    path: Path
    commits: int
    made: int


def pristine(project: Project, vllm_source: str = "", *, offline: bool) -> Pristine:
    """The upstream source: the pinned sdist, or what `vllm_source` names instead.

    `vllm_source` is an sdist file, a folder, `URL@REF`, or a tag of the repository
    that sources.toml names.
    """
    if not vllm_source:
        pinned = project.sources[sources.SDIST]
        path = sources.fetch(pinned, offline=offline)
        return _from_sdist(path, f"vLLM {project.vllm_version}", pinned.sha256)
    path = Path(vllm_source).expanduser()
    if path.is_file():
        return _from_sdist(path, f"vLLM from {path.name}", sources.sha256_file(path))
    if path.is_dir():
        return _from_folder(path, f"vLLM from {path.name}")
    return _from_git(project, vllm_source, offline)


def _from_sdist(path: Path, label: str, digest: str) -> Pristine:
    files = sources.read_sdist(path)

    def write(root: Path) -> list[str]:
        with tarfile.open(path) as archive:
            for member in progress(archive, desc=f"unpack {path.name}", unit=" files"):
                member.name = member.name.partition("/")[2]
                if member.name:
                    archive.extract(member, root, filter="data")
        return sorted(files)

    return Pristine(label, digest, files.get, write)


def _from_folder(path: Path, label: str) -> Pristine:
    files = {
        name: file
        for name, file in list_files(path).items()
        if not name.startswith(".git/")
    }

    def write(root: Path) -> list[str]:
        for name, file in progress(
            files.items(), desc=f"copy {path.name}", unit=" files"
        ):
            _copy(file, root / name)
        return list(files)

    return Pristine(label, digest_files(files), series.directory_reader(path), write)


def _from_git(project: Project, source: str, offline: bool) -> Pristine:
    url, _, ref = source.rpartition("@")
    if not url or "/" in ref:  # a bare tag
        url, ref = project.sources.repository, source
    url = url.removeprefix("git+")
    if not url or source.startswith(("/", ".")):
        raise BuildError(
            f"VLLM_SOURCE={source}: no such file or folder; give an sdist, a folder, a "
            "tag of vLLM's repository, or URL@TAG"
        )
    if offline and "://" in url and not url.startswith("file://"):
        raise BuildError(f"VLLM_SOURCE={source}: --offline forbids to clone {url}")
    key = hashlib.sha256(f"{url}@{ref}".encode()).hexdigest()[:12]
    clone = project.build / "upstream" / key
    if not clone.exists():
        clone.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=clone.parent) as scratch:
            try:
                git.Repo.clone_from(url, f"{scratch}/clone", branch=ref, depth=1)
            except git.GitCommandError as error:
                raise BuildError(
                    f"VLLM_SOURCE={source}: cannot clone {ref} of {url}:\n"
                    f"{error.stderr.strip()}"
                ) from None
            Path(scratch, "clone").rename(clone)
    found = _from_folder(clone, f"vLLM from {ref}")
    return Pristine(
        found.label, git.Repo(clone).head.commit.hexsha, found.read, found.write
    )


def update(project: Project, vllm_source: str = "", *, offline: bool = False) -> Result:
    """Bring build/vllm-<version> up to date; do nothing where nothing changed.

    Raises PatchFailure, before anything is written, when the series does not apply,
    and BuildError when the tree holds changes of the user's.
    """
    base = pristine(project, vllm_source, offline=offline)
    target = f"the source of {base.label}"
    check_new_files(project, base.read)
    applied = series.apply_each(project.series.patches, base.read, target)
    layers = _layers(project, base, applied)
    root = project.tree
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
            new = Path(scratch, root.name)
            repo = _init(new)
            _commit_layers(repo, layers, [])
            new.rename(root)
        return Result(root, len(layers), len(layers))
    repo, state = _open(root)
    same = [layer.digest == digest for layer, (digest, _) in zip(layers, state)]
    kept = (same + [False]).index(False)
    if kept == len(layers) == len(state):
        return Result(root, len(layers), 0)
    if kept == 0:
        shutil.rmtree(root)
        return update(project, vllm_source, offline=offline)
    Path(repo.git_dir, UPDATING).touch()
    repo.git.reset("--hard", "--quiet", state[kept - 1][1])
    _commit_layers(repo, layers, state[:kept])
    return Result(root, len(layers), len(layers) - kept)


def check_new_files(project: Project, read: series.Reader) -> None:
    """Raise BuildError if a file of overlay/ or csrc/ exists upstream."""
    new = (*project.overlay(), *project.csrc())
    taken = [path for path in new if read(path) is not None]
    if taken:
        raise BuildError(
            f"{', '.join(taken)}: exists upstream; overlay/ and csrc/ hold new files "
            "only, change upstream's with a patch"
        )


def _layers(
    project: Project,
    base: Pristine,
    applied: list[tuple[series.Patch, dict[str, bytes]]],
) -> list[Layer]:
    layers: list[Layer] = []

    def add(digest: str, message: str, write, author=(NAME, EMAIL)) -> None:
        below = layers[-1].digest if layers else ""
        chained = hashlib.sha256(f"{below}\0{digest}\0{message}".encode()).hexdigest()
        layers.append(Layer(chained, message, write, author))

    add(base.digest, f"{base.label}\n", base.write)
    for patch, changed in applied:
        author = (patch.author_name, patch.author_email)
        add(patch.digest, patch.message, _file_writer(changed), author)
    for message, files in (
        ("Add the modules of the overlay\n", project.overlay()),
        ("Add the native code of csrc\n", project.csrc()),
    ):
        add(digest_files(files), message, _copier(files))
    return layers


def _file_writer(files: dict[str, bytes]) -> Callable[[Path], list[str]]:
    def write(root: Path) -> list[str]:
        for path, data in files.items():
            (root / path).write_bytes(data)
        return list(files)

    return write


def _copier(files: dict[str, Path]) -> Callable[[Path], list[str]]:
    def write(root: Path) -> list[str]:
        for path, file in files.items():
            _copy(file, root / path)
        return list(files)

    return write


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def _init(root: Path) -> git.Repo:
    repo = git.Repo.init(root, initial_branch="main")
    with repo.config_writer() as config:
        config.set_value("core", "autocrlf", "false")
        config.set_value("core", "excludesFile", "/dev/null")
        config.set_value("core", "hooksPath", "/dev/null")
        config.set_value("gc", "auto", "0")
    info = Path(repo.git_dir, "info")
    info.mkdir(exist_ok=True)
    # Bytes go in as they are, whatever .gitattributes upstream ships.
    (info / "attributes").write_text("* -text -filter -ident\n")
    return repo


def _open(root: Path) -> tuple[git.Repo, list[tuple[str, str]]]:
    """The repository and its recorded (digest, commit) pairs, if nobody changed it."""
    remedy = (
        "Export what you want to keep (git format-patch), then remove the folder and "
        "run again."
    )
    try:
        repo = git.Repo(root)
        state = [
            (digest, commit)
            for digest, commit in json.loads(Path(repo.git_dir, STATE).read_text())
        ]
    except (git.InvalidGitRepositoryError, OSError, ValueError):
        raise BuildError(f"{root} was not made by this project. {remedy}") from None
    if Path(repo.git_dir, UPDATING).exists():  # an update of ours was interrupted
        return repo, state
    if not repo.head.is_valid() or repo.head.commit.hexsha != state[-1][1]:
        raise BuildError(f"{root} has commits that are not the project's. {remedy}")
    if changed := repo.git.status("--porcelain", "--untracked-files=no"):
        raise BuildError(f"{root} has uncommitted changes:\n{changed}\n{remedy}")
    return repo, state


def _commit_layers(
    repo: git.Repo, layers: list[Layer], state: list[tuple[str, str]]
) -> None:
    """Commit the layers that `state` lacks, and record all of them."""
    root = Path(repo.working_dir)
    for number in range(len(state), len(layers)):
        layer = layers[number]
        paths = layer.write(root)
        name, email = layer.author
        date = f"{EPOCH + number} +0000"
        # --force: upstream's .gitignore names files that its sdist ships.
        for start in range(0, len(paths), 500):
            repo.git.add("--force", "--", *paths[start : start + 500])
        environment = {
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": email,
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_NAME": NAME,
            "GIT_COMMITTER_EMAIL": EMAIL,
            "GIT_COMMITTER_DATE": date,
        }
        repo.git.commit(
            "--quiet",
            "--allow-empty",
            "--no-verify",
            "--no-gpg-sign",
            "--cleanup=verbatim",
            message=layer.message,
            env=environment,
        )
        state = [*state, (layer.digest, repo.head.commit.hexsha)]
    Path(repo.git_dir, STATE).write_text(json.dumps(state, indent=1) + "\n")
    Path(repo.git_dir, UPDATING).unlink(missing_ok=True)
