"""Whether a text follows a grammar, and texts drawn from one."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.wire.requests.grammar_limits import parser_limits


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))
LIMITS = LLParserLimits(**parser_limits())


def follows(grammar: str, text: str) -> bool:
    """Whether the whole text is allowed, and may end there."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
