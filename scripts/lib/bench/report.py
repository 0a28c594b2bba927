# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tables and plots of a benchmark's result."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from lib.bench.layers import TARGETS

PEERS = ("cublas", "humming")  # what "best peer" ranges over


def best_peer(row: dict[str, Any]) -> float:
    """Microseconds of the faster of cuBLAS and Humming; NaN where neither ran."""
    times = [row[name] for name in PEERS if name in row]
    return min(times, default=math.nan)


def ratios(result: dict[str, Any]) -> dict[int, list[float]]:
    """Best peer / ours by number of tokens."""
    found: dict[int, list[float]] = {}
    for row in result["rows"]:
        value = best_peer(row) / row.get("ternary", math.nan)
        if math.isfinite(value):
            found.setdefault(row["M"], []).append(value)
    return found


def w2a8_ratios(result: dict[str, Any]) -> dict[int, dict[str, list[float]]]:
    """cuBLAS, Humming W2A8 and our W2A16 over our W2A8, by number of tokens."""
    found: dict[int, dict[str, list[float]]] = {}
    for row in result["rows"]:
        ours = row.get("ternary_w2a8", math.nan)
        for name in ("cublas", "humming_w2a8", "ternary"):
            value = row.get(name, math.nan) / ours
            if math.isfinite(value):
                found.setdefault(row["M"], {}).setdefault(name, []).append(value)
    return found


def _w2a8_table(result: dict[str, Any]) -> list[str]:
    heads = {
        "cublas": "cuBLAS bf16 / ours",
        "humming_w2a8": "Humming W2A8 / ours",
        "ternary": "our W2A16 / W2A8",
    }
    lines = [
        "",
        "8-bit activations, quantized within the call, and one float32 scale a row",
        "(Humming: one per 128). Geometric mean (least):",
        "",
        "| M | " + " | ".join(heads.values()) + " | target |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for size_m, by_name in sorted(w2a8_ratios(result).items()):
        cells = [
            f"{geometric_mean(by_name[name]):.2f} ({min(by_name[name]):.2f})"
            if name in by_name
            else "-"
            for name in heads
        ]
        target = "W2A16 / W2A8 1.0" if size_m <= 16 else "Humming 1.0"
        if size_m >= 1024:
            target = "cuBLAS 1.5"
        lines.append(f"| {size_m} | {' | '.join(cells)} | {target} |")
    return lines


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def markdown(result: dict[str, Any], labels: dict[str, str]) -> str:
    """The result as a page."""
    names = [name for name in labels if any(name in row for row in result["rows"])]
    humming = f"Humming {result['humming']}" if result["humming"] else "no Humming"
    bandwidth = result["copy_bandwidth"] / 1e12
    lines = [
        f"# Ternary kernels on one {result['device']}",
        "",
        (
            f"{result['date']}, torch {result['torch']}, CUDA {result['cuda']}, "
            f"{humming}, {result['dtype']} activations, 2-bit weights with one float16 "
            "scale per 128. Cold L2, CUDA graphs, medians, microseconds per call. The "
            f"memory floor is each byte once at the {bandwidth:.2f} TB/s that a copy "
            "reached in this run; the matrix floor is 790 TFLOP/s, about what large "
            "bf16 products sustain (the peak is 989)."
        ),
        "",
        "| M | best peer / ours, geometric mean | least | target |",
        "|---|---|---|---|",
    ]
    for size_m, values in sorted(ratios(result).items()):
        target = f"{TARGETS[size_m]:.2f}" if size_m in TARGETS else "-"
        mean = geometric_mean(values)
        lines.append(f"| {size_m} | {mean:.2f} | {min(values):.2f} | {target} |")
    if any("ternary_w2a8" in row for row in result["rows"]):
        lines += _w2a8_table(result)
    lines += [
        "",
        "| layer (N x K) | M | "
        + " | ".join(labels[name] for name in names)
        + " | best peer / ours | memory floor | % of it | matrix floor | % of it |",
        "|---" * (len(names) + 7) + "|",
    ]
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" if name in row else "-" for name in names]
        ours = row.get("ternary", math.nan)
        lines.append(
            f"| {row['layer']} ({row['N']} x {row['K']}) | {row['M']} | "
            + " | ".join(times)
            + f" | {best_peer(row) / ours:.2f} | {row['floor_memory']:.2f} | "
            f"{100 * row['floor_memory'] / ours:.0f} | {row['floor_matrix']:.2f} | "
            f"{100 * row['floor_matrix'] / ours:.0f} |"
        )
    if result["problems"]:
        lines += ["", "Not measured:", ""]
        lines += [f"- {problem}" for problem in result["problems"]]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], labels: dict[str, str], path: Path) -> bool:
    """Draw time over M per layer with the floors; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = list(dict.fromkeys(row["layer"] for row in result["rows"]))
    columns = min(3, len(layers))
    lines = -(-len(layers) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines), squeeze=False
    )
    for axis, layer in zip(axes.flat, layers):
        rows = [row for row in result["rows"] if row["layer"] == layer]
        for name, label in labels.items():
            points = [(row["M"], row[name]) for row in rows if name in row]
            if points:
                width = 2.5 if name == "ternary" else 1.2
                axis.plot(*zip(*points), marker="o", label=label, linewidth=width)
        sizes = [row["M"] for row in rows]
        for name, style in (("floor_memory", ":"), ("floor_matrix", "--")):
            floor = [row[name] for row in rows]
            label = name.replace("_", ": ")
            axis.plot(sizes, floor, "k" + style, linewidth=1, label=label)
        axis.set(
            xscale="log",
            yscale="log",
            title=f"{layer} ({rows[0]['N']} x {rows[0]['K']})",
            xlabel="tokens M",
            ylabel="microseconds",
        )
        axis.grid(True, which="both", alpha=0.3)
    for axis in list(axes.flat)[len(layers) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return True
