"""A draft to which every other message of rows does not come; it asks again. No fault of the law."""

from draft_service.growing.grower import Grower
from tests.law.faults import replace, run_draft

take = Grower._store_features
COUNTS = [0]
"""Messages that came."""


def take_otherwise(self, job):
    """Which are lost goes by their number alone, never by what was drawn."""
    COUNTS[0] += 1
    if COUNTS[0] % 2:
        take(self, job)
    else:
        job.on_stored()


if __name__ == "__main__":
    replace(Grower, "_store_features", take_otherwise)
    run_draft()
