"""Asks a chat template to write calls, and Outrider to read them, to constrain them, and to send them back."""

import asyncio
import copy
import dataclasses
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gateway.api.openai_responses import message_of
from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import FAMILIES, CallFamily
from gateway.tools.cursor import MARKER
from gateway.tools.offer import ToolOffer, offer_of
from gateway.tools.reading import Reading, grammar_request, reading_of
from gateway.tools.recognition import AUTO, Families, families_of
from gateway.tools.tool_grammar import tool_grammar
from outrider.wire.errors import InvalidRequest
from tests.rendering import inline_template
from tests.tool_forms.chats import ANSWERS, RESULT, STRICT_ANSWER, STRICT_TOOL, TOOLS, USER, WRONG, Answer, Message
from tests.unit.gateway.tools.answers import written

DEMO = Path(__file__).parents[2] / "models/demo/target/tokenizer.json"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = (
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|end_of_text|>"),
    *("<|return|>", "<|endoftext|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[e~[", "<|eos|>"),
    *("<｜end▁of▁sentence｜>", "<|end▁of▁sentence|>", "<seed:eos>", "<SPECIAL_12>", "[/INST]", "<|tool_response>"),
    *(
        "<start_function_response>",
        "<|message_sep|>\n\n",
        "<|end_of_role|>",
        "<|observation|>",
        "[unused10]",
        "<|role_end|>",
        "<｜hy_eos:opensource｜>",
        "<|tools_suffix|>",
    ),
)
"""Texts that end an answer in one template or another: the stops of a model, which no answer shows."""
CHECKS = ("recognised", "written", "read", "streamed", "required", "strict", "history")
WHOLE = "the template"
"""Stands for an answer where a check is of the whole template."""
OWN_CALL = "a call as the family writes it"
NO_CALL = "a text without a call"
WRONG_ARGUMENT = "a wrong argument"
"""Texts that the grammars are tried on besides the answers."""


@dataclass
class Verdict:
    """What was found of one template."""

    family: CallFamily
    failures: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """What went wrong, by the names of the check and of the answer."""
    read: list[str] = field(default_factory=list)
    """Names of the answers that the template wrote and Outrider read."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts of the answers as the template writes them, by the name of the answer."""

    @property
    def failed_checks(self) -> set[str]:
        return {check for check, _ in self.failures}

    def fail(self, check: str, answer: str, why: str) -> None:
        self.failures.setdefault((check, answer), []).append(why)

    def told(self, check: str) -> str:
        """Return the table's word for a check."""
        if check not in ("recognised", "written") and not self.texts:
            return "-"
        if check == "streamed" and not self.read:
            return "-"
        if check in self.failed_checks:
            return "no"
        return "yes"


class Form:
    """A chat template, and how a gateway reads what a model with it writes."""

    def __init__(self, source: str, family: CallFamily) -> None:
        """`family`: the one whose form the template is known to write."""
        self.family = family
        self.template = inline_template(source, SPECIAL_TOKENS)
        self._grammars: dict[tuple[bool, bool, bool], str] = {}

    def render(self, messages: Sequence[Message], *, with_start: bool) -> str:
        """Return the prompt of a chat. `with_start`: whether it ends with the start of an answer."""
        tools = [tool.for_template() for tool in TOOLS]
        return asyncio.run(self.template.render(messages, with_start, {}, tools, max_chars=1 << 20))

    def written(self, answer: Answer) -> str | None:
        """Return the answer's text as a model of the template's family writes it; None = the template refuses it, or
        shows no call.
        """
        try:
            whole = self.render([USER, answer.message(self.family)], with_start=False)
        except InvalidRequest:
            return None
        start = _behind_user(self.render([USER], with_start=True))
        before, end = self._around_answers()
        ends = [each for each in (end, *ENDS) if each and not self.family.closing.endswith(each)]
        text = _without_start(_behind_user(whole), start, before).strip()
        for each in ends:
            # the template may make several messages of it, or go on with the next one
            pieces = [piece for piece in text.split(each) if answer.calls[0].name in piece]
            if pieces and len(pieces[0]) < len(text):
                text = _without_start(pieces[0], start, start.strip().removeprefix(each), before).strip()
        if not all(call.name in text for call in answer.calls):
            return None
        return text

    def _around_answers(self) -> tuple[str, str]:
        """Return the texts that the template writes around an answer of text alone."""
        try:
            whole = self.render([USER, {"role": "assistant", "content": RESULT}], with_start=False)
        except InvalidRequest:
            return "", ""
        before, _, end = _behind_user(whole).partition(RESULT)
        return before, end.strip()

    def reading(self, offer: ToolOffer, text: str, *, has_tokens: bool) -> tuple[Reading, Tokenizer]:
        """Return how an answer is read, and the tokenizer of that model. `text`: of an answer."""
        tokenizer = copy.copy(tokenizer_of(has_tokens))
        tokenizer.template = self.template
        tokenizer.tool_call_parser = self.family.name
        reading = reading_of(offer, tokenizer, self.render([USER], with_start=True))
        assert reading is not None
        if reading.in_reasoning and reading.reasoning is not None and reading.reasoning.marks[1] not in text:
            # The template shows past answers without their reasoning.
            reading = dataclasses.replace(reading, in_reasoning=False)
        return reading, tokenizer

    def grammar(self, offer: ToolOffer, text: str, *, has_tokens: bool) -> str:
        """Return the grammar of an output of a model with this template. `text`: of the output."""
        reading, tokenizer = self.reading(offer, text, has_tokens=has_tokens)
        key = (offer.choice == "required", has_tokens, reading.in_reasoning)
        if key not in self._grammars:
            request = grammar_request(offer, reading, tokenizer, "")
            assert request is not None
            self._grammars[key] = tool_grammar(request)
        return self._grammars[key]


@cache
def tokenizer_of(has_tokens: bool) -> Tokenizer:
    """Return a tokenizer: the demo pair's, with the families' marks as special tokens, or one of bytes alone."""
    if has_tokens:
        data = tokenizers.Tokenizer.from_file(str(DEMO))
        marks = {mark for family in FAMILIES for text in family.texts for mark in MARKER.findall(text)}
        marks = {mark for mark in marks if "NAME" not in mark and "KEY" not in mark}
        data.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks)])
        return Tokenizer(data.to_str(), {}, None)
    vocab = {"</s>": 0}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    data = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    data.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    data.decoder = decoders.ByteLevel()
    data.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(data.to_str(), {}, None)


@cache
def _guide(has_tokens: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer_of(has_tokens)._tokenizer.to_str())


def judge(
    source: str, family: CallFamily, answers: Collection[str] = ANSWERS, cut: Collection[str] = ANSWERS
) -> Verdict:
    """Return what was found of a template that writes calls in the form of `family`.

    `answers`: names of those in ANSWERS that it is asked for. `cut`: names of those that are cut at every place.
    """
    verdict = Verdict(family)
    form = Form(source, family)
    _check_recognition(form, verdict)
    for name in answers:
        text = form.written(ANSWERS[name])
        if text is None:
            verdict.fail("written", name, "the template refuses it, or shows no call")
            continue
        verdict.texts[name] = text
        _check_reading(form, name, text, verdict, all_cuts=name in cut)
    if verdict.texts:
        for name in answers:
            _check_history(form, name, verdict)
    for has_tokens in (False, True):
        _check_grammar(form, verdict, has_tokens)
    return verdict


def families_in(source: str) -> Families:
    """Return the families that a template shows."""
    tokenizer = copy.copy(tokenizer_of(False))
    tokenizer.template = inline_template(source, SPECIAL_TOKENS)
    tokenizer.tool_call_parser = AUTO
    return families_of(tokenizer, source)


def _check_recognition(form: Form, verdict: Verdict) -> None:
    found = families_in(form.template.source)
    if found.calls is not form.family:
        verdict.fail("recognised", WHOLE, found.describe())


def _check_reading(form: Form, name: str, text: str, verdict: Verdict, *, all_cuts: bool) -> None:
    answer = ANSWERS[name]
    if answer.content and form.family.is_bare and answer.content in text:
        verdict.fail("read", name, "calls without a mark are calls at the start of an answer alone")
        return
    reading, _ = form.reading(offer_of(TOOLS, "auto", None), text, has_tokens=False)
    found = read_in(reading, [text])
    expected = [(call.name, _ordered(call.arguments)) for call in answer.calls]
    contents = [answer.content]
    if answer.content not in text or _is_reasoning(answer.content, text, reading):
        contents.append("")  # the template leaves the text out, or writes it as reasoning
    if found[1] != expected or found[0] not in contents:
        verdict.fail("read", name, f"{text!r} is read as {found}")
        return
    verdict.read.append(name)
    ways = [list(text)]
    if all_cuts:
        ways += [[text[:at], text[at:]] for at in range(1, len(text))]
    for pieces in ways:
        if read_in(reading, pieces) != found:
            verdict.fail("streamed", name, f"cut at {len(pieces[0])}: {read_in(reading, pieces)}")
            return


def _is_reasoning(content: str, text: str, reading: Reading) -> bool:
    """Return whether an answer's content stands between the marks of its reasoning."""
    if not content or reading.reasoning is None:
        return False
    begin, end = reading.reasoning.marks
    before, _, after = text.partition(content)
    return (reading.in_reasoning or begin in before) and end not in before and end in after


def read_in(reading: Reading, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls, with their arguments as JSON in one spelling."""
    reader = reading.reader()
    parts = [part for piece in pieces for part in reader.push(piece)]
    message = message_of(parts + reader.finish(is_cut=False), lambda index, name: "id")
    calls = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        calls.append((function["name"], _ordered(json.loads(function["arguments"]))))
    return message["content"] or "", calls


def _ordered(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _check_history(form: Form, name: str, verdict: Verdict) -> None:
    answer = ANSWERS[name]
    messages = [USER, answer.message(form.family), *answer.results(form.family)]
    try:
        prompt = form.render(messages, with_start=True)
    except InvalidRequest as error:
        verdict.fail("history", name, error.message)
        return
    cities = [call.arguments["city"] for call in answer.calls if call.arguments.get("city", "").isalpha()]
    if prompt.count(RESULT) < len(answer.calls) or not all(city in prompt for city in cities):
        verdict.fail("history", name, "the result is not in the prompt")


def _check_grammar(form: Form, verdict: Verdict, has_tokens: bool) -> None:
    offers = {"required": offer_of(TOOLS, "required", None), "strict": offer_of([STRICT_TOOL], "auto", None)}
    alphabet = _alphabet(has_tokens)
    for check, offer in offers.items():
        for name, text in verdict.texts.items():
            answer = ANSWERS[name]
            if check == "strict" and name != STRICT_ANSWER:
                continue
            if answer.content or (answer.has_tag and has_tokens):
                continue  # what has to be calls has no text, and a tokenizer makes tokens of what looks like them
            refusal = _refusal(form, offer, text, has_tokens)
            if refusal:
                verdict.fail(check, name, f"{alphabet}: {refusal}")
        refusal = _refusal(form, offer, _own_text(form.family, ANSWERS[STRICT_ANSWER]), has_tokens)
        if refusal:
            verdict.fail(check, OWN_CALL, f"{alphabet}: {refusal}")
    if not _refusal(form, offers["required"], "Well.", has_tokens):
        verdict.fail("required", NO_CALL, f"{alphabet}: it is accepted")
    wrong_texts = [_own_text(form.family, WRONG)]
    wrong = form.written(WRONG)
    # A text that is read as no call may be accepted. A model that writes silent tags has tokens for them.
    if wrong is not None and STRICT_ANSWER in verdict.read and (has_tokens or not _has_silent(form.family, wrong)):
        wrong_texts.append(wrong)
    for text in wrong_texts:
        if not _refusal(form, offers["strict"], text, has_tokens):
            verdict.fail("strict", WRONG_ARGUMENT, f"{alphabet}: accepts {text!r}")


def _has_silent(family: CallFamily, text: str) -> bool:
    return any(silent in text for silent in family.silent)


def _own_text(family: CallFamily, answer: Answer) -> str:
    """Return the calls as a model of the family writes them, whatever the template."""
    return written(family, [(call.name, json.dumps(call.arguments)) for call in answer.calls])


def _alphabet(has_tokens: bool) -> str:
    if has_tokens:
        return "the demo pair's tokens"
    return "bytes"


def _refusal(form: Form, offer: ToolOffer, text: str, has_tokens: bool) -> str:
    """Return where the grammar of an output refuses the text; empty if it accepts it."""
    tokenizer = tokenizer_of(has_tokens)
    matcher = LLMatcher(_guide(has_tokens), form.grammar(offer, text, has_tokens=has_tokens))
    ids = tokenizer.encode(text)
    num_taken = matcher.try_consume_tokens(ids)
    if num_taken < len(ids):
        return f"refused at {tokenizer.decode(ids[num_taken:])!r} of {text!r}"
    if not matcher.is_accepting():
        return f"{text!r} is not taken as a whole"
    return ""


def _behind_user(text: str) -> str:
    """Return the text behind the user's message."""
    return text.rpartition(USER["content"])[2]


def _without_start(text: str, *starts: str) -> str:
    """Return an answer without the text in front of it, which may be one of `starts`, in any white space."""
    for start in sorted(filter(str.strip, starts), key=len, reverse=True):
        pattern = r"\s*".join(map(re.escape, "".join(start.split())))
        found = re.match(rf"\s*{pattern}", text)
        if found is not None:
            return text[found.end() :]
    head = _common(text, starts[0])
    # the common start of "<think>" and "<tool_call>" is no part of either
    return text[max(head.rfind(end) for end in "\n>]") + 1 :]


def _common(first: str, second: str) -> str:
    """Return the text with which both begin."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]
