"""What `outrider top` works out of two scrapes, and that it fits a terminal of 80 columns with whatever names."""

import pytest

from outrider.cli.monitor.series import Scrape, ScrapeInterval


def scrape(at_s: float, *lines: str, started_s: float = 1.0) -> Scrape:
    return Scrape.parse("\n".join((f"process_start_time_seconds {started_s}", *lines, "")), at_s)


def test_counters_count_from_0_in_another_life_and_where_a_series_is_new() -> None:
    before = scrape(10.0, 'made_total{kind="a"} 7')
    grown = ScrapeInterval(before, scrape(12.0, 'made_total{kind="a"} 9', 'made_total{kind="b"} 4'))
    assert grown.increase("made_total") == 6.0 and grown.rate("made_total", kind="a") == 1.0
    other = ScrapeInterval(before, scrape(12.0, 'made_total{kind="a"} 8', started_s=11.0))
    assert other.increase("made_total") == 8.0
    assert grown.increase("other_total") is None and ScrapeInterval(before, before).rate("made_total") is None


def test_a_quantile_is_that_of_promql_over_the_span_alone() -> None:
    def buckets(*counts: int) -> list[str]:
        bounds = ("0.1", "0.2", "0.4", "+Inf")
        return [f'h_bucket{{le="{le}"}} {count}' for le, count in zip(bounds, counts, strict=True)]

    span = ScrapeInterval(scrape(0.0, *buckets(100, 100, 100, 100)), scrape(1.0, *buckets(104, 108, 110, 110)))
    assert span.quantile(0.5, "h") == pytest.approx(0.125)  # the 5th of 10: a quarter into the second bucket
    assert span.quantile(0.95, "h") == pytest.approx(0.35)
    late = ScrapeInterval(scrape(0.0, *buckets(0, 0, 0, 0)), scrape(1.0, *buckets(0, 0, 0, 4)))
    assert late.quantile(0.5, "h") == 0.4 and late.quantile(0.5, "other") is None
    assert ScrapeInterval(late.after, late.after).quantile(0.5, "h") is None
