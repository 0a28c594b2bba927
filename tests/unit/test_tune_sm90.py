# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The costs of the Hopper kernels' tiles: what the table says, and how it is fitted."""

import itertools

import numpy as np
import pytest

from lib.bench import measurements, tune_sm90
from lib.bench.layers import LAYERS
from lib.bench.sm90_costs import (
    CSRC,
    KERNELS,
    SPLITS,
    UNKNOWN,
    Cut,
    Model,
    fit,
    header,
    least_squares,
    quality,
)
from lib.errors import BuildError

# An H200: clusters cannot use every multiprocessor.
CLUSTERS = {
    (kind, split): (2 if kind == 2 else 1) * (132 if split <= 2 else 120) // split
    for kind in range(4)
    for split in SPLITS
    if kind in (1, 2) or split in (1, 2, 4, 8)
}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def sizes(layer, size_m: int) -> tuple[int, int, int]:
    return size_m, up(layer.size_n, 64), up(layer.size_k, 128)


def test_table_is_as_the_script_writes_it(model):
    text = (CSRC / "sm90_tiles.h").read_text()
    source = text.splitlines()[4].removeprefix("// ")
    assert header(model, source) == text


@pytest.mark.parametrize("kernel", KERNELS)
def test_costs_are_linear(model, kernel):
    """The features are all that a cost depends on, whatever the costs are."""
    rng = np.random.default_rng(len(kernel))
    cuts = list(model.cuts(kernel, CLUSTERS, sizes(LAYERS[1], 64)))
    assert len(cuts) > 3
    for cut, at_once, features in cuts:
        costs = rng.random(5).astype(np.float32)
        where = (KERNELS.index(kernel), cut.tile, cut.split, at_once)
        direct = model.library.cost(
            *where, *sizes(LAYERS[1], 64), np.ctypeslib.as_ctypes(costs)
        )
        assert features @ costs == pytest.approx(direct, rel=1e-5)


def test_features_by_hand(model):
    """8B down, 1024 tokens, two blocks of 128 x 128 along K: waves of 66 tiles."""
    tile = model.shapes["many"].index((2, 1, 128, 1, 1))
    found = model.features("many", Cut(tile, 2), 66, (1024, 4096, 12288))
    waves = -(-(4096 // 128) * (1024 // 128) // 66)
    units = 12288 // 128 // 2 * 2  # k-blocks of a block, two tiles of 64 rows
    assert found.tolist() == [waves * units, waves, 0, waves, waves * 2 * 128 / 4 / 2]


@pytest.mark.parametrize(
    "kernel, tile, split, size",
    [
        ("many", 0, 3, (64, 64, 1024)),  # clusters are powers of two
        ("many", 0, 8, (64, 64, 512)),  # more blocks than k-blocks
        ("few", 0, 1, (9, 64, 1024)),  # a tile of 8 tokens
        ("few", 0, 5, (8, 64, 1024)),  # stages of two k-blocks
        ("rows", 7, 4, (64, 64, 1536)),  # two sets, and six steps
    ],
)
def test_cuts_that_cannot_be(model, kernel, tile, split, size):
    assert model.features(kernel, Cut(tile, split), 16, size) is None
    assert model.features(kernel, Cut(tile, 1), 0, size) is None


def test_least_squares_is_not_negative():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(rows, rows @ [2.0, 0.5]) == pytest.approx([2.0, 0.5])
    assert least_squares(rows, np.array([3.0, 2.0, 1.0]))[1] == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_fit_finds_the_costs_behind_times(kernel):
    """Times by other costs, with noise, of the cuts that the present ones suggest."""
    model = Model()
    rng = np.random.default_rng(KERNELS.index(kernel))
    truth = Model()
    shape = truth.tiles[kernel].shape
    unknown = truth.tiles[kernel] >= UNKNOWN
    truth.tiles[kernel] = np.where(unknown, [0.3, 2.0], truth.tiles[kernel])
    truth.tiles[kernel] *= rng.uniform(0.7, 1.4, shape)
    truth.shared[kernel] *= rng.uniform(0.7, 1.4, 3)
    entries = []
    for layer, size_m in itertools.product(LAYERS, tune_sm90.TOKENS[kernel]):
        m, n_pad, k_pad = sizes(layer, size_m)
        times = []
        for cut, at_once, features in model.cuts(kernel, CLUSTERS, (m, n_pad, k_pad)):
            noise = rng.normal(1, 0.005)
            way = {"tile": list(model.shapes[kernel][cut.tile]), "split": cut.split}
            us = truth.predict(kernel, cut, features) * noise
            times.append({**way, "clusters": at_once, "microseconds": us})
        size = {"M": m, "N_pad": n_pad, "K_pad": k_pad}
        entries.append({"kernel": kernel, **size, "times": times})
    before = quality(model, kernel, entries)
    fit(model, kernel, entries)
    after = quality(model, kernel, entries)
    assert after.error < 0.01 < before.error
    assert after.loss < 0.002 and after.worst < 0.02
    assert model.tiles[kernel][:, 0] == pytest.approx(truth.tiles[kernel][:, 0], 0.05)


def test_fit_keeps_what_was_not_measured():
    model = Model()
    old = model.tiles["many"].copy()
    tile = list(model.shapes["many"][2])
    way = {"tile": tile, "split": 1, "clusters": 132}
    entries = [
        {"M": m, "N_pad": 4096, "K_pad": k, "times": [{**way, "microseconds": us}]}
        for m, k, us in ((256, 2048, 20.0), (256, 4096, 38.0))
    ]
    fit(model, "many", entries)
    assert (np.delete(model.tiles["many"], 2, 0) == np.delete(old, 2, 0)).all()
    assert quality(model, "many", entries).error < 0.01


def test_a_tile_that_is_gone_is_named(model):
    entry = {"M": 64, "N_pad": 64, "K_pad": 1024}
    times = [{"tile": [9, 9, 9, 0, 0], "split": 1, "clusters": 1, "microseconds": 1.0}]
    with pytest.raises(BuildError, match=r"\(9, 9, 9, 0, 0\)"):
        fit(model, "many", [entry | {"times": times}])


def test_measurements_are_merged_by_size():
    def entry(m: int, us: float) -> dict:
        times = [{"microseconds": us}]
        return {"kernel": "few", "M": m, "N_pad": 64, "K_pad": 128, "times": times}

    old = {"date": "old", "entries": [entry(16, 1.0), entry(8, 1.0)]}
    new = {"date": "new", "entries": [entry(16, 2.0)]}
    both = measurements.merged(old, new, tune_sm90.key)
    assert both["date"] == "new"
    assert [(e["M"], e["times"][0]["microseconds"]) for e in both["entries"]] == [
        (8, 1.0),
        (16, 2.0),
    ]
    assert measurements.merged(None, new, tune_sm90.key) == new


def test_offline_without_measurements_says_so(tmp_path, monkeypatch):
    for file in ("sm90_tiles.h", "sm90_prefill_plan.h", "sm90_prefill_few_plan.h"):
        (tmp_path / file).write_text((CSRC / file).read_text())
    (tmp_path / "sm90_s8_plan.h").write_text((CSRC / "sm90_s8_plan.h").read_text())
    monkeypatch.setattr("sys.argv", ["t", "--offline", "--folder", str(tmp_path)])
    with pytest.raises(BuildError, match="sm90_tiles.json is missing"):
        tune_sm90.main()
