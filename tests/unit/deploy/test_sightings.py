"""What a launcher sees of its workers, and whom it believes gone."""

from deploy.pool_member import SERVING, STARTING
from deploy.ray_workers import ActorLost
from outrider.v1 import registry_pb2
from tests.unit.deploy.played import HUNG, Stage, chat, small


def test_another_life_at_the_same_place_is_another_worker() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.answers("target-chat-0", epoch=9)
    stage.tick()
    assert stage.states() == {"target-chat-0": STARTING}
    assert stage.workers["target-chat-0"].num_queries == 2


def test_an_engine_that_hangs_behind_a_server_that_answers_is_lost_and_then_ended() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for second in range(41):
        if "target-chat-0" not in stage.watched:
            stage.started("target-chat-0")
        stage.answers("target-chat-0", current_step_us=second * 1_000_000, **HUNG)
        stage.tick(1.0)
        if second < 8:
            assert stage.states() == {"target-chat-0": SERVING}
    assert stage.states() == {"target-chat-0": STARTING}
    assert stage.workers["target-chat-0"].num_ended_by_us == 1
    stage.workers["target-chat-0"].next = ActorLost("it is being restarted", is_final=False)
    stage.tick()
    stage.started("target-chat-0", epoch=2)
    stage.answers("target-chat-0", epoch=2)
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING}


def test_a_long_step_that_ends_is_not_ended() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for second in range(30):
        if "target-chat-0" not in stage.watched:
            stage.started("target-chat-0")
        stage.answers("target-chat-0", current_step_us=second * 1_000_000, **HUNG)
        stage.tick(1.0)
    assert stage.states() == {"target-chat-0": STARTING}
    stage.started("target-chat-0")
    stage.answers("target-chat-0", longest_step_us=30_000_000)
    stage.tick(60.0)
    assert stage.states() == {"target-chat-0": SERVING}
    assert stage.workers["target-chat-0"].num_ended_by_us == 0


def test_one_whose_process_ended_may_load_as_long_as_it_takes() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for _ in range(2):
        stage.answers("target-chat-0", epoch=0)
    stage.tick()
    assert stage.states() == {"target-chat-0": STARTING}
    stage.workers["target-chat-0"].next = ActorLost("it is being restarted", is_final=False)
    for _ in range(40):
        stage.tick(2.0)
    assert stage.workers["target-chat-0"].num_ended_by_us == 0


def test_whose_server_refuses_to_answer_lives() -> None:
    """With a certificate that it does not take, say. Silence before that does not count."""
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(4):
        stage.look(20, target_chat_0="answers", target_chat_1="silent")
        stage.look(20, target_chat_0="answers", target_chat_1="refuses")
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": STARTING}
    stage.look(80, target_chat_0="refuses", target_chat_1="refuses")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="answers")
    assert set(stage.states().values()) == {SERVING}
    stage.look(40, target_chat_0="refuses", target_chat_1="silent")
    assert stage.ended() == {"target-chat-1": 1}, "whose server refuses is seen"


def test_a_launcher_that_reaches_no_worker_ends_none() -> None:
    stage = Stage(chat(2), small())
    stage.serve()
    stage.look(80, target_chat_0="silent", target_chat_1="silent", draft_small_0="silent")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="silent", draft_small_0="silent")
    assert stage.ended() == {}, "they are to be asked again first"
    stage.look(20, target_chat_0="answers", target_chat_1="silent", draft_small_0="answers")
    assert stage.ended() == {}
    stage.look(10, target_chat_0="answers", target_chat_1="silent", draft_small_0="answers")
    assert stage.ended() == {"target-chat-1": 1}


def hears(*members: str) -> list[registry_pb2.GatewayReport]:
    return [
        registry_pb2.GatewayReport(gateway="g", responsive_workers=members),
        registry_pb2.GatewayReport(gateway="other"),
    ]


def test_who_answers_a_gateway_is_not_ended_though_the_launcher_does_not_see_it() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.reports = hears("target-chat-0", "target-chat-1")
    stage.look(80, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {}
    stage.reports = hears("target-chat-0")
    stage.look(29, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {"target-chat-1": 1}


def test_a_silent_worker_is_ended_unless_it_replies_to_a_gateway() -> None:
    for reports, ended in ((hears("target-chat-0"), {}), (hears(), {"target-chat-0": 1})):
        stage = Stage(chat(1))
        stage.serve()
        stage.reports = reports
        stage.look(40, target_chat_0="silent")
        assert stage.ended() == ended


def test_replies_to_a_gateway_do_not_save_a_hung_engine() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.reports = hears("target-chat-0", "target-chat-1")
    stage.look(45, target_chat_0="answers", target_chat_1="hangs")
    assert stage.ended() == {"target-chat-1": 1}
