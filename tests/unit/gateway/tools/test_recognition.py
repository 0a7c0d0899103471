"""A model's families are those of its chat template, unless the settings name others."""

import pytest

from gateway.tools.call_families import HERMES, LLAMA3
from gateway.tools.reasoning import MISTRAL, THINK
from gateway.tools.recognition import Families, check_parsers, families_of
from outrider.wire.errors import ConfigError
from tests.unit.gateway.tools.plans import tokenizer_of


@pytest.mark.parametrize(
    ("setting", "parsers"), [("tool_call_parser", ("none", "auto")), ("reasoning_parser", ("hermes", "none"))]
)
def test_a_parser_that_no_family_has_is_refused(setting: str, parsers: tuple[str, str]) -> None:
    check_parsers("auto", "auto")
    check_parsers("hermes", "think")
    check_parsers("phi4_functools", "auto")
    with pytest.raises(ConfigError, match=f"{setting} is 'none', must be auto or one of .*mistral") as caught:
        check_parsers(*parsers)
    assert caught.value.param == setting


def test_a_named_parser_goes_before_the_template() -> None:
    source = "{{ tools }}<tool_call></think>"
    assert families_of(tokenizer_of(source, parser="auto"), source) == Families(HERMES, THINK)
    assert families_of(tokenizer_of(source, parser="llama3_json"), source) == Families(LLAMA3, THINK)
    named = tokenizer_of(source + " ", parser="auto")
    named.reasoning_parser = "mistral"
    assert families_of(named, source) == Families(HERMES, MISTRAL)


def test_a_template_that_takes_no_tools_is_of_no_family() -> None:
    source = "{{ messages }}<tool_call></think>"
    families = families_of(tokenizer_of(source, parser="auto"), source)
    assert families == Families(None, THINK)
    assert (
        families.describe() == "tool calls are not read: the chat template takes no tools; reasoning in the form think"
    )


def test_a_form_of_no_family_is_described_by_its_tag() -> None:
    source = "{{ tools }}<my_tool_call>"
    families = families_of(tokenizer_of(source, parser="auto"), source)
    assert families == Families(None, None, "<my_tool_call>")
    assert families.describe().endswith("with <my_tool_call>, a form of no known family; no reasoning is split off")
