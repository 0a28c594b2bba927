# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The cost model of the Hopper kernels: the one they choose with, and its fit.

What a cut costs is linear in the numbers of ``sm90_tiles.h``: the `unit` and `wave` of
its tile, and three that all tiles of a kernel share. `Model` computes it with the
kernels' own headers, compiled by the C++ compiler; `fit` finds the numbers.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import BuildError
from lib.toolchain import find_cxx

CSRC = Path(__file__).resolve().parents[3] / "csrc" / "quantization" / "ternary"
KERNELS = ("many", "few", "rows", "blocks")
SPLITS = range(1, 9)
# Beyond every cost: a tile that nobody has measured yet.
UNKNOWN = 1e6


@dataclass(frozen=True)
class Cut:
    """One way to compute a product: a tile, by its place in the table, and a split."""

    tile: int
    split: int


class Model:
    """Tiles and costs of the headers in `csrc`.

    Raises:
        BuildError: there is no C++ compiler, or the headers do not compile.

    """

    def __init__(self, csrc: Path = CSRC):
        source = Path(__file__).with_suffix(".cpp")
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "costs.so")
            command = [find_cxx().path, "-std=c++20", "-O1", "-fPIC", "-shared"]
            command += [f"-I{csrc}", str(source), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{' '.join(command)}:\n{done.stderr}")
            library = ctypes.CDLL(str(target))
        library.cost.restype = ctypes.c_double
        self.library = library
        # By kernel: the numbers of each tile, and [tiles, 2] and [3] costs.
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        self.tiles: dict[str, np.ndarray] = {}
        self.shared: dict[str, np.ndarray] = {}
        for number, kernel in enumerate(KERNELS):
            shapes, costs = (ctypes.c_int * 320)(), (ctypes.c_float * 128)()
            count = library.tiles(number, shapes, costs)
            self.shapes[kernel] = [
                tuple(shapes[5 * i : 5 * i + 5]) for i in range(count)
            ]
            self.tiles[kernel] = np.array(costs[: 2 * count]).reshape(count, 2)
            shared = (ctypes.c_float * 3)()
            library.shared_costs(number, shared)
            self.shared[kernel] = np.array(shared[:])

    def features(
        self, kernel: str, cut: Cut, clusters: int, sizes: tuple[int, int, int]
    ) -> np.ndarray | None:
        """How often a cut pays unit, wave and the shared costs; None if it cannot be.

        `clusters`: thread block clusters of the split that run at one time. `sizes`:
        M, N_pad, K_pad.
        """
        found = []
        for i in range(5):
            costs = (ctypes.c_float * 5)(*(float(i == j) for j in range(5)))
            where = (KERNELS.index(kernel), cut.tile, cut.split, clusters, *sizes)
            found.append(self.library.cost(*where, costs))
        return None if min(found) < 0 else np.array(found)

    def predict(self, kernel: str, cut: Cut, features: np.ndarray) -> float:
        """Microseconds by the present costs."""
        costs = [*self.tiles[kernel][cut.tile], *self.shared[kernel]]
        return float(features @ np.array(costs))

    def costs(self, kernel: str) -> np.ndarray:
        """All costs of a kernel in a row: unit and wave of each tile, then three."""
        return np.concatenate([self.tiles[kernel].ravel(), self.shared[kernel]])

    def set_costs(self, kernel: str, costs: np.ndarray) -> None:
        """Replace them."""
        self.tiles[kernel] = costs[:-3].reshape(-1, 2)
        self.shared[kernel] = costs[-3:]

    def cuts(
        self, kernel: str, clusters: dict[tuple[int, int], int], sizes
    ) -> Iterator[tuple[Cut, int, np.ndarray]]:
        """Every cut of a product, its clusters at one time, and its features.

        `clusters`: by the number of `clusters_of` and the blocks of one.
        """
        for tile, shape in enumerate(self.shapes[kernel]):
            for split in SPLITS:
                shared = shape[4] if kernel == "many" else 1  # loads of tokens
                size = clusters_of(kernel, shape), split * shared
                at_once = clusters.get(size, 0)
                cut = Cut(tile, split)
                features = self.features(kernel, cut, at_once, sizes)
                if features is not None:
                    yield cut, at_once, features


def clusters_of(kernel: str, shape: Sequence[int]) -> int:
    """The `kernel` of the op ternary_sm90_clusters for a tile."""
    if kernel == "few":
        return shape[4]
    return 0 if kernel == "many" else 3


def least_squares(rows: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |rows x - right|, by leaving out what gets negative."""
    free = list(range(rows.shape[1]))
    while True:
        x = np.zeros(rows.shape[1])
        x[free] = np.linalg.lstsq(rows[:, free], right, rcond=None)[0]
        if not free or x[free].min() >= 0:
            return x
        free.remove(min(free, key=lambda i: x[i]))


def fit(model: Model, kernel: str, entries: list[dict[str, Any]]) -> None:
    """Replace the model's costs of a kernel by those that fit the entries best.

    Relative errors count, those of the fastest cuts of a size most. A tile that the
    entries lack keeps its costs, and one that they hardly have stays near them: a cost
    ten percent from what it was counts as a measurement that is off by one percent.
    """
    count = len(model.shapes[kernel])
    rows, right = [], []
    for entry in entries:
        best = min(t["microseconds"] for t in entry["times"])
        for time in entry["times"]:
            cut, features = timed(model, kernel, entry, time)
            row = np.zeros(2 * count + 3)
            row[2 * cut.tile : 2 * cut.tile + 2] = features[:2]
            row[2 * count :] = features[2:]
            weight = best / time["microseconds"] ** 2
            rows.append(row * weight)
            right.append(time["microseconds"] * weight)
    old = model.costs(kernel)
    known = np.abs(np.array(rows)).max(0) > 0
    for i in np.flatnonzero(known & (old > 0) & (old < UNKNOWN)):
        rows.append(np.eye(len(old))[i] * 0.1 / old[i])
        right.append(0.1)
    matrix, target = np.array(rows), np.array(right)
    new = old.copy()
    new[known] = least_squares(matrix[:, known], target)
    model.set_costs(kernel, new)


def refine(model: Model, kernel: str, entries: list[dict[str, Any]]) -> None:
    """Move the model's costs of a kernel to where its choices lose least.

    The least errors are not the least losses: at most sizes a few cuts lie within
    some percent of the best. From `fit` and from the costs as they were, single costs
    go up and down in ever smaller steps while that helps. Errors count, too: two
    launches, and few or many tokens, are compared by the costs themselves.
    """
    before = model.costs(kernel)
    fit(model, kernel, entries)
    fitted = model.costs(kernel)
    starts = fitted, np.where(before < UNKNOWN, before, fitted)
    measured = _Measured(model, kernel, entries)
    best = min(map(measured.descend, starts), key=measured.objective)
    model.set_costs(kernel, best)


class _Measured:
    """The entries of a kernel as arrays, and what costs mean for them."""

    WORST, ERROR, NEAR = 0.15, 2.0, 0.015
    FIRST_STEP, LAST_STEP = 0.04, 0.002

    def __init__(self, model: Model, kernel: str, entries: list[dict[str, Any]]):
        rows = [
            (*timed(model, kernel, entry, time), time["microseconds"])
            for entry in entries
            for time in entry["times"]
        ]
        self.tile = np.array([cut.tile for cut, _, _ in rows])
        self.features = np.array([features for _, features, _ in rows])
        self.time = np.array([time for _, _, time in rows])
        ends = np.cumsum([len(entry["times"]) for entry in entries])
        self.sizes = [slice(a, b) for a, b in zip([0, *ends], ends)]
        self.best = np.concatenate(
            [np.full(s.stop - s.start, self.time[s].min()) for s in self.sizes]
        )

    def objective(self, costs: np.ndarray) -> float:
        """Expected loss if costs were a little off, worst loss and error."""
        tiles = costs[:-3].reshape(-1, 2)[self.tile]
        cost = (self.features[:, :2] * tiles).sum(1) + self.features[:, 2:] @ costs[-3:]
        loss = self.time / self.best - 1
        expected, worst = 0.0, 0.0
        for s in self.sizes:
            least = cost[s].min()
            chance = np.exp(-(cost[s] / least - 1) / self.NEAR)
            expected += float((chance / chance.sum()) @ loss[s])
            worst = max(worst, float(loss[s][np.argmin(cost[s])]))
        error = (cost / self.time - 1) * self.best / self.time
        error = float(np.sqrt(np.mean(np.square(error))))
        return expected / len(self.sizes) + self.WORST * worst + self.ERROR * error

    def descend(self, costs: np.ndarray) -> np.ndarray:
        """Costs near by of a lower objective."""
        rng = np.random.default_rng(0)
        least, step = self.objective(costs), self.FIRST_STEP
        while step > self.LAST_STEP:
            before = least
            for i in rng.permutation(np.flatnonzero((costs > 0) & (costs < UNKNOWN))):
                for factor in (1 + step, 1 - step):
                    moved = costs.copy()
                    moved[i] *= factor
                    if (found := self.objective(moved)) < least:
                        costs, least = moved, found
            if least == before:
                step /= 2
        return costs


def timed(
    model: Model, kernel: str, entry: dict[str, Any], time: dict[str, Any]
) -> tuple[Cut, np.ndarray]:
    """The cut and the features of one of an entry's times."""
    shape = tuple(time["tile"])
    if shape not in model.shapes[kernel]:
        raise BuildError(f"no kernel has the tile {shape} any more; measure again")
    cut = Cut(model.shapes[kernel].index(shape), time["split"])
    sizes = entry["M"], entry["N_pad"], entry["K_pad"]
    features = model.features(kernel, cut, time["clusters"], sizes)
    if features is None:
        raise BuildError(f"{shape} and split {cut.split} do not fit {entry}")
    return cut, features


@dataclass
class Quality:
    """How well costs describe measurements."""

    error: float  # root mean square of relative errors
    loss: float  # geometric mean of chosen / best, less 1
    worst: float  # the same at the worst size
    worst_size: str


def quality(model: Model, kernel: str, entries: list[dict[str, Any]]) -> Quality:
    """The errors of the costs, and what the choices by them lose."""
    errors: list[float] = []
    losses = []
    for entry in entries:
        predicted, measured = [], []
        for time in entry["times"]:
            cut, features = timed(model, kernel, entry, time)
            predicted.append(model.predict(kernel, cut, features))
            measured.append(time["microseconds"])
        errors += [p / m - 1 for p, m in zip(predicted, measured) if p < UNKNOWN]
        chosen = measured[int(np.argmin(predicted))]
        losses.append(chosen / min(measured))
    worst = int(np.argmax(losses))
    size = entries[worst]
    return Quality(
        error=float(np.sqrt(np.mean(np.square(errors)))),
        loss=float(np.exp(np.mean(np.log(losses))) - 1),
        worst=losses[worst] - 1,
        worst_size=f"{size['N_pad']} x {size['K_pad']}, M = {size['M']}",
    )


# --- The header

_STRUCTS = {
    "many": (
        "Variant",
        ("warpgroups", "tiles", "tokens", "sets", "multicast"),
        "kVariants",
    ),
    "few": (
        "FewVariant",
        ("rows", "sets", "tokens", "blocks", "resident"),
        "kFewVariants",
    ),
    "rows": ("Variant", ("warpgroups", "tiles", "tokens", "sets"), "kRowVariants"),
    "blocks": ("Variant", ("warpgroups", "tiles", "tokens", "sets"), "kBlockVariants"),
}
_SHARED = {
    "many": ("SplitCost", "kSplit"),
    "few": ("FewCost", "kFewCost"),
    "rows": ("SplitCost", "kRowSplit"),
    "blocks": ("SplitCost", "kBlockSplit"),
}
_SPLIT_COST = ["struct SplitCost {", "  float meeting, exchange;", "};"]
_FEW_COST = ["struct FewCost {", "  float launch, meeting, token;", "};"]


def _struct(kernel: str) -> list[str]:
    name, fields, _ = _STRUCTS[kernel]
    lines = [f"struct {name} {{", f"  int {', '.join(fields)};"]
    return [*lines, "  float unit, wave;", "};"]


def _tables(model: Model, kernel: str) -> list[str]:
    struct, fields, name = _STRUCTS[kernel]
    lines = [f"constexpr {struct} {name}[] = {{"]
    for shape, costs in zip(model.shapes[kernel], model.tiles[kernel]):
        numbers = [str(n) for n in shape[: len(fields)]]
        numbers += [f"{cost:.4f}f" for cost in costs]
        lines.append(f"    {{{', '.join(numbers)}}},")
    struct, name = _SHARED[kernel]
    shared = model.shared[kernel][0 if kernel == "few" else 1 :]
    values = ", ".join(f"{cost:.4f}f" for cost in shared)
    return [*lines, "};", f"constexpr {struct} {name} = {{{values}}};"]


def header(model: Model, source: str) -> str:
    """sm90_tiles.h. `source`: a line that says where the costs come from."""
    off, on = "// clang-format off", "// clang-format on"
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
        "//",
        "// Written by scripts/lib/bench/tune_sm90.py.",
        f"// {source}",
        "//",
        "// The tiles that the Hopper kernels are built for and what they cost, in",
        "// microseconds: `unit` for 64 rows of a step along K (128 k; int8: 256 k) in",
        "// a thread block, `wave` for the ends of a tile. Where blocks split K,",
        "// `meeting` for their meeting, `exchange` for each KiB of partial sums that",
        "// a block sends (few tokens: `token` for each of a tile).",
        "#pragma once",
        "",
        "namespace vllm::ternary::sm90 {",
        "",
        "// Many tokens.",
        *_struct("many"),
        *_SPLIT_COST,
        off,
        *_tables(model, "many"),
        on,
        "",
        "// Few tokens. `blocks`: thread blocks that a multiprocessor can hold;",
        "// `resident`: that it gets.",
        *_struct("few"),
        *_FEW_COST,
        off,
        *_tables(model, "few"),
        on,
        "",
        "}  // namespace vllm::ternary::sm90",
        "",
        "namespace vllm::ternary::s8 {",
        "",
        "// 8-bit activations, one scale a row (kRow) or one per block of k (kBlock).",
        *_struct("rows"),
        *_SPLIT_COST,
        off,
        *_tables(model, "rows"),
        *_tables(model, "blocks"),
        on,
        "",
        "}  // namespace vllm::ternary::s8",
    ]
    return "\n".join(lines) + "\n"
