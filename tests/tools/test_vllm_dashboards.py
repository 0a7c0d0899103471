"""The queries of vLLM's public Grafana dashboards get data from a real Prometheus that reads our gateway.

The queries are those of examples/observability in vLLM's repository (November 2026): vllm_speculative_decoding.json and
grafana.json, each of whose variables is at All.
"""

import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.stack import Stack
from tests.watching.dashboards import Asked
from tests.watching.panels import answer
from tests.watching.prometheus import WINDOW_S, Prometheus

CHOSEN = '{job=~"$job", model_name=~"$model_name", instance=~"$instance", engine=~"$engine"}'
SPECULATION, OVERVIEW = "vllm_speculative_decoding", "grafana"


def rate(series: str, chosen: str = CHOSEN, by: str = "") -> str:
    return f"sum {by}(rate(vllm:{series}{chosen}[$__rate_interval]))"


def over(above: str, below: str, by: str = "") -> str:
    return f"{rate(above, by=by)} / ({rate(below, by=by)} > 0)"


ACCEPTED, DRAFTED, DRAFTS = (f"spec_decode_num_{each}_total" for each in ("accepted_tokens", "draft_tokens", "drafts"))
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
BETWEEN = "inter_token_latency_seconds"
BY_MODEL, BY_ENGINE = "by (model_name) ", "by (instance, engine) "
OF_SPECULATION = {
    "Draft acceptance rate": over(ACCEPTED, DRAFTED),
    "Acceptance length": f"1 + {over(ACCEPTED, DRAFTS)}",
    "Accepted tokens / s": rate(ACCEPTED),
    "Draft tokens / s": rate(DRAFTED),
    "Drafts / s": rate(DRAFTS),
    "Output from drafts": over(ACCEPTED, "generation_tokens_total"),
    "Draft acceptance rate by model": over(ACCEPTED, DRAFTED, BY_MODEL),
    "Mean acceptance length by model": f"1 + {over(ACCEPTED, DRAFTS, BY_MODEL)}",
    "Acceptance rate by draft position": f"{rate(BY_POSITION, by='by (position) ')} "
    f"/ on () group_left () ({rate(DRAFTS)} > 0)",
    "Draft acceptance rate by engine": over(ACCEPTED, DRAFTED, BY_ENGINE),
    "Rejected tokens / s": f"{rate(DRAFTED)} - {rate(ACCEPTED)}",
    "Inter-token latency, p95": f"histogram_quantile(0.95, {rate(f'{BETWEEN}_bucket', by='by (le) ')})",
    "Inter-token latency, mean": over(f"{BETWEEN}_sum", f"{BETWEEN}_count"),
    **{
        f"variable {label}": f"label_values(vllm:num_requests_running, {label})"
        for label in ("job", "model_name", "instance", "engine")
    },
}
ONE_MODEL = '{model_name="$model_name"}'
OF_OVERVIEW = {
    **{
        f"{name}, p99": f"histogram_quantile(0.99, {rate(f'{name}_seconds_bucket', ONE_MODEL, 'by (le) ')})"
        for name in ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
    },
    **{
        name: f"rate(vllm:{name}{ONE_MODEL}[$__rate_interval])"
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum",
            "request_decode_time_seconds_sum",
            "request_max_num_generation_tokens_sum",
        )
    },
    **{
        name: f"vllm:{name}{ONE_MODEL}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    },
    **{
        name: f"sum by (le) (increase(vllm:{name}_bucket{ONE_MODEL}[$__rate_interval]))"
        for name in ("request_prompt_tokens", "request_generation_tokens")
    },
    "request_success": f"sum by (finished_reason) (increase(vllm:request_success_total{ONE_MODEL}[$__rate_interval]))",
}
QUERIES = [
    *(Asked(SPECULATION, title, expr) for title, expr in OF_SPECULATION.items()),
    *(Asked(OVERVIEW, title, expr) for title, expr in OF_OVERVIEW.items()),
]
STAND = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""One request after another is a load that stands."""


@pytest.mark.timeout(180)
def test_every_query_gets_data_that_moves(stack: Stack, tmp_path: Path, dev_prompts: list[str]) -> None:
    model = httpx.get(f"{stack.http}/v1/models").json()["data"][0]["id"]
    with closing(Prometheus(tmp_path, stack.http.removeprefix("http://"))) as prometheus:
        began_s = time.time()
        number = 0
        while time.time() < began_s + 2.5 * WINDOW_S:
            prompt = dev_prompts[number % len(dev_prompts)][-200:]
            body = {"model": model, "prompt": prompt, "max_tokens": 24 + number % 7, "stop": ["\n\n\n"]}
            httpx.post(f"{stack.http}/v1/completions", json=body, timeout=60).raise_for_status()
            number += 1
        ended_s = time.time()
        asked = [
            Asked(each.dashboard, each.title, each.expr.replace('="$model_name"', f'="{model}"')) for each in QUERIES
        ]
        answered = [answer(prometheus, each, began_s, ended_s) for each in asked]
    faults = {each.asked.title: each.fault for each in answered if not each.well}
    assert {title: fault for title, fault in faults.items() if fault != "nothing moves" or title not in STAND} == {}
