"""The field's benchmark tools against the demo pair, told nothing but address, model, tokenizer and how much to ask.

Each has to finish without a failed request and, where it reads what speculation did, to have read what was counted
here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.samples import total
from tests.stack import DEMO_TARGET, Stack

NUM_REQUESTS = 6
SPECULATION = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@pytest.fixture(scope="module")
def model(stack: Stack) -> str:
    return str(httpx.get(f"{stack.http}/v1/models").json()["data"][0]["id"])


def run(tool: str, command: str, folder: Path, *args: str | int) -> str:
    """What the tool printed. Its home is the folder."""
    path = Path(os.environ["OUTRIDER_TOOLS"]).absolute() / tool / "bin" / command
    environment = {"VLLM_NO_USAGE_STATS": "1", "HOME": str(folder), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        [str(path), *map(str, args)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


def counted(stack: Stack) -> dict[str, float]:
    samples = stack.metrics()
    return {name: total(samples, f"vllm:spec_decode_{name}_total") for name in SPECULATION}


def grown(before: dict[str, float], after: dict[str, float]) -> tuple[float, ...]:
    return tuple(after[name] - before[name] for name in SPECULATION)


@pytest.mark.timeout(300)
def test_vllm_bench_serve(stack: Stack, model: str, tmp_path: Path) -> None:
    where = ("--base-url", stack.http, "--model", model, "--tokenizer", DEMO_TARGET)
    much = ("--num-prompts", NUM_REQUESTS, "--random-input-len", 64, "--random-output-len", 32)
    before = counted(stack)
    run("vllm", "vllm", tmp_path, "bench", "serve", *where, *much, "--save-result", "--result-dir", tmp_path)
    drafts, drafted, accepted = grown(before, counted(stack))
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * 32
    assert 0 < result["spec_decode_num_drafts"] <= drafts  # it may ask for one answer before it counts
    assert 0 < result["spec_decode_draft_tokens"] <= drafted
    assert 0 < result["spec_decode_accepted_tokens"] <= accepted
    rates = result["spec_decode_per_position_acceptance_rates"]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0
    own = result["spec_decode_accepted_tokens"] / result["spec_decode_num_drafts"]
    assert sum(rates) == pytest.approx(own, rel=0.02), "each accepted token has a position"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("streaming", [(), ("--streaming",)], ids=["whole", "streamed"])
def test_aiperf(stack: Stack, model: str, tmp_path: Path, streaming: tuple[str, ...]) -> None:
    where = ("--url", stack.http, "--model", model, "--tokenizer", DEMO_TARGET)
    much = ("--request-count", NUM_REQUESTS, "--isl", 64, "--osl", 32, "--concurrency", 2)
    before = counted(stack)
    run("aiperf", "aiperf", tmp_path, "profile", *where, *much, *streaming, "--ui", "none")
    drafts, drafted, accepted = grown(before, counted(stack))
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    result = json.loads(path.read_text())
    assert result["request_count"]["avg"] == NUM_REQUESTS
    assert not result.get("error_summary")
    names = ("total_spec_decode_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    assert tuple(result[name]["avg"] for name in names) == (drafts, drafted, accepted)
    assert accepted > 0
    scraped = next(tmp_path.rglob("server_metrics_export.json")).read_text()
    assert all(f"vllm:spec_decode_{name}" in scraped for name in SPECULATION), "it reads /metrics unasked"


@pytest.mark.timeout(300)
def test_guidellm(stack: Stack, model: str, tmp_path: Path) -> None:
    """It has no name for what speculation did; what it counts of tokens has to be what was made."""
    before = total(stack.metrics(), "vllm:generation_tokens_total")
    run(
        "guidellm",
        "guidellm",
        tmp_path,
        "run",
        "--backend",
        f"kind=openai_http,target={stack.http},model={model}",
        "--tokenizer",
        f"kind=huggingface_auto,model={DEMO_TARGET}",
        "--data",
        "kind=synthetic_text,prompt_tokens=64,output_tokens=24",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        f"kind=max_requests,count={NUM_REQUESTS}",
        "--output",
        f"kind=json,path={tmp_path}",
    )
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests: dict[str, list[dict[str, Any]]] = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    made = [each["output_metrics"]["text_tokens"] for each in requests["successful"]]
    assert made == [24] * NUM_REQUESTS
    assert total(stack.metrics(), "vllm:generation_tokens_total") - before >= sum(made)
