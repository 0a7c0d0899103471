"""Limits for the library llguidance, with which the gateway checks grammars and the workers compute token masks.

Gateway and workers use the same limits, so that the workers can follow every grammar that the gateway accepts. A limit
per step bounds the time that the mask of one slot adds to the step of all slots. Times below were measured on one core
at 3 GHz with a vocabulary of 128,000 tokens.
"""

from __future__ import annotations

from typing import Any

MAX_LEXER_STATES = 50_000
"""Maximum number of states of one grammar's lexer, which creates a state when it first reaches it. Regular expressions
with very many states took 0.1 to 0.7 kB per state, so 35 MB at most. A string with a `maxLength` has 9 states per
character, and reaches the limit after 5,500 characters."""
MAX_ITEMS_IN_ROW = 2000
"""Maximum number of parser items (ways to continue the grammar) that llguidance may hold at one byte of the output.
Each optional property of an object adds four. With 2,000 items the mask of a token takes 4 ms, and this time grows with
the square of their number."""


def parser_limits() -> dict[str, Any]:
    """Return the keyword arguments for llguidance's class LLParserLimits, by which it refuses grammars that take too
    much time or memory.
    """
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
    """Return a sentence on the limit that was exceeded, given an error text of llguidance. None = the error is not
    about a limit.
    """
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
