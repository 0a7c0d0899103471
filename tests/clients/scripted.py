"""A tiny model that says what each agent's script has, turn by turn, whatever the prompt.

Attention and MLP add nothing, so that the next token is a table of the last one. It drafts for itself, and is accepted.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 400_000
"""In bytes, which the tokens of prompts are."""
END = "</s>"
SHARPNESS = 30.0
SIDE = "side"
"""The script's turn for what an agent asks beside its task, without tools: a title, a summary."""
TEMPLATE = """\
{%- if tools %}<|start|>system
Call tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | map('tojson') | join('\\n') }}
{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% set turn = namespace(mark='<|side|>', past=0) %}
{%- if tools %}
  {%- for message in messages %}
    {%- if message.role == 'assistant' %}{% set turn.past = turn.past + 1 %}{% endif %}
  {%- endfor %}
  {%- for name, turns in SCRIPTS.items() %}
    {%- if ('task of ' ~ name ~ '.') in (messages | map(attribute='content') | map('string') | join(' ')) %}
      {%- set turn.mark = '<|' ~ name ~ [turn.past, turns - 1] | min ~ '|>' %}
    {%- endif %}
  {%- endfor %}
{%- endif %}
{{- turn.mark }}
{%- endif %}"""
"""The prompt ends in the mark of the turn that is to be said."""


def pieces(text: str, taken: set[str]) -> list[str]:
    """Split into tokens of which none was taken: the last token alone says what follows.

    >>> pieces("a call, a call", {"a ca"})
    ['a cal', 'l, a', ' cal', 'l']
    """
    found: list[str] = []
    while text:
        size = min(4, len(text))
        while text[:size] in taken and size < len(text):
            size += 1
        piece, text = text[:size], text[size:]
        while piece in taken and found:  # the end, too short to be new
            piece = found.pop() + piece
        assert piece not in taken, piece
        taken.add(piece)
        found.append(piece)
    return found


def make(folder: Path, scripts: dict[str, list[str]], marks: Sequence[str] = ()) -> None:
    """Write a model folder. A script has what is said at each turn; past its end, the last one again.

    marks: texts that are special tokens, each of which the scripts say at most once.
    """
    special = ["<unk>", END, "<|start|>", "<|end|>", *marks]
    taken = set(special)
    said = {f"<|{SIDE}|>": pieces("A side remark.", taken)}
    for name, turns in scripts.items():
        for turn, text in enumerate(turns):
            chain = []
            for part in _split(text, marks):
                if part in marks:
                    chain.append(part)
                else:
                    chain += pieces(part, taken)
            said[f"<|{name}{turn}|>"] = chain
    special += said
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for chain in said.values():
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in chain if piece not in marks])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    vocabulary = tokenizer.get_vocab()

    tokenizer.save(str(folder / "tokenizer.json"))
    lengths = json.dumps({name: len(turns) for name, turns in scripts.items()})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "unk_token": "<unk>"}
    settings["chat_template"] = TEMPLATE.replace("SCRIPTS", lengths)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    follows = {}
    for mark, chain in said.items():
        follows |= dict(zip((mark, *chain), (*chain, END), strict=True))
    _network(vocabulary, follows).save_pretrained(folder)


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Return the texts between marks, and the marks."""
    if not marks:
        return [text]
    pattern = "|".join(re.escape(mark) for mark in marks)
    return [part for part in re.split(f"({pattern})", text) if part]


def _network(vocabulary: dict[str, int], follows: dict[str, str]) -> LlamaForCausalLM:
    """Embeddings are only of the tokens that something follows: so the width stays small."""
    size = len(vocabulary)
    width = -(-(len(follows) + 1) // 8) * 8
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=vocabulary[END],
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        network.model.norm.weight.fill_(1.0)
        network.model.embed_tokens.weight.zero_()
        network.lm_head.weight.zero_()
        network.model.embed_tokens.weight[:, width - 1] = 1.0
        for row, (last, following) in enumerate(follows.items()):
            network.model.embed_tokens.weight[vocabulary[last]] = 0.0
            network.model.embed_tokens.weight[vocabulary[last], row] = 1.0
            network.lm_head.weight[vocabulary[following], row] = SHARPNESS / width**0.5
        network.lm_head.weight[vocabulary[END], width - 1] = SHARPNESS / width**0.5
    return network
