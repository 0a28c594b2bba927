# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPU_LOAD: what sits on the device is what is on disk, bit for bit, per dtype.

Each tensor is copied to the device and compared as the dtype that it has. Then it is
put into the layout of the device's kernels, as vLLM does when a model loads, and back.
"""

from collections.abc import Iterator

import torch

from . import causes, codec, spec
from .checkpoint import PACKED, SCALE, WEIGHT, ZERO_POINT, Checkpoint, Module
from .difference import Failure, compare


def check_module(
    checkpoint: Checkpoint, module: Module, device: torch.device
) -> Iterator[Failure]:
    """Failures of one module, at most one for each of its tensors."""
    on_device = {}
    for name, stored in module.tensors.items():
        disk = checkpoint.read(stored)
        on_device[name] = disk.to(device)
        failure = compare(
            f"{module.name}.{name}",
            disk,
            on_device[name].cpu(),
            "differs on the device",
        )
        if failure is not None:
            yield failure
            return
    if not module.is_ternary or SCALE not in module.tensors:
        return
    on_device.pop(WEIGHT, None)
    yield from _check_layout(checkpoint, module, on_device)


def _check_layout(
    checkpoint: Checkpoint, module: Module, on_device: dict[str, torch.Tensor]
) -> Iterator[Failure]:
    """The layout of the device's kernels, decoded, gives the tensors back."""
    fmt, scheme = codec.format, module.scheme
    size_n, size_k = module.size_n, module.size_k
    block = fmt.block_length(size_k, scheme.block_size)
    tensors = [on_device[PACKED]]
    try:
        for name in (SCALE, ZERO_POINT):
            table = on_device.get(name)
            if table is not None:
                table = fmt.expand_scale(table, (size_n,), size_k, scheme.block_size)
                table = table.contiguous()
            tensors.append(table)
        encoded = codec.layout.encode_layout(*tensors, size_k, block)
        decoded = codec.layout.decode_layout(*encoded, size_n, size_k, block)
    except (ValueError, RuntimeError) as e:
        yield Failure(f"{module.name}.{PACKED}", f"the device's layout refuses it: {e}")
        return
    # The device has no reserved code and no padding of its own.
    t = spec.decode(checkpoint.read(module.tensors[PACKED]).numpy(), size_k)
    disk = [torch.from_numpy(spec.encode(t)), tensors[1].cpu(), tensors[2]]
    if disk[2] is not None:
        disk[2] = disk[2].cpu().to(decoded[2].dtype)
    what = "in the device's layout, decoded again, differs"
    for name, want, have in zip((PACKED, SCALE, ZERO_POINT), disk, decoded):
        if want is None:
            continue
        failure = compare(f"{module.name}.{name}", want, have.cpu(), what)
        if failure is not None:
            failure.cause = (
                causes.of_packed(t, have.cpu().numpy())
                if name == PACKED and have.shape == want.shape
                else causes.of_scale(want, have.cpu())
            )
            yield failure
