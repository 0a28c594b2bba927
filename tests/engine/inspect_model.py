# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a loaded model holds; runs inside the engine's processes."""

import torch


def tensors_of(model: torch.nn.Module) -> list[dict]:
    """Name, shape, bytes and module kind of each parameter and buffer, once each."""
    seen: set[int] = set()
    found = []
    for module_name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        own = list(module.named_parameters(recurse=False))
        own += list(module.named_buffers(recurse=False))
        # A tensor kept as a plain attribute would be memory that no list shows.
        own += [
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]
        for name, tensor in own:
            if tensor.numel() and tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            found.append(
                dict(
                    module=module_name,
                    method=method,
                    name=name,
                    shape=list(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    bytes=tensor.numel() * tensor.element_size(),
                    size_n=getattr(module, "ternary_size_n", None),
                    size_k=getattr(module, "ternary_size_k", None),
                )
            )
    return found
