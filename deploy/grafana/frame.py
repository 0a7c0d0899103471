"""What both dashboards have in common: how they behave, what stands above the panels, and rows of panels below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from deploy.grafana import variables
from deploy.grafana.panels import Panel


def framed(
    title: str,
    uid: str,
    description: str,
    choices: Iterable[QueryVariable],
    sections: Iterable[tuple[str, Sequence[Panel]]],
) -> Dashboard:
    """sections: title and panels of each row."""
    built = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["outrider"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(variables.source())
    )
    for choice in choices:
        built = built.with_variable(choice)
    built = built.annotation(variables.firing()).link(variables.other_dashboards())
    for heading, panels in sections:
        built = built.with_row(Row(heading))
        for panel in panels:
            built = built.with_panel(panel)
    return built
