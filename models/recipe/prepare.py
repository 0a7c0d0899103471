"""Build the corpus and the tokenizer of the demo pair from Python's own sources and documentation.

    python -m models.recipe.prepare WORK [--stdlib DIR] [--docs DIR] [--tokenizer DIR]
    python -m models.recipe.prepare WORK --other --vocab-size 2048 [--written DIR --target DIR]

Writes into WORK: tokenizer/ (byte-level BPE), train.bin and val.bin (uint16 ids, <|endoftext|> before each file) and
val_files.json (names of the held-out files). About one file in fifty is held out, chosen by a hash of its content: the
same file is held out wherever it lies, and no copy of it is trained on.

--other makes a tokenizer that is not the demo pair's cut short: digits and underscores stand alone, and it is learnt
from the documentation. --written adds text that a target wrote (`outrider train-head`), read with its tokenizer: what a
draft of other tokens is best trained on, since it cannot be distilled token by token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from models.recipe.pair import CONTEXT_LIMIT, END_OF_TEXT, END_OF_TEXT_ID, SPECIAL_TOKENS, TOKENIZER_FOLDER
from outrider.training.written import read

DEBIAN_DOCS = Path("/usr/share/doc/python3.11/html/_sources")
HELD_OUT_ONE_IN = 50
MIN_CHARS = 200
# Tables of data: they would teach the pair to recite, not to write.
DATA_TABLES = ("/encodings/", "cjkencodings", "lib2to3/tests/data", "/pydoc_data/", "unicodedata", "test_unicode_")
NOT_THE_LIBRARY = ("site-packages", "whatsnew/changelog")


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus."""

    name: str
    """Path of the text below its source, such as stdlib/ast.py."""
    text: str
    held_out: bool


def documents(source: str, folder: Path, pattern: str, seen: set[str]) -> Iterator[Document]:
    """Yield the text files of `folder` whose names match `pattern`, without files of the same content.

    source: name of the folder in the documents' names. seen: digests of the contents so far; new ones are added.
    """
    for path in sorted(folder.rglob(pattern)):
        full_name = path.as_posix()
        if not path.is_file() or any(part in full_name for part in DATA_TABLES + NOT_THE_LIBRARY):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the library's tests hold files that are broken on purpose
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < MIN_CHARS or digest in seen:
            continue
        seen.add(digest)
        name = f"{source}/{path.relative_to(folder).as_posix()}"
        yield Document(name, text, held_out=int(digest[:4], 16) % HELD_OUT_ONE_IN == 0)


def collect(stdlib: Path, docs: Path | None) -> tuple[list[Document], list[Document]]:
    """Return the documents to train on, and the held-out ones. Raises ValueError naming a missing folder, or if one of
    the two lists is empty.

    stdlib, docs: folders of Python's sources and documentation.
    """
    for folder in (stdlib, docs):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: name the sources with --stdlib and --docs")
    seen: set[str] = set()
    found = list(documents("stdlib", stdlib, "*.py", seen))
    if docs is not None:
        found += documents("docs", docs, "*", seen)
    train = [doc for doc in found if not doc.held_out]
    held_out = [doc for doc in found if doc.held_out]
    if not train or not held_out:
        raise ValueError(
            f"{len(train)} training and {len(held_out)} held-out files in {stdlib}, {docs}: too little text"
        )
    return train, held_out


def train_tokenizer(texts: Iterator[str], vocab_size: int, *, other: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with GPT-2's pre-tokenizer, trained on texts. It encodes every text, and
    decodes the ids to the same bytes.

    other: whether each digit and underscore is a token of its own, unlike in the demo pair's tokenizer.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level
    if other:
        alone = pre_tokenizers.Split(Regex(r"[0-9_]"), behavior="isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([alone, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_LIMIT,
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def write_ids(path: Path, part: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> int:
    """Write the token ids of documents as uint16, with an end-of-text id before each document. Return the number of
    ids.
    """
    with path.open("wb") as out:
        for doc in part:
            # verbose=False: files are longer than the context, and are cut into windows later
            ids = [END_OF_TEXT_ID, *tokenizer.encode(doc.text, add_special_tokens=False, verbose=False)]
            np.array(ids, dtype=np.uint16).tofile(out)
    return path.stat().st_size // np.dtype(np.uint16).itemsize


def written_documents(folder: Path, target: Path) -> list[Document]:
    """Return texts that a target wrote: each is a prompt and the target's answer.

    folder: folder in which `outrider train-head` keeps the answers. target: folder of the target, for its tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in read(folder)]
    return [Document(f"written/{number}", text, held_out=False) for number, text in enumerate(texts)]


def prepare(
    work: Path,
    stdlib: Path,
    docs: Path | None,
    vocab_size: int,
    tokenizer_folder: Path | None,
    *,
    other: bool = False,
    written: tuple[Path, Path] | None = None,
) -> None:
    """Write all files that the module's docstring names.

    written: a folder of text to add, and the folder of the target that wrote it; None for no more text. Raises
    ValueError naming a missing folder, or if there is too little text.
    """
    train, held_out = collect(stdlib, docs)
    work.mkdir(parents=True, exist_ok=True)
    if tokenizer_folder is None:
        learnt_from = [doc for doc in train if not other or doc.name.startswith("docs/")] or train
        tokenizer = train_tokenizer((doc.text for doc in learnt_from), vocab_size, other=other)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(work / TOKENIZER_FOLDER)
    train += [] if written is None else written_documents(*written)
    random.Random(0).shuffle(train)
    for name, part in (("train", train), ("val", held_out)):
        num_tokens = write_ids(work / f"{name}.bin", part, tokenizer)
        print(f"{name}: {len(part)} files, {num_tokens:,} tokens")
    names = [doc.name for doc in held_out]
    (work / "val_files.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder to write into")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="Python sources")
    parser.add_argument("--docs", type=Path, help=f"text of the documentation; default {DEBIAN_DOCS} where it exists")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries of the tokenizer, at most 65536")
    parser.add_argument("--tokenizer", type=Path, help="use this model folder's tokenizer instead of training one")
    parser.add_argument("--other", action="store_true", help="train a tokenizer unlike the demo pair's")
    parser.add_argument("--written", type=Path, help="text that --target wrote: a folder WORK/heads/text-*")
    parser.add_argument("--target", type=Path, default=Path("models/demo/target"), help="who wrote it")
    args = parser.parse_args(argv)
    if not 256 + len(SPECIAL_TOKENS) <= args.vocab_size <= 1 << 16:
        parser.error(f"--vocab-size is {args.vocab_size}, must be {256 + len(SPECIAL_TOKENS)} to 65536")
    docs = args.docs or (DEBIAN_DOCS if DEBIAN_DOCS.is_dir() else None)
    written = None if args.written is None else (args.written, args.target)
    prepare(args.work, args.stdlib, docs, args.vocab_size, args.tokenizer, other=args.other, written=written)


if __name__ == "__main__":
    main()
