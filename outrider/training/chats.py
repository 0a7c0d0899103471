"""The prompts that a target is trained on, as it will be asked: a chat model's through its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from outrider.engine.files.model_files import first_line
from outrider.lab.models.alpha import tokenizer_of
from outrider.training.written import PROMPT_TOKENS, Ids
from outrider.wire.errors import ConfigError


def prompt_ids(target: str, texts: Sequence[str], is_raw: bool) -> list[Ids]:
    """Return the token ids of the texts, each as a user's message where the target has a chat template.

    Of a text the last PROMPT_TOKENS tokens are kept, beside those of the template. is_raw: the texts are prompts as
    they stand. Raises ConfigError for a template that fails.
    """
    tokenizer = tokenizer_of(target)
    template = None if is_raw else _template_of(target)
    if template is None:
        return [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in texts]
    rendered = [_render(template, target, _end_of(tokenizer, text)) for text in texts]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in rendered]


def _template_of(target: str) -> Any:
    """Return transformers' tokenizer of a target with a chat template; None without one."""
    try:
        found = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # as in the loader: a damaged file raises what its reader does
        raise ConfigError(f"the tokenizer of {target} cannot be read: {first_line(error)}", param="target") from error
    return found if found.chat_template else None


def _end_of(tokenizer: Any, text: str) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return text if len(ids) <= PROMPT_TOKENS else str(tokenizer.decode(ids[-PROMPT_TOKENS:]))


def _render(template: Any, target: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    try:
        return str(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the chat template of {target} takes no user's message alone: {first_line(error)}; --raw trains on the "
            "prompts as they stand"
        ) from error
