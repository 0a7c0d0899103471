"""What stands above the panels of both dashboards: choices, alerts as marks in time, links."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model

from deploy.grafana.panels import SOURCE


def source() -> dashboard.DatasourceVariable:
    current = model.VariableOption(text="Prometheus", value="prometheus")
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)


def choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """Any of a label's values, at first all of them."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(SOURCE)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(text="All", value="$__all"))
    )


def firing() -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name("Alerts")
        .datasource(SOURCE)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertstate="firing",alertname=~"Outrider.*"}')
    )


def other_dashboards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("Outrider dashboards").type(model.DashboardLinkType.DASHBOARDS)
    return link.tags(["outrider"]).as_dropdown(True).keep_time(True)
