"""Which label the rounds of a draft have, and which series outlive it."""

from typing import Any, cast

from gateway.workers.member import DraftMember
from gateway.workers.membership import MemberSpec
from gateway.workers.round_series import MAX_GONE_DRAFTS, RoundSeries
from outrider.v1 import common_pb2 as pb
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.unit.gateway.scripted_pool import connection_of, link_of


def draft(name: str, model_id: str, *, pool: str = "x", path: str = "") -> DraftMember:
    link = link_of(connection_of(), pb.WorkerInfo(model_id=model_id))
    link.model_path = path or model_id
    return DraftMember(MemberSpec(name, pool, "draft", name), cast(Any, link))


def series_of(drafts: dict[str, DraftMember]) -> tuple[RoundSeries, GatewayMetrics]:
    metrics = GatewayMetrics()
    series = RoundSeries(metrics, lambda: drafts)
    series.target_label = "target"
    series.update()
    return series, metrics


def labels_in(metrics: GatewayMetrics) -> set[str]:
    samples = [sample for family in metrics.rounds.collect() for sample in family.samples]
    return {sample.labels["draft"] for sample in samples}


def test_two_folders_of_one_name_are_labelled_by_their_pools() -> None:
    drafts = {"a": draft("a", "small", path="/a/small"), "b": draft("b", "other")}
    series, _ = series_of(drafts)
    assert [series.label_of(each) for each in drafts.values()] == ["small", "other"]
    drafts["c"] = draft("c", "small", pool="y", path="/b/small")
    assert [series.label_of(drafts[name]) for name in "abc"] == ["small@x", "other", "small@y"]


def test_rounds_without_a_draft_count_for_the_last_connected_draft() -> None:
    drafts: dict[str, DraftMember] = {}
    series, metrics = series_of(drafts)
    assert series.label_of(None) == ""
    drafts["a"] = draft("a", "small")
    series.update()
    assert series.label_of(None) == "small" and labels_in(metrics) == {"small"}, "before any round"


def test_the_counts_of_the_last_removed_drafts_stay() -> None:
    drafts: dict[str, DraftMember] = {}
    series, metrics = series_of(drafts)
    drafts["a"] = draft("a", "unused")
    series.update()
    assert labels_in(metrics) == {"unused"}
    for number in range(MAX_GONE_DRAFTS + 2):
        drafts["a"] = draft("a", f"m{number}")
        series.update()
        series.pair(f"m{number}").draft_tokens.inc()
    del drafts["a"]
    series.update()
    assert labels_in(metrics) == {f"m{number}" for number in range(2, MAX_GONE_DRAFTS + 2)}
    assert series.label_of(None) == f"m{MAX_GONE_DRAFTS + 1}"


def test_a_draft_that_leaves_without_counts_takes_no_place_of_one_with_counts() -> None:
    drafts: dict[str, DraftMember] = {}
    series, metrics = series_of(drafts)
    for number in range(MAX_GONE_DRAFTS):
        drafts["a"] = draft("a", f"m{number}")
        series.update()
        series.pair(f"m{number}").draft_tokens.inc()
    drafts["a"] = draft("a", "unused")
    series.update()
    del drafts["a"]
    series.update()
    assert labels_in(metrics) == {f"m{number}" for number in range(MAX_GONE_DRAFTS)}
