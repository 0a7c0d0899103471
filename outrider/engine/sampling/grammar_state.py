"""The tokens that a request's grammar allows: compiled once for a worker's tokenizer, followed by each slot.

A mask depends on the grammar and on the output tokens before it, whoever proposed them. If a grammar leaves no choice
of the next bytes, it allows only one way to write them, the tokenizer's own. Tokens without text are never allowed,
except those that end an output: they are allowed where the grammar may end, and are the only ones where it must. Ids
that the tokenizer does not have are not allowed.

`Grammars` may be used by any thread; a `GrammarState` belongs to one slot. llguidance releases the interpreter while it
compiles and while it makes a mask. Called by `grammar_compiler` and `penalties`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.grammar_limits import limit_reached, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]
"""Array [V]: for each id of the vocabulary, whether a grammar allows it at one position."""
MaskBits = NDArray[np.uint8]
"""A `Mask` with one bit per id, [ceil(V / 32) * 4] bytes; the lowest id of a byte is in its lowest bit."""

MAX_GRAMMARS = 16
"""Maximum number of compiled grammars that a worker keeps. Each may have a full lexer of 35 MB. A grammar that is
dropped stays in memory while a slot follows it."""
MAX_TEXT_BYTES = 4 << 20
"""Maximum bytes of the texts of all kept grammars; a compiled grammar takes about ten times the bytes of its text."""
MAX_FOLLOWED_TOKENS = 4096
"""Number of output tokens, of all slots that follow one compiled grammar, after which later slots get a new one. So the
grammar's lexer stays below its limit of states: a costly expression adds 1 to 45 per token. Compiling takes 1 to 5 ms.
"""

NO_TEXT = "\uffff"
"""Prefix of special tokens' names in the tokenizer that llguidance reads. No output contains such a name, since U+FFFF
is not a Unicode character."""


class Grammars:
    """Compiled grammars of one model, of which a worker keeps the most recently used."""

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int], *, must_follow: bool = True
    ) -> None:
        """Create the collection from a tokenizer. Reading it blocks the interpreter: 20 ms for 4,096 ids, a second for
        262,144.

        vocab_size: number of logits of a row. must_follow: whether a request with a grammar is refused if no grammar
        can be followed with this tokenizer. False: the request is served as if it had none.
        """
        self.vocab_size = vocab_size
        self._must_follow = must_follow
        end_ids = list[int]()
        for token_id in eos_token_ids:
            if token_id < vocab_size:
                end_ids.append(token_id)
        self._tokenizer, self._why_not = _read_tokenizer(tokenizer_json, vocab_size, end_ids)
        """The tokenizer, and an empty text. If no grammar can be followed: None, and the reason."""
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()
        """Guards `_kept` and `_num_bytes`."""

    def get(self, text: str) -> Grammar | None:
        """Return the compiled grammar of a text if it is kept; else None."""
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
            return found

    def compile(self, text: str) -> Grammar | None:
        """Return the compiled grammar of a text, and keep it; a kept one is not compiled again. Return None in a draft
        worker whose tokenizer is unfit for grammars: it then drafts as if the request had none.

        Raises InvalidRequest, with the reason, if the grammar cannot be followed.
        """
        found = self.get(text)
        if found is None and (self._must_follow or self._tokenizer is not None):
            found = Grammar(self, text, self._matcher(text))
            self._keep(found)
        return found

    def _matcher(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            why = f"no grammar can be followed with this model: {self._why_not}; leave the grammar out"
            raise InvalidRequest(why, param="grammar")
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**parser_limits()))
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {_reason(matcher)}", param="grammar")
        return matcher

    def forget(self, grammar: Grammar) -> None:
        """Drop a grammar from the kept ones, so that its text is compiled anew for the next slot."""
        with self._lock:
            if self._kept.get(grammar.text) is grammar:
                self._drop(grammar.text)

    def _keep(self, grammar: Grammar) -> None:
        with self._lock:
            self._kept[grammar.text] = grammar
            self._num_bytes += grammar.num_bytes
            while len(self._kept) > 1 and (len(self._kept) > MAX_GRAMMARS or self._num_bytes > MAX_TEXT_BYTES):
                self._drop(next(iter(self._kept)))

    def _drop(self, text: str) -> None:
        self._num_bytes -= self._kept.pop(text).num_bytes


def _read_tokenizer(tokenizer_json: bytes, vocab_size: int, end_ids: list[int]) -> tuple[LLTokenizer | None, str]:
    if not end_ids:
        return None, "it has no end of sequence, by which the answer would end"
    try:
        from llguidance import LLTokenizer

        return LLTokenizer(_spelt_out(tokenizer_json, vocab_size), n_vocab=vocab_size, eos_token=end_ids), ""
    except (ImportError, ValueError) as error:
        return None, f"its tokenizer cannot be read for that: {error}"


def _spelt_out(tokenizer_json: bytes, vocab_size: int) -> str:
    """Return the tokenizer with special tokens renamed so that no text contains them, and without ids beyond the
    model's logits.

    llguidance has it tokenize the text that a grammar forces, which must never become a special token.
    """
    read = json.loads(tokenizer_json)
    _drop_beyond(read, vocab_size)
    names = dict[str, str]()
    for token in read["added_tokens"]:
        content = token["content"]
        if token["special"] or (content.startswith("<") and content.endswith(">")):  # special for llguidance, too
            names[content] = token["content"] = f"{NO_TEXT}{content}"
            token["special"] = True
    model = read["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        renamed = dict[str, int]()
        for token, token_id in vocab.items():
            renamed[names.get(token, token)] = token_id
        model["vocab"] = renamed
    elif vocab is not None:  # Unigram's
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(read, ensure_ascii=False)


def _drop_beyond(read: dict[str, Any], vocab_size: int) -> None:
    # ids from vocab_size on, and the merges that make them
    model = read["model"]
    read["added_tokens"] = [token for token in read.get("added_tokens") or () if token["id"] < vocab_size]
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram's, in the order of ids
        model["vocab"] = vocab[:vocab_size]
    elif vocab is not None and max(vocab.values(), default=0) >= vocab_size:
        kept = {token: token_id for token, token_id in vocab.items() if token_id < vocab_size}
        model["vocab"] = kept
        if "merges" in model:
            merges = list[Sequence[str]]()
            for merge in model["merges"]:
                pair = merge
                if isinstance(merge, str):
                    pair = merge.split(" ")
                if {*pair, "".join(pair)} <= kept.keys():
                    merges.append(pair)
            model["merges"] = merges


@dataclass(eq=False, slots=True)
class Grammar:
    """Compiled grammar, shared by all slots whose requests have the same grammar text. The slots share its lexer, which
    belongs to the engine thread.
    """

    grammars: Grammars
    text: str
    _start: LLMatcher
    _num_followed: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the grammar's text."""
        return len(self.text.encode())

    def start(self) -> LLMatcher:
        """Return a new matcher, at the beginning of an output."""
        return self._start.deep_copy()

    def note_followed(self, num_tokens: int) -> None:
        """Add to the number of output tokens that slots produced under this compiled grammar. From MAX_FOLLOWED_TOKENS
        of them on the grammar's lexer may be nearly full, and the grammar is dropped with `retire`.
        """
        self._num_followed += num_tokens
        if self._num_followed >= MAX_FOLLOWED_TOKENS:
            self.retire()

    def retire(self) -> None:
        """Drop this compiled grammar from the kept ones, so that later slots compile its text anew. Slots that already
        follow this compiled grammar go on with it.
        """
        self.grammars.forget(self)


@dataclass(slots=True)
class _PrefixState:
    """State of a grammar after some output tokens."""

    matcher: LLMatcher | None
    """Matcher after the output tokens of this state; None if the grammar does not allow them, or cannot be followed
    further."""
    bits: MaskBits | None = None
    mask: Mask | None = None
    """`bits`, the ids that may follow, as one bool per id; None until `GrammarState.allowed` needs it."""
    failure: str | None = None
    """Reason why the grammar cannot be followed beyond the output tokens of this state; None if it can."""


class GrammarState:
    """Grammar of one slot, followed through its output and through draft tokens after the output.

    After an error of the matcher, for example at one of its limits, the grammar cannot be followed beyond the token at
    which it happened, and `failure` returns the reason. The compiled grammar is then dropped, so that later slots
    compile its text anew.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._output: list[int] = []
        self._states = {(): _PrefixState(grammar.start())}
        """States by the draft tokens after the output."""
        self._forced: list[int] | None = None

    def set_output(self, ids: Sequence[int]) -> None:
        """Set the committed output to `ids`. The call is fast if `ids` begin with the previous output."""
        known = len(self._output)
        if known == len(ids) and self._output == ids:
            return
        root = self._states[()]
        if self._output != ids[:known]:
            root = _PrefixState(self._grammar.start())
            known = 0
        new = ids[known:]
        self._output = list(ids)
        self._grammar.note_followed(len(new))
        root = self._after(root, new)
        if root.matcher is None and root.failure is None:
            root.failure = "the output so far is not of the grammar"
        self._states = {(): root}
        self._forced = None

    def allowed(self, draft_prefix: tuple[int, ...]) -> Mask | None:
        """Return for each id whether it may follow the output and these draft tokens, [V]. Return None if the grammar
        does not allow the draft tokens themselves, or cannot be followed further.
        """
        state = self._masked(draft_prefix)
        if state.mask is None and state.bits is not None:
            num_ids = self._grammar.grammars.vocab_size
            state.mask = np.unpackbits(state.bits, count=num_ids, bitorder="little").view(bool)
        return state.mask

    def allowed_bits(self, draft_prefix: tuple[int, ...]) -> MaskBits | None:
        """Return for each id whether it may follow the output and these draft tokens, one bit per id (`MaskBits`).
        Return None if the grammar does not allow the draft tokens themselves, or cannot be followed further.
        """
        return self._masked(draft_prefix).bits

    def failure(self, draft_prefix: tuple[int, ...]) -> str | None:
        """Return why the grammar cannot be followed further after the output and these draft tokens; None if it can."""
        return self._masked(draft_prefix).failure

    def forced(self) -> list[int]:
        """Return the ids of the text that the grammar forces after the output; empty if it leaves a choice. They are
        only proposed as draft tokens: `allowed` decides which ids may follow.
        """
        if self._forced is None:
            self._forced = []
            root = self._masked(())
            if root.matcher is not None:
                self._forced = root.matcher.compute_ff_tokens()
        return self._forced

    def _masked(self, prefix: tuple[int, ...]) -> _PrefixState:
        state = self._at(prefix)
        if state.bits is None and state.matcher is not None:
            bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
            if state.matcher.is_error():
                state.failure = self._failed(state.matcher)
                state.matcher = None
            else:
                state.bits = bits
        return state

    def _at(self, prefix: tuple[int, ...]) -> _PrefixState:
        state = self._states.get(prefix)
        if state is None:
            parent = self._at(prefix[:-1])
            copy = _PrefixState(None, failure=parent.failure)
            if parent.matcher is not None:
                copy.matcher = parent.matcher.deep_copy()
            state = self._after(copy, prefix[-1:])
            self._states[prefix] = state
        return state

    def _after(self, state: _PrefixState, ids: Sequence[int]) -> _PrefixState:
        """Return the state after further tokens; the matcher of `state` is used up. A grammar stays at its end."""
        matcher = state.matcher
        if matcher is None or matcher.try_consume_tokens(list(ids)) == len(ids) or _is_over(matcher):
            return _PrefixState(matcher, failure=state.failure)
        failure = None
        if matcher.is_error():
            failure = self._failed(matcher)
        return _PrefixState(None, failure=failure)

    def _failed(self, matcher: LLMatcher) -> str:
        self._grammar.retire()
        return _reason(matcher)


def _is_over(matcher: LLMatcher) -> bool:
    return matcher.is_stopped() and not matcher.is_error()


def _reason(matcher: LLMatcher) -> str:
    reason = matcher.get_error().partition("\n")[0]
    if reason.startswith("NoExtension"):
        return "no token of the model goes on as it says"
    return limit_reached(reason) or reason
