"""Encode training prompts as the target is prompted when it is served: for a chat model through its chat template.

Called by `train_head`.
"""

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
    """Return the token ids of each prompt, as the target would get them when it is served.

    If the target has a chat template and `is_raw` is False, each text is rendered as a user's message. Of a text with
    more than PROMPT_TOKENS tokens (those of the template do not count) only the last are kept. target: folder of the
    target. Raises ConfigError for a template that cannot be rendered.
    """
    tokenizer = tokenizer_of(target)
    template = None
    if not is_raw:
        template = _load_template(target)
    if template is None:
        return [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in texts]
    prompts = []
    for text in texts:
        rendered = _render(template, target, _truncate(tokenizer, text))
        prompts.append(tokenizer.encode(rendered, add_special_tokens=False).ids)
    return prompts


def _load_template(target: str) -> Any:
    # transformers' tokenizer, which renders its chat template; None where it has none
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # as in the loader: a damaged file raises what its reader does
        raise ConfigError(f"the tokenizer of {target} cannot be read: {first_line(error)}", param="target") from error
    if not tokenizer.chat_template:
        return None
    return tokenizer


def _truncate(tokenizer: Any, text: str) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) <= PROMPT_TOKENS:
        return text
    return str(tokenizer.decode(ids[-PROMPT_TOKENS:]))


def _render(template: Any, target: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    try:
        return str(template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the chat template of {target} takes no user's message alone: {first_line(error)}; --raw trains on the "
            "prompts as they stand"
        ) from error
