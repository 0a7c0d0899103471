"""Fetches a model's files from a hub, either into the hub's cache, where the workers look, or into a folder. For
`pull.py`.

huggingface_hub transfers them, and has settings of its own (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). This
module chooses the files, checks the disk's free space and the checksums, and turns the library's errors into ours.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.models.model_id import ADDITIONAL_TEMPLATES, INDEX_FILE, SAFETENSORS_FILES, is_gguf, split_hub_id
from outrider.wire.models.model_json import parse_weight_map

DEFAULT_REVISION = "main"
_CONFIGURATION_ENDS = (".json", ".jinja")
_OTHER_TOKENIZER_ENDS = (".model", "merges.txt")
"""Ends of the names of files, other than JSON files, from which a tokenizer is made if there is no tokenizer.json."""
_MAX_NAMES = 10
"""Maximum number of a repository's files that an error lists. A repository may have thousands."""


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def pull(model: str, revision: str, to: Path | None) -> Path:
    """Fetch those files of a model that are not on this machine yet. Return the folder of the files, or for the hub id
    of a GGUF file the file's path.

    The files are configuration, tokenizer, chat templates and safetensors, or only the GGUF file. model: hub id.
    revision: branch, tag or commit. to: folder to put the files into; None = the hub's cache.

    Raises ConfigError for a missing repository, file or permission and for too little disk space, Unavailable if the
    hub cannot be reached, and OutriderError if the checksum of a file is not the one that the repository lists.
    """
    from huggingface_hub import HfApi

    repository, gguf = split_hub_id(model)
    with _errors_of(repository, revision):
        if to is not None:
            _make_folder(to)
        found = HfApi().model_info(repository, revision=revision).siblings or []
        listed = [file.rfilename for file in found if _stays_inside(file.rfilename)]
        if gguf is not None:
            _check_listed(repository, gguf, listed)
            return _fetch(repository, revision, to, [gguf]) / gguf
        _check_listed(repository, "config.json", listed)
        weights = list(filter(listed.__contains__, SAFETENSORS_FILES))[:1]
        if INDEX_FILE in listed:
            folder = _fetch(repository, revision, to, [INDEX_FILE])
            weights = _shards((folder / INDEX_FILE).read_bytes(), repository)
        elif not weights:
            raise _missing_error(repository, f"{SAFETENSORS_FILES[0]} and no {INDEX_FILE}", listed)
        for name in weights:
            _check_listed(repository, name, listed)
        return _fetch(repository, revision, to, [*_configuration_files(listed), *weights])


def find(model: str, revision: str, to: Path | None) -> Path:
    """Return the folder of a model that was fetched before, or for the hub id of a GGUF file the file's path. The
    network is not used.

    model: hub id. revision: branch, tag or commit. to: folder that has the files; None = the hub's cache.

    Raises ConfigError with the names of missing files.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, gguf = split_hub_id(model)
    patterns = [glob.escape(gguf or "config.json")]
    try:
        folder = to or Path(
            snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=patterns)
        )
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{repository} at {revision} is not in {constants.HF_HUB_CACHE}: pull it without --offline and "
            "HF_HUB_OFFLINE, or set HF_HOME to where it is"
        ) from None
    if gguf is None:
        needed = _needed_files(folder, repository)
    else:
        needed = [gguf]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        verb = "are"
        if len(missing) == 1:
            verb = "is"
        raise ConfigError(
            f"{', '.join(missing)} of {repository} at {revision} {verb} not in {folder}: pull it without --offline and "
            "HF_HUB_OFFLINE"
        )
    if gguf is None:
        return folder
    return folder / gguf


def remove_unfinished() -> None:
    """Remove the incomplete files that this process is fetching; huggingface_hub would not continue them. Does
    nothing on systems without /proc.
    """
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        return
    for descriptor in descriptors.iterdir():
        try:
            path = Path(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if path.suffix == ".incomplete":
            path.unlink(missing_ok=True)


def _fetch(repository: str, revision: str, to: Path | None, names: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # it warns of what it mends
    patterns = list(map(glob.escape, names))
    with disable_progress_bars():
        files = snapshot_download(repository, revision=revision, local_dir=to, allow_patterns=patterns, dry_run=True)
    missing_bytes = {file.local_path: file.file_size or 0 for file in files if file.will_download}
    if missing_bytes:
        _check_free_space(repository, next(iter(missing_bytes)), sum(missing_bytes.values()))
    with _closed_bars() as bars:
        snapshot = snapshot_download(
            repository, revision=revision, local_dir=to, allow_patterns=patterns, tqdm_class=bars
        )
    folder = to or Path(snapshot)
    if missing_bytes:
        _check_checksums(repository, revision, to, folder, names)
    return folder


@contextmanager
def _closed_bars() -> Iterator[type[Any]]:
    """Yield a class of progress bars, and close them at the end: the library leaves its own open on a terminal."""
    from huggingface_hub.utils import tqdm

    opened = list[Any]()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]
            opened.append(self)

    try:
        yield Bar
    finally:
        for bar in opened:
            bar.close()


def _configuration_files(listed: Collection[str]) -> list[str]:
    ends: tuple[str, ...] = _CONFIGURATION_ENDS
    if "tokenizer.json" not in listed:
        ends += _OTHER_TOKENIZER_ENDS
    names = list[str]()
    for name in listed:
        is_at_top = "/" not in name and name.endswith(ends)
        if is_at_top or name in ADDITIONAL_TEMPLATES.values():
            names.append(name)
    return names


def _needed_files(folder: Path, repository: str) -> list[str]:
    index = folder / INDEX_FILE
    if index.is_file():
        return ["config.json", *_shards(index.read_bytes(), repository)]
    if any((folder / name).is_file() for name in SAFETENSORS_FILES):
        return ["config.json"]
    return ["config.json", SAFETENSORS_FILES[0]]


def _check_listed(repository: str, name: str, listed: Collection[str]) -> None:
    if name not in listed:
        raise _missing_error(repository, name, listed)


def _missing_error(repository: str, kind: str, listed: Collection[str]) -> ConfigError:
    names = sorted(listed)
    has = ", ".join(names[:_MAX_NAMES]) or "none"
    if len(names) > _MAX_NAMES:
        has += f" and {len(names) - _MAX_NAMES} more"
    ggufs = list(filter(is_gguf, names))
    if ggufs:
        has += f"; a GGUF file is named {repository}:{ggufs[0]}"
    return ConfigError(f"{repository} has no {kind}, and cannot be served; it has {has}")


def _stays_inside(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _shards(index: bytes, repository: str) -> list[str]:
    return sorted(set(parse_weight_map(index, f"{INDEX_FILE} of {repository}").values()))


def _make_folder(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--to is {to}, which is a file, or in one: name a folder") from None
    except OSError as error:
        raise ConfigError(f"--to is {to}, and cannot be made there ({error.strerror}): name another folder") from None


def _check_free_space(repository: str, path: str, num_bytes: int) -> None:
    folder = Path(path).parent
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{repository} needs {_size(num_bytes)} more, and {folder} has {_size(free_bytes)} free: make room, set "
            "HF_HOME to a folder on another disk, or say --to"
        )


def _size(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB"


def _check_checksums(repository: str, revision: str, to: Path | None, folder: Path, names: Collection[str]) -> None:
    """Remove the files whose checksum is not the one that the repository lists, and raise OutriderError if there is
    any.
    """
    from huggingface_hub import HfApi, constants

    if to is None:
        verified = HfApi().verify_repo_checksums(repository, revision=revision, cache_dir=constants.HF_HUB_CACHE)
    else:
        verified = HfApi().verify_repo_checksums(repository, revision=revision, local_dir=to)
    damaged = list[str]()
    for mismatch in verified.mismatches:
        name = mismatch["path"]
        if name in names:
            damaged.append(name)
            (folder / name).resolve().unlink(missing_ok=True)  # in the cache a link leads to the content
            (folder / name).unlink(missing_ok=True)
    if damaged:
        raise OutriderError(
            f"{', '.join(damaged)} did not come as the repository has it (its checksum is another) and was thrown "
            "away; the same command fetches it again"
        )


@contextmanager
def _errors_of(repository: str, revision: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into OutriderErrors."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # it hides what failed at the hub
        raise _own_error(error.__cause__ or error, repository, revision) from None
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise _own_error(error, repository, revision) from None


def _own_error(error: BaseException, repository: str, revision: str) -> OutriderError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    token = "set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{repository} is open to those alone whom its owners let in: ask there, then {token}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"there is no {repository} at {hub}, or it is private: check the id, and where it is private {token}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{repository} has no revision {revision}: say --revision with a branch, a tag or a commit that it has"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{repository} is no hub's id, such as owner/name: {error}")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        remedy = "try again later"
        if status in (401, 403):
            remedy = f"{token}; where it is set, it was refused"
        return Unavailable(f"{hub} answered {status} when asked for {repository}: {remedy}")
    if isinstance(error, errors.HTTPError):  # of the HTTP library below it
        return Unavailable(
            f"{hub} is out of reach ({type(error).__name__}: {error}): check the network and HF_ENDPOINT; files that "
            "are whole stay; --offline looks for what was fetched before"
        )
    return OutriderError(f"{repository} cannot be fetched: {error}")
