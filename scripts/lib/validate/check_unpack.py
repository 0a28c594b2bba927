# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPU_UNPACK: the bytes on disk mean the integers that they should.

With a reference the unpacked integers and the scales equal those rebuilt from the
full-precision weights. Without one, the tensors keep the format's rules, and unpacking
and packing again gives the same bytes.
"""

from collections.abc import Iterator

import numpy as np
import torch

from . import causes, codec, spec
from .checkpoint import (
    PACKED,
    SCALE,
    WEIGHT,
    ZERO_POINT,
    Checkpoint,
    Module,
    Tensors,
    row_ranges,
)
from .difference import Failure, compare
from .reference import RECIPES, Weight, Whole, nearest, reference_weight

_LOSSLESS = "already ternary"
_CAUSE_LIMIT = 1 << 28
"""Weights of a module that are looked at as a whole to find a cause."""


def check_module(
    checkpoint: Checkpoint, module: Module, reference: Tensors | None
) -> Iterator[Failure]:
    """Failures of one module, at most one for each of its tensors."""
    if not module.is_ternary:
        yield from _check_other(module)
        return
    failures = list(_check_shapes(checkpoint, module))
    if not failures:
        failures = list(_check_values(checkpoint, module))
        if reference is not None:
            seen = {f.tensor: f for f in failures}
            for failure in _compare_reference(checkpoint, module, reference):
                # A value that no tensor may have is worth more than that it differs.
                first = seen.setdefault(failure.tensor, failure)
                first.cause = failure.cause or first.cause
            failures = list(seen.values())
    yield from failures


def _compare_reference(
    checkpoint: Checkpoint, module: Module, reference: Tensors
) -> Iterator[Failure]:
    weight = reference_weight(reference, module)
    if weight is None:
        yield Failure(
            f"{module.name}.{PACKED}",
            f"the reference has no {module.name}.{WEIGHT} to rebuild it from",
        )
    elif weight.shape != (module.size_n, module.size_k):
        yield Failure(
            f"{module.name}.{PACKED}",
            f"unpacked it is [{module.size_n}, {module.size_k}], in the reference "
            f"{weight.name} is {list(weight.shape)}",
        )
    elif ZERO_POINT in module.tensors:
        yield from _compare_affine(checkpoint, module, weight)
    else:
        yield from _compare_rebuilt(checkpoint, module, weight)


def _check_other(module: Module) -> Iterator[Failure]:
    """A module that is not packed must not be expected to be."""
    for name in (SCALE, ZERO_POINT):
        if name in module.tensors and WEIGHT not in module.tensors:
            yield Failure(
                f"{module.name}.{name}",
                f"has no {PACKED} beside it; convert the checkpoint again",
            )
            return
    weight = module.tensors.get(WEIGHT)
    if weight is None or len(weight.shape) != 2:
        return
    from lib.convert import names

    kind = module.scheme.kind
    linear = names.is_block_linear(module.name)
    explicit = names.is_embedding(module.name) and kind != "unquantized"
    if kind == "ternary" and (linear or explicit):
        yield Failure(
            f"{module.name}.{WEIGHT}",
            f"is stored as {module.stored_as}, config.json says {PACKED}; name it in "
            "modules_to_not_convert or convert it",
        )
    if kind == "int8" and linear and weight.dtype != torch.int8:
        yield Failure(
            f"{module.name}.{WEIGHT}",
            f"is stored as {module.stored_as}, config.json says int8",
        )


def _check_shapes(checkpoint: Checkpoint, module: Module) -> Iterator[Failure]:
    """Whether the tensors are there, with the dtypes and shapes that they must have."""
    scheme = module.scheme
    name = f"{module.name}.{PACKED}"
    if scheme.kind != "ternary":
        yield Failure(
            name, f"is packed, config.json says that the module is {scheme.kind}"
        )
        return
    packed = module.tensors[PACKED]
    if packed.dtype != torch.uint8 or len(packed.shape) != 2:
        dtype = str(packed.dtype).removeprefix("torch.")
        yield Failure(
            name,
            f"is {dtype} {list(packed.shape)}, packed weights are uint8 "
            "[N, ceil(K / 4)]",
            cause="a byte was read as a float or as another integer"
            if packed.dtype != torch.uint8
            else "",
        )
        return
    if ZERO_POINT in module.tensors and not scheme.zero_point:
        yield Failure(
            f"{module.name}.{ZERO_POINT}",
            "is stored, config.json says zero_point is false",
        )
    yield from _check_tables(checkpoint, module, values=False)


def _check_values(checkpoint: Checkpoint, module: Module) -> Iterator[Failure]:
    """The values of the tensors, and unpack and pack as inverses of each other."""
    yield from _check_tables(checkpoint, module, values=True)
    yield from _check_codes(checkpoint, module, f"{module.name}.{PACKED}")


def _check_tables(
    checkpoint: Checkpoint, module: Module, values: bool
) -> Iterator[Failure]:
    """Scale and zero point: dtype and shape, or values too."""
    fmt, scheme = codec.format, module.scheme
    for kind in (SCALE, ZERO_POINT) if scheme.zero_point else (SCALE,):
        stored = module.tensors.get(kind)
        tensor = None if stored is None else checkpoint.read(stored)
        arguments = (tensor, (module.size_n,), module.size_k, scheme.block_size)
        name = f"{module.name}.{kind}"
        try:
            if kind == SCALE:
                dtype = getattr(torch, scheme.scale_dtype)
                fmt.check_scale(*arguments, dtype=dtype, values=values, name=name)
            else:
                fmt.check_zero_point(*arguments, values=values, name=name)
        except fmt.TernaryFormatError as e:
            yield Failure(e.name, f"{e.problem}. {e.remedy}")


def _check_codes(
    checkpoint: Checkpoint, module: Module, name: str
) -> Iterator[Failure]:
    fmt, stored, size_k = codec.format, module.tensors[PACKED], module.size_k
    width = stored.shape[1]
    for part in row_ranges(module.size_n, 24 * width):
        packed = checkpoint.read(stored, part.start, part.stop)
        bytes_ = packed.numpy()
        codes = spec.codes_of(bytes_).reshape(len(bytes_), -1)
        if not module.guessed_k and (codes[:, size_k:] != 0).any():
            row = int((codes[:, size_k:] != 0).any(axis=1).argmax())
            yield Failure(
                name,
                f"codes beyond K = {size_k} are not 0",
                f"row {part.start + row}, byte {width - 1}",
                causes.of_codes(bytes_),
            )
            return
        t = fmt.unpack(packed, size_k)
        want = torch.from_numpy(spec.decode(bytes_, size_k))
        if not torch.equal(t, want):
            again = torch.from_numpy(spec.encode(t.numpy()))
            failure = compare(
                name, packed, again, "the codec reads other integers", part.start
            )
            assert failure is not None
            failure.cause = causes.of_packed(want.numpy(), again.numpy())
            yield failure
            return
        reserved = codes == 3
        if reserved.any():
            row, column = (int(i[0]) for i in reserved.nonzero())
            whole = checkpoint.read(stored) if stored.nbytes < _CAUSE_LIMIT else packed
            clean = bytes_ ^ _reserved_bits(bytes_)
            shown = compare(
                name,
                torch.from_numpy(clean),
                packed,
                "the reserved code 11, which no writer may write, is read as 0",
                part.start,
            )
            assert shown is not None
            shown.position = f"weight {column} of {shown.position}"
            shown.cause = causes.of_codes(whole.numpy())
            yield shown
            return
        again = fmt.pack(t)
        failure = compare(
            name, packed, again, "unpacking and packing again changes", part.start
        )
        if failure is not None and not module.guessed_k:
            yield failure
            return


def _reserved_bits(bytes_: np.ndarray) -> np.ndarray:
    both = bytes_ & (bytes_ >> 1) & 0x55
    return both | both << 1


def _compare_rebuilt(
    checkpoint: Checkpoint, module: Module, weight: Weight
) -> Iterator[Failure]:
    """Integers and scales against those that a recipe makes of the reference."""
    one = module.scheme.block_size == "tensor"
    block = codec.format.block_length(module.size_k, module.scheme.block_size)
    dtype = module.tensors[SCALE].dtype
    whole = weight.whole(_parts(module)) if one else None
    recipe = ""
    for part in _parts(module):
        rows = weight.rows(part.start, part.stop)
        packed = checkpoint.read(module.tensors[PACKED], part.start, part.stop)
        scale = _scale_rows(checkpoint, module, SCALE, part)
        t = spec.decode(packed.numpy(), module.size_k)
        if recipe in ("", _LOSSLESS) and _is_ternary(rows, t, scale, block):
            recipe = _LOSSLESS
            continue
        w = rows.double().numpy()
        best = None
        for name in [recipe] if recipe else list(RECIPES):
            rebuilt = RECIPES[name](w, block, dtype, whole)
            if rebuilt is None:
                continue
            want = torch.where(torch.from_numpy(rebuilt.free), scale, rebuilt.scale)
            off = int((rebuilt.t != t).sum()) + int((want != scale).sum())
            if best is None or off < best[0]:
                best = (off, name)
            if not off or name == _LOSSLESS:
                break
        if best is None or best[0]:
            name = best[1] if best else "absmean"
            yield from _explain(checkpoint, module, weight, name, whole)
            return
        recipe = best[1]
    module.notes.append(f"rebuilt: {recipe}")


def _is_ternary(
    w: torch.Tensor, t: np.ndarray, scale: torch.Tensor, block: int
) -> bool:
    """Whether the weights are -s, 0 and +s exactly as t says.

    What the recipe for such weights finds, in fewer passes over them.
    """
    signs = torch.from_numpy(t)
    if not torch.equal(w.sign().to(torch.int8), signs):
        return False
    wide = scale.to(w.dtype)
    if not torch.equal(wide.double(), scale.double()):
        return False
    if scale.ndim > 1:
        wide = wide.repeat_interleave(block, dim=1)[:, : w.shape[1]]
    return bool(((w.abs() == wide) | (signs == 0)).all())


def _explain(
    checkpoint: Checkpoint,
    module: Module,
    weight: Weight,
    recipe: str,
    whole: Whole | None,
) -> Iterator[Failure]:
    """Compare once more, all rows at once, to find the causes."""
    block = codec.format.block_length(module.size_k, module.scheme.block_size)
    dtype = module.tensors[SCALE].dtype
    ts, scales = [], []
    for part in _parts(module):
        w = weight.rows(part.start, part.stop).double().numpy()
        rebuilt = RECIPES[recipe](w, block, dtype, whole)
        if rebuilt is None:  # some rows are ternary already and others are not
            rebuilt = RECIPES["absmean"](w, block, dtype, whole)
        assert rebuilt is not None
        ts.append(rebuilt.t)
        free = torch.from_numpy(rebuilt.free)
        scale = _scale_rows(checkpoint, module, SCALE, part)
        scales.append(torch.where(free, scale, rebuilt.scale))
    t = np.concatenate(ts)
    packed = checkpoint.read(module.tensors[PACKED])
    failure = compare(
        f"{module.name}.{PACKED}",
        torch.from_numpy(spec.encode(t)),
        packed,
        f"differs from the integers rebuilt from {weight.name} ({recipe})",
    )
    if failure is not None:
        if t.size <= _CAUSE_LIMIT:
            failure.cause = causes.of_packed(t, packed.numpy(), weight.rows(0, len(t)))
        yield failure
    scale = checkpoint.read(module.tensors[SCALE])
    want = scales[0] if whole is not None else torch.cat(scales)
    failure = compare(
        f"{module.name}.{SCALE}",
        want,
        scale,
        f"differs from the scales rebuilt from {weight.name} ({recipe})",
    )
    if failure is not None:
        failure.cause = causes.of_scale(want, scale)
        yield failure


def _scale_rows(
    checkpoint: Checkpoint, module: Module, name: str, part: range
) -> torch.Tensor:
    """Rows of a scale or zero point; all of the one that a whole tensor has."""
    stored = module.tensors[name]
    if module.scheme.block_size == "tensor":
        return checkpoint.read(stored)
    return checkpoint.read(stored, part.start, part.stop)


def _compare_affine(
    checkpoint: Checkpoint, module: Module, weight: Weight
) -> Iterator[Failure]:
    """With a zero point: the weights that the tensors stand for, bit for bit."""
    fmt, scheme = codec.format, module.scheme
    block = fmt.block_length(module.size_k, scheme.block_size)
    for part in _parts(module):
        w = weight.rows(part.start, part.stop)
        packed = checkpoint.read(module.tensors[PACKED], part.start, part.stop)
        scale, zero = (
            fmt.expand_scale(
                _scale_rows(checkpoint, module, name, part),
                (len(w),),
                module.size_k,
                scheme.block_size,
            ).contiguous()
            for name in (SCALE, ZERO_POINT)
        )
        s, z = scale.double().numpy(), zero.double().numpy()
        t = nearest(w.double().numpy(), s, z, block)
        failure = compare(
            f"{module.name}.{PACKED}",
            torch.from_numpy(spec.encode(t)),
            packed,
            f"differs from the integers rebuilt from {weight.name} and the zero points",
            part.start,
        )
        if failure is not None:
            failure.cause = causes.of_packed(t, packed.numpy(), w)
            yield failure
            return
        size = "row" if isinstance(scheme.block_size, str) else scheme.block_size
        made = fmt.dequantize(torch.from_numpy(t), scale, zero, size, w.dtype)
        # -0.0 and 0.0 are the same weight.
        failure = compare(
            f"{module.name}.{SCALE}",
            w + 0.0,
            made + 0.0,
            f"with the zero points does not give back {weight.name}",
            part.start,
        )
        if failure is not None:
            yield failure
            return
    module.notes.append("rebuilt: with zero points")


def _parts(module: Module) -> Iterator[range]:
    """Rows to take at a time, such that float64 copies of them stay small."""
    return row_ranges(module.size_n, 8 * module.size_k, 128 << 20)
