# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Complete prompts greedily and save the log-probabilities of every token.

Usage: score_tokens.py JOBS.json, a list of {"model": folder, "prompts": lists of token
ids, "steps": tokens to make, "out": file, "engine": further engine arguments}. Writes
{"tokens": [prompts, steps], "logprobs": [prompts, steps, vocabulary]} with torch.save.
"""

import gc
import json
import sys

import torch

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def run(job: dict) -> None:
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
