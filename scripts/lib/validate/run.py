# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The three reconciliations of a checkpoint, and how they went."""

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lib.cli import progress
from lib.memory import collector

from . import check_device, check_unpack
from .checkpoint import Checkpoint, Module, Reference, Tensors, table
from .difference import Failure
from .errors import ValidateError

SHOWN_FAILURES = 5
KEPT_FAILURES = 100


@dataclass
class Result:
    """How one of the checks went.

    Attributes:
        label: CPU_UNPACK, GPU_LOAD or TP_SHARD.
        reason: why it was skipped, or what the check was, or "".
        skipped: whether it was; a check that found a failure was not.
        failures: the first of them.
        count: how many there were.

    """

    label: str
    reason: str = ""
    skipped: bool = False
    failures: list[Failure] = field(default_factory=list)
    count: int = 0

    @property
    def status(self) -> str:
        """OK, FAIL or SKIPPED."""
        if self.count:
            return "FAIL"
        return "SKIPPED" if self.skipped else "OK"

    def line(self) -> str:
        """The line that the command prints."""
        reason = f" ({self.reason})" if self.reason and not self.count else ""
        return f"{self.label}: {self.status}{reason}"

    def add(self, failures: Iterable[Failure]) -> None:
        """Count failures and keep the first ones."""
        for failure in failures:
            self.count += 1
            if len(self.failures) < KEPT_FAILURES:
                self.failures.append(failure)


@dataclass
class Report:
    """What the command has to say."""

    model: Path
    reference: Path | None
    modules: list[Module]
    results: list[Result]
    notes: list[str]

    @property
    def failed(self) -> bool:
        """Whether a check found something."""
        return any(r.count for r in self.results)

    def text(self) -> str:
        """The report for people."""
        lines = [r.line() for r in self.results]
        lines += ["", *table(self.modules)]
        if self.notes:
            lines += ["", *self.notes]
        for result in self.results:
            for failure in result.failures[:SHOWN_FAILURES]:
                first, *rest = failure.lines()
                lines += ["", f"{result.label}: {first}", *rest]
            more = result.count - SHOWN_FAILURES
            if more > 0:
                lines += ["", f"{result.label}: and {more} more"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The report for machines."""
        return {
            "model": str(self.model),
            "reference": str(self.reference) if self.reference else None,
            "failed": self.failed,
            "checks": {
                r.label: {
                    "status": r.status,
                    "reason": r.reason,
                    "failure_count": r.count,
                    "failures": [f.as_dict() for f in r.failures],
                }
                for r in self.results
            },
            "modules": [
                {
                    "name": m.name,
                    "stored_as": m.stored_as,
                    "shape": m.shape,
                    "notes": m.notes,
                }
                for m in self.modules
            ],
            "notes": self.notes,
        }


def validate(
    model: Path, reference: Path | None, ranks: Sequence[int], device: str | None
) -> Report:
    """Run the three checks, a tensor at a time.

    Args:
        model: directory of the checkpoint.
        reference: directory of the full-precision checkpoint, or None.
        ranks: tensor-parallel sizes to cut for.
        device: "cuda", "cpu", or None for a GPU if there is one.

    Raises:
        ValidateError: the checks cannot be made at all.

    """
    whole = None if reference is None else Reference(reference)
    checkpoint = Checkpoint(model, whole)
    modules = checkpoint.modules
    ternary = checkpoint.ternary()
    notes = [
        f"{m.name}: K is taken to be {m.size_k}; nothing says what it is"
        for m in ternary
        if m.guessed_k and m.size_k
    ]
    if not ternary:
        failure = Failure(
            str(model), "has no packed_ternary_weight: no module is stored packed"
        )
        first = Result("CPU_UNPACK", failures=[failure], count=1)
        others = [
            Result(label, "no module is stored packed", skipped=True)
            for label in ("GPU_LOAD", "TP_SHARD")
        ]
        return Report(model, reference, modules, [first, *others], notes)
    results = [
        _unpack(checkpoint, modules, whole),
        _load(checkpoint, modules, device),
        _shard(checkpoint, ternary, ranks, notes),
    ]
    return Report(model, reference, modules, results, notes)


def _unpack(
    checkpoint: Checkpoint, modules: list[Module], reference: Tensors | None
) -> Result:
    result = Result("CPU_UNPACK")
    if reference is None:
        result.reason = "round trip and format rules only: no --reference"
    else:
        known = [
            m
            for m in checkpoint.ternary()
            if check_unpack.reference_weight(reference, m) is not None
        ]
        if not known:
            raise ValidateError(
                f"{reference.path}: has no weight of any ternary module of "
                f"{checkpoint.path}. Give the full-precision model that it was "
                "converted from."
            )
    for module in progress(modules, desc="CPU_UNPACK", unit="module", leave=False):
        result.add(check_unpack.check_module(checkpoint, module, reference))
    return result


def _load(checkpoint: Checkpoint, modules: list[Module], device: str | None) -> Result:
    result = Result("GPU_LOAD")
    if device == "cpu":
        result.reason, result.skipped = "--device cpu; the CPU's layout is right", True
    elif not torch.cuda.is_available():
        result.reason = "torch sees no CUDA device; the CPU's layout is right"
        result.skipped = True
    target = torch.device("cpu" if result.skipped else "cuda")
    for module in progress(modules, desc="GPU_LOAD", unit="module", leave=False):
        result.add(check_device.check_module(checkpoint, module, target))
    return result


def _shard(
    checkpoint: Checkpoint,
    ternary: list[Module],
    ranks: Sequence[int],
    notes: list[str],
) -> Result:
    result = Result("TP_SHARD")
    shards = import_shards()
    if isinstance(shards, str):
        result.reason, result.skipped = shards, True
        return result
    done = {tp: 0 for tp in ranks}
    left = {tp: 0 for tp in ranks}
    with _ranks().vllm_context(), collector() as collect:
        bar = progress(total=len(ternary), desc="TP_SHARD", unit="module", leave=False)
        for _, group in groupby(ternary, key=lambda m: m.name.rpartition(".")[0]):
            members = list(group)
            for layer in shards.layers_of(checkpoint, members):
                for tp in ranks:
                    if layer.spec.fits(tp):
                        done[tp] += 1
                        result.add(shards.check_layer(checkpoint, layer, tp))
                        collect()
                    else:
                        left[tp] += 1
            bar.update(len(members))
        bar.close()
    for tp in ranks:
        if left[tp]:
            notes.append(
                f"TP_SHARD over {tp} ranks: {done[tp]} cuts made, {left[tp]} cannot be "
                f"(the size is no multiple of {tp}; vLLM refuses them in FP16, too)"
            )
    if not any(done.values()):
        result.skipped = True
        result.reason = f"no layer can be cut for {', '.join(map(str, ranks))} ranks"
    return result


def import_shards() -> ModuleType | str:
    """The module that drives vLLM's loaders, or why there is none."""
    # vLLM would log to stdout, which holds the report. It asks once, at import; what
    # this process starts later must not inherit the answer.
    configure = os.environ.get("VLLM_CONFIGURE_LOGGING")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        return importlib.import_module("lib.validate.check_shards")
    except ModuleNotFoundError as e:
        if e.name == "vllm":
            return "vLLM is not installed in this Python"
        if e.name and e.name.startswith("vllm."):
            return f"the installed vLLM is not the patched one: it has no {e.name}"
        return f"vLLM cannot be imported: no module named {e.name}"
    except (ImportError, OSError) as e:
        return f"vLLM cannot be imported: {e}"
    finally:
        if configure is None:
            del os.environ["VLLM_CONFIGURE_LOGGING"]


def _ranks() -> ModuleType:
    return importlib.import_module("lib.validate.ranks")
