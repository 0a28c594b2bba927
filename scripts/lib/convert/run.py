# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Carries a plan out: writes the checkpoint, verifies it, puts it in its place."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .codec import format
from .errors import ConversionError
from .model import Ternary, Weight
from .plan import Decision, Plan, Progress, resolve
from .safetensors_io import ShardedWriter, StoredTensor, read_checkpoint


def check_destination(
    source: Path, dest: Path, overwrite: bool, others: Iterable[Path | None] = ()
) -> None:
    """Raises ConversionError if DEST cannot be written without harm; ``others`` are
    read besides SOURCE."""
    if dest.resolve() == source.resolve() or source.resolve() in dest.resolve().parents:
        raise ConversionError(
            f"{dest}: lies within SOURCE. Choose a directory outside of {source}."
        )
    # Replacing DEST would delete it.
    for path in filter(None, [source, *others]):
        if dest.resolve() in path.resolve().parents:
            raise ConversionError(
                f"{dest}: holds {path}, which is read. Choose another directory."
            )
    if dest.is_file():
        raise ConversionError(f"{dest}: is a file. Choose another name.")
    if dest.is_dir() and any(dest.iterdir()) and not overwrite:
        raise ConversionError(
            f"{dest}: exists and is not empty. Choose another name or pass "
            "--overwrite, which replaces it once the new checkpoint is whole."
        )


def execute(
    plan: Plan,
    dest: Path,
    *,
    max_shard_size: int,
    verify: bool,
    progress: Progress,
) -> Plan:
    """Writes the checkpoint of ``plan`` to ``dest``; returns the plan with the
    numbers of zeros filled in. Nothing appears under ``dest`` before it is whole
    (and verified, with ``verify``)."""
    dest = dest.resolve()  # what a symbolic link names, rather than the link
    dest.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(dest)
    needed = sum(spec.nbytes for spec in plan.specs())
    free = shutil.disk_usage(dest.parent).free
    if needed > free:
        raise ConversionError(
            f"{dest.parent}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are "
            "free. Make room or choose another place."
        )
    work = dest.parent / f".{dest.name}.partial-{os.getpid()}"
    work.mkdir()
    try:
        plan = _write(plan, work, max_shard_size, progress)
        if verify:
            verify_checkpoint(plan, work, progress)
        _publish(work, dest)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return plan


def _write(
    plan: Plan, directory: Path, max_shard_size: int, progress: Progress
) -> Plan:
    writer = ShardedWriter(directory, plan.specs(), max_shard_size)
    steps: list[Any] = []
    try:
        for step in progress(plan.steps, "Converting"):
            if not isinstance(step, Decision):
                writer.write(step.name, step.read())
                steps.append(step)
                continue
            value = resolve(step, plan.options)
            if isinstance(value, Ternary):
                zeros = value.t.numel() - int(value.t.count_nonzero())
                tensors = _tensors(value, step.weight.name)
            else:
                zeros, tensors = step.zeros, [value]
            for spec, tensor in zip(step.specs, tensors, strict=True):
                writer.write(spec.name, tensor)
            steps.append(replace(step, zeros=zeros))
            del value, tensors
        writer.close()
    finally:
        writer.abort()
    source = plan.source
    config = dict(source.config, quantization_config=plan.quantization_config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for relative in source.files():
        target = directory / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / relative, target)
    source.write_extra(directory)
    return replace(plan, steps=steps)


def _tensors(value: Ternary, name: str) -> list[torch.Tensor]:
    packed = format.pack(value.t, name=name)
    tensors = [packed, value.scale]
    return tensors if value.zero_point is None else [*tensors, value.zero_point]


def verify_checkpoint(plan: Plan, directory: Path, progress: Progress) -> None:
    """Reads ``directory`` back and compares with the source: integers, scales and
    zero points of every ternary weight, and for lossless ones the decoded weight
    too; all bytes of what was carried over. Raises ConversionError naming the
    first tensor that differs."""
    stored = read_checkpoint(directory)
    expected = {spec.name: spec for spec in plan.specs()}
    if stored.keys() != expected.keys():
        difference = sorted(stored.keys() ^ expected.keys())
        raise ConversionError(
            f"{directory}: verification failed, tensor {difference[0]} is missing or "
            "should not be there."
        )
    config = json.loads((directory / "config.json").read_text())
    if config.get("quantization_config") != plan.quantization_config:
        raise ConversionError(f"{directory}/config.json: verification failed.")
    for step in progress(plan.steps, "Verifying"):
        if isinstance(step, Decision):
            _verify_weight(step, stored, plan)
        else:
            _same(step.name, stored[step.name].read(), step.read())


def _verify_weight(step: Decision, stored: dict[str, StoredTensor], plan: Plan) -> None:
    weight = step.weight
    value = resolve(step, plan.options)
    found = [stored[spec.name].read() for spec in step.specs]
    if not isinstance(value, Ternary):
        _same(weight.name, found[0], value)
        return
    packed, scale, *zero_point = found
    name = weight.module + ".packed_ternary_weight"
    t = format.unpack(packed, weight.size_k, name=name)
    _same(name, t, value.t)
    format.check_codes(packed, weight.size_k, strict=True, name=name)
    _same(weight.module + ".weight_scale", scale, value.scale)
    if zero_point:
        assert value.zero_point is not None
        _same(weight.module + ".weight_zero_point", zero_point[0], value.zero_point)
    if step.how == "lossless":
        block = value.block_size
        del value, found, packed
        _same_weight(weight, t, scale, block)


def _same_weight(
    weight: Weight, t: torch.Tensor, scale: torch.Tensor, block: int | str
) -> None:
    """Compares the decoded weight with the source's by groups of rows, to have one
    of the two in memory."""
    original = weight.read()
    assert isinstance(original, torch.Tensor)
    scale = format.expand_scale(scale, (weight.size_n,), weight.size_k, block)
    block = format.block_length(weight.size_k, block)
    for part in format.row_chunks(weight.size_n, 32 * weight.size_k):
        decoded = format.dequantize(t[part], scale[part], None, block, weight.dtype)
        # -0.0 becomes 0.0, which + 0.0 does too.
        _same(weight.name, decoded, original[part] + 0.0)


def _same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    a = found.contiguous().view(-1)
    b = expected.contiguous().view(-1)
    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not same or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        raise ConversionError(
            f"{name}: verification failed, what was written does not equal what was "
            "read. Convert again; if it happens again, check disk and memory."
        )


def _publish(work: Path, dest: Path) -> None:
    """Renames ``work`` to ``dest``, putting an existing ``dest`` aside first."""
    if not dest.exists():
        work.rename(dest)
        return
    aside = dest.parent / f".{dest.name}.replaced-{os.getpid()}"
    dest.rename(aside)
    try:
        work.rename(dest)
    except BaseException:
        aside.rename(dest)
        raise
    shutil.rmtree(aside)


def _remove_leftovers(dest: Path) -> None:
    """Removes what a killed run of this command left beside ``dest``."""
    for path in dest.parent.glob(f".{dest.name}.partial-*"):
        match = re.fullmatch(r".*\.partial-(\d+)", path.name)
        if match and not _is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
