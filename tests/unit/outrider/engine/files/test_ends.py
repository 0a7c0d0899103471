"""Every end of sequence that a file of the folder states."""

from pathlib import Path

from outrider.engine.files.ends import read_ends
from outrider.engine.loading.loader import read_config
from outrider.engine.model_check import CheckTask, read_model
from tests.unit.outrider.engine.files.folders import change, load


def test_every_end_that_a_file_states_ends_an_answer(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=4)
    change(folder / "generation_config.json", eos_token_id=[4, 5])
    ends = read_ends(str(folder), read_config(str(folder)))
    assert ends.ids == (4, 5, 0)
    assert ends.difference is not None and "tokenizer_config.json </s> (0)" in ends.difference
    assert load(folder).facts.eos_token_ids == (4, 5, 0)
    notes = read_model(str(folder), CheckTask(str(folder), [], "cpu", "auto")).notes
    assert notes == (ends.difference,), "doctor says so, too"


def test_minus_one_is_no_end(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=-1)
    change(folder / "generation_config.json", eos_token_id=[-1, 5])
    assert load(folder).facts.eos_token_ids == (5, 0)


def test_files_that_agree_on_the_ends_are_no_news(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[0, 7])
    ends = read_ends(str(folder), read_config(str(folder)))
    assert (ends.ids, ends.difference) == ((0, 7), None)


def test_an_end_that_a_class_has_unstated_ends_nothing_where_a_file_states_another(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=None)  # LlamaConfig's is 2
    (folder / "generation_config.json").unlink()
    assert read_ends(str(folder), read_config(str(folder))).ids == (0,)
    change(folder / "tokenizer_config.json", eos_token=None)
    assert read_ends(str(folder), read_config(str(folder))).ids == (2,)
