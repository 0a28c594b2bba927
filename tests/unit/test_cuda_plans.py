# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the CUDA kernels' host code launches, for devices and sizes of every kind.

g++ compiles csrc/quantization/ternary with the emulator's headers in place of CUDA's
(tests/emulate/include); the host code then runs for made-up devices, and every launch
is checked: each output once, each k once and in no empty part, grids, clusters, shared
memory and tensor maps within the limits of CUDA and of the device, indices within their
types. No kernel runs.
"""

import ctypes
import json
import random
import re
import subprocess
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from lib.bench import tune
from lib.toolchain import find_cxx

SOURCES = Path(__file__).parents[2] / "csrc/quantization/ternary"
HERE = Path(__file__).parent / "cuda_plans"
EMULATE = Path(__file__).parents[1] / "emulate"
# Device code compiles without its inline assembly: `asm(...)` is nothing, and
# `asm volatile(...)` becomes `asm("")`.
NO_ASSEMBLY = ["-Dasm(...)=", '-Dvolatile(...)=("")', "-D__shared__="]
# Sources whose names do not clash, compiled together: the headers are read once.
UNITS = [
    ["mma_gemm", "mma_gemm_half", "mma_gemm_bfloat16"],
    [
        *("mma_s8", "mma_s8_half", "mma_s8_bfloat16"),
        *("mma_s8_direct_half", "mma_s8_direct_bfloat16"),
        *("mma_s8_tokens_half", "mma_s8_tokens_bfloat16"),
    ],
    [
        *("sm90_prefill", "sm90_prefill_half", "sm90_prefill_bfloat16"),
        *("sm90_prefill_few_half", "sm90_prefill_few_bfloat16"),
    ],
    ["sm90_s8", "sm90_s8_rows", "sm90_s8_blocks"],
    ["device_info", "gemm_dispatch", "w2a8_quantize", "moe_gemm"],
]
NAIVE = "reference_gemm", "reference_w2a8"
DIRECT = range(8, 14)  # variants of mma_s8_gemm from kDirect on: mma_s8_direct.cuh
ONE = range(14, 17)  # and from kDirectOne on: one token of 8 bits
ROW = 1 << 20  # a block that covers any row
HALF, BFLOAT16, FLOAT = range(3)
TABLE, MMA, MMA_S8, HOPPER = range(4)  # kinds of check_gemm
W_TABLE, W_MMA, W_INSIDE, W_HOPPER = range(4)  # and of check_w2a8


class Device(NamedTuple):
    """Compute capability, multiprocessors, shared memory in KiB, multiprocessors
    among which a cluster must find room, and the index it is known by."""

    capability: int
    processors: int
    shared: int
    group: int
    index: int

    def __str__(self) -> str:
        return f"sm_{self.capability}x{self.processors}"


DEVICES = [
    Device(*row, index)
    for index, row in enumerate(
        [(90, n, 227, 16 if n % 18 else 18) for n in (1, 2, 7, 16, 60, 78, 114, 132)]
        + [(80, n, 163, 16) for n in (14, 108)]
        + [(86, n, 99, 12) for n in (1, 84)]
        + [
            (89, 142, 99, 12),
            (100, 148, 227, 16),
            (120, 48, 99, 12),
            (120, 170, 99, 12),
        ]
    )
]
H200 = DEVICES[7]
# What models have, and what they do not.
LAYERS = [(6144, 1024), (1024, 3072), (1024, 1024), (6144, 4096), (24576, 4096)]
LAYERS += [(4096, 12288), (34816, 5120), (5120, 17408), (151936, 1024), (384, 1536)]
LAYERS += [(1, 1), (63, 127), (65, 129), (250, 2050), (100, 8), (777, 333)]


class Plans:
    """The compiled host code; errors are those of cuda_plans/checks.cpp."""

    def __init__(self, library: Path):
        self.native = ctypes.CDLL(str(library))
        for name in ("check_gemm", "check_w2a8", "check_moe", "kernels"):
            getattr(self.native, name).restype = ctypes.c_char_p
        for d in DEVICES:
            self.add(d)

    def add(self, d: Device) -> None:
        self.native.set_device(
            d.index, d.capability, d.processors, d.shared << 10, d.group
        )

    def gemm(
        self,
        d: Device,
        kind: int,
        sizes: tuple[int, int, int],
        block: int = 128,
        types: tuple[int, int] = (BFLOAT16, HALF),
        zero_point: bool = False,
        config: tuple[int, int, int] = (0, 132, 1),
    ) -> list[str]:
        """Kernels that a product launches: none where the kind does not take it."""
        found = self.native.check_gemm(
            d.index, kind, *sizes, block, *types, zero_point, *config
        )
        case = (str(d), kind, sizes, block, types, zero_point, config)
        return self._names(found, case)

    def w2a8(
        self,
        d: Device,
        kind: int,
        sizes: tuple[int, int, int],
        block: int = ROW,
        types: tuple[int, int] = (BFLOAT16, HALF),
        norm: bool = False,
        ends: tuple[int, ...] = (),
        config: tuple[int, int, int] = (0, 132, 1),
    ) -> list[str]:
        ends = ends or (sizes[1],)
        array = (ctypes.c_int * len(ends))(*ends)
        found = self.native.check_w2a8(
            d.index, kind, *sizes, block, *types, norm, len(ends), array, *config
        )
        return self._names(found, (str(d), kind, sizes, block, types, ends, config))

    def experts(
        self, d: Device, sizes: tuple[int, int, int], dtype: int, zero_point: bool
    ) -> int:
        """Launches of the experts' product of blocks of routes, N and K."""
        blocks, n, k = sizes
        found = self.native.check_moe(d.index, n, k, blocks, dtype, zero_point)
        return len(self._names(found, (str(d), sizes, dtype, zero_point)))

    def _names(self, found: bytes, case: tuple[object, ...]) -> list[str]:
        assert found in (b"", b"unsupported"), (found.decode(), case)
        return self.native.kernels().decode().splitlines()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plans]:
    folder = tmp_path_factory.mktemp("plans")
    names = ("plans", "checks", "digits", "tokens")
    files = [HERE / f"{name}.cpp" for name in names]
    files.append(EMULATE / "tensor_map.cpp")
    for i, unit in enumerate(UNITS):
        files.append(folder / f"unit{i}.cpp")
        files[-1].write_text("".join(f'#include "{name}.cu"\n' for name in unit))
    command = [find_cxx().path, "-std=c++20", "-fPIC", "-w", *NO_ASSEMBLY]
    command += [f"-I{path}" for path in (EMULATE / "include", HERE, SOURCES)]
    command += ["-include", "cuda_runtime.h"]  # as nvcc does

    def compile_file(path: Path) -> str:
        out = str(folder / path.stem) + ".o"
        speed = "-O1" if path.parent == HERE else "-O0"
        subprocess.run([*command, speed, "-c", str(path), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_file, files))
    library = folder / "plans.so"
    subprocess.run([command[0], "-shared", *objects, "-o", str(library)], check=True)
    yield Plans(library)


def rng(*case: object) -> random.Random:
    return random.Random(zlib.crc32(repr(case).encode()))


def random_sizes(r: random.Random) -> tuple[int, int, int]:
    m = r.choice([r.randint(1, 96), r.randint(1, 600), r.randint(1, 1 << 17)])
    n = r.choice([r.randint(1, 300), r.randint(1, 40000), r.randint(1, 300000)])
    k = r.choice([r.randint(1, 600), r.randint(1, 20000), 128 * r.randint(1, 300)])
    if r.random() < 0.2:
        n, k = r.choice(LAYERS)
    return m, n, k


def random_block(r: random.Random) -> int:
    return r.choice([32, 64, 96, 128, 256, 384, 512, 1024, 36, ROW])


def random_config(r: random.Random) -> tuple[int, int, int]:
    variant = r.choice([*range(4), *DIRECT])
    return variant, r.choice([1, 2, 66, 132, 999, 1 << 17]), r.randint(1, 8)


@pytest.mark.parametrize("d", DEVICES, ids=str)
def test_every_number_of_tokens(plans: Plans, d: Device) -> None:
    """Both tables, M from 1 to beyond their last class, for layers of models."""
    edges = [1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 48, 64, 65, 96, 97, 1000, 4096]
    for m in range(1, 101) if d == H200 else edges:
        for i, (n, k) in enumerate(LAYERS):
            types = (m + i) % 2, HALF
            names = plans.gemm(d, TABLE, (m, n, k), 128, types)
            assert names and not set(names) & set(NAIVE)
            names = plans.w2a8(d, W_TABLE, (m, n, k), ROW, types)
            assert names and not set(names) & set(NAIVE)


@pytest.mark.parametrize("kind", [TABLE, MMA, MMA_S8, HOPPER])
@pytest.mark.parametrize("d", DEVICES, ids=str)
def test_random_products(plans: Plans, d: Device, kind: int) -> None:
    r, taken = rng(d, kind), 0
    for _ in range(200):
        taken += bool(
            plans.gemm(
                d,
                kind,
                random_sizes(r),
                random_block(r),
                (r.randrange(2), r.randrange(3)),
                r.random() < 0.2,
                random_config(r),
            )
        )
    assert taken > (10 if kind != HOPPER or d.capability == 90 else -1)


@pytest.mark.parametrize("kind", [W_TABLE, W_MMA, W_INSIDE, W_HOPPER])
@pytest.mark.parametrize("d", DEVICES, ids=str)
def test_random_quantized_products(plans: Plans, d: Device, kind: int) -> None:
    """With the quantization in front, and parts that end anywhere."""
    r, taken = rng("w2a8", d, kind), 0
    for _ in range(200):
        m, n, k = random_sizes(r)
        m = r.randint(1, 16) if kind == W_INSIDE else m
        ends = sorted(r.randint(0, n) for _ in range(r.choice([0, 0, 1, 2, 4])))
        taken += bool(
            plans.w2a8(
                d,
                kind,
                (m, n, k),
                random_block(r),
                (r.randrange(2), r.randrange(3)),
                r.random() < 0.3,
                (*ends, n),
                random_config(r),
            )
        )
    assert taken > (10 if kind != W_HOPPER or d.capability == 90 else -1)


@pytest.mark.parametrize("d", DEVICES, ids=str)
def test_direct_kernels(plans: Plans, d: Device) -> None:
    """One to sixteen tokens: what is built is launched where there are clusters,
    nothing elsewhere, nor for what they do not take."""
    r, found = rng("direct", d), set()
    for i in range(10_000 if d == H200 else 1500):
        n = r.randint(1, r.choice([300, 40_000, 40_000, 1_048_560]))
        split = r.choice([1, 1, 1, 2, 4, 8, 9])
        k = 32 * r.randint(1, r.choice([64, 140, 700]) * min(split, 8))
        if r.random() < 0.1:
            k += r.randint(1, 31)
        elif r.random() < 0.2:
            k = 128 * r.choice([4, 8, 16, 32]) * min(split, 8)
        m, types = r.randint(1, 3), (i % 2, HALF)
        block = r.choice([128, 256, 2048, ROW])
        config = (r.choice(DIRECT[:3]), random_config(r)[1], split)
        names = plans.gemm(d, MMA_S8, (m, n, k), block, types, config=config)
        assert len(names) == 1
        if m > 2 or k % 32:
            assert "::mma_s8_kernel<" in names[0]
        found.update(names)
        m, kind = r.choice([1, 8, 16, r.randint(2, 17)]), r.choice([W_INSIDE, W_MMA])
        if m > 16:
            kind = W_MMA
        config = (r.choice(DIRECT), *config[1:])
        names = plans.w2a8(d, kind, (m, n, k), block, types, config=config)
        assert len(names) == 1
        if m > 16 or k % 32 or k <= 384:
            assert "::mma_s8_kernel<" in names[0]
        found.update(names)
        config = (r.choice(ONE), *config[1:])
        names = plans.w2a8(d, W_INSIDE, (1, n, k), block, types, config=config)
        assert len(names) == 1
        # With scales of blocks by the tokens' kernel.
        assert k % 32 == 0 or "::mma_s8_kernel<" in names[0]
        assert k <= block or "::direct_digits" not in names[0]
        found.update(names)
    # Digits, with all warps along K or not; an odd k tile is loaded on its own.
    ends = {(1, 0, "true"), (1, 0, "false"), (2, 1, "true"), (2, 1, "false")}
    ends |= {(0, 3, "true"), (0, 5, "true")}
    # 8 bits: whether quantized inside, one scale per row, up to so many tokens, k
    # tiles of a warp, and rounds of quantization.
    shapes = {(r, 8, n) for r in ("true", "false") for n in (1, 2)}
    shapes |= {("true", 16, 1), ("true", 16, 2), ("false", 16, 1)}
    wanted = set()
    for dtype in ("__half", "__nv_bfloat16") if d.capability >= 90 else ():
        one = ends | {(3, 1, "true")}
        wanted |= {("digits", dtype, 1, *end, "false") for end in one}
        wanted |= {("digits", dtype, 1, *end, "true") for end in one}
        wanted |= {("digits", dtype, 2, *end, "false") for end in ends}
        for row, tokens, tiles in shapes:
            wanted.add(("tokens", dtype, "false", row, tokens, tiles, 1))
            for rounds in (1, 2, 4) if tokens == 8 else ():
                if tiles > 1 or rounds < 4:
                    wanted.add(("tokens", dtype, "true", row, 8, tiles, rounds))
    direct = [re.search(r"::direct_(\w+)_kernel<(.*?)>", name) for name in found]
    launched = {
        tuple(int(v) if v.isdigit() else v for v in (m[1], *m[2].split(", ")))
        for m in direct
        if m
    }
    assert launched <= wanted and bool(launched) == bool(wanted), launched - wanted
    assert d != H200 or launched == wanted, wanted - launched


@pytest.mark.parametrize("d", [d for d in DEVICES if d.capability == 90], ids=str)
def test_few_tokens_and_short_rows(plans: Plans, d: Device) -> None:
    """A cluster shares out stages, of which short rows have few."""
    for k in [*range(128, 2049, 128), 3072, 5000]:
        for n in [64, 384, 832, 1024, 2944]:
            for m in (1, 8, 16, 32, 64, 65, 1024):
                assert plans.gemm(d, HOPPER, (m, n, k), ROW)
                assert plans.w2a8(d, W_HOPPER, (m, n, k), ROW)
                assert plans.w2a8(d, W_HOPPER, (m, n, k), 128) or k < 256


def test_any_number_of_multiprocessors(plans: Plans) -> None:
    """From a slice of a GPU to more than there are, in groups of any size."""
    for i, processors in enumerate(range(1, 160, 3)):
        for d in (
            Device(90, processors, 227, 16 + i % 3, 16 + i),
            Device(89, processors, 99, 12, 80 + i % 40),
        )[: 2 if i < 40 else 1]:
            plans.add(d)
            for m in (1, 4, 12, 24, 64, 100, 1000):
                for n, k in LAYERS[:6] + LAYERS[-3:]:
                    plans.gemm(d, TABLE, (m, n, k))
                    plans.w2a8(d, W_TABLE, (m, n, k))


@pytest.mark.parametrize("d", [H200, DEVICES[9], DEVICES[12]], ids=str)
def test_extremes(plans: Plans, d: Device) -> None:
    """Sizes whose outputs or weights pass 2^31, and sizes that only the naive take."""
    million = 1 << 20
    for m in (1, 8, 64, 65535 * 8, 65535 * 8 + 1, 65536 * 16):
        for n, k in [(200_000, 128), (262_144, 16_384), (64, 32_640), (64, 33_024)]:
            for zero_point in (False, True):
                plans.gemm(d, TABLE, (m, n, k), 128, zero_point=zero_point)
            plans.w2a8(d, W_TABLE, (m, n, k), 128)
            plans.w2a8(d, W_TABLE, (m, n, k), ROW)
    for m in (1, 8, 64, 4096):
        for zero_point in (False, True):
            for n in (million - 64, million, 4 * million, 64 * million):
                plans.gemm(d, TABLE, (m, n, 128), 128, zero_point=zero_point)
            sizes = (m, 262_144, million)
            # More scales than 32 bits count.
            assert plans.gemm(d, TABLE, sizes, 32, zero_point=True) == [NAIVE[0]]
        plans.w2a8(d, W_TABLE, (m, 64 * million, 128), 128)


@pytest.mark.parametrize("d", [H200, DEVICES[9], DEVICES[12]], ids=str)
def test_any_number_of_routes(plans: Plans, d: Device) -> None:
    """A launch takes 65535 blocks of routes."""
    for blocks, launches in [(1, 1), (65535, 1), (65536, 2), (131070, 2), (131071, 3)]:
        for dtype in (HALF, BFLOAT16):
            for zero_point in (False, True):
                sizes = blocks, 1500 + dtype, 2000
                assert plans.experts(d, sizes, dtype, zero_point) == launches
    most = (2**31 - 1) // 16
    assert plans.experts(d, (most, 64, 128), HALF, False) == -(-most // 65535)


@pytest.mark.parametrize("d", DEVICES, ids=str)
def test_what_no_tensor_core_takes(plans: Plans, d: Device) -> None:
    for m in (1, 16, 64, 500):
        assert plans.gemm(d, TABLE, (m, 100, 200), 36) == [NAIVE[0]]
        assert plans.w2a8(d, W_TABLE, (m, 100, 200), 36) == [NAIVE[1]]
        assert plans.gemm(d, TABLE, (m, 100, 2 * ROW), 128, zero_point=True) == [
            NAIVE[0]
        ]


def test_the_table_names_kernels_that_run(plans: Plans) -> None:
    """Every entry, for its own sizes, on the device that it was measured on."""
    table = json.loads((SOURCES / "dispatch_table.json").read_text())
    header = (SOURCES / "dispatch_table.h").read_text()
    entries = re.findall(r"\{(\d+), (\d+), (\d+), (\d), (\d), (\d+), (\d+)\}", header)
    assert header == tune.header(table) and len(entries) > 100
    split = header.index("kW2A8Table")
    first = len(re.findall(r"\{\d+, \d+, \d+, \d, \d", header[:split]))
    names = {
        (False, 0): "::mma_gemm_kernel<",
        (False, 1): "::sm90::",
        (False, 2): "::mma_s8_kernel<",
        (True, 0): "::mma_s8_kernel<",
        (True, 1): "::s8::s8_kernel<",
        (True, 2): "::mma_s8_kernel<",
    }
    for i, entry in enumerate(entries):
        m, n, k, kernel, *_, variant = map(int, entry)
        w2a8 = i >= first
        # Behind a direct kernel's: for what that does not take.
        if i and entry[:3] == entries[i - 1][:3]:
            assert int(entries[i - 1][6]) >= DIRECT[0] > variant
            k -= 8
        call = plans.w2a8 if w2a8 else plans.gemm
        found = call(H200, TABLE, (m, n, k), ROW if w2a8 else 128)
        wanted = names[w2a8, kernel]
        if variant in DIRECT:
            wanted = "::direct_tokens_kernel<" if w2a8 else "::direct_digits_kernel<"
        if variant in ONE:
            wanted = "::direct_digits_kernel<"
        assert found and all(wanted in name for name in found), entry
        # Inside: each token's 8-bit form is made by every thread block.
        own = r"S8Input\)1|direct_tokens_kernel<\w+, true|direct_digits.*true>"
        inside = [bool(re.search(own, name)) for name in found]
        assert not w2a8 or all(inside) == (kernel == 2), found


def test_few_multiprocessors_are_for_few_rows() -> None:
    """Else smaller neighbours leave some idle that the measured layer did not."""
    header = (SOURCES / "dispatch_table.h").read_text()
    for entry in re.findall(r"\{\d+, (\d+), \d+, \d, \d, (\d+), \d+\}", header):
        n, sixths = map(int, entry)
        assert sixths >= 6 or n <= tune.FEW_ROWS, entry


def test_what_the_direct_kernels_do_not_take(plans: Plans) -> None:
    """Goes to the fastest of the other kernels, not to these with the same cut."""
    own = "S8Input)1"  # every thread block quantizes the tokens
    for m in (2, 4, 5, 8):
        for n, k in ((5120, 9216), (7168, 9248), (4096, 6152), (6144, 4104)):
            (name,) = plans.w2a8(H200, W_TABLE, (m, n, k))
            assert "::mma_s8_kernel<" in name and own not in name, (m, n, k)
    (name,) = plans.w2a8(H200, W_TABLE, (1, 4096, 4096), norm=True)
    table = (SOURCES / "dispatch_table.h").read_text().split("kW2A8Table")[1]
    *_, other = re.findall(r"\{1, 4096, 4096, [02], (\d+), (\d+), (\d+)\}", table)
    split, sixths, variant = map(int, other)
    config = (variant, H200.processors * sixths // 6 // split, split)
    (wanted,) = plans.w2a8(H200, W_MMA, (1, 4096, 4096), config=config)
    assert name == wanted
    # Scales of blocks: not to the 16-bit kernel, but to that for up to eight tokens.
    for k in (1024, 4096):
        (name,) = plans.w2a8(H200, W_TABLE, (1, 4096, k), 128)
        assert "::direct_tokens_kernel<" in name and "true, false, 8" in name
    for m in (1, 2):
        (name,) = plans.gemm(H200, TABLE, (m, 4096, 4096), 64)
        assert "::mma_gemm_kernel<" in name
        for d in DEVICES:
            if d.capability < 90:
                (name,) = plans.gemm(d, TABLE, (m, 4096, 4096))
                assert "::mma_gemm_kernel<" in name


def test_tuning_knows_a_refusal() -> None:
    """Each text by which it tells one from a fault is in a kernel's sources."""
    sources = "".join(path.read_text() for path in sorted(SOURCES.glob("*.cu*")))
    assert all(text in sources for text in tune.REFUSALS)
    assert not any(
        text in "CUDA error: illegal memory access" for text in tune.REFUSALS
    )


def test_devices_are_not_mixed_up(plans: Plans) -> None:
    """A device's own limits and multiprocessors, whatever its index has in common."""
    other = Device(90, 60, 227, 16, H200.index + 64)  # no other test's
    plans.add(other)
    for d in (H200, other, H200):
        for m in (8, 64, 4096):
            assert plans.gemm(d, TABLE, (m, 24576, 4096))
            assert plans.w2a8(d, W_HOPPER, (m, 24576, 4096))
