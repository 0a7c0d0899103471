"""Log-probs in OpenAI's words: entries that differ have names that differ."""

from gateway.api.logprobs import chat_logprobs, completion_logprobs
from gateway.generation import OutputLogprobs, OutputToken
from outrider.wire.kinds import TokenKind
from tests.unit.gateway.rounds.test_detokenizer import BYTE_LEVEL


def test_ids_that_the_tokenizer_does_not_have_are_named_by_number() -> None:
    """Many models have more rows than tokens: each is an entry of its own in the map by text."""
    first = BYTE_LEVEL.vocab_size
    best = tuple((first + place, -1.0 - place) for place in range(5))
    token = OutputToken(first, TokenKind.PLAIN, "", 0, OutputLogprobs(-1.0, top=best, rank=1))
    told = completion_logprobs([token], BYTE_LEVEL)
    assert told["tokens"] == [f"<id {first}>"]
    assert list(told["top_logprobs"][0]) == [f"<id {first + place}>" for place in range(5)]
    entry = chat_logprobs([token], BYTE_LEVEL)["content"][0]
    assert (entry["token"], entry["bytes"]) == (f"<id {first}>", None)
