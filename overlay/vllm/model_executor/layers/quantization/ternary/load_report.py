# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The table, logged once when a model loads, of which modules are stored how."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

_HEADER = ("stored as", "modules", "weights", "MiB", "such as")


@dataclass
class _Row:
    modules: int = 0
    weights: int = 0
    bytes: int = 0
    example: str = ""


class LoadReport:
    """Collects the modules of one model as they are created.

    The log shows what the parameters hold, so a weight that is kept in a wider type
    than the settings say is visible at once.
    """

    def __init__(self) -> None:
        self._modules: WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = (
            WeakKeyDictionary()
        )
        self._logged = False

    def __reduce__(self) -> tuple[type["LoadReport"], tuple[()]]:
        # The config travels to the process that creates the modules; none exist yet.
        return LoadReport, ()

    def add(self, layer: torch.nn.Module, prefix: str, storage: str) -> None:
        """Note a module that was just created, and give it a way to `log_once`."""
        self._modules[layer] = (prefix, storage)
        layer.ternary_report = self

    def log_once(self) -> None:
        """Log the table, unless that was done; on the first tensor-parallel rank."""
        if self._logged:
            return
        self._logged = True
        if get_tensor_model_parallel_rank() == 0:
            logger.info("%s", self.table(get_tensor_model_parallel_world_size()))

    def table(self, tp_size: int = 1) -> str:
        """The table as text, the largest part first."""
        rows: dict[str, _Row] = {}
        seen: set[int] = set()
        for layer, (prefix, storage) in self._modules.items():
            row = rows.setdefault(storage, _Row(example=prefix))
            row.modules += 1
            weights, size = _measure(layer, seen)
            row.weights += weights
            row.bytes += size
        cells = [_HEADER]
        for storage, row in sorted(rows.items(), key=lambda item: -item[1].bytes):
            cells.append(
                (
                    storage,
                    str(row.modules),
                    f"{row.weights:,}",
                    f"{row.bytes / 2**20:.2f}",
                    row.example,
                )
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if 0 < i < 4 else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        share = f", one rank of {tp_size}" if tp_size > 1 else ""
        title = f"Weights of the checkpoint{share} (norms and biases not counted):"
        return "\n".join([title, *lines])


def report_of(layer: torch.nn.Module) -> None:
    """Log the table of the model that the layer belongs to, once."""
    report = getattr(layer, "ternary_report", None)
    if report is not None:
        report.log_once()


def _measure(layer: torch.nn.Module, seen: set[int]) -> tuple[int, int]:
    """(weights, bytes) of a module's own parameters; a tied one counts once."""
    parameters = [
        (name, p)
        for name, p in layer.named_parameters(recurse=False)
        if not name.endswith("bias") and p.data_ptr() not in seen
    ]
    seen.update(p.data_ptr() for _, p in parameters)
    size = sum(p.nbytes for _, p in parameters)
    if hasattr(layer, "ternary_sizes"):  # experts
        local = layer.local_num_experts
        weights = sum(
            local * rows * layer.ternary_cuts[name].local_size_k
            for name, (rows, _, _) in layer.ternary_sizes.items()
        )
    elif hasattr(layer, "ternary_size_n") and parameters:
        weights = layer.ternary_size_n * layer.ternary_size_k
    else:
        weights = sum(p.numel() for _, p in parameters)
    return weights, size
