"""Whether every query of the dashboards returns data, and data that moves, from the Prometheus that has watched."""

from dataclasses import dataclass

from tests.watching.dashboards import FILES, LABEL_VALUES, Asked, other_queries, panel_queries, with_all_chosen
from tests.watching.prometheus import WINDOW_S, Prometheus

RATE_INTERVAL = f"{WINDOW_S}s"
STILL = (
    "proposals_refused_total",
    "dropped_draft_tokens_total",
    "breaker_open",
    "ALERTS{",
    "head_bytes",
    "kept_feature_bytes",
)
"""In queries of what may stay as it is: no part lies here, few failures open a breaker, an alert that fires is 1,
and no draft is a head."""
ABSENT = ("outrider_worker_head_agreement", "outrider_worker_feature_")
"""In queries that may have no data: nobody here drafts with a head."""


@dataclass(frozen=True, slots=True)
class Answered:
    asked: Asked
    num_series: int
    num_samples: int
    """That are numbers."""
    num_moving: int = 0
    """Series that have more than one value."""
    error: str | None = None

    @property
    def fault(self) -> str | None:
        if self.error is None and not self.num_samples and any(name in self.asked.expr for name in ABSENT):
            return None
        if self.error is not None or not self.num_samples:
            return self.error or "no data"
        may_stand = self.asked.instant or any(name in self.asked.expr for name in STILL)
        return None if self.num_moving or may_stand else "nothing moves"

    @property
    def well(self) -> bool:
        return self.fault is None


def answers(prometheus: Prometheus, start_s: float, end_s: float) -> list[Answered]:
    """Of both dashboards, over that time (Unix seconds)."""
    asked = [query for path in FILES for query in (*panel_queries(path), *other_queries(path))]
    return [answer(prometheus, each, start_s, end_s) for each in asked]


def answer(prometheus: Prometheus, asked: Asked, start_s: float, end_s: float) -> Answered:
    """Ask one query over that time (Unix seconds)."""
    expr = with_all_chosen(asked.expr, RATE_INTERVAL)
    try:
        variable = LABEL_VALUES.fullmatch(expr)
        if variable is not None:
            found = prometheus.label_values(variable[2], variable[1])
            return Answered(asked, len(found), len(found), len(found))
        lines = prometheus.now(expr) if asked.instant else prometheus.course(expr, start_s, end_s)
    except (RuntimeError, KeyError) as error:
        return Answered(asked, 0, 0, error=str(error))
    num_moving = sum(len(set(line.values)) > 1 for line in lines)
    return Answered(asked, len(lines), sum(len(line.values) for line in lines), num_moving)
