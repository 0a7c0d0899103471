"""Run OpenVINO GenAI's continuous-batching pipeline, which is the one that `LLMPipeline` runs on a CPU, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from protocol import NGRAM, Job, Setup, in_groups, serve

FORMATS = {"float32": "fp32", "bfloat16": "fp32"}
"""Formats of the export; bfloat16 is a precision of inference there."""
HINTS = {"float32": "f32", "bfloat16": "bf16"}
KV_CACHE_GB = 1


class OpenVino:
    def __init__(self, setup: Setup) -> None:
        self.version = f"OpenVINO GenAI {genai.__version__}"
        self._num_draft_tokens = setup.num_draft_tokens
        self._looks_up = not setup.draft
        target = _exported(setup, "target")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = KV_CACHE_GB, setup.max_concurrency
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": len(setup.cores),
            "INFERENCE_PRECISION_HINT": HINTS[setup.dtype],
            "KV_CACHE_PRECISION": HINTS[setup.dtype],
            "ENABLE_CPU_PINNING": False,
        }
        self._plain = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", properties)
        with_draft = properties | {"prompt_lookup": True}
        if setup.draft:
            with_draft = properties | {"draft_model": genai.draft_model(_exported(setup, "draft"), "CPU", **properties)}
        # Beside a draft, answers to prompts that it feeds in several pieces are wrong.
        scheduler.max_num_batched_tokens = setup.max_concurrency * setup.context
        self._drafted = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", with_draft)

    def run(self, job: Job) -> list[list[int]]:
        pipeline = self._drafted if job.speculative else self._plain
        outputs = []
        for group in in_groups(job.prompts, job.concurrency):
            tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in group]
            configs = [self._config(job, index) for index in range(len(group))]
            outputs += [list(made.m_generation_ids[0]) for made in pipeline.generate(tensors, configs)]
        return outputs

    def _config(self, job: Job, index: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig(max_new_tokens=job.max_tokens, ignore_eos=True)
        if job.temperature:
            config.do_sample, config.temperature, config.rng_seed = True, job.temperature, job.seed + index
            config.top_p, config.top_k = 1.0, 2**31 - 1
        if job.speculative:
            config.num_assistant_tokens = self._num_draft_tokens
            if self._looks_up:
                config.max_ngram_size = NGRAM
        return config

    def close(self) -> None: ...


def _exported(setup: Setup, role: str) -> Path:
    """Return the checkpoint in OpenVINO's own form, made when it is missing."""
    out = Path(setup.folder) / f"openvino-{role}-{FORMATS[setup.dtype]}"
    if not (out / "openvino_model.bin").exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        command += ["--model", getattr(setup, role), "--task", "text-generation-with-past"]
        command += ["--weight-format", FORMATS[setup.dtype], str(out)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return out


if __name__ == "__main__":
    serve(OpenVino)
