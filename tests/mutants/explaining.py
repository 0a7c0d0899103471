"""What is told of a round: where the target stood, what the draft drew from, and to nobody who did not ask."""

from tests.mutants import Mutant

TOLD, VERIFIER = "target_service/explaining.py", "target_service/verifier.py"
LAWS = ("tests/unit/test_explaining.py",)
SERVED = ("tests/service/test_target_service.py::test_an_explanation_changes_nothing_and_comes_to_those_who_ask",)

EXPLAINING = (
    Mutant(
        TOLD,
        "rows = [each.start + 1 + each.last for",
        "rows = [each.start + max(0, each.last) for",
        "the target's best are told of the place before",
        LAWS,
    ),
    Mutant(
        TOLD,
        "    row = LogitRow(asking.state, tree.prefix(asking.last))",
        "    row = LogitRow(asking.state, ())",
        "what drafts do to penalties and the grammar is not told",
        LAWS,
    ),
    Mutant(
        TOLD,
        "        laws = [r.draft_laws[last + 1]] if is_drawn",
        "        laws = [r.draft_laws[max(0, last)]] if is_drawn",
        "the law that is told is not the one that the refused token was drawn from",
        LAWS,
    ),
    Mutant(
        VERIFIER,
        "            if lease.speculation.explain:",
        "            if True:",
        "who did not ask is told, and waits for it",
        SERVED,
    ),
    Mutant(
        VERIFIER,
        "            sound.append((lease, r, own))",
        "            sound.append((lease, r, own if not lease.speculation.explain else replace(own, next_id=0)))",
        "who asks gets another answer",
        SERVED,
    ),
    Mutant(
        "target_service/parked.py",
        "        us, self.us = self.us, 0",
        "        us = self.us",
        "what a delivery took is told of every step that verifies a part of it",
        LAWS,
    ),
    Mutant(
        "outrider/wire/kinds.py",
        "        return TokenKind.ACCEPTED if self in (TokenKind.FORCED, TokenKind.PREDICTED) else self",
        "        return self",
        "forced and predicted tokens are missing among those that are counted as accepted",
        ("tests/unit/test_session.py",),
    ),
)
