"""What a request asks for is checked against the served model, before its prompt is read."""

from typing import Any

import pytest

from gateway.admission.request_checks import check_request, find_model
from gateway.generation import ServedFacts, SpeculationOptions
from outrider.wire.errors import InvalidRequest, ModelNotFound
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import BeamParams
from outrider.wire.requests.tree_shape import TreeShape
from tests.unit.gateway.admission.asked import demand, info
from tests.unit.gateway.scripted_pool import connection_of, link_of, served_model


@pytest.mark.parametrize(
    ("path", "name", "is_served"),
    [
        ("/models/demo", "./demo/", True),
        ("/models/demo", "/models/demo", True),
        ("/models/demo", "emo", False),
        ("/models/demo", "/", False),
        ("org/demo", "org/demo", True),
        ("org/demo", "demo", False),
        ("", "", False),
    ],
)
def test_a_model_is_found_by_where_it_was_started_from_too(path: str, name: str, is_served: bool) -> None:
    facts = ServedFacts("chat", 512, 320, 0, 320, None, model_path=path)
    if is_served:
        assert find_model([facts], name) is facts
    else:
        with pytest.raises(ModelNotFound):
            find_model([facts], name)


def test_no_round_of_a_search_is_explained() -> None:
    asked = demand(BeamParams(4), speculation=SpeculationOptions(explain=True))
    with pytest.raises(InvalidRequest, match="do not go together") as caught:
        check_request(asked, [ServedFacts("m", 512, 320, 0, 320, None)])
    assert caught.value.param == "speculation.explain"


@pytest.mark.parametrize("beams", [True, False])
def test_beams_are_refused_where_no_target_supports_them(beams: bool) -> None:
    """It is one of two: a search may be given either."""
    connections = {"s": connection_of(), "t": connection_of()}
    connections["s"].info, connections["t"].info = info(True), info(beams)
    why = served_model({name: link_of(each) for name, each in connections.items()}, {}).facts().no_beams
    assert (why is None) is beams
    facts = ServedFacts("m", 512, 320, 0, 320, None, no_beams=why)
    if beams:
        assert check_request(demand(BeamParams(4)), [facts]) is facts
        return
    with pytest.raises(InvalidRequest, match="runs no token trees on the path") as caught:
        check_request(demand(BeamParams(4)), [facts])
    assert caught.value.param == "use_beam_search"


def test_more_beams_than_half_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="from 2 to 10"):
        check_request(demand(BeamParams(11)), [ServedFacts("m", 512, 20, 0, 320, None)])


TREE = TreeShape.parse("4x2x1")


@pytest.mark.parametrize(
    ("wishes", "no_trees", "why"),
    [({}, "the target m takes chains alone (path flash)", "path flash"), ({"lenience": 0.9}, None, "lenience 0.9")],
)
def test_refused_by_name(wishes: dict[str, Any], no_trees: str | None, why: str) -> None:
    facts = ServedFacts("m", 512, 320, 0, 320, "draft", (Drafter.MODEL,), no_trees=no_trees)
    asked = demand(None, speculation=SpeculationOptions(tree=TREE, **wishes))
    with pytest.raises(InvalidRequest, match=r"speculation\.tree is 4x2x1") as caught:
        check_request(asked, [facts])
    assert why in caught.value.message and caught.value.param == "speculation.tree"
