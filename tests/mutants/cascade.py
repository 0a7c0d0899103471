"""A draft that is drafted for: a table's guesses and what is drawn."""

from tests.mutants import Mutant

CASCADE, GROWER = "draft_service/cascade.py", "draft_service/grower.py"
DRAFTED_FOR = ("tests/engine/test_cascade.py",)

CASCADES = (
    Mutant(
        GROWER,
        "            self._drafter.keep_fed(growing, num_fed, cascade.drawn)",
        "            pass",
        "a guess that was not drawn stays in the cache",
        DRAFTED_FOR,
    ),
    Mutant(
        "draft_service/model_drafter.py",
        "ahead = enumerate(guesses[:num_fed], first)",
        "ahead = enumerate(guesses[:num_fed], first - 1)",
        "what follows a guess is drawn from the row before it",
        DRAFTED_FOR,
    ),
    Mutant(
        CASCADE,
        "if each.token_id == guess.token_id), None)",
        "), None)",
        "a guess counts as drawn, whatever was",
        DRAFTED_FOR,
    ),
    Mutant(
        CASCADE,
        " or not said.tree.wants(child):",
        ":",
        "a guess that was drawn is followed where the tree would not grow",
        DRAFTED_FOR,
    ),
    Mutant(
        CASCADE,
        "        self._drawn.append(index)",
        "        self._drawn.append(0)",
        "of several guesses the first is kept in place of that which was drawn",
        DRAFTED_FOR,
    ),
    Mutant(
        CASCADE,
        "        self.follower.truncate(self._num_source + base_len)\n",
        "",
        "a table follows what is committed twice",
        DRAFTED_FOR,
    ),
    Mutant(
        GROWER,
        "            self._push_drawn(owners.values())\n",
        "",
        "what was drawn and guessed leaves later than what was not",
        DRAFTED_FOR,
    ),
    Mutant(
        "draft_service/feeding.py",
        "_without_last(row, num_guesses.get(key, 0))",
        "row",
        "guesses that there is no memory for fail the step",
        DRAFTED_FOR,
    ),
)
