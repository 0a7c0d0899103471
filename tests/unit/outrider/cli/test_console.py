"""What others said reaches the terminal as text, whatever shows it."""

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from outrider.cli.console import answer_console, print_error, screen_console

HOSTILE = "a[b]\x1b]0;title\x07\x9b2J\ud800[/c]"
SHOWN = "a[b]␛]0;title␇\ufffd2J\ufffd[/c]"


def test_neither_brackets_nor_controls_of_others_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"no answer:\n{HOSTILE}")
    assert capsys.readouterr().err == f"error: no answer: {SHOWN}\n"
    hostile = HOSTILE.replace("\x07", "")  # rich leaves the bell out of Text
    shown = SHOWN.replace("␇", "").removesuffix("c]")  # for controls a table has no room: it cuts the end
    table = Table(hostile, box=None)
    table.add_row(hostile)
    for console in (answer_console(), screen_console()):
        for each in (hostile, table, Text(hostile, "bold")):
            console.print(each)
        with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
            progress.add_task(hostile)
    said = capsys.readouterr().out
    assert said.count(shown) == 2 * 5 and not {"\x1b", "\x9b"} & set(said)
