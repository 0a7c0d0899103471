"""A draft whose rows are those of the token before: stale, as if they came from another text. No fault of the law."""

import dataclasses

from draft_service.growing.grower import Grower
from tests.law.faults import replace, run_draft

take = Grower._store_features
LAST = {}
"""By ticket, the last row of the message before."""


def take_otherwise(self, job):
    """Each row in place of the next; the first of a message is of the message before it, or nothing."""
    rows = job.rows.copy()
    rows[1:] = job.rows[:-1]
    rows[0] = LAST.get(job.ticket, rows[0])
    LAST[job.ticket] = job.rows[-1]
    take(self, dataclasses.replace(job, rows=rows))


if __name__ == "__main__":
    replace(Grower, "_store_features", take_otherwise)
    run_draft()
