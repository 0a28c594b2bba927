# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run engines one after the other in one process, and print what they did as JSON.

Usage: drive_engine.py JOBS, where JOBS is a JSON list of
{"model": directory, "args": {engine arguments}, "steps": [[step, ...arguments], ...]}.
The last line begins with "RESULTS " and holds one list of results for each job; a job
whose engine did not start or whose step failed ends with {"error": message}.

As a module: `drive(jobs)` runs the script in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 307
MAX_TOKENS = 16


class Step(NamedTuple):
    """A generated token, and how much likelier (log) it was than the runner-up."""

    token: int
    margin: float


Texts = list[list[Step]]


def tokens_of(texts: Texts) -> list[list[int]]:
    return [[step.token for step in text] for text in texts]


def same_greedy(found: Texts, expected: Texts) -> bool:
    """Equal tokens; in 16 bits, up to a step where the best two are a near-tie.

    What follows such a step is another text, so the comparison of that text ends there.
    """
    from server import NEAR_TIE

    if [len(text) for text in found] != [len(text) for text in expected]:
        return False
    for text, reference_text in zip(found, expected, strict=True):
        for step, reference in zip(text, reference_text, strict=True):
            if step.token != reference.token:
                if reference.margin >= NEAR_TIE:
                    return False
                break
    return True


def assert_same_greedy(found: Texts, expected: Texts) -> None:
    assert same_greedy(found, expected), (found, expected)


def drive(
    jobs: list[dict[str, Any]],
    log: Path | None = None,
    *,
    may_fail: bool = False,
    **env: str,
) -> list[Any]:
    """Run jobs in one fresh process.

    Args:
        jobs: as JOBS above.
        log: where to write all output of the process.
        may_fail: a job may end with {"error": message}.
        env: further environment variables.

    Returns:
        One list of results for each job.

    Raises:
        RuntimeError: the process ended early (holds the end of its output), or a job
            failed.

    """
    from server import engine_env

    result = subprocess.run(
        [sys.executable, __file__, json.dumps(jobs)],
        # One process for engine and worker, where there is one rank, starts faster.
        env=engine_env(
            VLLM_ALLOW_INSECURE_SERIALIZATION="1",
            **({} if _ranks(jobs) > 1 else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
            **env,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if log is not None:
        log.write_text(result.stdout)
    lines = [x for x in result.stdout.splitlines() if x.startswith("RESULTS ")]
    if not lines:
        raise RuntimeError(f"the engines ended early: {result.stdout[-8000:]}")
    jobs_results = json.loads(lines[-1].removeprefix("RESULTS "))
    for job, results in zip(jobs, jobs_results, strict=True):
        if not may_fail and results and "error" in (results[-1] or ()):
            raise RuntimeError(f"{job}: {results[-1]['error']}")
        for i, ((name, *_), result) in enumerate(zip(job["steps"], results)):
            if name == "generate" and "error" not in result:
                results[i] = [[Step(*step) for step in text] for text in result]
    return jobs_results


def _ranks(jobs: list[dict[str, Any]]) -> int:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return max(job.get("args", {}).get(size, 1) for job in jobs for size in sizes)


def prompts() -> list[list[int]]:
    """Six prompts of different lengths, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(20)
    return [
        torch.randint(0, VOCAB_SIZE, (3 + 8 * i,), generator=generator).tolist()
        for i in range(6)
    ]


def generate(llm: Any, adapter: str | None = None) -> Texts:
    """Greedy tokens of all prompts, with their margins."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts()],
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
        ),
        use_tqdm=False,
        lora_request=None if adapter is None else LoRARequest("adapter", 1, adapter),
    )
    return [
        [
            Step(token, _margin(top))
            for token, top in zip(completion.token_ids, completion.logprobs)
        ]
        for completion in (output.outputs[0] for output in outputs)
    ]


def _margin(top: dict[int, Any]) -> float:
    low, high = sorted(entry.logprob for entry in top.values())[-2:]
    return high - low


def reload_weights(llm: Any, path: str | None = None) -> None:
    """Load the weights again in place, from another directory if one is given.

    What is cached of earlier prompts came from the weights before.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    llm.reset_prefix_cache()


def load_format(llm: Any, name: str) -> None:
    """Change how the next reload reads files."""
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": name}},))


def warm_up(llm: Any) -> None:
    """Run a forward pass without requests on every rank.

    In eager mode the CPU worker of vLLM 0.32.0 leaves it out, and with it the buffers
    that a second pipeline stage receives into.
    """
    llm.collective_rpc(lambda worker: worker.model_runner.profile_run())


def sleep(llm: Any, level: int) -> None:
    """Give up the device's memory and take it back."""
    llm.sleep(level)
    llm.wake_up()


def tensors(llm: Any) -> list[list[dict]]:
    """What each rank holds, see inspect_model.py."""
    from inspect_model import tensors_of

    return llm.apply_model(tensors_of)


STEPS = {
    f.__name__: f
    for f in (generate, load_format, reload_weights, sleep, tensors, warm_up)
}


def run_job(job: dict[str, Any]) -> list[Any]:
    """Start the job's engine and take its steps."""
    from server import DTYPE, GPU_MEMORY

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        **GPU_MEMORY,
    )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        arguments["distributed_executor_backend"] = "uni"
    results: list[Any] = []
    llm = None
    try:
        llm = LLM(job["model"], **(arguments | job.get("args", {})))
        for name, *step_arguments in job["steps"]:
            results.append(STEPS[name](llm, *step_arguments))
    except Exception as e:
        results.append({"error": str(e)})
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    return results


if __name__ == "__main__":
    print("RESULTS " + json.dumps([run_job(job) for job in json.loads(sys.argv[1])]))
