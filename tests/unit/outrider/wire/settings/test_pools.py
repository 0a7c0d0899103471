"""The settings of pools: what they mean, and what is refused before anything starts."""

import json
from typing import Any

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.settings.system import SystemConfig, merge_settings
from tests.unit.outrider.wire.settings.clusters import CLUSTER, NO_FLAGS


def read(values: dict[str, Any]) -> SystemConfig:
    return SystemConfig.read(values)


def test_pools_are_read_whole_and_come_back_from_json() -> None:
    config = read(CLUSTER)
    chat, code, small = config.pools
    assert (chat.name, chat.role, chat.count, chat.min, chat.max, chat.num_gpus) == ("chat", "target", 2, 2, 4, 0.5)
    assert (code.count, code.min, code.max, code.model_name, code.worker.max_slots) == (1, 1, 1, "coder", 3)
    assert (small.role, small.count, small.min, small.max, small.serves) == ("draft", 3, 1, 3, ("chat", "code"))
    assert [pool.is_sized_by_load for pool in config.pools] == [True, False, True]
    assert (chat.member(0), chat.setting) == ("target-chat-0", "targets.chat")
    assert config.scaling.up_after_s == 2
    assert read(json.loads(config.to_json())) == config


def test_a_target_and_a_draft_are_short_for_a_pool_of_each() -> None:
    config = read({"target": {"model": "t", "num_gpus": 2}, "draft": {"model": "d"}, "gateway": {"model_name": "x"}})
    target, draft = config.pools
    assert (target.name, target.count, target.max, target.model_name, target.num_gpus) == ("target", 1, 1, "x", 2)
    assert (draft.name, draft.serves, draft.member(0), draft.setting) == ("draft", ("target",), "draft-0", "draft")
    assert "model_name" not in config.gateway
    assert read(json.loads(config.to_json())).pools == config.pools


def test_a_draft_without_a_model_takes_its_tokenizer_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read({**CLUSTER, "drafts": {"guesses": {"drafter": "ngram", "serves": ["code", "chat"]}}})
    (guesses,) = config.draft_pools
    worker: Any = guesses.worker
    assert (worker.drafter, worker.model, guesses.has_model) == ("ngram", "u", False)
    assert read(json.loads(config.to_json())) == config
    named = read({**CLUSTER, "drafts": {"guesses": {"drafter": "lookup", "model": "v", "serves": "chat"}}})
    assert named.draft_pools[0].worker.model == "v"
    monkeypatch.setenv("OUTRIDER_DRAFT_DRAFTER", "lookup")
    assert read({"target": {"model": "t"}, "draft": {}}).draft_pools[0].worker.model == "t"
    monkeypatch.setenv("OUTRIDER_DRAFT_MODEL", "w")
    assert read({"target": {"model": "t"}, "draft": {}}).draft_pools[0].worker.model == "w"


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("unigram", "gateway.drafter is unigram and no target has a drafter_text to count in; name one"),
        ("ngram+model", "gateway.drafter is ngram+model and there is no draft; add one, or say ngram"),
    ],
)
def test_a_drafter_that_no_worker_has_is_refused_before_anything_loads(
    drafter: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {**NO_FLAGS, "gateway": {"drafter": drafter}}
    with pytest.raises(ConfigError) as error:
        merge_settings({}, flags, no_draft=True, no_ray=True)
    assert error.value.message.startswith(message)
    monkeypatch.setenv("OUTRIDER_TARGET_DRAFTER_TEXT", "a.txt")
    assert merge_settings({}, flags, no_draft=drafter == "unigram", no_ray=True).gateway["drafter"] == drafter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": {"chat": {"model": "t", "max_slotz": 1}}},
            "targets.chat.max_slotz is no setting; did you mean max_slots?",
        ),
        ({"targets": {"chat": {}}}, "targets.chat.model is missing"),
        (
            {"targets": {"chat": {"model": "t", "count": 3, "max": 2}}},
            "targets.chat: count 3 is not within min 3 and max 2",
        ),
        ({"targets": {"chat": {"model": "t", "count": "many"}}}, "targets.chat.count is 'many'"),
        ({"targets": {"chat": {"model": "t", "num_cpus": 1.5}}}, "num_cpus is 1.5: above 1 Ray takes whole numbers"),
        ({"targets": {"chat": {"model": "t", "labels": {"a b": "c"}}}}, "labels has 'a b': 'c', must look like"),
        ({"targets": {"chat": {"model": "t", "serves": ["x"]}}}, "targets.chat.serves is no setting"),
        (
            {"targets": {"chat": {"model": "t", "count": 2, "port": 7000}}},
            "targets.chat.port is 7000 for up to 2 workers",
        ),
        ({"targets": {"chat": {"model": "t", "count": 2, "tensor_parallel": 2}}}, "a pool has one split target"),
        ({"targets": {"Chat": {"model": "t"}}}, "targets has a pool 'Chat': a name is"),
        (
            {"targets": {"chat": {"model": "t"}, "code": {"model": "t"}}, "drafts": {"s": {"model": "d"}}},
            "drafts.s.serves is None",
        ),
        (
            {"drafts": {"small": {"model": "d", "serves": ["nobody"]}}},
            "drafts.small.serves has 'nobody', which is no target pool",
        ),
        ({"drafts": {"chat": {"model": "d", "serves": ["chat"]}}}, "targets and drafts both have a pool 'chat'"),
        ({"target": {"model": "t"}}, "target and targets are two forms of the same"),
        ({"ray": {"registri": "a:1"}}, "ray.registri is no setting; did you mean registry?"),
        ({"ray": {"registry": "here"}}, "ray.registry is 'here'"),
        ({"ray": None}, "without Ray there is one pool of targets"),
        ({"gateway": {"drafter": "model&model"}}, "gateway.drafter is model&model and there is one pool of drafts"),
        ({"gateway": {"model_name": "x"}}, "gateway.model_name is 'x'; pools say targets.NAME.model_name"),
        ({"gateway": {"registry": "a:1"}}, "gateway.registry is 'a:1': it follows from where the workers run"),
        ({"scaling": {"busy_low": 0.9}}, "scaling: busy_low 0.9 is not below busy_high 0.85"),
        ({"pools": {}}, "'pools' is no part of a system"),
    ],
)
def test_what_is_wrong_is_named_with_pool_and_setting(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({**CLUSTER, **change})
    assert message in caught.value.message


def test_a_draft_flag_names_a_drafter_and_its_text() -> None:
    with pytest.raises(ConfigError, match=r"drafter_text is 'a\.txt' and drafter 'ngram'"):
        merge_settings({}, {**NO_FLAGS, "draft": {"model": "ngram:a.txt"}}, no_draft=False, no_ray=False)


@pytest.mark.parametrize("key", ["labels", "num_cpus", "max"])
def test_settings_that_need_ray_are_refused_without_it(key: str) -> None:
    value: Any = {"labels": {"a": "b"}, "num_cpus": 1, "max": 2}[key]
    with pytest.raises(ConfigError, match="no Ray, which would see to it"):
        read({"target": {"model": "t", key: value}, "ray": None})
