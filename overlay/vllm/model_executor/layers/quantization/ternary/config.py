# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`quant_method: ternary`: from a checkpoint's settings to vLLM's layers."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from .checkpoint_files import check_safetensors_files, refuse_load_format
from .embedding import TernaryEmbeddingMethod
from .int8 import TernaryInt8LinearMethod
from .linear import TernaryLinearMethod
from .load_report import LoadReport
from .moe import TernaryMoEMethod, expert_schemes
from .schemes import (
    UNQUANTIZED,
    Scheme,
    SchemeTable,
    TernaryConfigError,
    fused_parts,
)

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper


# What vLLM puts before the names of a draft model that is a whole model.
_DRAFT_PREFIX = "draft_model."
TOKEN_EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "wte")


def checkpoint_prefix(prefix: str) -> str:
    """A module's name as the settings of its own model know it."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.runner_type == "draft":
        return prefix.removeprefix(_DRAFT_PREFIX)
    return prefix


class TernaryConfig(QuantizationConfig):
    """Weights in {-1, 0, +1}, two bits each, with a scale per block.

    Args:
        schemes: the parsed `quantization_config` of the checkpoint. vLLM has none to
            give where the method is only asked for by name.

    Raises:
        TernaryConfigError: there is none.

    """

    # vLLM asks for the method of embeddings and heads, whether a model hands the config
    # to them or not.
    names_vocabulary = True
    # Rerankers are made of rows of a head.
    reads_head_rows = True

    def __init__(self, schemes: SchemeTable | None = None):
        super().__init__()
        if schemes is None:
            raise TernaryConfigError(
                f"quantization is {self.get_name()}, but config.json has no "
                "quantization_config, which says how its modules are stored. Leave "
                "--quantization out if the model is not quantized, or give "
                "quantization_config in --hf-overrides."
            )
        self.schemes = schemes
        self.text_config: PreTrainedConfig | None = None
        self.embedding_scheme: Scheme | None = None
        self.report = LoadReport()

    @classmethod
    def get_name(cls) -> QuantizationMethods:
        return "ternary"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        dtypes = [torch.float16, torch.bfloat16]
        return dtypes + [torch.float32] if current_platform.is_cpu() else dtypes

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TernaryConfig":
        """Parse `quantization_config`.

        Raises:
            TernaryConfigError: for an unknown key or an impossible value, by name.

        """
        if not hasattr(torch.ops._C, "ternary_gemm"):
            raise ValueError(
                "The ternary kernels (vllm._ternary_C) did not load; the log says why "
                "under `Failed to import from vllm._ternary_C`."
            )
        return cls(SchemeTable.from_config(config))

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PreTrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        check_safetensors_files(model_name)
        if hf_config is not None:
            self.text_config = hf_config.get_text_config()

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head is the embedding, now: vLLM changes the model's config later
        where the checkpoint has an `lm_head.weight` all the same."""
        return bool(getattr(self.text_config, "tie_word_embeddings", False))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        self.schemes.map_names(hf_to_vllm_mapper)

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        refuse_load_format(self.get_name())
        prefix = checkpoint_prefix(prefix)
        strict, packed_modules = self.schemes.strict, self.packed_modules_mapping
        method: QuantizeMethodBase | None = None
        if isinstance(layer, LinearBase):
            scheme = self.linear_scheme(prefix)
            if scheme.kind == "ternary":
                method = TernaryLinearMethod(scheme, strict, packed_modules)
            elif scheme.kind == "int8":
                method = TernaryInt8LinearMethod(scheme, prefix, packed_modules)
            else:
                method = UnquantizedLinearMethod()
        elif isinstance(layer, RoutedExperts):
            schemes = expert_schemes(self.schemes, layer, prefix)
            scheme = schemes["w2"]
            if scheme.kind == "ternary":
                method = TernaryMoEMethod(layer.moe_config, schemes, strict)
        elif isinstance(layer, VocabParallelEmbedding):
            is_head = isinstance(layer, ParallelLMHead)
            prefix = layer.prefix = self.vocab_name(layer, prefix, is_head)
            scheme = self.vocab_scheme(prefix, is_head) or UNQUANTIZED
            if scheme.kind == "int8":
                raise ValueError(
                    f"quantization_config: {prefix} is int8, which vLLM has no kernel "
                    "for in an embedding or head. Store it as ternary or unquantized."
                )
            if scheme.kind == "ternary":
                method = TernaryEmbeddingMethod(scheme, strict)
        else:
            return None
        self.refuse_requantization(layer, prefix, scheme)
        self.report.add(layer, prefix, scheme.describe())
        return method

    def refuse_requantization(
        self, layer: torch.nn.Module, prefix: str, scheme: Scheme
    ) -> None:
        """Raises ValueError where --quantization-config names a quantized layer."""
        online = self.online_quantization_config
        if online is None or scheme.kind == "unquantized":
            return
        online.packed_modules_mapping = self.packed_modules_mapping
        if isinstance(layer, LinearBase) and online.resolve_quant_method_cls(
            type(layer), prefix
        ):
            raise ValueError(
                f"--quantization-config would quantize {prefix} again, which the "
                f"checkpoint stores as {scheme.describe()}. Leave it out, or name the "
                "module in its ignore list."
            )

    def vocab_name(
        self, layer: VocabParallelEmbedding, prefix: str, is_head: bool
    ) -> str:
        """The name of an embedding or head, which some models do not give.

        Without one it is the token embedding that settings name, if its size is that
        of the model's vocabulary and hidden states.
        """
        prefix = prefix.lstrip(".")  # of a model that puts its own, empty one before
        config = self.text_config
        if prefix or is_head or config is None:
            return prefix
        size = (layer.org_vocab_size, layer.embedding_dim)
        if size != (
            getattr(config, "vocab_size", None),
            getattr(config, "hidden_size", None),
        ):
            return prefix
        written = [
            name
            for name in self.schemes.overrides
            if name.rpartition(".")[2] in TOKEN_EMBEDDINGS
        ]
        usual = [f"model.{name}" for name in TOKEN_EMBEDDINGS]
        named = [n for n in [*written, *usual] if self.schemes.explicit(n) is not None]
        return named[0] if named else prefix

    def vocab_scheme(self, prefix: str, is_head: bool) -> Scheme | None:
        """The scheme of an embedding or head, which only `module_overrides` gives.

        A head tied to the embedding, which a model creates first, has the embedding's.
        """
        if is_head and self.tied_embeddings:
            return self.embedding_scheme
        scheme = self.schemes.explicit(prefix)
        # A model may have further tables, of positions or for each layer.
        if not is_head and scheme is not None:
            self.embedding_scheme = scheme
        return scheme

    def linear_scheme(self, prefix: str) -> Scheme:
        """The scheme of a linear layer, fused or not.

        Raises:
            TernaryConfigError: when the parts of a fused layer are stored differently.

        """
        parent, _, name = prefix.rpartition(".")
        parts = fused_parts(self.packed_modules_mapping, name)
        if not parts:
            return self.schemes.scheme(prefix)
        dotted = f"{parent}." if parent else ""
        return self.schemes.fused_scheme(prefix, [dotted + part for part in parts])
