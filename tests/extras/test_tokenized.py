"""Text, JSONL, Parquet and Arrow through a tokenizer: the real libraries write them, and say what should come out."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.core.config import DataConfig
from harness.core.errors import ConfigError, DataError, ExitCode, MachineError
from harness.data import documents as text_files
from harness.data import prepare as preparing
from harness.data.corpus import Tokens
from harness.data.dataset import DatasetBatches
from harness.data.prepare import Preparation, prepare_dataset
from harness.data.tokenizer import load_encoder
from harness.data.tokens import TokenData, prepare
from tests.extras.tiny_models import save
from tests.support.runs import ROOT, harness, train
from tests.unit.data.token_files import config, headerless

DOCUMENTS = [
    f"Document {number}: " + "the quick brown fox, é and ü; " * (1 + number % 7)
    for number in range(120)
]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as a Hugging Face folder has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(DOCUMENTS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return folder


def jsonl(folder: Path) -> Path:
    lines = [
        json.dumps({"text": text, "meta": {"n": number}}) for number, text in enumerate(DOCUMENTS)
    ]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    return folder / "docs.jsonl"


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": DOCUMENTS}), folder / "docs.parquet", row_group_size=17
    )
    return folder / "docs.parquet"


def parquet_folder(folder: Path) -> Path:
    (folder / "data").mkdir()
    for number in range(3):
        rows = DOCUMENTS[40 * number : 40 * (number + 1)]
        pyarrow.parquet.write_table(
            pyarrow.table({"text": rows, "n": range(40)}), folder / f"data/train-{number}.parquet"
        )
    (folder / "README.md").write_text("card")
    return folder


def arrow(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(
        str(folder / "saved"), num_shards=2
    )
    return folder / "saved"


def texts(folder: Path) -> Path:
    (folder / "texts").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / "texts" / f"{number:03}.txt").write_text(text)
    return folder / "texts"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "JSONL": jsonl, "Parquet": parquet, "Parquet folder": parquet_folder, "Arrow": arrow, "text": texts,
}  # fmt: skip


def documents(data: TokenData, split: str) -> list[list[int]]:
    """A split's documents, by where they begin."""
    tokens = data.train if split == "train" else data.val
    assert isinstance(tokens, Tokens)
    (row,), damage = tokens.read(np.arange(len(tokens))[None])
    assert not damage
    return [part.tolist() for part in np.split(row, data.starts(split)[1:])]


def expected(tokenizer: Path, texts: Sequence[str] = DOCUMENTS) -> list[list[int]]:
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = library.token_to_id(END)
    return [[*library.encode(text, add_special_tokens=False).ids, end] for text in texts]


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_what_the_library_gives(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    path = SOURCES[kind](tmp_path)
    settings = config(path, tokenizer=str(tokenizer), packing="documents")
    data = prepare(settings, tmp_path / "run")
    train, val = documents(data, "train"), documents(data, "val")
    assert sorted(train + val) == sorted(expected(tokenizer))
    assert train == [each for each in expected(tokenizer) if each in train], (
        "in the order of the source"
    )
    assert len(val) == pytest.approx(12, abs=3)
    assert data.vocab == -(-data.ids // 16) * 16
    again = prepare(settings, tmp_path / "run")
    assert documents(again, "train") == train


@pytest.mark.parametrize("kind", ["JSONL", "Parquet", "Arrow"])
def test_rows_without_a_tokenizer_are_bytes(tmp_path: Path, kind: str) -> None:
    data = prepare(config(SOURCES[kind](tmp_path), packing="documents"), tmp_path / "run")
    found = documents(data, "train") + documents(data, "val")
    assert sorted(bytes(each).decode() for each in found) == sorted(
        f"{text}\n" for text in DOCUMENTS
    )
    assert data.vocab == 256


def test_splits_of_a_dataset_dict_are_taken_and_others_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    parts = {"train": DOCUMENTS[:80], "validation": DOCUMENTS[80:100], "test": DOCUMENTS[100:]}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in parts.items()}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    data = prepare(
        config(tmp_path / "saved", tokenizer=str(tokenizer), packing="documents"), tmp_path / "run"
    )
    assert documents(data, "train") == expected(tokenizer, DOCUMENTS[:80])
    assert documents(data, "val") == expected(tokenizer, DOCUMENTS[80:100])
    assert [skip["name"] for skip in data.info["skipped"]] == ["test"]


def test_val_jsonl_beside_train_jsonl_is_the_split(tmp_path: Path) -> None:
    for name, rows in (("train", DOCUMENTS[:100]), ("val", DOCUMENTS[100:])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in rows)
        )
    data = prepare(config(tmp_path / "train.jsonl", packing="documents"), tmp_path / "run")
    assert [bytes(each).decode() for each in documents(data, "val")] == [
        f"{row}\n" for row in DOCUMENTS[100:]
    ]


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    folder = parquet_folder(tmp_path)
    pyarrow.parquet.write_table(
        pyarrow.table({"content": DOCUMENTS}), folder / "data" / "odd.parquet"
    )
    with pytest.raises(DataError, match=r'odd\.parquet: has no "text"\n    why: it has content'):
        prepare(config(folder), tmp_path / "run")
    with pytest.raises(DataError) as caught:
        prepare(config(folder, text_key="content"), tmp_path / "run")
    assert len(caught.value.problems) == 3
    with pytest.raises(DataError, match='"n" has int64, not text'):
        prepare(config(folder / "data" / "train-0.parquet", text_key="n"), tmp_path / "run")


BAD_TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "no such file": lambda folder: None,
    "has no tokenizer.json": lambda folder: folder.mkdir(),
    "is no tokenizer": lambda folder: folder.write_text("{}"),
}


@pytest.mark.parametrize("message", BAD_TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, message: str) -> None:
    BAD_TOKENIZERS[message](tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=message):
        prepare(config(jsonl(tmp_path), tokenizer=str(tmp_path / "tokenizer")), tmp_path / "run")


def test_ids_that_the_tokenizer_has_not_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = headerless(tmp_path / "train.bin", np.arange(5000) % 400)
    with pytest.raises(DataError, match="has the token id 399, which the tokenizer does not"):
        prepare(config(path, tokenizer=str(tokenizer)), tmp_path / "run")
    data = prepare(
        config(headerless(path, np.arange(5000) % 100), tokenizer=str(tokenizer)), tmp_path / "run"
    )
    assert data.ids > 100, "of the tokenizer, not of the data"


def test_prepared_with_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    prepare_dataset(Preparation(str(jsonl(tmp_path)), "JSONL"), tmp_path / "made")
    with pytest.raises(DataError, match="was prepared with another tokenizer"):
        prepare(config(tmp_path / "made", tokenizer=str(tokenizer)), tmp_path / "run")


def test_bytes_for_a_trained_model_of_other_tokens_are_told(tmp_path: Path) -> None:
    """As of a snapshot that came without tokenizer.json."""
    model = save(tmp_path / "model", "llama", vocab_size=512)
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    given = ("data.path=text.jsonl", "data.context=32", "train.steps=1", "data.val_samples=2")
    for weights in ("auto", "fresh"):
        target = (f"model.target=hf:{model}", f"model.args={{weights: {weights}}}")
        done = train(tmp_path, "--name", weights, "--recipe", "fp32", *given, *target)
        assert done.returncode == 0, done.stdout
        assert ("data.bytes: a token is a byte" in done.stdout) == (weights == "auto")
        assert (f"model hf:{model}: new weights" in done.stdout) == (weights == "fresh")


@pytest.mark.parametrize("named", [True, False])
def test_documents_that_are_joined_without_an_end_are_told(
    named: bool, tmp_path: Path, tokenizer: Path
) -> None:
    """A byte order mark, which editors put before UTF-8, is no part of a document either."""
    (tmp_path / "tokenizer").mkdir()
    ours = tmp_path / "tokenizer" / "tokenizer.json"
    ours.write_text((tokenizer / "tokenizer.json").read_text().replace(END, "<end of it>"))
    if named:
        with_end = {"eos_token": "<end of it>"}
        ours.with_name("tokenizer_config.json").write_text(json.dumps(with_end))
    (tmp_path / "text").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text, encoding="utf-8-sig")
    given = ("data.path=text", "data.tokenizer=tokenizer", "data.context=32", "train.steps=2")
    done = train(tmp_path, "--name", "r", "--recipe", "bf16", *given, "data.val_samples=2")
    assert done.returncode == 0, done.stdout
    assert (
        "data.joined: the tokenizer names no token that ends a document" in done.stdout
    ) != named
    made = prepare(config(tmp_path / "text", tokenizer=str(ours)), tmp_path / "again")
    library = Tokenizer.from_file(str(ours))
    first = documents(made, "train")[0]
    assert library.decode(first, skip_special_tokens=False).startswith("Document"), "no mark"


def test_the_command_and_a_run_on_what_it_made(tmp_path: Path, tokenizer: Path) -> None:
    jsonl(tmp_path)
    done = harness(
        tmp_path,
        "data",
        "prepare",
        "docs.jsonl",
        "--tokenizer",
        str(tokenizer),
        "--out",
        "made",
        "--val-fraction",
        "0.2",
    )
    assert done.returncode == 0, done.stderr
    assert "120 documents" in done.stdout
    assert f"data.path={Path('made')}" in done.stdout
    ran = train(
        tmp_path,
        "--name",
        "r",
        "--recipe",
        "bf16",
        "data.path=made",
        "train.steps=3",
        "data.val_samples=2",
    )
    assert ran.returncode == ExitCode.DONE, ran.stdout
    assert (tmp_path / "runs" / "r" / "data" / "tokenizer.json").read_bytes() == (
        tokenizer / "tokenizer.json"
    ).read_bytes()


def gives_up(folder: Path, how: str) -> Path:
    """A tokenizer that fails on a text with a long row of a: its regex gives up, which is a panic of the library, or it
    has no token for what it does not know."""
    if how == "panic":
        made = Tokenizer(models.BPE(vocab={END: 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$|b"), "isolated")
    else:
        made = Tokenizer(models.WordLevel(vocab={END: 0, "ab": 1}, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


SAID = {"panic": "Regex search error", "unknown": "[UNK]"}


@pytest.mark.parametrize("how", SAID)
def test_a_text_that_the_tokenizer_fails_on_is_named_or_passed_over(
    tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "rows.jsonl", gives_up(tmp_path / "tokenizer", how)
    bad = {"panic": "a" * 5000 + "b", "unknown": "zebra"}[how]
    texts = [bad if number in (7, 31) else "ab ab ab ab ab" for number in range(60)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text("".join(lines))
    with pytest.raises(DataError) as caught:
        prepare(config(path, tokenizer=str(file)), tmp_path / "run")
    assert len(caught.value.problems) == 2
    for problem, row in zip(caught.value.problems, (7, 31), strict=True):
        assert "fails on a text" in problem.what
        assert problem.where.endswith(f"rows.jsonl, row {row}")
        assert SAID[how] in problem.why
        assert "data.bad=skip" in problem.fix
    data = prepare(config(path, tokenizer=str(file), bad="skip"), tmp_path / "other")
    assert list(data.info["skipped"]) == [
        {"name": "2 rows", "reason": f"data.tokenizer: {file} fails on a text"}
    ]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("batch", [1, 1024])
def test_a_document_in_pieces_keeps_its_end_where_the_tokenizer_fails_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """A text file is cut into pieces; documents must not run into each other where a piece is passed over."""
    monkeypatch.setattr(text_files, "PIECE", 1 << 10)
    monkeypatch.setattr(preparing, "_BATCH_PIECES", batch)
    file = gives_up(tmp_path / "tokenizer", "unknown")
    documents: list[int] = []
    for ending in ("", "zebra\n" * 10):
        folder, out = tmp_path / f"texts{len(documents)}", tmp_path / f"out{len(documents)}"
        folder.mkdir()
        for number in range(20):
            (folder / f"{number}.txt").write_text(
                "ab ab ab ab\n" * 500 + (ending if number % 2 else "")
            )
        prepare_dataset(
            Preparation(str(folder), "text", tokenizer=str(file), bad="skip"), out, processes=1
        )
        made = json.loads((out / "dataset.json").read_text())
        documents.append(made["documents"])
    assert made["skipped"] == [
        {"name": "10 rows", "reason": f"data.tokenizer: {file} fails on a text"}
    ]
    assert documents[0] == documents[1]


def test_workers_make_what_one_process_makes_and_one_that_dies_is_told(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_INLINE", 0)
    monkeypatch.setattr(preparing, "_BATCH_PIECES", 5)
    wanted = Preparation(str(jsonl(tmp_path)), "JSONL", tokenizer=str(tokenizer))
    one = prepare_dataset(wanted, tmp_path / "one", processes=1)

    def kill(progress: preparing.Progress) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(MachineError, match="a worker died"):
        prepare_dataset(wanted, tmp_path / "two", 2, kill)
    assert prepare_dataset(wanted, tmp_path / "two", 2)["sha256"] == one["sha256"]
    assert not multiprocessing.active_children()


CHATS = [
    [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": f"The answer is {number}, and no other."},
    ]
    for number in range(60)
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def from_docs(page: str, heading: str) -> str:
    """The program under a heading of the guide."""
    section = (ROOT / "docs" / "guide" / page).read_text().split(f"## {heading}\n")[1]
    return section.split("```py\n")[1].split("```\n")[0]


@pytest.fixture(scope="module")
def chatting(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatting")
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize("how", ["messages", "conversations", "prompt"])
def test_chats_become_text_by_the_command_of_the_error(
    tmp_path: Path, chatting: Path, how: str
) -> None:
    roles = {"user": "human", "assistant": "gpt"}
    rows: list[dict[str, Any]] = []
    for chat in CHATS:
        if how == "conversations":
            chat = [{"from": roles[each["role"]], "value": each["content"]} for each in chat]
        rows.append(
            {"prompt": chat[:1], "completion": chat[1:]} if how == "prompt" else {how: chat}
        )
    (tmp_path / "FILE").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path / "FILE", format="JSONL"), tmp_path / "one")
    command = caught.value.problems[0].fix.split(": ", 1)[1].split("; then data.path")[0]
    command = command.replace("TOKENIZER <", f"{chatting} <").replace(
        "python -c", f"{sys.executable} -c"
    )
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)

    data = prepare(config(tmp_path / "NEW.jsonl", tokenizer=str(chatting)), tmp_path / "two")
    ids: list[int] = []
    for split in (data.train, data.val):
        ids += split.read(np.arange(len(split))[None])[0][0].tolist()
    text = load_encoder(str(chatting)).decode(ids)
    for number in range(60):
        turn = f"<|user|>Question {number}?{END}<|assistant|>The answer is {number}, and no other.{END}"
        assert turn in text


def test_the_guide_renders_chats(tmp_path: Path, chatting: Path) -> None:
    (tmp_path / "render.py").write_text(from_docs("data.md", "Chats"))
    given = "\n".join(json.dumps({"messages": chat}) for chat in CHATS)
    made = subprocess.run([sys.executable, "render.py", chatting], cwd=tmp_path, input=given,
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    first = json.loads(made.splitlines()[0])["text"]
    assert first == f"<|user|>Question 0?{END}<|assistant|>The answer is 0, and no other.{END}"


def test_chats_of_the_guide_have_a_loss_on_answers_alone(
    tmp_path: Path, chatting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_chats.py").write_text(from_docs("datasets.md", "Chats: the answers alone"))
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
    monkeypatch.syspath_prepend(tmp_path)
    data = DatasetBatches(
        DataConfig(target="my_chats:load", args={"path": str(chats), "tokenizer": str(chatting)}),
        seed=0, global_batch=4, micro_batch=4,
    )  # fmt: skip
    (batch,) = data.micro_batches(data.window(0), 0, 1)
    encoder = load_encoder(str(chatting))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        answer = encoder.decode(labels[labels != -100].tolist())
        number = answer.split(",")[0].rpartition(" ")[2]
        assert answer == f"The answer is {number}, and no other.{END}"
        whole = f"<|user|>Question {number}?{END}<|assistant|>{answer}"
        assert encoder.decode(ids.tolist()).startswith(whole)


@pytest.mark.parametrize("kept", ["all", "ascii"])
def test_a_tokenizer_that_drops_what_it_does_not_know_is_told(
    tmp_path: Path, tokenizer: Path, kept: str
) -> None:
    """A BPE without bytes and without an unknown token drops a character in silence."""
    texts = [
        f"{number}: the quick \u6f22\u5b57\u304b\u306a\u6df7\u3058\u308a\u6587 fox"
        for number in range(400)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    given = tokenizer
    if kept == "ascii":
        given = tmp_path / "tokenizer.json"
        letters = "0123456789:thequickfox "
        Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [])).save(str(given))
    made = harness(
        tmp_path, "data", "prepare", "rows.jsonl", "--tokenizer", str(given), "--out", "made"
    )
    assert made.returncode == 0, made.stderr
    told = re.search(r"note: of the text that was looked at, (\d+)% comes back", made.stdout)
    if kept == "all":
        assert told is None
        return
    # As it is written: 13 letters and a number of up to 3 digits come back, 8 signs do not.
    assert told is not None
    assert 60 <= int(told[1]) <= 66
    done = train(tmp_path, "--recipe", "bf16", "--dry-run", "data.path=made")
    assert "comes back from its token ids" in done.stdout.replace("\n", " ")
