"""Run transformers' own `generate`, with `assistant_model` for the draft, or without one `prompt_lookup_num_tokens`.
Several prompts are one padded batch.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from protocol import NGRAM, Job, Lacks, Setup, in_groups, serve
from transformers import AutoModelForCausalLM, PreTrainedModel


class Transformers:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(len(setup.cores))
        transformers.utils.logging.set_verbosity_error()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._target = _load(setup.target, setup.dtype)
        self._drafting: dict[str, Any] = {
            "prompt_lookup_num_tokens": setup.num_draft_tokens,
            "max_matching_ngram_size": NGRAM,
        }
        if setup.draft:
            draft = _load(setup.draft, setup.dtype)
            draft.generation_config.num_assistant_tokens = setup.num_draft_tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._drafting = {"assistant_model": draft}

    def run(self, job: Job) -> list[list[int]]:
        if job.speculative and job.concurrency > 1:
            raise Lacks("assisted generation takes one prompt at a time")
        torch.manual_seed(job.seed)
        return [ids for group in in_groups(job.prompts, job.concurrency) for ids in self._generate(group, job)]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], job: Job) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # [B, width] int64
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        made = self._target.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=job.max_tokens,
            **(self._drafting if job.speculative else {}),
            **(sampling if job.temperature else {"do_sample": False}),
        )
        return made[:, width:].tolist()

    def close(self) -> None: ...


def _load(folder: str, dtype: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # ends of sequence are ignored
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    serve(Transformers)
