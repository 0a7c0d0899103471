"""Beam search: what goes on, what has ended, and what of it lies in the cache."""

from tests.mutants import Mutant

SEARCH, TREE = "outrider/engine/speculation/beam.py", "outrider/engine/speculation/beam_tree.py"
GROWING, TARGET = "outrider/engine/speculation/growing_beams.py", "target_service/beams.py"
LAWS, DRAFTED = ("tests/unit/test_beam.py",), ("tests/unit/test_growing_beams.py",)
ENGINE = "tests/engine/test_beams.py"
STEPS, LOST, MOVED = (
    (f"{ENGINE}::test_drafts_change_no_answer_and_right_ones_save_steps",),
    (f"{ENGINE}::test_what_was_lost_is_fed_again_in_pieces",),
    (f"{ENGINE}::test_a_search_goes_on_from_its_levels_on_another_lease_and_on_another_target",),
)

BEAMS = (
    Mutant(
        GROWING,
        "list(zip(self.live, self.sums, strict=True))",
        "[(node, 0.0) for node in self.live]",
        "a draft's beams are sorted without the target's sums, and are not the target's",
        DRAFTED,
    ),
    Mutant(
        GROWING,
        "                    if token_id not in self._stop_ids\n",
        "",
        "a draft's beams go on behind what ends them, in place of those that the target chooses",
        DRAFTED,
    ),
    Mutant(
        TARGET,
        "None in following:\n                return levels\n"
        "            rows = [row for row in following if row is not None",
        "not (first := following[0]):\n                return levels\n"
        "            rows = [row or first for row in following",
        "a level is decided by what is said behind the best beam alone, though others were not fed",
        STEPS,
    ),
    Mutant(
        SEARCH,
        "divisor = self._divisor(num_levels + 1)",
        "divisor = self._divisor(max(1, num_levels))",
        "an answer's score is that of one a token shorter",
        LAWS,
    ),
    Mutant(
        SEARCH,
        "self._max_tokens if is_longest_best else len(self.levels)",
        "self._max_tokens if is_longest_best else len(self.levels) + 1",
        "a search ends by a length that no beam has",
        LAWS,
    ),
    Mutant(
        SEARCH,
        "elif len(live) < width:",
        "elif rank < width:",
        "what ends costs a live beam its place",
        LAWS,
    ),
    Mutant(
        SEARCH,
        "return self._params.width + len(self._stop_ids)",
        "return self._params.width",
        "too little is known of a beam whose best continuations end",
        LAWS,
    ),
    Mutant(
        SEARCH,
        "params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0",
        "False",
        'early_stopping "never" is that of false',
        LAWS,
    ),
    Mutant(
        TARGET,
        "*(num_tail + place for place in tree.keep(tree.inner()))",
        "*(max(num_tail - 1, 0) + place for place in tree.keep(tree.inner()))",
        "what stays in the cache is taken one off, behind settled tokens that were fed with it",
        LOST,
    ),
    Mutant(
        TREE,
        "place = {id(self.root): root_at}",
        "place = {id(self.root): min(root_at, 0)}",
        "beams hang under the first of the settled tokens that are fed with them, not the last",
        LOST,
    ),
    Mutant(
        TARGET,
        "return inner[: max(0, most)] if",
        "return inner if",
        "a search that lost its memory feeds its whole tree at once, however large",
        LOST,
    ),
    Mutant(
        TARGET,
        "        for level in levels:\n            self.search.apply(level)\n",
        "",
        "a search that goes on elsewhere forgets the sums of its beams, and what has ended",
        MOVED,
    ),
    Mutant(
        "gateway/rounds/beam_session.py",
        'return {"base_len": self.num_prompt, "levels": self.levels}',
        'return {"base_len": self.num_prompt, "levels": []}',
        "a slot that is opened again begins the search anew",
        ("tests/unit/test_beam_session.py",),
    ),
)
