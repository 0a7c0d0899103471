"""How models are called where users read of them."""

import pytest

from outrider.wire.models.model_id import without_folders


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        (
            "/srv/my models/llama",
            "model is '/srv/my models/llama', and there is no",
            "model is 'llama', and there is no",
        ),
        ("/srv/llama", "/srv/llama/model.safetensors ends early", "llama/model.safetensors ends early"),
        ("~/llama", "/root/llama has no config.json (see ~/llama)", "llama has no config.json (see llama)"),
        (
            "unigram:/srv/words",
            "model is 'unigram:/srv/words': ../x is no text",
            "model is 'unigram:words': x is no text",
        ),
        (
            "meta/llama",
            "meta/llama of https://hub.co/a/b: GPU and/or CPU",
            "meta/llama of https://hub.co/a/b: GPU and/or CPU",
        ),
    ],
)
def test_a_sentence_for_users_has_no_folder_of_the_servers_disk(model: str, text: str, expected: str) -> None:
    assert without_folders(text, model) == expected
