"""Chat templates that are rendered in this process: for tests that have no pool of renderers."""

import json
from functools import cache
from typing import Any

from gateway.chat_template import ChatTemplate, Variant
from gateway.confined import templates
from gateway.confined.pool import WorkRefused, encode_request
from gateway.confined.template_shape import TemplateShape
from outrider.wire.errors import InvalidRequest


class InlineRenderers:
    """Does at once what a process of the pool would do, through the same JSON."""

    async def run(self, caller: bytes, request: Any) -> Any:
        return work(request)


def work(request: Any) -> Any:
    try:
        return json.loads(json.dumps(templates.work(json.loads(encode_request(request)))))
    except InvalidRequest as error:
        raise WorkRefused(error.message, error.param) from None


def inline_template(source: str, special_tokens: dict[str, str] | None = None, **named: str) -> ChatTemplate:
    """Return a template of this source that is rendered in this process. named: variants by name."""
    variants = {name: _variant(each, special_tokens or {}) for name, each in {"default": source, **named}.items()}
    default = variants.pop("default")
    return ChatTemplate("the test's template", default, variants, special_tokens or {}, InlineRenderers())


@cache
def _shape(source: str, special_tokens: str) -> TemplateShape:
    return TemplateShape(**work({"kind": "probe", "source": source, "names": json.loads(special_tokens)}))


def _variant(source: str, special_tokens: dict[str, str]) -> Variant:
    reads = frozenset(work({"kind": "check", "source": source}))
    return Variant(source, reads, _shape(source, json.dumps(special_tokens)))
