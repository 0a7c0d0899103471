"""Which tokens a request's grammar allows: compiled once for a worker's tokenizer, followed by each slot.

A mask is a function of the grammar and of the output tokens before it, whoever proposed them. Where a grammar leaves no
choice of the next bytes it allows one way to write them: the tokenizer's own. Tokens that are no text are never
allowed, but for those that end an answer, where the grammar may end; where it has to, nothing else is. Ids that the
tokenizer does not have are not allowed either.

`Grammars` may be asked from any thread, what it makes belongs to one slot. llguidance lets go of the interpreter while
it compiles and while it makes a mask. Called by `grammar_compiler`, and by `penalties`, which follows.
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
"""[V]: which ids may come."""
MaskBits = NDArray[np.uint8]
"""[ceil(V / 32) * 4]: the same, a bit an id, that of the lowest id of a byte the lowest."""

MAX_GRAMMARS = 16
"""Compiled grammars that a worker keeps. Each may hold a full lexer: 16 of 35 MB are 0.6 GB. One that
is no longer kept lives on while a slot follows it, so that each open slot may add 35 MB at worst."""
MAX_TEXT_BYTES = 4 << 20
"""Bytes of their texts, all together: what is compiled takes some ten times as much."""
MAX_FOLLOWED_TOKENS = 4096
"""Output tokens, of all slots together, behind which a grammar is compiled anew for those that come, so that states
that others met do not end them: an expression that explodes adds 1 to 45 a token. At 1,000 tokens/s compiling takes
1 to 5 ms of another thread in 4 s."""

NO_TEXT = "\uffff"
"""Begins the names of special tokens: Unicode has no such character."""


class Grammars:
    """Compiles for one model, and keeps what was asked for last."""

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int], *, must_follow: bool = True
    ) -> None:
        """vocab_size: the width of the model's logits. must_follow: requests with a grammar are refused where none can
        be followed; without, they are served as if they had none.

        Reads the tokenizer, which holds the interpreter up: 20 ms for 4,096 ids, a second for 262,144.
        """
        self.vocab_size = vocab_size
        self._must_follow = must_follow
        ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer, self._why_not = _tokenizer_of(tokenizer_json, vocab_size, ends)
        """None where no grammar can be followed."""
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()
        """Of what is kept."""

    def get(self, text: str) -> Grammar | None:
        """Return a grammar that is compiled; None where `compile` would take its time."""
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
            return found

    def compile(self, text: str) -> Grammar | None:
        """Return the grammar of a text, None where it is served as if there were none. Raises InvalidRequest saying
        what of it cannot be followed.
        """
        found = self.get(text)
        if found is None and (self._must_follow or self._tokenizer is not None):
            found = Grammar(self, text, self._matcher(text))
            self._keep(found)
        return found

    def _matcher(self, text: str) -> LLMatcher:
        """Return the beginning of a text's grammar. Raises InvalidRequest."""
        if self._tokenizer is None:
            why = f"no grammar can be followed with this model: {self._why_not}; leave the grammar out"
            raise InvalidRequest(why, param="grammar")
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**parser_limits()))
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be followed: {_reason(matcher)}", param="grammar")
        return matcher

    def forget(self, grammar: Grammar) -> None:
        """Compile this text anew when it is asked for again."""
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


def _tokenizer_of(tokenizer_json: bytes, vocab_size: int, ends: list[int]) -> tuple[LLTokenizer | None, str]:
    """Return the tokenizer as llguidance needs it, or None and why there is none."""
    if not ends:
        return None, "it has no end of sequence, by which the answer would end"
    try:
        from llguidance import LLTokenizer

        return LLTokenizer(_spelt_out(tokenizer_json, vocab_size), n_vocab=vocab_size, eos_token=ends), ""
    except (ImportError, ValueError) as error:
        return None, f"its tokenizer cannot be read for that: {error}"


def _spelt_out(tokenizer_json: bytes, vocab_size: int) -> str:
    """Return the tokenizer with special tokens under names that no text has, so that it writes their names in other
    tokens. llguidance asks it how it writes what a grammar leaves no choice of; a special token is never text, nor is
    one beyond the model's logits.
    """
    read = json.loads(tokenizer_json)
    _drop_beyond(read, vocab_size)
    names = {}
    for token in read["added_tokens"]:
        content = token["content"]
        if token["special"] or (content.startswith("<") and content.endswith(">")):  # as llguidance sees it
            names[content] = token["content"] = f"{NO_TEXT}{content}"
            token["special"] = True
    model = read["model"]
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    elif vocab is not None:  # Unigram's
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(read, ensure_ascii=False)


def _drop_beyond(read: dict[str, Any], vocab_size: int) -> None:
    """Take the tokens of ids from `vocab_size` on out of a tokenizer, and the merges that make them."""
    model = read["model"]
    read["added_tokens"] = [token for token in read.get("added_tokens") or () if token["id"] < vocab_size]
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram's, in the order of ids
        model["vocab"] = vocab[:vocab_size]
    elif vocab is not None and max(vocab.values(), default=0) >= vocab_size:
        kept = model["vocab"] = {token: token_id for token, token_id in vocab.items() if token_id < vocab_size}
        if "merges" in model:
            pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]


@dataclass(eq=False, slots=True)
class Grammar:
    """A text, compiled: shared by all slots that ask for it. All of them add to one lexer, on the engine thread."""

    grammars: Grammars
    text: str
    _start: LLMatcher
    _num_followed: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    def start(self) -> LLMatcher:
        """Return what follows an output from its first token on."""
        return self._start.deep_copy()

    def note_followed(self, num_tokens: int) -> None:
        """Count output tokens, and retire behind so many that the lexer may be filling up."""
        self._num_followed += num_tokens
        if self._num_followed >= MAX_FOLLOWED_TOKENS:
            self.retire()

    def retire(self) -> None:
        """Have the text compiled anew for slots that come; those that follow this go on with it."""
        self.grammars.forget(self)


@dataclass(slots=True)
class _Place:
    """What is known behind some output tokens."""

    matcher: LLMatcher | None
    """None where the grammar does not lead, or can be followed no further."""
    bits: MaskBits | None = None
    mask: Mask | None = None
    """What the bits say, once somebody has asked."""
    failure: str | None = None


class GrammarState:
    """Follows one slot's output, and draft tokens behind it.

    A grammar that can be followed no further fails behind the tokens that lead there, for good, and is retired.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._output: list[int] = []
        self._places = {(): _Place(grammar.start())}
        """By draft tokens behind the output."""
        self._forced: list[int] | None = None

    def set_output(self, ids: Sequence[int]) -> None:
        """Go on behind the committed output `ids`: from where it was if it extends that, else from the beginning."""
        known = len(self._output)
        if known == len(ids) and self._output == ids:
            return
        root = self._places[()]
        if self._output != ids[:known]:
            root, known = _Place(self._grammar.start()), 0
        new = ids[known:]
        self._output = list(ids)
        self._grammar.note_followed(len(new))
        root = self._after(root, new)
        if root.matcher is None and root.failure is None:
            root.failure = "the output so far is not of the grammar"
        self._places, self._forced = {(): root}, None

    def allowed(self, draft_prefix: tuple[int, ...]) -> Mask | None:
        """Return which ids may follow; None for a prefix that has probability 0, behind which nothing is decided, and
        where the grammar fails.
        """
        place = self._masked(draft_prefix)
        if place.mask is None and place.bits is not None:
            num_ids = self._grammar.grammars.vocab_size
            place.mask = np.unpackbits(place.bits, count=num_ids, bitorder="little").view(bool)
        return place.mask

    def allowed_bits(self, draft_prefix: tuple[int, ...]) -> MaskBits | None:
        """Return the same as bits, an eighth of the bytes, for a device that unpacks them itself."""
        return self._masked(draft_prefix).bits

    def failure(self, draft_prefix: tuple[int, ...]) -> str | None:
        """Return why the grammar can be followed no further behind these draft tokens; None where it can."""
        return self._masked(draft_prefix).failure

    def forced(self) -> list[int]:
        """Return the tokens that follow the output where the grammar leaves no choice: guesses, as the mask alone says
        what may come.
        """
        if self._forced is None:
            root = self._masked(())
            self._forced = [] if root.matcher is None else root.matcher.compute_ff_tokens()
        return self._forced

    def _masked(self, prefix: tuple[int, ...]) -> _Place:
        place = self._at(prefix)
        if place.bits is None and place.matcher is not None:
            bits = np.frombuffer(place.matcher.compute_bitmask(), dtype=np.uint8)
            if place.matcher.is_error():
                place.matcher, place.failure = None, self._failed(place.matcher)
            else:
                place.bits = bits
        return place

    def _at(self, prefix: tuple[int, ...]) -> _Place:
        place = self._places.get(prefix)
        if place is None:
            before = self._at(prefix[:-1])
            matcher = None if before.matcher is None else before.matcher.deep_copy()
            place = self._places[prefix] = self._after(_Place(matcher, failure=before.failure), prefix[-1:])
        return place

    def _after(self, place: _Place, ids: Sequence[int]) -> _Place:
        """Return what is known behind further tokens; takes the matcher. Behind its end a grammar stays at its end."""
        matcher = place.matcher
        if matcher is None or matcher.try_consume_tokens(list(ids)) == len(ids) or _is_over(matcher):
            return _Place(matcher, failure=place.failure)
        return _Place(None, failure=self._failed(matcher) if matcher.is_error() else None)

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
