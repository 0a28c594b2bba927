# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The table of a conversion, for people and as JSON."""

from typing import Any

from .plan import Decision, Plan


def rows(plan: Plan) -> list[dict[str, Any]]:
    """One entry per 2-D weight."""
    return [_row(d) for d in plan.decisions]


def summary(plan: Plan) -> dict[str, Any]:
    """Everything there is to say about a conversion, for ``json.dumps``."""
    others = [s for s in plan.steps if not isinstance(s, Decision)]
    before = sum(s.nbytes_source or s.spec.nbytes for s in others)
    after = sum(s.spec.nbytes for s in others)
    return {
        "source": str(plan.source.path),
        "source_kind": plan.source.kind,
        "modules": rows(plan),
        "other_tensors": {
            "count": len(others),
            "bytes_before": before,
            "bytes_after": after,
        },
        "bytes_before": before + sum(d.weight.nbytes for d in plan.decisions),
        "bytes_after": after + sum(d.nbytes for d in plan.decisions),
        "quantization_config": plan.quantization_config,
        "notes": plan.notes,
    }


def table(plan: Plan) -> str:
    """The per-module table."""
    header = ("module", "shape", "from", "to", "block", "zeros", "before", "after")
    lines = [header]
    for row in rows(plan):
        sparsity = row["sparsity"]
        how = row["how"]
        to = f"ternary ({how})" if row["kind"] == "ternary" else f"as it is ({how})"
        lines.append(
            (
                row["module"],
                "x".join(map(str, row["shape"])),
                row["stored"],
                to,
                "" if row["block_size"] is None else str(row["block_size"]),
                "" if sparsity is None else f"{sparsity:.1%}",
                size(row["bytes_before"]),
                size(row["bytes_after"]),
            )
        )
    data = summary(plan)
    other = data["other_tensors"]
    for name, part in (
        (f"{other['count']} other tensors", other),
        ("total", data),
    ):
        before, after = size(part["bytes_before"]), size(part["bytes_after"])
        lines.append((name, "", "", "", "", "", before, after))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(
            cell.rjust(width) if i > 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    text.insert(-2, "-" * len(text[1]))
    return "\n".join([*text, *(f"note: {n}" for n in plan.notes)])


def size(nbytes: int) -> str:
    """Bytes with a binary unit."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def _row(decision: Decision) -> dict[str, Any]:
    weight = decision.weight
    zeros = decision.zeros
    return {
        "module": weight.module,
        "shape": [weight.size_n, weight.size_k],
        "stored": weight.stored,
        "kind": decision.kind,
        "how": decision.how,
        "block_size": decision.block_size,
        "scale_dtype": (
            str(decision.scale_dtype).removeprefix("torch.")
            if decision.kind == "ternary"
            else None
        ),
        "zero_point": decision.zero_point_dtype is not None,
        "sparsity": None if zeros is None else zeros / (weight.size_n * weight.size_k),
        "bytes_before": weight.nbytes,
        "bytes_after": decision.nbytes,
    }
