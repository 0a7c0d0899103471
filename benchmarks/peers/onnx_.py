"""Run onnxruntime-genai's `Generator`. Several prompts are one padded batch; its speculative model takes one prompt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from protocol import Answer, Job, Lacks, Setup, in_groups, serve

PRECISIONS = {"float32": "fp32"}


class Onnx:
    def __init__(self, setup: Setup) -> None:
        if setup.dtype not in PRECISIONS:
            raise Lacks(f"its builder makes no {setup.dtype} model for a CPU")
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}"
        target = _exported(setup, "target")
        self._pad = int(json.loads((target / "genai_config.json").read_text())["model"]["pad_token_id"])
        self._plain = _load(target, setup)
        self._drafted = _load(_paired(target, _exported(setup, "draft"), setup), setup) if setup.draft else None

    def run(self, job: Job) -> Answer | list[list[int]]:
        import time

        if job.speculative and self._drafted is None:
            raise Lacks("it drafts with nothing but a draft model")
        if job.speculative and job.concurrency > 1:
            raise Lacks("its speculative model takes one prompt at a time")
        started, outputs, drafted, accepted = time.perf_counter(), [], 0, 0
        for group in in_groups(job.prompts, job.concurrency):
            generator, width = self._generator(group, job)
            while not generator.is_done():
                generator.generate_next_token()
            outputs += [[int(i) for i in generator.get_sequence(row)[width:]] for row in range(len(group))]
            if job.speculative:
                stats = generator.get_speculative_stats()
                drafted += stats["draft_tokens_proposed"]
                accepted += stats["draft_tokens_accepted"]
        return Answer(outputs, time.perf_counter() - started, drafted or None, accepted if drafted else None)

    def _generator(self, prompts: list[list[int]], job: Job) -> tuple[genai.Generator, int]:
        """Return a generator, and the padded length of its prompts. A least length makes it ignore ends of sequence.

        It wants the padding on the right, and recognises it by the id; answers begin after it all the same.
        """
        width = max(map(len, prompts))
        model = self._drafted if job.speculative else self._plain
        params = genai.GeneratorParams(model)
        length = width + job.max_tokens
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts))
        if job.temperature:
            params.set_search_options(
                do_sample=True, temperature=job.temperature, top_k=0, top_p=1.0, random_seed=job.seed
            )
        generator = genai.Generator(model, params)
        pad = [prompt + [self._pad] * (width - len(prompt)) for prompt in prompts]
        generator.append_tokens(np.array(pad, dtype=np.int32))
        return generator, width

    def close(self) -> None: ...


def _load(folder: Path, setup: Setup) -> genai.Model:
    config = genai.Config(str(folder))
    threads = {"intra_op_num_threads": len(setup.cores)}
    decoders = (
        ("decoder", "draft")
        if "draft" in json.loads((folder / "genai_config.json").read_text())["model"]
        else ("decoder",)
    )
    for name in decoders:
        config.overlay(json.dumps({"model": {name: {"session_options": threads}}}))
    return genai.Model(config)


def _exported(setup: Setup, role: str) -> Path:
    out = Path(setup.folder) / f"onnx-{role}-{PRECISIONS[setup.dtype]}"
    if not (out / "model.onnx.data").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", getattr(setup, role)]
        command += ["-o", str(out), "-p", PRECISIONS[setup.dtype], "-e", "cpu", "-c", str(out / "cache")]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    return out


def _paired(target: Path, draft: Path, setup: Setup) -> Path:
    """Return one folder that holds both, with the configuration that makes a pair of them."""
    out = target.with_name(target.name.replace("target", "pair"))
    shutil.rmtree(out, ignore_errors=True)
    (out / "draft").mkdir(parents=True)
    for source, folder in ((target, out), (draft, out / "draft")):
        for file in source.iterdir():
            if file.is_file():
                os.link(file, folder / file.name)
    config = json.loads((target / "genai_config.json").read_text())
    config["model"]["type"] = "speculative"
    config["model"]["draft"] = json.loads((draft / "genai_config.json").read_text())["model"]["decoder"]
    config["model"]["draft"]["filename"] = "draft/model.onnx"
    config["speculative"] = {"max_draft_tokens": setup.num_draft_tokens}
    (out / "genai_config.json").unlink()  # a link to the target's own
    (out / "genai_config.json").write_text(json.dumps(config, indent=1))
    return out


if __name__ == "__main__":
    serve(Onnx)
