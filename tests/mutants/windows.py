"""Scaffolds of the target's own drafters: what is fed beside drafts, where it hangs, and whose it is."""

from tests.mutants import Mutant

LOOKAHEAD, OWN, PASS = "outrider/drafting/lookahead.py", "target_service/own_lookahead.py", "target_service/own_pass.py"
VERIFIER, DRAFTS = "target_service/verifier.py", "target_service/drafts.py"
UNIT, STEPS, ROWS = ("tests/unit/test_lookahead.py",), ("tests/engine/test_turns.py",), ("tests/unit/test_rows.py",)

WINDOWS = (
    Mutant(
        OWN,
        "self._slots[slot.key] = Lookahead(self._shape, [*source_ids, *slot.committed])",
        "self._slots.setdefault(slot.key, next(iter(self._slots.values()), "
        "Lookahead(self._shape, [*source_ids, *slot.committed])))",
        "one pool for all: the speed of an answer tells of texts under other salts",
        UNIT,
    ),
    Mutant(
        LOOKAHEAD,
        "self._levels = [deeper[0][1:], ",
        "self._levels = [deeper[0][:-1], ",
        "the window stands still while its columns move, and its n-grams are none",
        UNIT,
    ),
    Mutant(
        LOOKAHEAD,
        "*range(-1, window - 1), *range(window - 1, num_ids - window)",
        "*range(-1, window - 1), *range(window, num_ids - window + 1)",
        "columns hang one off, and nothing of what they bring comes true",
        UNIT,
    ),
    Mutant(
        OWN,
        "[parent if parent < 0 else len(parents) + parent for parent in window.parents]",
        "window.parents",
        "windows hang under the step's drafts",
        (*UNIT, *STEPS),
    ),
    Mutant(
        PASS,
        "end, rows = path[-1] if path else -1, list[int]()",
        "end, rows = -1, list[int]()",
        "what is said behind the last token is taken for what follows the drafts that were kept",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        PASS,
        "        placed += [draft, *range(first, first + len(own) - 1)]",
        "        placed += [draft] * len(own)",
        "look-ahead ids hang side by side, and say what each says alone",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        "outrider/training/pass_embeddings.py",
        "ahead = behind[:, :, None] + 1 + order",
        "ahead = behind[:, :, None] + order",
        "look-ahead embeddings are trained to say the token that they stand for",
        ("tests/engine/test_training.py",),
    ),
    Mutant(
        VERIFIER,
        "*(len(tail) + parent for parent in nodes)]",
        "*(len(tail) + parent - (place >= len(ready.draft_ids)) for place, parent in enumerate(nodes))]",
        "scaffolds hang a token too early",
        STEPS,
    ),
    Mutant(
        VERIFIER,
        "for num in (len(r.draft_ids) + 1, len(r.scaffold_ids))])\n    return torch.cat(parts[::2])",
        "for num in (len(r.scaffold_ids), len(r.draft_ids) + 1)])\n    return torch.cat(parts[1::2])",
        "a step is decided by what is said behind tokens that nobody said",
        STEPS,
    ),
    Mutant(
        "target_service/rows.py",
        "rows = each.num_scaffolds + len(drafts)",
        "rows = each.num_scaffolds",
        "windows are fed that do not pay for the drafts that they bring",
        ROWS,
    ),
    Mutant(
        "target_service/lease.py",
        "parent if parent < num_drafts else parent - len(others) for parent",
        "parent for parent",
        "beside fewer drafts than there were, ids hang under other ids than their own",
        ("tests/unit/test_own_pass.py",),
    ),
    Mutant(
        DRAFTS,
        "lease.own_shares[r.scaffold.drafter].note(None)",
        "pass",
        "windows that bring nothing are fed for ever",
        ("tests/unit/test_lease.py",),
    ),
)
