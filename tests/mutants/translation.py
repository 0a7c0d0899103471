"""Drafts of other tokenizers: what is told of the target's tokens, and what of the draft's law is read as theirs."""

from tests.mutants import Mutant

TRANSLATION, SLOT = "outrider/drafting/translation.py", "draft_service/translated_slot.py"
UNIT = ("tests/unit/test_translated_drafts.py",)
ENGINE = ("tests/engine/test_translated_drafting.py",)

TRANSLATIONS = (
    Mutant(
        TRANSLATION,
        "            if furthest <= begin and begin in run.ends and place:",
        "            if begin in run.ends and place:",
        "a place within a character is taken for one where tokens of both begin",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "            if not place:\n                meeting = 0\n",
        "            if True:\n                meeting = 0\n",
        "a text that goes on is told as one that begins",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "        if raw and _is_whole(raw) and",
        "        if raw and",
        "halves of characters are guessed, and what follows them is told otherwise",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "            np.logaddexp.at(out, self._more[0], row[self._more[1]])",
        "            np.maximum.at(out, self._more[0], row[self._more[1]])",
        "of a text that the draft writes in two ways one is left out",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "    tokenizer.encode_special_tokens = True\n",
        "",
        "a text that spells a special token of the draft's is one",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "                self._tell(run, ids, marks)\n                marks",
        "                marks",
        "text before a special token is not told",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "        return (ids if has_ended else ids[:-1]), has_ended\n",
        "        return ids, has_ended\n",
        "of a text that goes on the last token is guessed, with which what follows merges",
        UNIT,
    ),
    Mutant(
        TRANSLATION,
        "            return place if furthest <= start else None\n",
        "            return place\n",
        "text that merges with what is committed is guessed without its beginning",
        UNIT,
    ),
    Mutant(
        "outrider/drafting/token_bytes.py",
        "        if token_id in silent or token_id == unknown:\n            continue\n",
        "",
        "special tokens of one name are one text",
        UNIT,
    ),
    Mutant(
        "draft_service/model_drafter.py",
        "goes_on = tree.root.is_fed and slot.is_told(len(slot.cached) - len(tree.fed))",
        "goes_on = tree.root.is_fed",
        "guesses below tokens that the draft writes otherwise go on from a text that it does not have",
        ENGINE,
    ),
    Mutant(
        SLOT,
        "        return max(0, self._limit + 1 - len(self._retelling.ids)) if self._retelling.is_whole else 0\n",
        "        return max(0, self._limit + 1 - len(self._retelling.ids))\n",
        "the draft guesses what follows half a character without knowing it",
        ENGINE,
    ),
    Mutant(
        SLOT,
        "        return told if len(told) <= self._limit else told[: self._limit]\n",
        "        return told\n",
        "a text that is longer in the draft's tokens than its context ends its worker's step",
        ENGINE,
    ),
    Mutant(
        SLOT,
        "        self._num_agreed = min(self._num_agreed, self._retelling.commit(self.committed, num_same))\n",
        "        self._retelling.commit(self.committed, num_same)\n",
        "what was cached before it was told otherwise is taken for what is told now",
        ENGINE,
    ),
)
