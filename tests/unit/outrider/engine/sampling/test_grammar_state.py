"""A grammar in a request's law: masks along prefixes, who wins where it meets bans, and what cannot be followed."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gateway.grammars import create_schema_grammar
from outrider.engine.sampling import grammar_state as grammar_module
from outrider.engine.sampling import penalties
from outrider.engine.sampling.count_distribution import distribution_of_counts
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.device_sampling import distributions
from outrider.engine.sampling.grammar_state import Grammars, GrammarState
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_row, process_unchecked
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests import grammar_limits
from outrider.wire.requests.params import SamplingParams
from target_service.step.decide import decide
from tests.grammars import (
    CHOICE,
    CLOSE,
    COMMA,
    ELEVEN,
    END,
    ONE,
    OPEN,
    REGEX,
    SCHEMA,
    TWO,
    compiled,
    grammars_of,
    tokenizer_of,
)
from tests.proposals import chain_proposal, sure
from tests.stack import DEMO_TARGET

VOCAB = 8
PROMPT = (2, 3, 4)
IDS = range(VOCAB)


def state_of(text: str, output: Sequence[int] = (), width: int = VOCAB, **params: Any) -> SamplingState:
    made = SamplingState(
        SamplingParams(max_tokens=40, grammar=text, **params), PROMPT, (END,), compiled(text, grammars_of(width=width))
    )
    made.set_output(output)
    return made


def ids_of(state: SamplingState, prefix: tuple[int, ...] = ()) -> list[int] | None:
    mask = state.allowed(prefix)
    return None if mask is None else np.flatnonzero(mask).tolist()


def left(state: SamplingState, prefix: tuple[int, ...] = ()) -> list[int]:
    """Which ids keep a finite logit, as the host and as a device see it."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(len(prefix)))
    row = LogitRow(state, prefix)
    on_host, on_device = process_row(logits[0].numpy(), row), process_unchecked(logits, [row])[0]
    assert torch.equal(torch.from_numpy(on_host), on_device)
    for some in ([ONE, COMMA], [END, TWO, ELEVEN]):
        ids = np.array(some)
        assert np.array_equal(process_row(logits[0].numpy()[ids], row, ids, VOCAB), on_host[ids])
    return np.flatnonzero(on_host > -np.inf).tolist()


def said_by_llguidance(text: str, output: Sequence[int]) -> list[int] | None:
    """Of a matcher that reads the output from its beginning; None where it refuses it."""
    tokenizer = LLTokenizer(tokenizer_of().to_str(), n_vocab=VOCAB, eos_token=[END])
    matcher = LLMatcher(tokenizer, text, log_level=0)
    for token_id in output:
        if not matcher.is_stopped() and matcher.try_consume_tokens([token_id]) == 0:
            return None
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, count=VOCAB, bitorder="little")).tolist()


class TestMasks:
    @pytest.mark.parametrize("text", [SCHEMA, REGEX, CHOICE])
    def test_the_mask_is_a_function_of_the_output_whoever_proposed_it(self, text: str) -> None:
        """As drafts behind any part of the output, as output at once, or behind another that was taken back."""
        moving, at_first = state_of(text), state_of(text)
        num_led_to = 0
        for prefix in itertools.product(IDS, repeat=3):
            expected = said_by_llguidance(text, prefix)
            if expected is None:
                assert at_first.allowed(prefix) is None
                continue
            num_led_to += 1
            for size in (3, 0, 1, 2):  # behind another of the same length and more, too
                moving.set_output(prefix[:size])
                moving.forced()  # looks ahead, and changes nothing
                assert ids_of(moving, prefix[size:]) == expected
        assert num_led_to > 5

    def test_behind_its_end_a_grammar_stays_there(self) -> None:
        state = state_of(SCHEMA)
        assert ids_of(state, (OPEN, ONE, CLOSE)) == [END] == ids_of(state, (OPEN, ONE, CLOSE, END, END))
        state.set_output((OPEN, CLOSE, END, END))
        assert ids_of(state) == [END] and state.failure(()) is None
        assert ids_of(state_of(REGEX, (ONE,))) == [END, ONE, TWO, CLOSE, COMMA, ELEVEN]
        assert ids_of(state_of(REGEX, (ONE, END))) == [END]

    def test_ids_that_the_tokenizer_does_not_have_never_come(self) -> None:
        state = state_of(REGEX, width=11)
        mask = state.allowed((ONE,))
        assert mask is not None and mask.shape == (11,) and not mask[8:].any()
        far = Grammars(tokenizer_of().to_str().encode(), VOCAB, [END, 70_000])
        assert compiled(REGEX, far).start().compute_bitmask()[0]

    def test_a_device_is_sent_a_bit_an_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        width = 4099  # no multiple of 8
        row = LogitRow(state_of(REGEX, (ONE,), width=width))
        sent = list[int]()
        to_device = penalties.to_device

        def counted(array: np.ndarray, device: torch.device) -> torch.Tensor:
            sent.append(array.nbytes)
            return to_device(array, device)

        monkeypatch.setattr(penalties, "to_device", counted)
        logits = torch.randn(2, width)
        processed = process_unchecked(logits, [row, row])
        expected = process_row(logits[1].numpy(), row)
        assert np.array_equal(processed[1].numpy(), expected) and (expected > -np.inf).sum() == 6
        num_mask_bytes = 2 * -(-width // 32) * 4
        assert sent == [2 * 8, num_mask_bytes], "the rows' indices, and their masks"

    def test_behind_a_draft_that_is_not_allowed_nothing_is_decided(self) -> None:
        state = state_of(SCHEMA)
        for prefix in ((COMMA,), (COMMA, ONE), (OPEN, COMMA, ONE)):
            assert state.allowed(prefix) is None and left(state, prefix) == list(IDS)

    def test_what_is_counted_is_what_is_allowed(self) -> None:
        """Tables, and their way around a law of one id."""
        row = LogitRow(state_of(SCHEMA))
        assert distribution_of_counts((np.array([COMMA]), np.array([3.0])), row, VOCAB) is None
        one = distribution_of_counts((np.array([OPEN]), np.array([3.0])), row, VOCAB)
        many = distribution_of_counts((np.array([ONE, OPEN]), np.array([9.0, 1.0])), row, VOCAB)
        assert one is not None and many is not None
        assert one.prob(OPEN) == many.prob(OPEN) == 1.0

    def test_a_distribution_is_cut_once_it_is_masked(self) -> None:
        """What the grammar forbids takes no place among the best, and no mass."""
        logits = torch.tensor([[9.0, 9.0, 1.0, 2.0, 8.0, 8.0, 1.5, 3.0]])
        for cut in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.6}):
            row = LogitRow(state_of(SCHEMA, **cut), (OPEN, ONE, COMMA))  # 1, 2 and 11 may come
            on_host = HostLogits(logits).distribution(0, row).dense_scores()
            on_device = distributions(process_unchecked(logits, [row]), [row])[0]
            for scores in (on_host, on_device.numpy()):
                assert ELEVEN in (kept := np.flatnonzero(np.isfinite(scores))) and ONE not in kept
        greedy = LogitRow(state_of(SCHEMA, temperature=0.0), (OPEN, ONE, COMMA))
        assert HostLogits(logits).best_id(0, greedy) == ELEVEN
        assert HostLogits(logits).ranked(0, greedy, 8)[0] == [ELEVEN, TWO, ONE]


class TestWhoWins:
    """The grammar, over every ban; a ban, among what the grammar allows."""

    def test_an_end_is_banned_where_the_answer_can_go_on(self) -> None:
        state = state_of(REGEX, min_tokens=3)
        assert left(state, (ONE,)) == [ONE, TWO, CLOSE, COMMA, ELEVEN]
        assert END in left(state, (ONE, ONE, ONE))

    def test_an_end_comes_where_nothing_else_may(self) -> None:
        assert left(state_of(SCHEMA, min_tokens=9), (OPEN, CLOSE)) == [END]

    def test_bad_words_are_banned_among_what_is_allowed_and_no_further(self) -> None:
        state = state_of(SCHEMA, bad_words=((ONE,), (TWO, CLOSE)))
        assert left(state, (OPEN,)) == [TWO, CLOSE, ELEVEN]
        assert CLOSE not in left(state, (OPEN, TWO)) and CLOSE in left(state, (OPEN, ELEVEN))
        assert left(state_of(SCHEMA, bad_words=((OPEN,),))) == [OPEN]
        of_all = tuple((token_id,) for token_id in (ONE, TWO, ELEVEN))
        assert left(state_of(SCHEMA, bad_words=of_all), (OPEN, ONE, COMMA)) == [ONE, TWO, ELEVEN]

    def test_a_bias_moves_what_is_allowed(self) -> None:
        state = state_of(SCHEMA, logit_bias={OPEN: -100.0, COMMA: 100.0})
        assert left(state) == [OPEN]

    def test_forced_tokens_count_for_penalties(self) -> None:
        """As drafts, and once they are output."""
        params = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        drafting = state_of(CHOICE, (TWO,), **params)
        drafting.set_output((TWO, OPEN))
        assert drafting.forced() == [ONE, CLOSE]
        fresh = state_of(CHOICE, (TWO, OPEN, ONE, CLOSE), **params)
        committed = state_of(CHOICE, (TWO, OPEN), **params)
        committed.set_output((TWO, OPEN, ONE, CLOSE))
        found = [drafting.edits((ONE, CLOSE)), fresh.edits(()), committed.edits(())]
        columns = [{i: (f, o) for i, f, o in zip(*each, strict=True)} for each in map(_columns, found)]
        assert columns[0] == columns[1] == columns[2]
        assert columns[0][ONE] == (1.2, -2.0) and columns[0][OPEN] == (1.2, -2.0)


def _columns(edits: Any) -> tuple[list[int], list[float], list[float]]:
    return edits.ids.tolist(), edits.factor.tolist(), edits.offset.tolist()


class TestForcedTokens:
    def test_they_are_what_the_mask_leaves(self) -> None:
        state = state_of(CHOICE, (TWO, OPEN))
        for place, token_id in enumerate(forced := state.forced()):
            assert ids_of(state, tuple(forced[:place])) == [token_id]
        assert forced == [ONE, CLOSE] and state_of(REGEX).forced() == []

    def test_the_same_bytes_in_other_tokens_are_decided_like_any_draft_token(self) -> None:
        """`111` has to come, and behind 11 its last 1 may be the first half of another 11: tokens are not bytes."""
        state = state_of(LLMatcher.grammar_from_regex("111[12]"), (ELEVEN,), acceptance=AcceptanceRule.COUPLED)
        assert ids_of(state) == [ONE, ELEVEN] and state.forced() == []
        logits = torch.zeros(2, VOCAB)
        answers = set()
        for seed in range(32):
            params = SamplingParams(seed=seed)
            slot: Any = _Slot(params, [*PROMPT, ELEVEN])
            made = SamplingState(params, PROMPT, (END,), state._grammar._grammar)  # type: ignore[union-attr]
            made.set_output((ELEVEN,))
            (decided,) = sure(decide([chain_proposal(slot, [ONE])], [made], logits))
            own = coupled_id(HostLogits(logits).distribution(0, LogitRow(made)), params, len(PROMPT) + 1)
            assert (len(decided.path), decided.next_id if own != ONE else ONE) == (own == ONE, own)
            answers.add(own)
        assert answers == {ONE, ELEVEN}


def test_log_probs_under_an_expression_are_the_models_own_and_finite() -> None:
    state = state_of(LLMatcher.grammar_from_regex("1"))
    params = SamplingParams(seed=1, num_logprobs=VOCAB)
    slot: Any = _Slot(params, [*PROMPT])
    made = SamplingState(params, PROMPT, (END,), state._grammar._grammar)  # type: ignore[union-attr]
    (decided,) = sure(decide([chain_proposal(slot, [])], [made], torch.zeros(1, VOCAB)))
    ((_, top_ids, top_logprobs),) = decided.reported
    assert decided.next_id == ONE and len(top_ids) == VOCAB and np.isfinite(top_logprobs).all()


class _Slot:
    def __init__(self, params: SamplingParams, committed: list[int]) -> None:
        self.params, self.committed = params, committed


class TestWhatCannotBeFollowed:
    EXPLODING = LLMatcher.grammar_from_regex("(1|2)*1(1|2){12}[12,]")

    @pytest.fixture(autouse=True)
    def few_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_limits, "MAX_LEXER_STATES", 120)

    def followed(self, state: GrammarState, seed: int) -> tuple[list[int], str | None]:
        """Numbers at random until the grammar fails."""
        generator, output = np.random.default_rng(seed), list[int]()
        while state.failure(()) is None and len(output) < 2000:
            output.append(int(generator.choice([ONE, TWO])))
            state.set_output(output)
        return output, state.failure(())

    def test_it_fails_behind_its_own_tokens_naming_the_limit(self) -> None:
        grammars = grammars_of()
        state = GrammarState(compiled(self.EXPLODING, grammars))
        _, failure = self.followed(state, 1)
        assert failure == "its lexer has too many states, more than 120 (MAX_LEXER_STATES)"
        assert state.allowed(()) is None and state.forced() == []
        assert state.failure((ONE,)) == failure, "nor further on"

    def test_a_full_lexer_ends_who_meets_it_and_nobody_who_comes_later(self) -> None:
        """All who follow it share it; it is not compiled anew for them."""
        grammars = grammars_of()
        shared = compiled(self.EXPLODING, grammars)
        beside = GrammarState(shared)
        self.followed(GrammarState(shared), 1)
        assert grammars.get(self.EXPLODING) is None
        assert self.followed(beside, 2)[1] is not None
        output, _ = self.followed(GrammarState(compiled(self.EXPLODING, grammars)), 2)
        assert len(output) > 2

    def test_what_many_followed_is_compiled_anew_for_who_comes_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grammar_module, "MAX_FOLLOWED_TOKENS", 6)
        grammars = grammars_of()
        shared = compiled(REGEX, grammars)
        for _ in range(2):
            assert grammars.get(REGEX) is shared
            GrammarState(shared).set_output([ONE, TWO, ONE])
        assert grammars.get(REGEX) is None

    def test_a_draft_that_fails_leaves_the_output_as_it_was(self) -> None:
        state = GrammarState(compiled(self.EXPLODING))
        output, _ = self.followed(GrammarState(compiled(self.EXPLODING)), 1)
        failures = [state.failure(tuple(output[:size])) for size in range(len(output) + 1)]
        assert failures[0] is None and "too many states" in str(failures[-1])

    def test_an_output_that_is_not_of_the_grammar_is_no_beginning(self) -> None:
        state = GrammarState(compiled(SCHEMA))
        state.set_output([COMMA])
        assert state.failure(()) == "the output so far is not of the grammar" and state.allowed(()) is None
        state.set_output([OPEN])
        assert state.failure(()) is None

    def test_a_text_that_no_token_can_write(self) -> None:
        state = GrammarState(compiled(LLMatcher.grammar_from_regex("1x")))
        assert state.failure((ONE,)) == "no token of the model goes on as it says"


class TestLimits:
    def test_all_that_the_library_has_are_set(self) -> None:
        limits = LLParserLimits(**grammar_limits.parser_limits())
        fields = {name for name in dir(limits) if not name.startswith("_")}
        assert fields == grammar_limits.parser_limits().keys()

    def test_the_gateway_refuses_what_a_worker_could_not_follow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ways = [{"type": "array", "items": {"type": "integer", "minimum": number}} for number in range(30)]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": ways}}
        text = create_schema_grammar(schema, "p", strict=False)
        monkeypatch.setattr(grammar_limits, "MAX_ITEMS_IN_ROW", 40)
        with pytest.raises(InvalidRequest, match="MAX_ITEMS_IN_ROW") as refused:
            create_schema_grammar(schema, "p", strict=False)
        state = GrammarState(compiled(text))
        state.set_output([OPEN, OPEN])
        failure = state.failure(())
        assert failure is not None and failure in refused.value.message


class TestCompiling:
    def test_a_text_is_compiled_once_and_those_used_last_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        grammars = grammars_of()
        monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 2)
        first = compiled(SCHEMA, grammars)
        assert compiled(REGEX, grammars) and compiled(SCHEMA, grammars) is first is grammars.get(SCHEMA)
        assert compiled(CHOICE, grammars) and grammars.get(REGEX) is None and grammars.get(SCHEMA) is first
        monkeypatch.setattr(grammar_module, "MAX_TEXT_BYTES", len(REGEX) + 1)
        assert compiled(REGEX, grammars) and grammars.get(SCHEMA) is None is grammars.get(CHOICE)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ('{"grammars":[{"json_schema":{"type":"foo"}}]}', "Invalid type: foo"),
            ('{"grammars":[{"json_schema":{"type":"array","uniqueItems":true}}]}', "uniqueItems"),
            ("start: word", "word"),
        ],
    )
    def test_what_is_wrong_is_named(self, text: str, why: str) -> None:
        with pytest.raises(InvalidRequest, match=why) as error:
            compiled(text)
        assert error.value.param == "grammar"

    @pytest.mark.parametrize(
        ("tokenizer", "ends", "why"),
        [
            (b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}', [0], "decoder"),
            (tokenizer_of().to_str().encode(), [70_000], "no end of sequence"),
        ],
    )
    def test_a_model_that_can_follow_none(self, tokenizer: bytes, ends: list[int], why: str) -> None:
        """A target refuses the request; a draft goes on without."""
        with pytest.raises(InvalidRequest, match=f"{why}.*leave the grammar out"):
            Grammars(tokenizer, VOCAB, ends).compile(SCHEMA)
        assert Grammars(tokenizer, VOCAB, ends, must_follow=False).compile(SCHEMA) is None


INTEROPERABILITY = "the function returns interoperability"


@pytest.mark.parametrize(
    ("text", "num_rows", "banned"),
    [
        ("<|endoftext|>", 4096, {0, 1, 2, 3}),  # the tokenizer's own way to write it would be the special token
        ("<|user|>", 4096, {0, 1, 2, 3}),
        (INTEROPERABILITY, 1000, set(range(1000, 4096))),  # what has no row of logits is written with shorter ones
        (INTEROPERABILITY, 4000, set(range(4000, 4096))),
    ],
)
def test_a_forced_text_is_written_in_tokens_that_may_come(text: str, num_rows: int, banned: set[int]) -> None:
    """By the demo's tokenizer of 4,096 tokens, where a grammar leaves no choice."""
    grammars = Grammars(Path(DEMO_TARGET, "tokenizer.json").read_bytes(), num_rows, [0])
    grammar = grammars.compile(LLMatcher.grammar_from_regex(re.escape(text)))
    assert grammar is not None
    state, output = GrammarState(grammar), list[int]()
    while (forced := state.forced()) and forced != [0]:
        output += forced
        state.set_output(output)
        mask = state.allowed(())
        assert mask is not None and len(mask) == num_rows and mask.any()
    assert not banned & set(output)
    assert grammars._tokenizer is not None and grammars._tokenizer.decode_bytes(output) == text.encode()
