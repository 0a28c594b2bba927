# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` as a user starts it, for the tests to talk to."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Activations: the widest that the device's kernels take.
DTYPE = "float32" if DEVICE == "cpu" else "float16"
START_TIMEOUT_S = 600
# Rounding of 16-bit activations moves the logits of these models by about a
# hundredth; in float32 every token must agree.
NEAR_TIE = 0.0 if DTYPE == "float32" else 0.05
# A KV cache of a fixed size: an engine that measures what is free fails as soon as
# another process on the GPU gives memory back meanwhile.
GPU_MEMORY = (
    {}
    if DEVICE == "cpu"
    else {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
)


def engine_env(**extra: str) -> dict[str, str]:
    """Environment of an engine process: offline, small, whichever the device."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **extra,
    }
    if DEVICE == "cpu":
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env


def engine_args(compiled: bool = False) -> list[str]:
    """Arguments that keep an engine small on either device.

    Args:
        compiled: with torch.compile and CUDA graphs, where there is a GPU.

    """
    args = ["--dtype", DTYPE, "--max-num-seqs", "8", "--max-model-len", "128"]
    for name, value in GPU_MEMORY.items():
        args += [f"--{name.replace('_', '-')}", str(value)]
    return args if compiled and DEVICE == "cuda" else [*args, "--enforce-eager"]


@contextlib.contextmanager
def serve(
    model: Path, log: Path, *args: str, compiled: bool = False
) -> Iterator[openai.OpenAI]:
    """Run `vllm serve MODEL`, and give a client once it is healthy.

    Raises:
        RuntimeError: the server ended or did not become healthy; holds its log's end.

    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1"]
    command += ["--port", str(port), *engine_args(compiled), *args]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=engine_env(),
            start_new_session=True,
        )
    try:
        _wait_healthy(process, port, log)
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-6000:]}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server is not healthy: {log.read_text()[-6000:]}")
