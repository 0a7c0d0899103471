"""A draft whose rows are a position further than the target says. No fault of the law."""

import dataclasses

from draft_service.growing.grower import Grower
from tests.law.faults import replace, run_draft

take = Grower._store_features


def take_otherwise(self, job):
    """What is missing at the beginning is not to be had."""
    take(self, dataclasses.replace(job, start=job.start + 1))


if __name__ == "__main__":
    replace(Grower, "_store_features", take_otherwise)
    run_draft()
