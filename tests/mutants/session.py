"""One answer: its text, its stop strings, its usage."""

from tests.mutants import Mutant

TEXT, STATE = "gateway/rounds/detokenizer.py", "gateway/rounds/session.py"
DETOKENIZER = ("tests/unit/test_detokenizer.py",)
VERDICTS = ("tests/unit/test_session.py",)

SESSION = (
    Mutant(
        TEXT,
        "        num_held = max((stop.num_matched for stop in self._stops), default=0)",
        "        num_held = 0",
        "the beginning of a stop string is sent before it is known that it is one",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "        text = self._held\n        tokens",
        '        text = ""\n        tokens',
        "text that was held back is lost",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "self._ended(text, stop, num_after), len(tokens), stop,",
        "self._ended(text, stop, num_after), len(ids), stop,",
        "tokens after the one that completed a stop string are counted",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "                    return max(complete, key=len), len(added) - place",
        "                    return min(complete, key=len), len(added) - place",
        "of two stop strings that end together the shorter one stays in part in the text",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "            size = self._borders[size]",
        "            size = 0",
        "a stop string that begins within a false start of itself is missed",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "        text = held + cut_off\n",
        "        text = cut_off\n",
        "an answer that ends in the middle of what might have been a stop string loses it",
        DETOKENIZER,
    ),
    Mutant(
        TEXT,
        "        return cut_off + text",
        "        return text",
        "a character that never became whole vanishes",
        DETOKENIZER,
    ),
    Mutant(
        STATE,
        "        text_ids = ids[:-1] if stopped_by_id and not self.request.keeps_stop else ids  # a stop id is no text",
        "        text_ids = ids",
        "the stop token shows in the text",
        VERDICTS,
    ),
    Mutant(
        STATE,
        "ids[: pushed.num_kept], FinishReason.STOP, pushed.stop",
        "ids, FinishReason.STOP, pushed.stop",
        "tokens after a stop string are committed and counted",
        VERDICTS,
    ),
    Mutant(
        STATE,
        "        return self.request.params.max_tokens - self.num_output - 1",
        "        return self.request.params.max_tokens - self.num_output",
        "a round drafts a token that can never be committed",
        VERDICTS,
    ),
    Mutant(
        STATE,
        "            delta += held\n",
        "",
        "the last characters of an answer are missing",
        VERDICTS,
    ),
    Mutant(
        STATE,
        "        self.usage.num_accepted_tokens += verdict.num_accepted",
        "        self.usage.num_accepted_tokens += verdict.num_drafted",
        "usage says that every draft was kept",
        VERDICTS,
    ),
)
