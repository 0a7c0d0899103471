"""`make complexity`: what it counts."""

from __future__ import annotations

from tests.measures.complexity import PAPERS, Weight, imported, records, unclear, weigh, weigh_groups

LEASE = """
from __future__ import annotations
from dataclasses import dataclass
from outrider.wire.kinds import Drafter, Fallback
from target_service.leases.jobs import Verdict

@dataclass(frozen=True)
class Lease:
    until_len: int
    drafts: dict[str, Draft]

@dataclass(slots=True)
class Part:
    data: int

class Draft(NamedTuple):
    pair: Pair

class Kept:
    '''No record.'''
    name: str

Pair = tuple[Part, "text"]
"""
JOBS = """
@dataclass
class Verdict:
    outcome: Outcome | None
    kept: Kept

@dataclass
class Outcome:
    reason: Any
"""
TEXTS = {"target_service/leases/lease.py": LEASE, "target_service/leases/jobs.py": JOBS}


def test_a_file_weighs_its_nodes_its_lines_and_what_is_dense() -> None:
    plain = weigh("a = b\n\n# A comment\n")
    assert plain == Weight(num_files=1, num_nodes=6, num_lines=2)
    dense = weigh("a = [b for b in c]\nd = a if c else {*()}\n")
    assert (dense.num_comprehensions, dense.num_conditionals) == (1, 1)


def test_what_went_to_the_papers_is_counted_and_left_out() -> None:
    found = weigh_groups({"target_service/a.py": "a", "outrider/papers/b.py": "b", "gateway/c.py": "c"})
    assert found["all"].num_files == 2
    assert found[f"all but {PAPERS}"] == found["target_service"] == weigh("a")


def test_names_of_the_product_that_the_step_imports_from_others() -> None:
    texts = {**TEXTS, "target_service/rows.py": "from target_service.leases.lease import Lease\nimport math"}
    assert imported(texts) == {
        "outrider.wire.kinds.Drafter",
        "outrider.wire.kinds.Fallback",
        "target_service.leases.jobs.Verdict",
    }


def test_fields_of_records_are_followed_through_what_they_hold() -> None:
    found = {record.name: (len(record.fields), record.is_own) for record in records(TEXTS)}
    assert found == {
        "Lease": (2, True),
        "Verdict": (2, True),
        "Draft": (1, True),
        "Part": (1, True),
        "Outcome": (1, False),
    }
    assert sorted(unclear(records(TEXTS))) == ["Outcome.reason: Any", "Part.data: int"]
