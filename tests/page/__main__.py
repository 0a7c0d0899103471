"""Run the tests of this folder in an environment of their own: the page in a Chromium, on a demo system started for it.

    make page-test                    # or: python -m tests.page [PYTEST'S ARGUMENTS]

Needs Chromium or Chrome on the machine: says so and exits 3 without. Writes the pictures of docs/page.md; those of a
chat where the model of `make chat` has been fetched.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from models.chat.fetch import chat_model
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Stack, gateway_beside, running

FOLDER = Path(__file__).parent
REPO = FOLDER.parents[1]
PYTHON = REPO / ".work/page/bin/python"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NO_BROWSER = 3
CONTEXT = 16384
"""Tokens: room for an answer of 10,000, as the demo pair's own 2,048 are not."""
AWAY_S = 4.0
"""Before a draft that was killed is started again: time to see its rounds turn plain."""


def raised(folder: str, made: Path) -> str:
    """Return a folder of the same model with a larger context. What it says there may be nonsense."""
    shutil.copytree(folder, made)  # no links: a worker refuses those that lead out of its model's folder
    config = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


@contextlib.contextmanager
def revived(stack: Stack, pid_file: Path) -> Iterator[None]:
    """Start the draft again, at its port, whenever it has died. Its pid stands in `pid_file`."""
    ending = threading.Event()

    def watch() -> None:
        while not ending.is_set():
            assert stack.draft is not None
            pid_file.write_text(str(stack.draft.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                stack.draft.popen.wait(0.2)
                if not ending.wait(AWAY_S):
                    stack.draft.kill()
                    stack.draft = stack.draft.again()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ending.set()
        watcher.join()


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser: install one of {', '.join(BROWSERS)}, such as Debian's chromium", file=sys.stderr)
        return NO_BROWSER
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = new_key()
        write_keys(folder / "keys.yaml", (ApiKey(name="page", sha256=digest_of(key)),))
        target, draft = raised(DEMO_TARGET, folder / "target"), raised(DEMO_DRAFT, folder / "draft")
        name = ("--model-name", "outrider/demo")
        system = stack.enter_context(running(target, draft, gateway_args=name, log_folder=folder))
        chat = chat_model()
        if chat.is_file():
            drafts = ("--drafter", "ngram", "--model-name", "SmolLM2-135M-Instruct")
            chatting = stack.enter_context(running(str(chat), None, gateway_args=drafts))
            os.environ["OUTRIDER_PAGE_CHAT_URL"] = chatting.http
        keyed = stack.enter_context(gateway_beside(system, "--api-keys", str(folder / "keys.yaml")))
        stack.enter_context(revived(system, folder / "draft.pid"))
        environment = os.environ | {
            "OUTRIDER_PAGE_URL": system.http,
            "OUTRIDER_PAGE_KEYED_URL": f"http://{keyed.ready['http']}",
            "OUTRIDER_PAGE_KEY": key,
            "OUTRIDER_PAGE_DRAFT_PID": str(folder / "draft.pid"),
            "OUTRIDER_PAGE_BROWSER": browser,
        }
        # Without the settings, plugins and fixtures of the other tests, which need the engine.
        alone = ("-c", os.devnull, "--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), "-p", "no:cacheprovider")
        command = [str(PYTHON), "-m", "pytest", *alone, "-q", "-ra", "--timeout", "600", str(FOLDER), *sys.argv[1:]]
        return subprocess.run(command, env=environment, cwd=REPO, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
