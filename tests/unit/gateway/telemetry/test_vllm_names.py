"""vLLM's names: each as vLLM spells it, and with what our own series say."""

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.generation import ChoiceUsage, FinishReason
from gateway.telemetry.vllm_names import ABORTED, FAILED, ChoiceSeries, ChoiceTimes, ModelLoad, VllmNames
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.samples import total
from tests.stack import parse_metrics

LOAD = ModelLoad("chat", "big", 3, 2, 0.25, 16, 100)
SERIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
}
MORE_LABELS = {
    "vllm:spec_decode_num_accepted_tokens_per_pos": {"position"},
    "vllm:request_success": {"finished_reason"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


@pytest.fixture
def ended(metrics: GatewayMetrics) -> ChoiceSeries:
    made = ChoiceSeries(metrics.registry)
    made.begin("chat")
    metrics.answers("chat")
    metrics.registry.register(VllmNames(metrics, lambda: [LOAD]))
    return made


def text_of(metrics: GatewayMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_every_series_is_there_from_the_start_with_vllms_type_and_labels(
    metrics: GatewayMetrics, ended: ChoiceSeries
) -> None:
    metrics.pair("big", "small").drafted_per_position.labels(position="0").inc()
    found = {
        each.name: each for each in text_string_to_metric_families(text_of(metrics)) if each.name.startswith("vllm:")
    }
    families = {name: family for name, family in found.items() if not name.endswith("_created")}
    assert {name: family.type for name, family in families.items()} == SERIES
    for name, family in families.items():
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels["model_name"] == "chat" and sample.labels["engine"] == "0"
            assert sample.labels.keys() - {"model_name", "engine", "le"} == MORE_LABELS.get(name, set()), name


def test_what_answers_took(metrics: GatewayMetrics, ended: ChoiceSeries) -> None:
    usage = ChoiceUsage(num_prompt_tokens=7, num_completion_tokens=5)
    ended.note("chat", FinishReason.LENGTH, usage, ChoiceTimes(10.0, 10.5, 12.5, 16.5, 5))
    ended.note_pause("chat", 2.0)
    ended.note_failure("chat", ABORTED)
    samples = parse_metrics(text_of(metrics))
    sums = {
        name: total(samples, f"vllm:{name}_sum")
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
            "inter_token_latency_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
        )
    }
    assert list(sums.values()) == [6.5, 0.5, 2.0, 4.0, 6.0, 1.0, 2.0, 7, 5, 5]
    reasons = ("stop", "length", ABORTED, FAILED)
    assert [total(samples, "vllm:request_success_total", finished_reason=each) for each in reasons] == [0, 1, 1, 0]


def test_an_endpoint_picker_finds_the_series_of_its_default_flags(metrics: GatewayMetrics, ended: ChoiceSeries) -> None:
    """It parses the text into families, takes a gauge by its name and then the newest sample, which is the last where
    none has a time. Names: defaultEngineConfigs of the Gateway API inference extension. lora_requests_info is absent,
    as in a vLLM without adapters.
    """
    families = {family.name: family for family in text_string_to_metric_families(text_of(metrics))}
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    assert [families[f"vllm:{name}"].samples[-1].value for name in names] == [2, 3, 0.25]
    labels = families["vllm:cache_config_info"].samples[-1].labels
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (16, 100)
