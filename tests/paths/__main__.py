"""`make paths`: the files that one streaming chat enters, in order, held against docs/architecture.md.

Fails where a file of the spine was not entered or came out of order, where an entered file of the gateway or of a
service is neither on the spine nor listed as a helper, and where the page names a file that is not there.
"""

import re
import sys
from dataclasses import dataclass

from tests.forked import REPO
from tests.paths.trace import Entered, trace_chat

DOCUMENT = REPO / "docs" / "architecture.md"
MOST_ON_SPINE = 18
MOST_IN_ROUND = 12
OF_ROUND = ("gateway/rounds/", "draft_service/", "target_service/", "outrider/")
LISTED = ("gateway/", "draft_service/", "target_service/")
"""Folders whose entered files must be on the page."""


@dataclass(frozen=True)
class Page:
    """The two lists of the page, in its order. Paths below the repository."""

    spine: list[str]
    helpers: list[str]

    @classmethod
    def read(cls, text: str) -> "Page":
        """Raises ValueError where a list is missing."""
        return cls(*(_paths_between(text, name) for name in ("spine", "helpers")))

    def wrong(self, entered: dict[str, Entered]) -> list[str]:
        """Return what does not fit, a sentence each."""
        found = [f"{path} is listed and not in the repository" for path in self.all if not (REPO / path).is_file()]
        found += [f"{path} is listed twice" for path in sorted(set(self.all)) if self.all.count(path) > 1]
        if len(self.spine) > MOST_ON_SPINE:
            found.append(f"the spine has {len(self.spine)} files, at most {MOST_ON_SPINE} are allowed")
        of_round = [path for path in self.spine if path.startswith(OF_ROUND)]
        if len(of_round) > MOST_IN_ROUND:
            found.append(f"the round has {len(of_round)} files, at most {MOST_IN_ROUND} are allowed")
        everywhere = {path for files in entered.values() for path in files}
        found += [f"{path} is on the spine and was not entered" for path in self.spine if path not in everywhere]
        for path in sorted(everywhere - set(self.all)):
            if path.startswith(LISTED):
                found.append(f"{path} was entered and is neither on the spine nor a helper")
        for module, files in entered.items():
            expected = [path for path in self.spine if path in files and _runs_in(path, module)]
            came = [path for path in files if path in expected]
            if came != expected:
                found.append(f"{module} entered the spine as {', '.join(came)}; the page has {', '.join(expected)}")
        return found

    @property
    def all(self) -> list[str]:
        return [*self.spine, *self.helpers]


def _paths_between(text: str, name: str) -> list[str]:
    begin, end = f"<!-- {name}: make paths -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{DOCUMENT.name} has no list between {begin!r} and {end!r}")
    return re.findall(r"`([\w/]+\.py)`", text.partition(begin)[2].partition(end)[0])


def _runs_in(path: str, module: str) -> bool:
    """Of the spine's shared files, drafting is the draft's and acceptance the target's."""
    owner = "draft_service" if "/speculation/" in path else "target_service"
    return path.startswith(f"{module}/") or (path.startswith("outrider/") and module == owner)


def show(entered: dict[str, Entered], page: Page) -> None:
    for module in ("gateway", "draft_service", "target_service"):
        files = entered[module]
        own = [path for path in files if path.startswith(f"{module}/")]
        shared = [path for path in files if path not in own]
        print(f"\n{module}: {len(own)} files of its own, by first entry (ms after the request was sent)")
        for path in own:
            mark = "spine" if path in page.spine else "helper" if path in page.helpers else "NOT LISTED"
            print(f"  {1e3 * files[path]:8.1f}  {path:46}{mark}")
        for folder in ("outrider/engine/", "outrider/wire/", "outrider/drafting/"):
            of_folder = [path.removeprefix(folder) for path in shared if path.startswith(folder)]
            if of_folder:
                print(f"  {folder}: {len(of_folder)}: {', '.join(of_folder)}")
    own = [path for path in entered["gateway"] if path.startswith("gateway/")]
    workers = [path for path in {**entered["draft_service"], **entered["target_service"]} if path.startswith(LISTED)]
    spine = [path for path in page.spine if any(path in files for files in entered.values())]
    print(f"\nOne chat enters {len(own)} files of the gateway and {len(workers)} of the two services;", end=" ")
    of_round = sum(path.startswith(OF_ROUND) for path in spine)
    print(f"{len(spine)} of {len(page.spine)} on the spine, {of_round} of a round.")


def main() -> int:
    page = Page.read(DOCUMENT.read_text())
    entered = trace_chat()
    show(entered, page)
    wrong = page.wrong(entered)
    for each in wrong:
        print(f"docs/architecture.md: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
