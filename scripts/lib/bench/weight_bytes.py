# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What runs inside an engine's processes: a module that they can import."""

import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = {
        t.data_ptr(): t.numel() * t.element_size()
        for t in [*model.parameters(), *model.buffers()]
    }
    return sum(tensors.values())
