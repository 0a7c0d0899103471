"""`outrider doctor` says in which families a model's calls and reasoning are read, by its chat template."""

from typing import Any

import pytest

from gateway.tools.template_check import finding


@pytest.mark.parametrize(
    ("fields", "state", "found"),
    [
        ({"file": "{{ tools }}<tool_call></think>"}, "ok", "read in the form hermes; reasoning in the form think"),
        (
            {
                "configured": [
                    {"name": "default", "template": ""},
                    {"name": "tool_use", "template": "{{ tools }}[ARGS]"},
                ]
            },
            "ok",
            "read in the form json; no reasoning is split off",
        ),
        (
            {"file": "{{ tools }}<my_tool_call>"},
            "warning",
            "with <my_tool_call>, a form of no known family; no reasoning",
        ),
        ({"file": "{{ messages }}<tool_call>"}, "ok", "not read: the chat template takes no tools; no reasoning"),
        ({}, "ok", "the model has no chat template, so it takes no tools"),
        ({"file": "{% if %}"}, "problem", "chat_template.jinja has a syntax error at line 1"),
        (
            {"file": "{% for i in range(20000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}"},
            "ok",
            "takes no tools",  # and the attempt to render it ended at a limit
        ),
    ],
)
async def test_the_finding_names_the_families_or_the_unknown_tag(
    fields: dict[str, Any], state: str, found: str
) -> None:
    made = await finding({"file": "", "configured": None, "additional": {}, **fields})
    assert made[0] == state and found in made[1]
    assert bool(made[2]) == (state != "ok")
