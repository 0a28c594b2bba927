# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load models one after the other as an engine's worker does, without an engine.

Usage: load_models.py JOBS, where JOBS is a JSON list of
{"model": directory, "args": {engine arguments}, "read": name of a linear layer}. The
last line begins with "RESULTS " and holds, for each job, the message of the error that
its loading ended with, or the layer's weight [N, K], or null if none was asked for.
With "rank": [rank, size] the model is that rank's part, and with "experts": file the
weights of all experts are saved, {name of the layer: {"w13" and "w2": [E, N, K]}}.

As a module: `load_all(jobs)` runs the script in a process of its own, because vLLM's
groups of ranks belong to a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def load_all(jobs: list[dict[str, Any]]) -> list[Any]:
    """Load every job's model; a result as above for each.

    Raises:
        RuntimeError: the process ended early; holds the end of its output.

    """
    scripts = str(Path(__file__).parents[2] / "scripts")
    result = subprocess.run(
        [sys.executable, __file__, json.dumps(jobs)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": scripts,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = [x for x in result.stdout.splitlines() if x.startswith("RESULTS ")]
    if not lines:
        raise RuntimeError(f"the process ended early: {result.stdout[-6000:]}")
    return json.loads(lines[-1].removeprefix("RESULTS "))


def _load(job: dict[str, Any]) -> Any:
    import torch

    from lib.validate.ranks import tensor_parallel
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    try:
        arguments = {
            "model": job["model"],
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 32,
        }
        arguments |= job.get("args", {})
        config = EngineArgs(**arguments).create_engine_config()
        with set_current_vllm_config(config):
            # A group for experts is only made where the model has some.
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
            with tensor_parallel(*job.get("rank", (0, 1))):
                model = get_model(vllm_config=config)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    if "experts" in job:
        torch.save(_experts(model), job["experts"])
    if "read" not in job:
        return None
    # The parameter itself may be in the layout of a kernel.
    layer = model.get_submodule(job["read"])
    out = layer(torch.eye(layer.input_size))
    return (out[0] if isinstance(out, tuple) else out).t().tolist()


def _experts(model: Any) -> dict[str, dict[str, Any]]:
    """What the parameters of ternary experts stand for, without what precedes a cut."""
    import torch

    from vllm.model_executor.layers.quantization.utils import ternary_format as fmt

    found: dict[str, dict[str, Any]] = {}
    for layer in model.modules():
        for name, cut in getattr(layer, "ternary_cuts", {}).items():
            packed, scale, _ = layer.quant_method.unpacked_weight(layer, name)
            t = fmt.unpack(packed, cut.local_size_k)
            block = layer.quant_method.schemes[name].block_size
            weights = fmt.dequantize(t, scale, None, block, torch.float32)
            parts = found.setdefault(layer.layer_name, {})
            parts[name] = weights[..., cut.lead :]
    return found


def main() -> None:
    import tempfile

    import torch

    from vllm.distributed import init_distributed_environment
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    # A CPU worker replaces it, too: there is no accelerator to ask.
    torch.accelerator.empty_cache = lambda: None
    with tempfile.NamedTemporaryFile() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        results = [_load(job) for job in json.loads(sys.argv[1])]
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
