"""Whether every query of the dashboards returns data from the Prometheus that has watched the system."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.watching.dashboards import FILES, Asked, other_queries, panel_queries, with_all_chosen
from tests.watching.prometheus import WINDOW_S, Prometheus

RATE_INTERVAL = f"{WINDOW_S}s"
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True, slots=True)
class Answered:
    asked: Asked
    num_series: int
    num_samples: int
    error: str | None = None

    @property
    def well(self) -> bool:
        return self.error is None and self.num_samples > 0


def answers(prometheus: Prometheus, start_s: float, end_s: float) -> list[Answered]:
    """Of both dashboards, over that time (Unix seconds)."""
    asked = [query for path in FILES for query in (*panel_queries(path), *other_queries(path))]
    return [_answer(prometheus, each, start_s, end_s) for each in asked]


def _answer(prometheus: Prometheus, asked: Asked, start_s: float, end_s: float) -> Answered:
    expr = with_all_chosen(asked.expr, RATE_INTERVAL)
    try:
        variable = _LABEL_VALUES.fullmatch(expr)
        if variable is not None:
            found = prometheus.label_values(variable[2], variable[1])
            return Answered(asked, len(found), len(found))
        lines = prometheus.now(expr) if asked.instant else prometheus.course(expr, start_s, end_s)
    except (RuntimeError, KeyError) as error:
        return Answered(asked, 0, 0, str(error))
    return Answered(asked, len(lines), sum(len(line.values) for line in lines))
