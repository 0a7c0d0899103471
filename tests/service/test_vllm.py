"""vLLM's endpoints around the tokenizer, its parameters of prompts and texts, and what is refused by name."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

import outrider
from gateway.admission import requests as admission_requests
from gateway.api import routes
from gateway.api.openai_answers import best_of
from gateway.generation import OutputLogprobs, OutputToken
from gateway.tokenizer import Tokenizer
from outrider.wire.kinds import TokenKind
from tests.service.front_door import in_process
from tests.service.scripted_generator import CONTEXT_LIMIT, DEMO, ScriptedGenerator, demo_tokenizer, rounds

TOKENIZER = demo_tokenizer()
CHAT: Any = [{"role": "user", "content": "hello there"}]
EOT = sorted(TOKENIZER.special_ids)[0]


async def test_a_text_and_back() -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        told = (await http.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True})).json()
        back = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()
        empty = (await http.post("/tokenize", json={"prompt": ""})).json()
    ids = TOKENIZER.encode("hello there")
    assert told == {"count": 2, "max_model_len": CONTEXT_LIMIT, "tokens": ids, "token_strs": ["hello", "Ġthere"]}
    assert back == {"prompt": "hello there"} and empty["count"] == 0 and empty["token_strs"] is None


async def test_large_texts_and_tokens_keep_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ran_in: list[int] = []

    def noted(work: Any) -> Any:
        def run(*args: Any) -> Any:
            ran_in.append(threading.get_ident())
            return work(*args)

        return run

    monkeypatch.setattr(routes.JsonResponse, "render", noted(routes.JsonResponse.render))
    monkeypatch.setattr(routes, "check_token_ids", noted(routes.check_token_ids))
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        for path, body in (("/tokenize", {"prompt": "x\n" * 30_000}), ("/detokenize", {"tokens": [1] * 30_000})):
            assert (await http.post(path, json=body)).status_code == 200
    assert len(ran_in) == 3 and threading.get_ident() not in ran_in


async def test_a_chat_is_tokenised_as_it_is_answered_and_special_tokens_come_back() -> None:
    generator = ScriptedGenerator(TOKENIZER)
    async with in_process(generator) as http:
        told = (await http.post("/tokenize", json={"messages": CHAT})).json()
        await http.post("/v1/chat/completions", json={"messages": CHAT})
        special = sorted(TOKENIZER.special_ids)[0]
        back = (await http.post("/detokenize", json={"tokens": [special]})).json()
        info = (await http.get("/tokenizer_info")).json()
    assert tuple(told["tokens"]) == generator.requests[0].prompt_ids
    assert back == {"prompt": TOKENIZER.token_text(special)}
    assert info["eos_token"] in map(TOKENIZER.token_text, TOKENIZER.special_ids)
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, body: Any, param: str) -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        answer = await http.post(path, json=body)
        unknown = await http.post(path, json={"prompt": "x", "tokens": [1]} | {"model": "other"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert unknown.status_code in (400, 404)


async def test_the_version_and_what_is_not_offered() -> None:
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        assert (await http.get("/version")).json() == {"version": outrider.__version__}
        for path in ("embeddings", "images/generations", "batches", "audio/speech", "files"):
            answer = await http.post(f"/v1/{path}", json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"].startswith(f"{path.split('/')[0]} are not offered")


PROMPT = "Once upon a time"
IDS = TOKENIZER.encode(PROMPT)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def asked(generator: ScriptedGenerator, path: str = COMPLETIONS, **body: Any) -> Any:
    async with in_process(generator) as http:
        answer = await http.post(path, json=({"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}) | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(generator: ScriptedGenerator, path: str = COMPLETIONS, **body: Any) -> list[Any]:
    async with in_process(generator) as http:
        asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
        answer = await http.post(path, json=asked | body | {"stream": True})
    return [json.loads(each.removeprefix("data: ")) for each in answer.text.strip().split("\n\n")[:-1]]


async def test_echo_with_logprobs_tells_those_of_the_prompt_in_front() -> None:
    generator = ScriptedGenerator(TOKENIZER, " lived")
    whole = (await asked(generator, echo=True, logprobs=2))["choices"][0]
    told = whole["logprobs"]
    num = len(IDS)
    assert whole["text"] == f"{PROMPT} lived" and generator.requests[0].num_prompt_logprobs == 2
    assert told["token_logprobs"][:num] == [None, *(-0.25 * at for at in range(1, num))]
    assert told["token_logprobs"][num:] == [-0.5] * len(TOKENIZER.encode(" lived"))
    assert told["top_logprobs"][0] is None and len(told["top_logprobs"][1]) == 2
    for text, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert whole["text"][offset : offset + len(text)] == text
    chunks = [event["choices"][0]["logprobs"] for event in await events(generator, echo=True, logprobs=2)]
    assert {name: [each for chunk in chunks for each in chunk[name]] for name in told} == told


async def test_max_tokens_0_scores_the_prompt_alone() -> None:
    generator = ScriptedGenerator(TOKENIZER, " lived")
    answer = await asked(generator, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(IDS) and answer["usage"]["completion_tokens"] == 0
    assert generator.requests[0].is_empty and generator.requests[0].params.max_tokens == 1


async def test_prompt_logprobs_have_vllms_form() -> None:
    answer = await asked(ScriptedGenerator(TOKENIZER), prompt_logprobs=1)
    told = answer["choices"][0]["prompt_logprobs"]
    assert told[0] is None and len(told) == len(IDS)
    own, other = str(IDS[1]), str(IDS[1] + 1)
    assert told[1][own] == {"logprob": -0.25, "rank": 2, "decoded_token": TOKENIZER.token_text(IDS[1])}
    assert (told[1][other]["rank"], told[1][other]["logprob"]) == (1, -0.125)
    assert list(told[1]) == [own, other]
    chat = await asked(ScriptedGenerator(TOKENIZER), CHATS, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == 2 and "prompt_logprobs" not in chat["choices"][0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_token_ids_are_told_where_they_are_asked_for(path: str) -> None:
    generator = ScriptedGenerator(TOKENIZER, "the quick brown fox")
    whole = await asked(generator, path, return_token_ids=True, n=2)
    chunks = await events(generator, path, return_token_ids=True)
    prompt_ids, ids = list(generator.requests[0].prompt_ids), TOKENIZER.encode(generator.text)
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids, ids]
    assert (whole["choices"][1] if path == COMPLETIONS else whole)["prompt_token_ids"] == prompt_ids
    first = chunks[0]["choices"][0] if path == COMPLETIONS else chunks[0]
    assert first["prompt_token_ids"] == prompt_ids and "prompt_token_ids" not in json.dumps(chunks[1:])
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == ids


async def test_what_ends_a_text_and_special_tokens_may_be_a_part_of_it() -> None:
    generator = ScriptedGenerator(TOKENIZER, "the quick brown fox")
    for keeps, text in ((False, "the quick "), (True, "the quick brown")):
        answer = await asked(generator, stop="brown", include_stop_str_in_output=keeps)
        assert answer["choices"][0]["text"] == text and answer["choices"][0]["stop_reason"] == "brown"
    answer = await asked(generator, prompt=[EOT, *IDS], echo=True, skip_special_tokens=False)
    assert answer["choices"][0]["text"].startswith(TOKENIZER.token_text(EOT) + PROMPT)
    assert generator.requests[-1].shows_special


@pytest.mark.parametrize(("most", "kept"), [(2, IDS[-2:]), (100, IDS), (-1, IDS)])
async def test_of_a_prompt_its_end_is_taken(most: int, kept: list[int]) -> None:
    generator = ScriptedGenerator(TOKENIZER)
    await asked(generator, truncate_prompt_tokens=most)
    await asked(generator, prompt=[5] * 5000, max_tokens=8, truncate_prompt_tokens=-1)
    assert list(generator.requests[0].prompt_ids) == kept
    assert len(generator.requests[1].prompt_ids) == CONTEXT_LIMIT - 8


async def test_the_best_of_several_are_told() -> None:
    generator = ScriptedGenerator(TOKENIZER, "the fox", numbered=True)
    answer = await asked(generator, prompt=["a", "b"], n=2, best_of=4, max_tokens=50)
    assert len(generator.requests) == 8 and generator.requests[0].params.num_logprobs == 0
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    outputs = [rounds(generator, request)[-1] for request in generator.requests]
    scored = [
        replace(output, tokens=(OutputToken(1, TokenKind.PLAIN, "", 0, OutputLogprobs(-abs(at - 2.0), ())),))
        for at, output in enumerate(outputs[:4])
    ]
    assert best_of(scored, 4, 2) == [2, 1]


async def test_a_suffix_is_written_in_the_tokens_for_it() -> None:
    described = json.loads((DEMO / "tokenizer.json").read_bytes())
    added = dict(described["added_tokens"][0])
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    described["added_tokens"] += [added | {"id": 4096 + at, "content": name} for at, name in enumerate(names)]
    tokenizer = Tokenizer(json.dumps(described), {}, None)
    generator = ScriptedGenerator(tokenizer, "b")
    await asked(generator, prompt="a", suffix="c")
    ids = (4096, *tokenizer.encode("a"), 4097, *tokenizer.encode("c"), 4098)
    assert generator.requests[0].prompt_ids == ids


@pytest.mark.parametrize("n", [1, 2])
async def test_choices_of_a_prompt_share_its_scores(n: int) -> None:
    generator = ScriptedGenerator(TOKENIZER, " lived")
    answer = await asked(generator, prompt=[PROMPT, "hello there"], prompt_logprobs=1, n=n, best_of=2)
    assert [each.num_prompt_logprobs for each in generator.requests] == [1, None, 1, None]
    lengths = [len(each["prompt_logprobs"]) for each in answer["choices"]]
    assert lengths == [len(IDS)] * n + [2] * n


async def test_scores_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_requests, "MAX_PROMPT_LOGPROBS", 2 * 2 * len(IDS))
    async with in_process(ScriptedGenerator(TOKENIZER)) as http:
        bodies: list[Any] = [{"prompt": PROMPT, "prompt_logprobs": 1, "n": n} for n in (2, 3)]
        bodies.append({"prompt": PROMPT, "echo": True, "logprobs": 1, "n": 2, "stream": True})
        answers = [await http.post(COMPLETIONS, json=body) for body in bodies]
    assert [each.status_code for each in answers] == [200, 400, 400]
    assert [each.json()["error"]["param"] for each in answers[1:]] == ["prompt_logprobs", "n"]
