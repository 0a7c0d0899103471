"""How the outputs of a chat are read: with which family, markers and reasoning."""

import pytest
from llguidance import LLMatcher

from gateway.admission.prompts import Chat
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.grammars import create_schema_grammar
from gateway.rounds.detokenizer import Detokenizer
from gateway.tools.call_families import BY_PARSER
from gateway.tools.offer import NO_TOOLS, ToolOffer, offer_of
from gateway.tools.reading import ReasoningBudget
from outrider.engine.sampling.grammar_state import Grammars, GrammarState
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.tools.answers import objects, told, written
from tests.unit.gateway.tools.plans import ADD, ADDED, ROME, SOURCE, WEATHER, guide_of, planned, takes, tokenizer_of


@pytest.mark.parametrize(
    "text, begun",
    [("Hello", None), ("<think>\nx\n</think>\n\nHello", None), ("<think>\nfoo", True), ("", False)],
    ids=["content", "behind reasoning", "in reasoning", "nothing"],
)
def test_the_message_that_is_continued_says_whether_reasoning_goes_on(text: str, begun: bool | None) -> None:
    """begun: None = there is none any more."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    (chat,) = parse_body(ChatBody, body).unchecked_request("id").prompts
    assert isinstance(chat, Chat)
    answer = create_schema_grammar({"type": "integer"}, "x", strict=False)
    reading, grammar = planned(chat.tools, "</think>", prompt=f"assistant\n{text}", answer=answer)
    assert (None if reading is None else reading.in_reasoning) is begun
    assert takes(grammar, "12") is (not begun) and takes(grammar, "hm</think>\n\n12") is (begun is True)
    assert takes(grammar, "<think>hm</think>12") is (begun is not None)


def test_markers_that_are_special_tokens_are_seen_by_the_reader() -> None:
    for name in ("mistral", "deepseek_v3", "mistral_args", "kimi_k2", "glm45", "gemma4", "olmo3"):
        family = BY_PARSER[name]
        tokenizer = tokenizer_of(SOURCE, True, name)
        reading, _ = planned(offer_of([WEATHER, ADD], "auto", None), control=True, family=family)
        assert reading is not None and reading.family is family and reading.shown_ids
        calls = written(family, [ROME, ADDED])
        ids = tokenizer.encode(f"née {calls}")
        detokenizer = Detokenizer(tokenizer, (), reading.shown_ids)
        reader, parts = reading.reader(), []
        for token_id in ids:
            parts += reader.push(detokenizer.push([token_id]).text_delta)
        parts += reader.push(detokenizer.finish()[0]) + reader.finish(False)
        content, _, found = told(parts)
        assert content == "née" and objects(found) == objects([ROME, ADDED])
        hidden = Detokenizer(tokenizer, ())
        assert hidden.push(ids).text_delta + hidden.finish()[0] == tokenizer.decode(ids) != f"née {calls}"


def test_tools_need_a_template_that_takes_them() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no tools.*--chat-template") as caught:
        planned(offer_of([ADD], "auto", None), "{{ messages }}")
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [("", "<think>"), ("", " \n\n<think>"), ("<think>", "")],
    ids=["the output begins it", "behind white space", "the prompt begins it"],
)
@pytest.mark.parametrize(
    "offer, answer, body",
    [
        (NO_TOOLS, "", "Four. <tool_call>"),
        (offer_of([ADD], "auto", None), "", "Four."),
        (offer_of([WEATHER], "required", None), "", written(BY_PARSER["hermes"], [ROME])),
        (NO_TOOLS, create_schema_grammar({"type": "integer"}, "x", strict=False), "12"),
    ],
    ids=["text", "calls may come", "calls must come", "a schema"],
)
def test_a_budget_ends_the_reasoning(offer: ToolOffer, answer: str, body: str, prompt: str, begin: str) -> None:
    source = SOURCE + "</think>"

    def allowed(num_tokens: int, thought: str, end: str = "</think>") -> bool:
        budget = ReasoningBudget(num_tokens)
        _, grammar = planned(offer, source, True, prompt, answer, budget=budget)
        return takes(grammar, f"{begin}{thought}{end}\n\n{body}", True)

    thought = "One and two and three"
    num_tokens = len(tokenizer_of(source, True).encode(thought, add_special_tokens=False))
    assert allowed(num_tokens, thought) and allowed(num_tokens + 1, thought) and allowed(1 << 40, thought)
    assert not allowed(num_tokens - 1, thought)
    assert allowed(0, "") and not allowed(0, thought)


def test_reasoning_with_a_budget_ends_with_the_token_alone() -> None:
    _, grammar = planned(NO_TOOLS, "</think>", True, prompt="<think>", budget=ReasoningBudget(50))
    encode = tokenizer_of("", True).encode
    ids = [*encode("Hm </thi", add_special_tokens=False), *encode("nk>", add_special_tokens=False)]
    assert LLMatcher(guide_of(True), grammar).try_consume_tokens(ids) < len(ids)


def test_a_budget_counts_draft_tokens_as_committed_ones() -> None:
    tokenizer = tokenizer_of("", True)
    ids = tokenizer.encode("One and two", add_special_tokens=False)
    _, text = planned(NO_TOOLS, "</think>", True, prompt="<think>", budget=ReasoningBudget(len(ids)))
    grammar = Grammars(tokenizer._tokenizer.to_str().encode(), tokenizer.vocab_size, (0,)).compile(text)
    assert grammar is not None
    for num_committed in range(len(ids) + 1):
        state = GrammarState(grammar)
        state.set_output(ids[:num_committed])
        before = state.allowed(tuple(ids[num_committed:-1]))
        if num_committed < len(ids):
            assert before is not None and before[ids[-1]]
        behind = state.allowed(tuple(ids[num_committed:]))
        assert behind is not None and behind.nonzero()[0].tolist() == [tokenizer.control_id("</think>")]


def test_a_budget_leaves_an_output_without_reasoning_alone() -> None:
    reading, grammar = planned(NO_TOOLS, "</think>", True, budget=ReasoningBudget(0))
    assert reading is not None and reading.max_reasoning_tokens == 0
    assert takes(grammar, "Any <tool_call> text", True) and not takes(grammar, "Any <think> text", True)
    _, grammar = planned(NO_TOOLS, "</think>", True, prompt="<think>\n\n</think>", budget=ReasoningBudget(0))
    assert grammar == ""


@pytest.mark.parametrize(
    "source, control, problem",
    [("{{ messages }}", True, "shows no reasoning"), ("</think>", False, "tokens of their own [(]think[)]")],
    ids=["no reasoning", "marks are text"],
)
def test_a_budget_that_cannot_be_kept_is_refused_or_left_out(source: str, control: bool, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        planned(NO_TOOLS, source, control, budget=ReasoningBudget(5))
    assert caught.value.param == "thinking_token_budget"
    _, grammar = planned(NO_TOOLS, source, control, budget=ReasoningBudget(5, is_optional=True))
    assert grammar == ""


def test_what_cannot_be_enforced_without_tools_is_not_put_down_to_tools() -> None:
    with pytest.raises(InvalidRequest, match=r"^reasoning and the form of the answer cannot be enforced") as caught:
        planned(NO_TOOLS, "</think>", True, prompt="<think>", budget=ReasoningBudget(1 << 80))
    assert caught.value.param is None
