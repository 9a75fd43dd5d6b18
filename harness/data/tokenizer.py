"""From text to token ids, and back: a token for each byte, or a `tokenizer.json` of the tokenizers library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.core.errors import ConfigError, DataError, Problem
from harness.core.files import MAX_LARGE, read_bounded, read_mapping
from harness.core.schema import import_extra
from harness.data.arrays import Ints
from harness.data.corpus import Vocabulary

WHERE = "data.tokenizer"
_FILE = "tokenizer.json"
# The usual names of the end-of-text token, where no tokenizer_config.json says it: GPT-2, Llama 2, Llama 3, Gemma, ...
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]")


class Encoder(Protocol):
    """Makes token ids of texts."""

    vocabulary: Vocabulary
    """The ids that it may make."""

    def encode(self, texts: Sequence[str | bytes]) -> list[Ints]:
        """Ids of each text, int64 [tokens], without the separator. bytes are UTF-8.

        Raises DataError if the tokenizer fails on one of the texts.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; ids that are no text become the replacement character."""
        ...


class Bytes:
    """A token is a byte; a document ends with a line end, as in a run's copy of its text."""

    vocabulary = Vocabulary(256, separator=10)

    def encode(self, texts: Sequence[str | bytes]) -> list[Ints]:
        """The UTF-8 bytes of each text."""
        made: list[Ints] = []
        for text in texts:
            raw = text.encode() if isinstance(text, str) else text
            ids = np.frombuffer(raw, dtype=np.uint8)
            made.append(ids.astype(np.int64))
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """As UTF-8; ids from 256 on are no byte."""
        replacement = "\N{REPLACEMENT CHARACTER}".encode()
        content = bytearray()
        for each in ids:
            content += bytes([each]) if each < 256 else replacement
        return content.decode(errors="replace")


class Tokenizer:
    """What a `tokenizer.json` describes; nothing is added to a text, cut off or padded."""

    def __init__(self, path: Path) -> None:
        """path: the file, or a folder that has it (as Hugging Face writes one). Raises ConfigError."""
        self._path = path
        file = tokenizer_file(path)
        library = import_extra("tokenizers", "hf", WHERE)
        try:
            content = read_bounded(file, MAX_LARGE)
            self._tokenizer: Any = library.Tokenizer.from_buffer(content)
        except OSError as error:
            raise _problem(path, f"cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises plain Exceptions
            fix = "write it again with save_pretrained"
            raise _problem(path, f"is no tokenizer: {error}", fix) from error

        # The file may set both, for inference. Here they would cut documents off, or fill them up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise _problem(path, "has no tokens")

        # The largest id counts, not how many there are: a tokenizer may leave ids out.
        sha256 = hashlib.sha256(content).hexdigest()
        self.vocabulary = Vocabulary(max(ids.values()) + 1, _end(file, ids), sha256)

    def encode(self, texts: Sequence[str | bytes]) -> list[Ints]:
        """Ids of each text. The name of a special token in a text becomes that token."""
        # `encoding` shares the work among processes already, and a process with the library's threads cannot be forked.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        plain = [text if isinstance(text, str) else text.decode() for text in texts]
        try:
            made = self._tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        except MemoryError:
            raise
        except BaseException as error:
            # Ctrl-C is no fault of the text, and neither is running out of memory.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            why = str(error)[:300]
            fix = "leave that text out or cut it into lines, or take another tokenizer"
            problem = Problem("fails on a text", f"{WHERE}: {self._path}", why, fix)
            raise DataError(problem) from error
        return [np.asarray(each.ids, dtype=np.int64) for each in made]

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; special tokens are written by their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that `path` means. Raises ConfigError if there is none."""
    try:
        path = path.expanduser()
        file = path / _FILE if path.is_dir() else path
        there = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise _problem(path, f"cannot be read: {error}") from error
    if not there:
        what = f"has no {_FILE}" if path.is_dir() else "no such file"
        fix = "give a tokenizer.json, or a folder that has one (AutoTokenizer.from_pretrained(...).save_pretrained)"
        raise _problem(path, what, fix)
    return file


def load_encoder(path: str | None) -> Encoder:
    """The tokenizer at `path`; bytes for None. Raises ConfigError."""
    return Tokenizer(Path(path)) if path else Bytes()


def _is_panic(error: BaseException) -> bool:
    """Whether the Rust code of the library panicked, as at a regex that takes too long. That is no Exception."""
    return type(error).__name__ == "PanicException"


def _end(file: Path, ids: dict[str, int]) -> int | None:
    """The id that ends a document: what tokenizer_config.json says, else a usual name."""
    # Either the token itself, or an object with the token and how to strip it.
    named = read_mapping(file.with_name("tokenizer_config.json"), MAX_LARGE).get("eos_token")
    token = named.get("content") if isinstance(named, dict) else named
    if isinstance(token, str) and token in ids:
        return ids[token]
    for name in _USUAL_ENDS:
        if name in ids:
            return ids[name]
    return None


def _problem(path: Path, what: str, fix: str = "") -> ConfigError:
    return ConfigError(Problem(what, f"{WHERE}: {path}", fix=fix))
