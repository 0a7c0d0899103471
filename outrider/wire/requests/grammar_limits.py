"""Limits of llguidance, by which the gateway checks grammars and the workers compute masks from them.

Both use the same limits, so that a grammar that the gateway accepts is one that the workers can follow. A limit per
step bounds the time that one slot's mask adds to the step of all slots. Times are of one core at 3 GHz and a vocabulary
of 128,000 tokens.
"""

from __future__ import annotations

from typing import Any

MAX_LEXER_STATES = 50_000
"""States of one grammar's lexer, which are created when they are reached. Expressions that explode took 0.1 to 0.7 kB a
state, 35 MB at most; a string with a `maxLength` has 9 states a character, and reaches the limit after 5,500."""
MAX_ITEMS_IN_ROW = 2000
"""Ways to continue at one byte of the output, four for each optional property of an object. A mask takes 4 ms with
2,000; the time grows with the square."""


def parser_limits() -> dict[str, Any]:
    """Return all arguments of llguidance's LLParserLimits."""
    return {
        "max_items_in_row": MAX_ITEMS_IN_ROW,
        "initial_lexer_fuel": 1_000_000,  # 70 ms of compiling, before the first step
        "step_lexer_fuel": 50_000,  # 7 ms of a step
        "step_max_items": 3_000,  # 5 ms of a step, of ambiguous rules up to 40 ms; 499 optional properties take 2,000
        "max_lexer_states": MAX_LEXER_STATES,
        "max_grammar_size": 1_000_000,  # never reached: max_compile_s and the library's 65,525 symbols come before
        "precompute_large_lexemes": True,  # while compiling, not in a step
        "verbose_errors": False,  # errors quote none of the grammar
    }


def limit_reached(error: str) -> str | None:
    """Return a sentence on the limit that an error of llguidance names, or None for another error."""
    if "Current row has" in error:
        return f"it has too many ways to go on at one place, more than {MAX_ITEMS_IN_ROW} (MAX_ITEMS_IN_ROW)"
    if "too many states" in error:
        return f"its lexer has too many states, more than {MAX_LEXER_STATES} (MAX_LEXER_STATES)"
    if "too many expressions" in error:
        return "its expressions take too long in one step (step_lexer_fuel)"
    if "symbols.len()" in error:
        return "it has more than 65,525 rules and texts, all that the library counts"
    if "Too many items" in error:
        return "its rules take too long in one step (step_max_items)"
    return None
