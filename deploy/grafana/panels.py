"""The few kinds of panel that the dashboards are made of. Called by overview and worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.units import BytesIEC, BytesPerSecondSI, NoUnit, OpsPerSecond, PercentUnit, Seconds

SECONDS, SHARE, BYTES, BYTES_PER_S, PER_S, PLAIN = (
    Seconds,
    PercentUnit,
    BytesIEC,
    BytesPerSecondSI,
    OpsPerSecond,
    NoUnit,
)
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""A variable of each dashboard, so that they fit any Grafana that has a Prometheus."""
HEIGHT, STAT_HEIGHT = 8, 4
GRID_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and what its lines are called: text with {{label}}."""

    expr: str
    legend: str


Link = dashboard.DashboardLink
Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


def lines(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    width: int = 8,
    stacked: bool = False,
    most: float | None = None,
    link: Link | None = None,
) -> timeseries.Panel:
    """Return lines over time; the axis begins at 0. `width` of GRID_WIDTH."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(HEIGHT)
        .unit(unit)
        .min(0)
        .fill_opacity(30 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(_legend())
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if most is not None:
        panel = panel.max(most)
    return panel if link is None else panel.data_links([link])


def number(
    title: str, description: str, query: Query, unit: str, *, width: int = 3, steps: Sequence[tuple[float, str]] = ()
) -> stat.Panel:
    """Return the last value, with its course behind it. `steps`: (from this value on, colour)."""
    thresholds = [model.Threshold(value=None, color="text"), *(model.Threshold(value, color) for value, color in steps)]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(STAT_HEIGHT)
        .unit(unit)
        .with_target(_target(query, 0))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_model.BigValueGraphMode.AREA)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(thresholds))
    )


def buckets(title: str, description: str, expr: str, unit: str) -> heatmap.Panel:
    """Return a histogram over time. `expr`: sum by (le) of the rate of its buckets."""
    target = _target(Query(expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(8)
        .height(HEIGHT)
        .with_target(target)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64).exponent(0.5))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
    )


def rows(title: str, description: str, query: Query, hidden: Sequence[str], *, width: int = 12) -> table.Panel:
    """Return a table of a row for each series of the last instant: its labels, without `hidden`, and its value."""
    organize = model.DataTransformerConfig(id_val="organize", options={"excludeByName": dict.fromkeys(hidden, True)})
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .span(width)
        .height(HEIGHT)
        .with_target(_target(query, 0).instant().format(PromQueryFormat.TABLE))
        .transformations([organize])
    )


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).datasource(SOURCE)
    return target.ref_id(chr(ord("A") + index)).range()


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_model.LegendDisplayMode.LIST)
        .placement(common_model.LegendPlacement.BOTTOM)
    )
