"""PromQL that the panels have in common. Variables of the dashboards and of Grafana stand in it as $name."""

from __future__ import annotations

from deploy.grafana.panels import Query

PAIR = 'target=~"$target",draft=~"$draft"'
"""What is chosen above the panels."""
BY_PAIR = "by (target, draft)"


def rate(series: str, labels: str = "") -> str:
    return f"rate({series}{{{labels}}}[$__rate_interval])" if labels else f"rate({series}[$__rate_interval])"


def ratio(part: str, whole: str, by: str = "", labels: str = "") -> str:
    """Return the ratio of the rates of two counters."""
    space = f"{by} " if by else ""
    return f"sum {space}({rate(part, labels)}) / sum {space}({rate(whole, labels)})"


def quantiles(series: str, labels: str = "") -> list[Query]:
    """Return queries of p50, p95 and p99 of a histogram over all gateways."""
    inner = f"sum by (le) ({rate(f'{series}_bucket', labels)})"
    return [Query(f"histogram_quantile({q / 100}, {inner})", f"p{q}") for q in (50, 95, 99)]


TOKENS_PER_PASS = (
    f"sum {BY_PAIR} ({rate('spec_emitted_tokens_total', PAIR)}) / "
    f"(sum {BY_PAIR} ({rate('spec_rounds_total', PAIR)}) + "
    f"sum {BY_PAIR} ({rate('spec_plain_steps_total', PAIR)}))"
)
"""A round and a plain step are one pass of the target for one answer each."""
