"""`outrider generate` and `outrider chat` against a real gRPC server; terminals through a pseudo-terminal."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from outrider.v1 import common_pb2
from outrider.wire import errors
from outrider.wire.requests.speculation import num_draft_tokens_from_proto
from tests.unit.outrider.cli.generate.typed import RUN, outrider
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, failing, hanging


def test_text_goes_to_stdout_and_figures_to_stderr(gateway: ScriptedGateway) -> None:
    result = outrider("generate", "hello", "--address", gateway.address)
    assert result.exit_code == 0
    assert result.stdout == TEXT
    assert "\x1b" not in result.output
    assert result.stderr.startswith(f"pair, guessed, alone at {gateway.address}\n7 tokens in")
    assert "2 rounds, 1 plain steps, acceptance rate 0.80 (4/5)" in result.stderr
    assert "mean accepted length 3.00, 2.33 tokens per target pass" in result.stderr
    assert re.search(r"\d+\.\d tokens/s", result.stderr)


@pytest.mark.parametrize("command", ["generate hello", "chat"])
def test_options_reach_the_gateway(gateway: ScriptedGateway, command: str) -> None:
    options = (
        "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 -K auto --stop a --stop b "
        "--model m --acceptance rejection --lenience 0.5 --tree best:12x4"
    )
    result = outrider(*command.split(), "--address", gateway.address, *options.split(), stdin="hello\n")
    assert result.exit_code == 0, result.output
    (request,) = gateway.requests
    params, speculation = request.params, request.speculation
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, request.has_seed) == (0.1, 7, True)
    assert (list(request.stop), request.model) == (["a", "b"], "m")
    assert speculation.enabled and num_draft_tokens_from_proto(speculation.num_draft_tokens) == "auto"
    assert speculation.HasField("num_draft_tokens")
    assert (speculation.acceptance, speculation.lenience) == (common_pb2.ACCEPTANCE_RULE_REJECTION, 0.5)
    assert (speculation.tree.num_nodes, speculation.tree.max_depth) == (12, 4)


def test_a_prediction_is_a_files_text(gateway: ScriptedGateway, tmp_path: Path) -> None:
    path = tmp_path / "before.py"
    path.write_text("größe = 1\n", encoding="utf-8")
    for file, code in ((path, 0), (tmp_path / "none.py", 1)):
        done = outrider("generate", "hello", "--address", gateway.address, "--prediction", str(file))
        assert done.exit_code == code
    assert [each.prediction for each in gateway.requests] == ["größe = 1\n"]
    assert "--prediction" in done.stderr and "cannot be read" in done.stderr


def test_json_is_one_object(gateway: ScriptedGateway) -> None:
    result = outrider("generate", "hello", "--address", gateway.address, "--json", colour=True)
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert (answer["address"], answer["model"]) == (gateway.address, "pair, guessed, alone")
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT
    assert choice["tokens"][2] == {"id": 3, "kind": "recovered", "text": " red"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    assert choice["usage"]["acceptance_rate"] == 0.8
    assert choice["usage"]["mean_accepted_length"] == 3.0
    assert choice["usage"]["num_completion_tokens"] == 7


def test_an_error_in_the_middle_keeps_the_text(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(failing(errors.Unavailable("the target\nis [lost]"), num_rounds=1))
    result = outrider("generate", "hello", "--address", gateway.address)
    assert result.exit_code == 1
    assert result.stdout == " the quick red\n"
    assert result.stderr.endswith("\nerror: the target is [lost]\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.generate.generate.Client", lambda *args, **kwargs: 1 / 0)
    assert isinstance(outrider("generate", "hello").exception, ZeroDivisionError)


def test_ctrl_c_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    command = [*RUN, "generate", "hello", "--address", gateway.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(14) == b" the quick red"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b"\n")
    assert err.endswith(f" at {gateway.address}\n".encode())
    assert gateway.cancelled.wait(5)
