# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The patched source tree as a git repository."""

import hashlib
import shutil
from pathlib import Path

import git
import pytest
from small_project import UPSTREAM, fresh, patch_text, write

from lib import tree
from lib.errors import BuildError
from lib.project import Project
from lib.series import PatchFailure


def update(project: Project, source: str = "") -> tree.Result:
    return tree.update(fresh(project), source, offline=True)


def commits(project: Project) -> list[git.Commit]:
    return list(git.Repo(project.tree).iter_commits(reverse=True))


def state(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_one_commit_per_layer(project: Project):
    result = update(project)
    assert (result.made, result.commits) == (6, 6)
    made = commits(project)
    assert [c.summary for c in made] == [
        "vLLM 1.2.3",
        "Change line 4 of vllm/one.py",
        "Change line 9 of vllm/two.py",
        "Change line 12 of CMakeLists.txt",
        "Add the modules of the overlay",
        "Add the native code of csrc",
    ]
    assert made[1].message.endswith("\n\nBody of Change line 4 of vllm/one.py.\n")
    assert (made[2].author.name, made[2].author.email) == ("B", "b@example.org")
    assert list(made[1].stats.files) == ["vllm/one.py"]
    assert not git.Repo(project.tree).is_dirty(untracked_files=True)
    # Files that upstream's .gitignore names are part of its sdist.
    assert sorted(
        b.path for b in made[0].tree.traverse() if b.type == "blob"
    ) == sorted(UPSTREAM)
    assert (project.tree / "vllm/one.py").read_text().splitlines()[4] == "first"
    assert (project.tree / "vllm/new/module.py").read_text() == "NEW = 1\n"
    assert (project.tree / "csrc/cpu/ternary/gemm.cpp").is_file()


def test_second_run_does_nothing(project: Project):
    update(project)
    before = state(project.tree)
    assert update(project).made == 0
    assert state(project.tree) == before


def test_equal_inputs_give_equal_commits(project: Project):
    update(project)
    first = commits(project)[-1].hexsha
    shutil.rmtree(project.tree)
    update(project)
    assert commits(project)[-1].hexsha == first


def test_rebuilds_from_the_first_changed_patch(project: Project):
    update(project)
    old = commits(project)
    (project.patches / "0002-two.patch").write_text(
        patch_text("vllm/two.py", 9, "another")
    )
    assert update(project).made == 4
    new = commits(project)
    assert [c.hexsha for c in new[:2]] == [c.hexsha for c in old[:2]]
    assert not {c.hexsha for c in new[2:]} & {c.hexsha for c in old[2:]}
    assert (project.tree / "vllm/two.py").read_text().splitlines()[9] == "another"
    assert (project.tree / "CMakeLists.txt").read_text().splitlines()[12] == "third"


def test_only_the_overlay_changed(project: Project):
    update(project)
    write(project.root / "overlay/vllm/new/other.py", "")
    (project.root / "overlay/vllm/new/module.py").unlink()
    assert update(project).made == 2
    assert not (project.tree / "vllm/new/module.py").exists()
    assert (project.tree / "vllm/new/other.py").exists()


def test_patch_removed_from_the_series(project: Project):
    update(project)
    (project.patches / "0003-build.patch").unlink()
    (project.patches / "series").write_text("0001-one.patch\n0002-two.patch\n")
    assert update(project).made == 2
    assert (project.tree / "CMakeLists.txt").read_text() == UPSTREAM["CMakeLists.txt"]


@pytest.mark.parametrize("existing", [True, False])
def test_failure_leaves_the_tree_as_it_was(project: Project, existing: bool):
    if existing:
        update(project)
    before = state(project.build)
    text = patch_text("vllm/two.py", 9, "x").replace(" two 8", " two eight")
    (project.patches / "0002-two.patch").write_text(text)
    with pytest.raises(PatchFailure) as caught:
        update(project)
    (bad,) = caught.value.mismatches
    assert (bad.patch, bad.path) == ("0002-two.patch", "vllm/two.py")
    assert bad.hunk == "hunk 1 of 1 (@@ -7,7 +7,7 @@)"
    assert bad.expected[2] == b"two eight\n" and bad.found[2] == b"two 8\n"
    assert state(project.build) == before


def test_overlay_must_not_overwrite(project: Project):
    write(project.root / "overlay/vllm/one.py", "")
    with pytest.raises(BuildError, match=r"vllm/one\.py: exists upstream"):
        update(project)
    assert not project.tree.exists()


def test_changes_of_the_user_are_kept(project: Project):
    update(project)
    (project.tree / "vllm/one.py").write_text("mine")
    with pytest.raises(BuildError, match="uncommitted changes"):
        update(project)
    assert (project.tree / "vllm/one.py").read_text() == "mine"
    repo = git.Repo(project.tree)
    repo.git.add("--update")
    repo.index.commit("mine")
    with pytest.raises(BuildError, match="commits that are not the project's"):
        update(project)


def test_foreign_folder_is_kept(project: Project):
    write(project.tree / "file", "mine")
    with pytest.raises(BuildError, match="not made by this project"):
        update(project)
    assert (project.tree / "file").read_text() == "mine"


def test_interrupted_update_is_taken_up(project: Project):
    update(project)
    (project.tree / ".git" / tree.UPDATING).touch()
    (project.tree / "vllm/one.py").write_text("half written")
    write(project.root / "overlay/vllm/new/module.py", "NEW = 2\n")
    assert update(project).made == 2
    assert (project.tree / "vllm/one.py").read_text().splitlines()[4] == "first"


def test_source_folder_sdist_and_tag(project: Project, tmp_path: Path):
    folder = tmp_path / "upstream"
    for name, text in UPSTREAM.items():
        write(folder / name, text)
    assert update(project, str(folder)).made == 6
    patched = (project.tree / "vllm/one.py").read_text()

    repo = git.Repo.init(folder, initial_branch="main")
    repo.git.add("--force", "--all")
    with repo.config_writer() as config:
        config.set_value("user", "name", "x")
        config.set_value("user", "email", "x@example.org")
    repo.index.commit("all")
    repo.create_tag("v1.2.3")
    assert update(project, f"file://{folder}@v1.2.3").made == 6
    assert (project.tree / "vllm/one.py").read_text() == patched
    with pytest.raises(BuildError, match="cannot clone v9"):
        update(project, f"file://{folder}@v9")

    archive = shutil.make_archive(
        str(tmp_path / "own"), "gztar", tmp_path, folder.relative_to(tmp_path)
    )
    assert update(project, archive).made == 6
    assert (project.tree / "vllm/one.py").read_text() == patched
    with pytest.raises(BuildError, match="no such file or folder"):
        update(project, "./missing")


def test_no_environment_of_git_gets_in(project: Project, monkeypatch, tmp_path: Path):
    """Hooks and signing that the user configured for all repositories stay out."""
    hooks = tmp_path / "hooks"
    write(hooks / "commit-msg", "#!/bin/sh\nexit 1\n")
    (hooks / "commit-msg").chmod(0o755)
    text = (
        f"[core]\n hooksPath = {hooks}\n autocrlf = true\n[commit]\n gpgSign = true\n"
    )
    write(tmp_path / "gitconfig", text)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    update(project)
    assert (project.tree / "vllm/two.py").read_text().count("\r") == 0
