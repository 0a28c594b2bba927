# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Mamba2's input projection, whose rows the mixer cuts itself, rank by rank."""

import zlib

import pytest
import torch

from lib.validate.ranks import tensor_parallel
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.quantization.ternary import TernaryConfig
from vllm.model_executor.layers.quantization.ternary.bitnet import BitNetConfig
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
)
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)

HIDDEN, INNER, STATE, HEADS = 132, 64, 16, 8


def make_mixer(quant_config, groups: int, name: str) -> MambaMixer2:
    return MambaMixer2(
        hidden_size=HIDDEN,
        ssm_state_size=STATE,
        conv_kernel_size=4,
        intermediate_size=INNER,
        use_conv_bias=True,
        use_bias=False,
        n_groups=groups,
        num_heads=HEADS,
        head_dim=INNER // HEADS,
        quant_config=quant_config,
        prefix=name,
    )


def rows_of(groups: int) -> int:
    """Rows of in_proj in the checkpoint: gate, x, B, C and dt."""
    return 2 * INNER + 2 * groups * STATE + HEADS


def load(mixer: MambaMixer2, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        param = getattr(mixer.in_proj, name)
        param.weight_loader(param, tensor)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block", [64, "row", "tensor"])
@pytest.mark.parametrize("groups,tp", [(1, 1), (1, 2), (1, 4), (2, 2), (4, 2)])
def test_rows_of_every_rank(groups: int, tp: int, block, zero_point: bool) -> None:
    """Those that the unquantized mixer has, groups repeated where it repeats them."""
    name = f"layers.{groups}.{tp}.{block}.{zero_point}.mixer"
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    n = rows_of(groups)
    t = torch.randint(-1, 2, (n, HIDDEN), dtype=torch.int8, generator=g)
    shape = fmt.scale_shape((n,), HIDDEN, block)
    scale = (torch.rand(shape, generator=g) + 0.1).half()
    tensors = {"packed_ternary_weight": fmt.pack(t), "weight_scale": scale}
    zero = None
    if zero_point:
        zero = torch.randint(-1, 2, shape, generator=g).float() / 4
        tensors["weight_zero_point"] = zero
    dense = fmt.dequantize(t, scale, zero, block)
    config = TernaryConfig(SchemeTable(Scheme(block_size=block, zero_point=zero_point)))
    for rank in range(tp):
        with tensor_parallel(rank, tp):
            plain = make_mixer(None, groups, f"{name}.plain.{rank}")
            load(plain, {"weight": dense})
            mixer = make_mixer(config, groups, f"{name}.{rank}")
            load(mixer, tensors)
            layer = mixer.in_proj
            layer.quant_method.process_weights_after_loading(layer)
        packed, scales, zeros = layer.quant_method.unpacked_weight(layer)
        held = fmt.dequantize(
            fmt.unpack(packed, HIDDEN),
            scales,
            zeros,
            "row" if block == "tensor" else block,
        )
        assert torch.equal(held, plain.in_proj.weight)


def test_masters_of_bitnet() -> None:
    """Quantized whole, then cut: ranks share the scale of the tensor."""
    settings = {"linear_class": "autobitlinear", "quantization_mode": "online"}
    g = torch.Generator().manual_seed(3)
    master = torch.randn(rows_of(1), HIDDEN, generator=g)
    s = master.abs().mean()
    t = (master / s).round().clamp(-1, 1)
    for rank in range(2):
        with tensor_parallel(rank, 2):
            plain = make_mixer(None, 1, f"plain.{rank}.mixer")
            load(plain, {"weight": t})
            mixer = make_mixer(BitNetConfig.from_config(settings), 1, f"{rank}.mixer")
            load(mixer, {"weight": master})
            layer = mixer.in_proj
            layer.quant_method.process_weights_after_loading(layer)
        packed, scales, _ = layer.quant_method.unpacked_weight(layer)
        assert torch.equal(fmt.unpack(packed, HIDDEN).float(), plain.in_proj.weight)
        torch.testing.assert_close(scales, s.expand(scales.shape))


def test_wrong_tensor_is_named() -> None:
    config = TernaryConfig(SchemeTable(Scheme()))
    with tensor_parallel(0, 2):
        mixer = make_mixer(config, 1, "model.layers.0.mixer")
        packed = torch.zeros(rows_of(1), HIDDEN // 4 - 1, dtype=torch.uint8)
        with pytest.raises(TernaryFormatError, match=r"in_proj\.packed.*\[168, 33\]"):
            load(mixer, {"packed_ternary_weight": packed})
