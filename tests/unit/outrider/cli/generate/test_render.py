"""An answer as a terminal shows it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.generate.render import KindPainter, tokens_per_pass
from outrider.client import Round, RoundTimings, Token, TokenKind, Usage
from tests.unit.outrider.cli.generate.typed import outrider
from tests.unit.outrider.client.scripted_gateway import ScriptedGateway

A, R, B, P = TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS, TokenKind.PLAIN


def test_tokens_are_coloured_by_kind_on_a_terminal(gateway: ScriptedGateway) -> None:
    result = outrider("generate", "hello", "--address", gateway.address, colour=True)
    assert result.stdout == (
        "\x1b[32m the\x1b[0m\x1b[32m quick\x1b[0m\x1b[34m red\x1b[0m"  # accepted green, recovered blue
        "\x1b[32m fox\x1b[0m\x1b[32m ran\x1b[0m\x1b[39m!\x1b[0m"  # bonus in the default colour
        "\n"
    )
    assert "\x1b[32maccepted \x1b[0m\x1b[34mrecovered \x1b[0m" in result.stderr


def test_an_answer_that_is_not_exact_is_marked() -> None:
    usage = Usage(9, 24, 8, 40, 16, 0, 0, 0, lenience=0.5)
    assert tokens_per_pass(usage) == "3.00 tokens per target pass; not exact: lenience 0.5"
    assert tokens_per_pass(replace(usage, lenience=None)) == "3.00 tokens per target pass"


def round_of(delta: str, *tokens: tuple[TokenKind, str]) -> Round:
    return Round(
        request_id="r",
        choice=0,
        tokens=tuple(Token(id=0, kind=kind, text=text) for kind, text in tokens),
        text_delta=delta,
        num_drafted=0,
        num_accepted=0,
        timings=RoundTimings(0, 0, 0, 0),
    )


def test_painter_gives_a_split_character_to_its_first_piece() -> None:
    painter = KindPainter()
    assert painter.paint(round_of("a", (A, "a"), (R, "\ufffd"))) == [(A, "a")]
    assert painter.paint(round_of("€b", (P, "\ufffd"), (B, "b"))) == [(R, "€"), (B, "b")]


def test_painter_holds_what_a_stop_string_holds_back() -> None:
    painter = KindPainter()
    assert painter.paint(round_of("one E", (A, "one"), (A, " EN"))) == [(A, "one"), (A, " E")]
    assert painter.paint(round_of("Nough", (R, "ough"))) == [(A, "N"), (R, "ough")]


PIECES = st.sampled_from(["", "a", "b", " a", "ab", "€", "\ufffd", "\n"])
ROUNDS = st.lists(st.tuples(PIECES, st.lists(st.tuples(st.sampled_from(TokenKind), PIECES), max_size=4)), max_size=6)


@given(ROUNDS)
def test_painter_never_loses_repeats_or_reorders_text(script: list) -> None:
    painter = KindPainter()
    for delta, tokens in script:
        assert "".join(text for _, text in painter.paint(round_of(delta, *tokens))) == delta


def test_an_answer_cannot_steer_the_terminal(gateway: ScriptedGateway) -> None:
    async def script(request):
        from tests.unit.outrider.client.scripted_gateway import rounds

        *_, last = rounds()
        last.text_delta = last.tokens[0].text = "\x1b[2J\x9b"
        yield last

    gateway.scripts.extend([script, script])
    assert "␛[2J\ufffd" in outrider("generate", "x", "--address", gateway.address, colour=True).stdout
    assert outrider("generate", "x", "--address", gateway.address).stdout == "\x1b[2J\x9b\n"
