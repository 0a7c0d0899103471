"""`make real-model` without the model: what it refuses, and the reference that its tokenizer is held against."""

from pathlib import Path

import pytest

from models.real import make
from models.real.sentencepiece import Kind, SentencePiece

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_repository_never_holds_the_model() -> None:
    with pytest.raises(make.NotMade, match=f"{make.VARIABLE} is .*name another"):
        make.make(REPOSITORY / "models" / "gemma")


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gguf" / make.GGUF
    file.parent.mkdir()
    file.write_bytes(b"half of it")
    with pytest.raises(make.NotMade, match=f"must have {make.GGUF_SHA256}; remove it and say make real-model again"):
        make.make(tmp_path)


def test_the_last_line_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(make.VARIABLE, str(tmp_path))
    assert str(tmp_path) in (make.why_absent() or "")
    (tmp_path / make.STAMP).touch()
    assert make.why_absent() is None
    assert make.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["a", "bc"]),  # bc has the better score, though ab comes first
        ("ab c", ["ab", "\u2581", "c"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),  # the longest of the users' tokens, each by itself
        ("<end>b", ["<end>", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
    ],
)
def test_texts_are_cut_by_score(text: str, pieces: list[str]) -> None:
    kinds = {"<bos>": Kind.CONTROL, "<end>": Kind.CONTROL, "\n": Kind.USERS, "\n\n": Kind.USERS}
    kinds |= {"<0xC3>": Kind.BYTE, "<0xA9>": Kind.BYTE} | dict.fromkeys(["a", "b", "c", "\u2581"], Kind.NORMAL)
    kinds |= {"ab": Kind.NORMAL, "bc": Kind.NORMAL}
    tokens = list(kinds)
    scores = [{"bc": -1.0, "ab": -2.0}.get(token, -9.0) for token in tokens]
    ids = SentencePiece(tokens, scores, list(kinds.values()), bos_id=0).encode(text)
    assert [tokens[token_id] for token_id in ids] == ["<bos>", *pieces]
