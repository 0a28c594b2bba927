# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writes ``quantization_config`` from what was decided for each module."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from . import names
from .codec import schemes

Settings = Mapping[str, Any]
"""kind, block_size, zero_point, scale_dtype of one module."""


def build(
    decided: Mapping[str, Settings],
    activation_bits: int | None = None,
    input_norm: Mapping[str, Any] | None = None,
    quantized_head: bool = False,
) -> dict[str, Any]:
    """The config that gives every module in ``decided`` its settings.

    The most frequent ternary settings become the default; the rest is listed by
    name, or by a regular expression where every module of that name in every
    block is alike. ``quantized_head`` says that the head's input is normalized and
    quantized as that of the linears. The result is read back with the overlay's own
    reader and compared.
    """
    linear = [
        _key(s)
        for m, s in decided.items()
        if s["kind"] == "ternary" and not names.is_embedding(m)
    ]
    all_ternary = [_key(s) for s in decided.values() if s["kind"] == "ternary"]
    count = Counter(linear or all_ternary)
    default = dict(count.most_common(1)[0][0])
    config: dict[str, Any] = {
        "quant_method": "ternary",
        "block_size": default["block_size"],
        "zero_point": default["zero_point"],
    }
    if default["scale_dtype"] != "float16":
        config["scale_dtype"] = default["scale_dtype"]
    if activation_bits is not None:
        config["activation_bits"] = activation_bits
    if input_norm is not None:
        config["input_norm"] = dict(input_norm)
    overrides: dict[str, Any] = {}
    config["modules_to_not_convert"] = _not_convert(decided, overrides)

    different = {}
    for module, settings in decided.items():
        if settings["kind"] != "ternary":
            continue
        entry = {k: v for k, v in settings.items() if k != "kind" and v != default[k]}
        if names.is_embedding(module):
            # The settings of the linears' inputs are not those of a table.
            if not (quantized_head and module.endswith("lm_head")):
                entry |= {"activation_bits": None} if activation_bits else {}
                entry |= {"input_norm": None} if input_norm else {}
            different[module] = {"kind": "ternary", **entry}
        elif entry:
            different[module] = {"kind": "ternary", **entry}
    overrides.update(_compress(different, decided))
    if overrides:
        config["module_overrides"] = overrides
    _check(config, decided)
    return config


def _key(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, v) for k, v in settings.items() if k != "kind"))


def _not_convert(
    decided: Mapping[str, Settings], overrides: dict[str, Any]
) -> list[str]:
    """Patterns for the unconverted modules. transformers takes a pattern as the
    beginning or the end of a name, so one that would also hit a converted module
    is replaced by an exact entry in ``overrides``."""
    ternary = [m for m, s in decided.items() if s["kind"] == "ternary"]
    # vLLM asks for a module that is stored fused by the names of its parts.
    ternary += [part for m in ternary for part in names.parts_of(m)]
    patterns: list[str] = []
    for module, settings in decided.items():
        if settings["kind"] == "ternary" or schemes.matches_not_convert(
            module, patterns
        ):
            continue
        tail = names.suffix(module)
        for pattern in (tail, module):
            hits = (schemes.matches_not_convert(m, [pattern]) for m in ternary)
            if schemes.matches_not_convert(module, [pattern]) and not any(hits):
                patterns.append(pattern)
                break
        else:
            overrides[module] = {"kind": "unquantized"}
    # A tower by its beginning, too: vLLM may fuse other modules in it than are stored
    # fused; and some of its classes leave the beginning out.
    plain = [m for m, s in decided.items() if s["kind"] != "ternary"]
    towers = dict.fromkeys(tower for m in plain for tower in names.tower(m))
    return patterns + [
        tower
        for tower in towers
        if not any(schemes.matches_not_convert(m, [tower]) for m in ternary)
    ]


def _compress(
    different: dict[str, dict[str, Any]], decided: Mapping[str, Settings]
) -> dict[str, dict[str, Any]]:
    by_suffix: dict[str, list[str]] = defaultdict(list)
    for module in different:
        by_suffix[names.suffix(module)].append(module)
    result = {}
    for tail, modules in by_suffix.items():
        same = all(different[m] == different[modules[0]] for m in modules)
        everyone = sum(names.suffix(m) == tail for m in decided)
        if same and len(modules) > 1 and len(modules) == everyone:
            body = r"\d+".join(re.escape(part) for part in tail.split("*"))
            result[rf"re:.*\.{body}"] = different[modules[0]]
        else:
            result.update({m: different[m] for m in modules})
    return result


def _check(config: dict[str, Any], decided: Mapping[str, Settings]) -> None:
    table = schemes.SchemeTable.from_config(config)
    for module, settings in decided.items():
        scheme = table.scheme(module)
        read = {k: getattr(scheme, k) for k in settings}
        if scheme.kind == "unquantized":
            read = {"kind": "unquantized"}
            settings = {"kind": settings["kind"]}
        assert read == dict(settings), f"{module}: {settings} is read as {read}"
