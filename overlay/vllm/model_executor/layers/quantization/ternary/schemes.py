# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which module of a checkpoint is stored how: the settings of `quant_method: ternary`.

No vLLM import: the converter and the validator read configs with this module too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

BlockSize = int | Literal["row", "tensor"]

SCALE_DTYPES = ("float16", "bfloat16", "float32")
KINDS = ("ternary", "int8", "unquantized")
DEFAULT_BLOCK_SIZE = 128


class TernaryConfigError(ValueError):
    """A `quantization_config` that cannot be served; names the key and the remedy."""


@dataclass(frozen=True)
class Scheme:
    """How the weight of one module is stored and computed.

    Attributes:
        kind: "ternary", "int8" (one signed byte a weight) or "unquantized".
        block_size: consecutive weights along the input dimension that share a
            scale: a multiple of 4, or "row" (one scale a row), or "tensor" (one).
        zero_point: whether a `weight_zero_point` tensor is stored.
        activation_bits: None for 16-bit activations, 8 for int8 per token.
        scale_dtype: dtype name of the stored scales.
        input_norm: {"name": ..., "eps": ...} of an RMSNorm on the layer's input,
            stored as `<module>.<name>.weight`, or None.

    """

    kind: Literal["ternary", "int8", "unquantized"] = "ternary"
    block_size: BlockSize = DEFAULT_BLOCK_SIZE
    zero_point: bool = False
    activation_bits: int | None = None
    scale_dtype: str = "float16"
    input_norm: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TernaryConfigError(_bad("kind", self.kind, f"one of {KINDS}"))
        block = self.block_size
        if isinstance(block, str):
            if block not in ("row", "tensor"):
                raise TernaryConfigError(
                    _bad("block_size", block, 'a multiple of 4, "row" or "tensor"')
                )
        elif isinstance(block, bool) or not isinstance(block, int) or block <= 0:
            raise TernaryConfigError(
                _bad("block_size", block, 'a positive multiple of 4, "row" or "tensor"')
            )
        elif block % 4:
            raise TernaryConfigError(
                _bad(
                    "block_size",
                    block,
                    "a multiple of 4: four weights share a byte, so a block must "
                    "begin on one",
                )
            )
        if not isinstance(self.zero_point, bool):
            raise TernaryConfigError(
                _bad("zero_point", self.zero_point, "true or false")
            )
        bits = self.activation_bits
        if bits is not None and (isinstance(bits, bool) or bits != 8):
            raise TernaryConfigError(
                _bad("activation_bits", bits, "8, or leave it out")
            )
        if bits == 8 and self.zero_point:
            raise TernaryConfigError(
                _bad("zero_point", True, "false where activation_bits is 8")
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise TernaryConfigError(
                _bad("scale_dtype", self.scale_dtype, f"one of {SCALE_DTYPES}")
            )
        if self.input_norm is not None:
            known = {"name", "eps"}
            if (
                not isinstance(self.input_norm, Mapping)
                or set(self.input_norm) != known
            ):
                raise TernaryConfigError(
                    _bad("input_norm", self.input_norm, 'the keys "name" and "eps"')
                )
            name, eps = self.input_norm["name"], self.input_norm["eps"]
            if not isinstance(name, str) or not name.isidentifier():
                raise TernaryConfigError(
                    _bad("input_norm.name", name, "the last name of the norm's module")
                )
            if isinstance(eps, bool) or not isinstance(eps, (int, float)) or eps < 0:
                raise TernaryConfigError(
                    _bad("input_norm.eps", eps, "a number that is not negative")
                )
            if bits != 8:
                raise TernaryConfigError(
                    _bad("activation_bits", bits, "8 where input_norm is given")
                )

    def blocks_along(self, size_k: int) -> int:
        """Number of scales in a row of `size_k` weights."""
        if isinstance(self.block_size, str):
            return 1
        return -(-size_k // self.block_size)

    def describe(self) -> str:
        """A few words for the table printed at load."""
        if self.kind == "unquantized":
            return "unquantized"
        block = self.block_size
        parts = [self.kind, block if isinstance(block, str) else f"block {block}"]
        if self.zero_point:
            parts.append("zero point")
        if self.activation_bits:
            parts.append(f"{self.activation_bits}-bit activations")
        if self.input_norm:
            parts.append("input norm")
        return ", ".join(map(str, parts))


UNQUANTIZED = Scheme(kind="unquantized")
_SCHEME_KEYS = {f.name for f in fields(Scheme)}
_TOP_KEYS = (_SCHEME_KEYS - {"kind"}) | {
    "quant_method",
    "format_version",
    "strict",
    "modules_to_not_convert",
    "module_overrides",
}


def _bad(key: str, value: Any, remedy: str) -> str:
    return f"quantization_config: {key} is {value!r}; it must be {remedy}."


def matches_not_convert(name: str, patterns: Iterable[str]) -> bool:
    """Whether `modules_to_not_convert` names the module, as transformers reads it.

    A pattern names a module when it is a dotted prefix of its name, matches the
    beginning of its name as a regular expression, or is the end of its name
    (`transformers.quantizers.quantizers_utils.should_convert_module`).
    """
    for pattern in patterns:
        if name.endswith(pattern):
            return True
        try:
            if re.match(pattern, name):
                return True
        except re.error as e:
            raise TernaryConfigError(
                _bad(
                    "modules_to_not_convert",
                    pattern,
                    f"a module name or a regular expression ({e})",
                )
            ) from None
    return False


def matches_override(name: str, pattern: str) -> bool:
    """Whether a key of `module_overrides` names the module.

    Args:
        name: full module name, such as "model.layers.0.mlp.down_proj".
        pattern: the exact name, a dotted prefix of it, or "re:" followed by a
            regular expression that matches the whole name.

    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as e:
            raise TernaryConfigError(
                _bad("module_overrides", pattern, f"a regular expression ({e})")
            ) from None
    return name == pattern or name.startswith(pattern + ".")


# What most classes of vLLM fuse, for those that do not say what they do.
_USUAL_PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def fused_parts(packed_modules: Mapping[str, list[str]], name: str) -> list[str]:
    """The modules of the checkpoint that a layer `name` fuses; none if it is not one.

    Args:
        packed_modules: what the model's class says of itself.
        name: the last part of the layer's name.

    """
    return packed_modules.get(name) or _USUAL_PARTS.get(name, [])


@dataclass
class SchemeTable:
    """The parsed `quantization_config`: one default and its exceptions.

    Precedence for a module: an exact name in `module_overrides`, then the longest
    prefix, then regular expressions in the order written, then
    `modules_to_not_convert`, then the default.
    """

    default: Scheme = field(default_factory=Scheme)
    strict: bool = False
    not_convert: list[str] = field(default_factory=list)
    overrides: dict[str, Scheme] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "SchemeTable":
        """Parse a `quantization_config` dictionary.

        Raises:
            TernaryConfigError: for an unknown key or an impossible value, by name.

        """
        method = config.get("quant_method", "ternary")
        if str(method).lower() != "ternary":  # as vLLM finds the method
            raise TernaryConfigError(_bad("quant_method", method, '"ternary"'))
        _refuse_unknown(config, _TOP_KEYS, "quantization_config")
        version = config.get("format_version", 1)
        if version != 1:
            raise TernaryConfigError(
                _bad("format_version", version, "1, the only version this vLLM reads")
            )
        strict = config.get("strict", False)
        if not isinstance(strict, bool):
            raise TernaryConfigError(_bad("strict", strict, "true or false"))
        default = Scheme(**{k: v for k, v in config.items() if k in _SCHEME_KEYS})
        not_convert = config.get("modules_to_not_convert") or []
        if isinstance(not_convert, str) or not all(
            isinstance(p, str) for p in not_convert
        ):
            raise TernaryConfigError(
                _bad("modules_to_not_convert", not_convert, "a list of module names")
            )
        overrides_config = config.get("module_overrides") or {}
        if not isinstance(overrides_config, Mapping):
            raise TernaryConfigError(
                _bad("module_overrides", overrides_config, "a mapping of settings")
            )
        overrides = {}
        for pattern, settings in overrides_config.items():
            where = f"module_overrides[{pattern!r}]"
            if not isinstance(settings, Mapping):
                raise TernaryConfigError(_bad(where, settings, "a mapping of settings"))
            _refuse_unknown(settings, _SCHEME_KEYS, where)
            try:
                scheme = replace(default, **settings)
            except TernaryConfigError as e:
                raise TernaryConfigError(f"{where}: {e}") from None
            # What only concerns quantized modules does not tell plain ones apart.
            plain = scheme.kind == "unquantized"
            overrides[pattern] = UNQUANTIZED if plain else scheme
        return cls(default, strict, list(not_convert), overrides)

    def explicit(self, name: str) -> Scheme | None:
        """The scheme that `module_overrides` gives the module, or None."""
        if (scheme := self.overrides.get(name)) is not None:
            return scheme
        matching = [p for p in self.overrides if matches_override(name, p)]
        prefixes = [p for p in matching if not p.startswith("re:")]
        if prefixes:
            return self.overrides[max(prefixes, key=len)]
        return self.overrides[matching[0]] if matching else None

    def scheme(self, name: str) -> Scheme:
        """The scheme of the linear module `name`."""
        if (scheme := self.explicit(name)) is not None:
            return scheme
        if matches_not_convert(name, self.not_convert):
            return UNQUANTIZED
        return self.default

    def fused_scheme(self, name: str, parts: Iterable[str]) -> Scheme:
        """The scheme of a layer that fuses the modules `parts` of the checkpoint.

        A pattern that names a part means that part, whether it matches the layer's
        own name or not: "qkv_proj" ends with "v_proj".

        Raises:
            TernaryConfigError: when the parts differ, since one layer is computed
                by one kernel.

        """
        parts = list(parts)
        whole = SchemeTable(
            not_convert=[
                pattern
                for pattern in self.not_convert
                if not any(matches_not_convert(part, [pattern]) for part in parts)
            ],
            overrides={
                pattern: scheme
                for pattern, scheme in self.overrides.items()
                if not any(matches_override(part, pattern) for part in parts)
            },
        )
        if (scheme := whole.explicit(name)) is not None:
            return scheme
        if matches_not_convert(name, whole.not_convert):
            return UNQUANTIZED
        schemes = {part: self.scheme(part) for part in parts}
        if len(set(schemes.values())) > 1:
            listed = "; ".join(f"{p}: {s.describe()}" for p, s in schemes.items())
            raise TernaryConfigError(
                f"{name} fuses modules that are stored differently ({listed}). Give "
                "them one setting in modules_to_not_convert or module_overrides."
            )
        return next(iter(schemes.values()))

    def map_names(self, mapper: Any) -> None:
        """Rename modules from the checkpoint's to vLLM's structure.

        Args:
            mapper: vLLM's `WeightsMapper`. Regular expressions are left as written
                and match the name in vLLM.

        """
        self.overrides = {
            p if p.startswith("re:") else _renamed(p, mapper)[-1]: scheme
            for p, scheme in self.overrides.items()
        }
        self.not_convert = [
            new for p in self.not_convert for new in _renamed(p, mapper, ("", "x."))
        ]


def _renamed(name: str, mapper: Any, beginnings: Iterable[str] = ("",)) -> list[str]:
    """What vLLM may call a module: what its name is mapped to and, where that is
    another, what the name of its weight is, for which some mappings are made.

    Args:
        name: whole, or what it ends with.
        mapper: vLLM's `WeightsMapper`.
        beginnings: what to try in front of the name, for the ends of names.

    """
    found = mapper.apply_list([name]) or [name]
    for before in beginnings:
        mapped = mapper.apply_list([f"{before}{name}.weight"])
        for new in mapped:
            new = new.removeprefix(before).removesuffix(".weight")
            if new not in (name, *found):
                found.append(new)
    return found


def _refuse_unknown(config: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(config) - known)
    if unknown:
        raise TernaryConfigError(
            f"{where}: unknown key {unknown[0]!r}"
            + (f" (and {unknown[1:]})" if unknown[1:] else "")
            + f"; known keys are {sorted(known)}."
        )
