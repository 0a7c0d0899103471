"""Calls that a chat template writes are read back, and accepted by the grammar, for each family's own template."""

import pytest

from gateway.tools.call_families import BY_PARSER
from tests.tool_forms.oracle import judge
from tests.tool_forms.table import unexpected
from tests.tool_forms.templates import TemplateFile, own_templates

ANSWERS = ("one call", "two calls", "text before", "each type", "lines", "tags")


@pytest.mark.parametrize("template", own_templates(), ids=lambda template: template.family)
def test_what_the_template_writes_is_read_constrained_and_taken_back(template: TemplateFile) -> None:
    verdict = judge(template.source, BY_PARSER[template.family], ANSWERS, cut=())  # test_reader cuts
    assert unexpected(template, verdict) == []
    assert verdict.read == list(ANSWERS)
