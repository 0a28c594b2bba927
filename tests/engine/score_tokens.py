# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Complete prompts greedily and save the log-probabilities of every token.

Usage: score_tokens.py JOBS.json, a list of {"model": folder, "prompts": lists of token
ids, "steps": tokens to make, "out": file, "engine": further engine arguments}. Writes
{"tokens": [prompts, steps], "logprobs": [prompts, steps, vocabulary]} with torch.save.

As a module: `score(models, ...)` runs the script in a process of its own.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

Scores = dict[str, torch.Tensor]


def score(
    models: Mapping[str, Path],
    prompts: list[list[int]],
    steps: int,
    tp: int,
    folder: Path,
) -> dict[str, Scores]:
    """Run an engine of `tp` ranks for each model, one after the other.

    Args:
        models: directories by name.
        prompts: token ids.
        steps: tokens to make.
        tp: tensor-parallel ranks.
        folder: an empty directory.

    Returns:
        What the script writes, by name.

    """
    from server import DEVICE, DTYPE, GPU_MEMORY, engine_env

    engine = {"dtype": DTYPE, "tensor_parallel_size": tp, **GPU_MEMORY}
    jobs = [
        {
            "model": str(model),
            "prompts": prompts,
            "steps": steps,
            "out": str(folder / f"{name}.pt"),
            "engine": engine,
        }
        for name, model in models.items()
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if DEVICE == "cpu" and tp > 1:
        # One core for each rank, where the machine has a single NUMA node.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    result = subprocess.run(
        [sys.executable, __file__, str(folder / "jobs.json")],
        env=engine_env(**env),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return {name: torch.load(folder / f"{name}.pt") for name in models}


def run(job: dict) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=128,
        max_logprobs=-1,
        **job["engine"],
    )
    sampling = SamplingParams(
        max_tokens=job["steps"],
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling
    )
    logprobs = [
        [
            [step[token].logprob for token in range(len(step))]
            for step in answer.outputs[0].logprobs
        ]
        for answer in answers
    ]
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    torch.save(
        {"tokens": torch.tensor(tokens), "logprobs": torch.tensor(logprobs)}, job["out"]
    )
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    with open(sys.argv[1]) as jobs:
        for next_job in json.load(jobs):
            run(next_job)
