"""Fetch what is served of a hub's repository: into the hub's cache, where the workers look, or into a folder.

huggingface_hub knows the hub's interface, its cache and its settings (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
But what it begins it throws away when its process ends, and it compares no content: so files are fetched here, each
into one that a later call goes on with, and have to have the checksum that the repository names before they count.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.models.model_id import ADDITIONAL_TEMPLATES, INDEX, SAFE, is_gguf, split_hub_id
from outrider.wire.models.model_json import parse_weight_map

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

DEFAULT_REVISION = "main"
OTHER_TOKENIZERS = (".model", "merges.txt")
"""Ends of the files of which a tokenizer.json is made where there is none, besides the JSON among them."""
_AT_ONCE = 8
"""Files fetched at once, as huggingface_hub has it."""
_READ_BYTES = 2**20
_PARTIAL_CONTENT = 206
_INCOMPLETE = ".incomplete"
_MOST_NAMES = 10
"""Files of a repository that an error names: a repository may have thousands."""

_T = TypeVar("_T")
_R = TypeVar("_R")

Told = Callable[[int, int], None]
"""Called with the bytes that are there, and all."""


def check_installed() -> None:
    """Raise ConfigError where the library that speaks with a hub is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("models are fetched with huggingface_hub: pip install 'outrider[engine]'")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def pull(model: str, revision: str, to: Path | None, told: Told) -> Path:
    """Fetch what is not there yet of a repository, and return its folder: `to`, or the snapshot in the hub's cache; of
    an id with a GGUF file that file alone, and return its path.

    Raises ConfigError for what there is not, what may not be read, and too small a disk; Unavailable where the hub is
    out of reach; OutriderError for a file with another checksum than the repository says.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # its warnings are of what it mends
    model, gguf = split_hub_id(model)
    with _errors_of(model, revision):
        api = HfApi()
        commit = api.model_info(model, revision=revision).sha or revision
        if to is not None:
            _make_folder(to)
        tree = api.list_repo_tree(model, revision=commit, recursive=True)
        listed = {entry.path: entry for entry in tree if isinstance(entry, RepoFile) and _stays_inside(entry.path)}
        endings = (".json", ".jinja") if "tokenizer.json" in listed else (".json", ".jinja", *OTHER_TOKENIZERS)
        if gguf is not None:
            _check_listed(model, gguf, listed)
            files = _files(model, commit, [listed[gguf]], to)
            _check_room(model, files)
            _fetch_all(files, told)
            folder = to or Path(snapshot_download(model, revision=revision, allow_patterns=[glob.escape(gguf)]))
            return folder / gguf
        small = [name for name in listed if _is_small(name, endings)]
        files = _files(model, commit, [listed[name] for name in small], to)
        index = next((file for file in files if file.name == INDEX), None)
        if index is not None:
            _fetch_all([index], lambda *_: None)
        names = _weights(model, listed, None if index is None else _shards(index.path.read_bytes(), model))
        files += _files(model, commit, [listed[name] for name in names], to)
        distinct = list({file.path: file for file in files}.values())  # files of equal content are one in the cache
        _check_room(model, distinct)
        _fetch_all(distinct, told)
        if to is not None:
            return to
        patterns = [glob.escape(file.name) for file in files]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def _is_small(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file of a repository is a configuration, of the tokenizer or a chat template."""
    if name in ADDITIONAL_TEMPLATES.values():
        return True
    return "/" not in name and name.endswith(endings)


def find(model: str, revision: str, to: Path | None) -> Path:
    """Return the folder of a repository that was fetched before, without the network. Raises ConfigError naming what
    is missing.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    model, gguf = split_hub_id(model)
    first = gguf or "config.json"
    where = Path(constants.HF_HUB_CACHE) if to is None else to
    try:
        folder = to or Path(
            snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=[glob.escape(first)])
        )
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{model} at {revision} is not in {where}: pull it without --offline and HF_HUB_OFFLINE, or set HF_HOME to "
            "where it is"
        ) from None
    missing: list[str] = []
    if gguf is None:
        missing = _missing(folder, model)
    elif not (folder / gguf).is_file():
        missing = [gguf]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} of {model} at {revision} {'is' if len(missing) == 1 else 'are'} not in {folder}: "
            "pull it without --offline and HF_HUB_OFFLINE"
        )
    return folder if gguf is None else folder / gguf


def _missing(folder: Path, model: str) -> list[str]:
    names = ["config.json"]
    index = folder / INDEX
    if index.is_file():
        names += _shards(index.read_bytes(), model)
    elif not any((folder / name).is_file() for name in SAFE):
        names.append(SAFE[0])
    begun = [path.name.removesuffix(_INCOMPLETE) for path in sorted(folder.glob(f"*{_INCOMPLETE}"))]
    return list(dict.fromkeys([name for name in names if not (folder / name).is_file()] + begun))


def _weights(model: str, listed: Mapping[str, RepoFile], shards: list[str] | None) -> list[str]:
    """Return the files with the weights that are read, and none of the same weights in another form."""
    whole = [name for name in SAFE if name in listed][:1]
    names = whole if shards is None else shards
    _check_listed(model, "config.json", listed)
    if not names:
        raise _lacking(model, f"{SAFE[0]} and no {INDEX}", listed)
    for name in names:
        _check_listed(model, name, listed)
    return names


def _check_listed(model: str, name: str, listed: Mapping[str, RepoFile]) -> None:
    if name not in listed:
        raise _lacking(model, name, listed)


def _lacking(model: str, what: str, listed: Mapping[str, RepoFile]) -> ConfigError:
    others = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    has = ", ".join(sorted(listed)[:_MOST_NAMES]) or "none"
    gguf = next((name for name in sorted(listed) if is_gguf(name)), None)
    remedy = "" if gguf is None else f"; a GGUF file is named {model}:{gguf}"
    return ConfigError(f"{model} has no {what}, and cannot be served; it has {has}{others}{remedy}")


def _stays_inside(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _shards(index: bytes, model: str) -> list[str]:
    return sorted(set(parse_weight_map(index, f"{INDEX} of {model}").values()))


@dataclass(frozen=True)
class _File:
    """A file of a repository and where it goes."""

    name: str
    url: str
    num_bytes: int
    checksum: str
    """Lower-case hex: SHA-256 of a large file, else git's SHA-1 of a blob."""
    path: Path
    checked: bool
    """Whether a file at `path` has the checksum, as all in the cache have."""

    @property
    def part(self) -> Path:
        """What is there of a file that is not whole."""
        return self.path.with_name(self.path.name + _INCOMPLETE)

    @property
    def num_bytes_there(self) -> int:
        if self.path.exists() and self.path.stat().st_size == self.num_bytes:
            return self.num_bytes
        return self.part.stat().st_size if self.part.exists() else 0

    @property
    def is_there(self) -> bool:
        return self.path.exists() and (self.checked or self.has_checksum(self.path))

    def has_checksum(self, path: Path) -> bool:
        if path.stat().st_size != self.num_bytes:
            return False
        digest = hashlib.sha256() if len(self.checksum) == 64 else hashlib.sha1(b"blob %d\0" % self.num_bytes)
        with path.open("rb") as stream:
            while data := stream.read(_READ_BYTES):
                digest.update(data)
        return digest.hexdigest() == self.checksum


def _files(model: str, commit: str, entries: list[RepoFile], to: Path | None) -> list[_File]:
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "blobs"

    def file(entry: RepoFile) -> _File:
        checksum = (entry.blob_id if entry.lfs is None else entry.lfs.sha256).lower()
        url = hf_hub_url(model, entry.path, revision=commit)
        path = blobs / _etag(url) if to is None else to / entry.path
        return _File(entry.path, url, entry.size, checksum, path, checked=to is None)

    return _do_all(file, entries, threading.Event())


def _etag(url: str) -> str:
    """Return the name of the file's content in the cache."""
    from huggingface_hub import get_hf_file_metadata

    etag = get_hf_file_metadata(url, headers=_headers()).etag
    if etag is None or not _stays_inside(etag) or "/" in etag:
        raise OutriderError(f"{url} comes with the ETag {etag}, as from no hub; is HF_ENDPOINT a hub's?")
    return etag


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers())


def _make_folder(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--to is {to}, which is a file, or in one: name a folder") from None
    except OSError as error:
        raise ConfigError(f"--to is {to}, and cannot be made there ({error.strerror}): name another folder") from None


def _check_room(model: str, files: list[_File]) -> None:
    folder = files[0].path.parent
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(file.num_bytes - file.num_bytes_there for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{model} needs {_size(needed)} more, and {folder} has {_size(free)} free: make room, set HF_HOME to a "
            "folder on another disk, or say --to"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


class _Stopped(Exception):
    """The call ends, whether well or not: nobody wants the rest."""


def _fetch_all(files: list[_File], told: Told) -> None:
    there = {file.name: file.num_bytes_there for file in files}
    total, stop = sum(file.num_bytes for file in files), threading.Event()

    def tell(name: str, num_bytes: int) -> None:
        if stop.is_set():
            raise _Stopped
        there[name] = num_bytes
        told(sum(there.values()), total)

    told(sum(there.values()), total)
    _do_all(lambda file: _fetch(file, tell), files, stop)


def _do_all(work: Callable[[_T], _R], items: Sequence[_T], stop: threading.Event) -> list[_R]:
    """Do this for all items, _AT_ONCE at a time; raise what the first that fails raises, with `stop` set and the others
    waited for. A Ctrl-C waits for nobody: the threads end with the process, also where a connection stalls.
    """
    rest, ended = iter(range(len(items))), queue.SimpleQueue[int | Exception]()
    results: dict[int, _R] = {}

    def run() -> None:
        for index in rest:
            try:
                results[index] = work(items[index])
                ended.put(index)
            except Exception as error:
                ended.put(error)
            if stop.is_set():
                return

    threads = [threading.Thread(target=run, daemon=True) for _ in items[:_AT_ONCE]]
    for thread in threads:
        thread.start()
    for _ in items:
        outcome = ended.get()
        if isinstance(outcome, Exception):
            stop.set()
            for thread in threads:
                thread.join()
            raise outcome
    return [results[index] for index in range(len(items))]


def _fetch(file: _File, tell: Callable[[str, int], None]) -> None:
    while not file.is_there:
        file.part.parent.mkdir(parents=True, exist_ok=True)
        with file.part.open("ab") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is fetching {file.name} into {file.part}; wait for it") from None
            if not _is_at(stream, file.part):  # before the lock, another process ended with it: whole or thrown away
                continue
            _append(file, stream, tell)
            stream.flush()
            if not file.has_checksum(file.part):
                file.part.unlink()
                raise OutriderError(
                    f"{file.name} did not come as the repository has it (its checksum is another) and was thrown away; "
                    "the same command fetches it again"
                )
            os.replace(file.part, file.path)
            return
    tell(file.name, file.num_bytes)


def _is_at(stream: BinaryIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat())


def _append(file: _File, stream: BinaryIO, tell: Callable[[str, int], None]) -> None:
    """Fetch the rest of a file, again and again where the connection breaks after something came. Of a hub that sends
    more than it said, no more is read than shows it.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import get_session, hf_raise_for_status

    while (begin := stream.tell()) < file.num_bytes:
        tell(file.name, begin)
        headers = {**_headers(), "Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
        try:
            with get_session().stream(
                "GET", file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as reply:
                hf_raise_for_status(reply)
                if reply.status_code != _PARTIAL_CONTENT:  # it knows no ranges
                    stream.seek(0)
                    stream.truncate()
                for data in reply.iter_raw():
                    stream.write(data)
                    tell(file.name, stream.tell())
                    if stream.tell() > file.num_bytes:
                        break
        except errors.HTTPError:  # of the library that it has for HTTP
            if stream.tell() <= begin:
                raise
        if stream.tell() <= begin:
            raise Unavailable(f"{file.url} gives no more than {stream.tell()} of {file.num_bytes} bytes; try again")


@contextmanager
def _errors_of(model: str, revision: str) -> Iterator[None]:
    """Turn the library's errors into ours: a sentence that says what to do."""
    from huggingface_hub import constants, errors

    hub, token = constants.ENDPOINT, "set HF_TOKEN to a token that may read it"
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"{model} is open to those alone whom its owners let in: ask there, then {token}") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"there is no {model} at {hub}, or it is private: check the id, and where it is private {token}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{model} has no revision {revision}: say --revision with a branch, a tag or a commit that it has"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{model} is no hub's id, such as owner/name: {error}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"{token}; where it is set, it was refused" if status in (401, 403) else "try again later"
        raise Unavailable(f"{hub} answered {status} when asked for {model}: {remedy}") from None
    except errors.HTTPError as error:  # of the library that it has for HTTP
        raise Unavailable(
            f"{hub} is out of reach ({type(error).__name__}: {error}): check the network and HF_ENDPOINT; what is "
            "there of a file stays; --offline looks for what was fetched before"
        ) from None
    except OSError as error:
        raise OutriderError(f"{model} cannot be fetched: {error}") from None
