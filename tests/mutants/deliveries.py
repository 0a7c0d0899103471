"""Proposals on their way from draft to target: tickets, and what travels under them."""

from tests.mutants import Mutant

TABLE = "target_service/tickets.py"
TICKETS = ("tests/unit/test_tickets.py",)

DELIVERIES = (
    Mutant(
        TABLE,
        "        if part.ticket in self._finished:\n            return Arrival.LATE\n        proposal",
        "        proposal",
        "what comes for a finished round is parked again and never freed",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "    if part.start != num_here:",
        "    if part.start > num_here:",
        "a part that comes twice counts twice",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "    if committed_len != expected[0]:",
        "    if committed_len > expected[0]:",
        "drafts for an older state of the answer are verified as if they were for this one",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "    if num_draft_tokens > expected[1]:",
        "    if num_draft_tokens > expected[1] + 1:",
        "a draft sends more tokens than the verify has room for",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "        if proposal.refused is not None or proposal.complete:",
        "        if proposal.refused is not None:",
        "a proposal changes while the engine reads it",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "            if proposal.expected is None and proposal is not keep:",
        "            if proposal is not keep:",
        "a draft that fills the table takes the room of proposals that a verify awaits",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "        self._num_bytes -= proposal.num_bytes\n",
        "",
        "memory of proposals is counted for ever, until no proposal is taken",
        TICKETS,
    ),
    Mutant(
        TABLE,
        "p.expected is None and now - p.created_s >= self._ttl_s]",
        "now - p.created_s >= self._ttl_s]",
        "a proposal that its verify awaits expires under it",
        TICKETS,
    ),
)
