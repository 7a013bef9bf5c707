# SPDX-License-Identifier: Apache-2.0
"""A corpus becomes the same file of tokens however it is packed, and bad ones say where."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from penstock.data import unpacked
from penstock.errors import ConfigError, StoreError
from penstock.text import TokenFile

tokenizers = pytest.importorskip("tokenizers")
zstandard = pytest.importorskip("zstandard")
pytest.importorskip("rich")

from penstock.cli import main  # noqa: E402 - it needs the above
from penstock.text import corpus, token_writer  # noqa: E402 - like that
from penstock.text.corpus import CorpusPlace  # noqa: E402
from penstock.text.packing import pack_tokens  # noqa: E402 - like that

WORDS = [f"w{k}" for k in range(90)]
TEXTS = [" ".join(WORDS[(k * j) % 90] for j in range(1, 3 + k % 17)) for k in range(2_000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer of words, by white space; with a padding and a truncation, as saved ones have."""
    vocabulary = {word: k for k, word in enumerate(["[UNK]", "</s>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=12)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 4_096)
    monkeypatch.setattr(corpus, "_CHUNK_ROWS", 100)


def ids_of(text):
    return [2 + int(word[1:]) for word in text.split()]


def lines_of(texts, key="text"):
    return "".join(json.dumps({"id": k, key: text}) + "\n" for k, text in enumerate(texts))


def documents_in(path):
    return [sample.tolist() for sample in TokenFile(path)]


EXPECTED = [ids_of(text) for text in TEXTS]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(lines_of(TEXTS))
    return path


def write_gzip(path, data):
    half = len(data) // 2
    path.write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]))


def write_zstandard(path, data):
    compress, half = zstandard.ZstdCompressor().compress, len(data) // 2
    path.write_bytes(compress(data[:half]) + compress(data[half:]))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        ("jsonl", lambda path, data: path.write_bytes(data)),
        ("ndjson", lambda path, data: path.write_bytes(data.removesuffix(b"\n"))),
        ("json.gz", write_gzip),
        ("jsonl.zst", write_zstandard),
    ],
)
def test_lines_are_packed_in_their_order(tmp_path, tokenizer, suffix, write, num_workers):
    path = tmp_path / f"corpus.{suffix}"
    write(path, lines_of(TEXTS).encode())
    report = pack_tokens(path, tmp_path / "t", tokenizer, num_workers=num_workers)
    assert documents_in(tmp_path / "t") == EXPECTED
    assert report.num_documents == len(TEXTS)
    assert report.num_tokens == sum(map(len, EXPECTED))
    file = TokenFile(tmp_path / "t")
    file.verify()
    assert file.dtype == np.uint16
    assert len(file.tokenizer_digest) == 64


def test_a_folder_is_packed_by_the_names_of_its_files(tmp_path, tokenizer):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "b.jsonl").write_text(lines_of(TEXTS[500:]))
    write_gzip(folder / "a.jsonl.gz", lines_of(TEXTS[:500]).encode())
    (folder / "readme.md").write_text("no corpus")
    pack_tokens(folder, tmp_path / "t", tokenizer, num_workers=2)
    assert documents_in(tmp_path / "t") == EXPECTED


def test_tables_are_packed(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"id": range(len(TEXTS)), "content": TEXTS})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=333)
    pack_tokens(tmp_path / "c.parquet", tmp_path / "t", tokenizer, text_key="content")
    assert documents_in(tmp_path / "t") == EXPECTED
    with pytest.raises(ConfigError, match=r"no column 'text', but \['id', 'content'\]"):
        pack_tokens(tmp_path / "c.parquet", tmp_path / "u", tokenizer)


def test_a_dataset_of_hugging_faces_is_packed(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "hf")
    pack_tokens(tmp_path / "hf", tmp_path / "t", tokenizer)
    assert documents_in(tmp_path / "t") == EXPECTED


@pytest.mark.parametrize("append", [None, "70000"])
def test_token_ids_are_packed_as_they_are(tmp_path, append):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input_ids": EXPECTED}), tmp_path / "c.parquet")
    (tmp_path / "c.jsonl").write_text(lines_of(EXPECTED, "input_ids"))
    end = [] if append is None else [int(append)]
    for source in ("c.parquet", "c.jsonl"):
        pack_tokens(tmp_path / source, tmp_path / "t", append_token=append, overwrite=True)
        assert documents_in(tmp_path / "t") == [ids + end for ids in EXPECTED]


def test_a_token_is_appended_to_each_document(tmp_path, tokenizer, lines):
    pack_tokens(lines, tmp_path / "t", tokenizer, append_token="</s>")
    assert documents_in(tmp_path / "t") == [[*ids, 1] for ids in EXPECTED]
    with pytest.raises(ConfigError, match="'<eos>' is no token: it has to be in the tokenizer"):
        pack_tokens(lines, tmp_path / "u", tokenizer, append_token="<eos>")
    with pytest.raises(ConfigError, match="has to be a number without --tokenizer"):
        pack_tokens(lines, tmp_path / "u", append_token="</s>")


def test_empty_documents_are_counted_and_blank_lines_are_nothing(tmp_path, tokenizer):
    path = tmp_path / "c.jsonl"
    path.write_text(lines_of(["w1", "", "  "]) + "\n \n" + lines_of(["w2"]))
    report = pack_tokens(path, tmp_path / "t", tokenizer, append_token="</s>")
    assert documents_in(tmp_path / "t") == [[3, 1], [4, 1]]
    assert (report.num_documents, report.num_empty, report.num_left_out) == (2, 2, 0)


def test_an_empty_corpus_is_an_empty_file(tmp_path, tokenizer):
    (tmp_path / "c.jsonl").touch()
    pack_tokens(tmp_path / "c.jsonl", tmp_path / "t", tokenizer)
    file = TokenFile(tmp_path / "t", max_tokens=8)
    assert len(file) == file.num_tokens == len(file.blocks(4)) == 0


BAD_LINES = [
    (b'{"text": "w1"', r"line 3: Expecting ',' delimiter"),
    (b'{"text": "\xff"}', r"line 3: 'utf-8' codec can't decode byte 0xff"),
    (b'{"body": "w1"}', r"line 3: it has no 'text', but body: name a field with --text-key"),
    (b'["w1"]', r"line 3: it is JSON, but a list, not an object"),
    (b'{"text": 5}', r"line 3: 'text' is not text, but int"),
    (b'{"text": null}', r"line 3: 'text' is not text, but NoneType"),
    (rb'{"text": "\ud800"}', r"line 3: 'utf-8' codec can't encode character"),
    (b'{"text": ' + b"[" * 100_000, r"line 3: .*recursion"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_line_that_is_no_document_is_named_or_left_out(
    tmp_path, tokenizer, line, said, num_workers
):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "w1"}\n\n' + line + b'\n{"text": "w2"}\n')
    with pytest.raises(StoreError, match=said) as caught:
        pack_tokens(path, tmp_path / "t", tokenizer, num_workers=num_workers)
    assert f"{path}, line 3" in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    report = pack_tokens(
        path, tmp_path / "t", tokenizer, num_workers=num_workers, on_error="skip", resume=True
    )
    assert documents_in(tmp_path / "t") == [[3], [4]]
    assert report.num_left_out == 1
    ((where, why),) = report.left_out
    assert re.search(said, f"{where.rpartition(', ')[2]}: {why}")


def test_rows_that_are_no_document_are_named_or_left_out(tmp_path, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    broken = pa.array([b"w1", b"\xff", None], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "c.parquet")
    with pytest.raises(StoreError, match=r"c\.parquet, row 1: 'utf-8' codec"):
        pack_tokens(tmp_path / "c.parquet", tmp_path / "t", tokenizer)
    report = pack_tokens(tmp_path / "c.parquet", tmp_path / "t", tokenizer, on_error="skip")
    assert [why for _, why in report.left_out][1] == "'text' is not text, but NoneType"
    assert documents_in(tmp_path / "t") == [[3]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_forgotten_tokenizer_is_named(tmp_path, lines, kind):
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        lines = tmp_path / "c.parquet"
        pq.write_table(pa.table({"text": TEXTS}), lines)
    with pytest.raises((ConfigError, StoreError), match=r"no .*'input_ids', but .*--tokenizer"):
        pack_tokens(lines, tmp_path / "t")
    with pytest.raises(StoreError, match=r"'text' is a text, and no token IDs: give --tokenizer"):
        pack_tokens(lines, tmp_path / "t", text_key="text")


def test_of_several_splits_one_is_to_be_named(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "hf")
    with pytest.raises(StoreError, match="holds several splits: name one"):
        pack_tokens(tmp_path / "hf", tmp_path / "t", tokenizer)


@pytest.mark.parametrize("ids", ["[-1]", "[4294967296]", "[0.5]", "[[1]]"])
def test_what_are_no_token_ids_is_named(tmp_path, ids):
    (tmp_path / "c.jsonl").write_text(f'{{"input_ids": {ids}}}\n')
    with pytest.raises(StoreError, match=r"line 1: 'input_ids' (has token IDs|is an array)"):
        pack_tokens(tmp_path / "c.jsonl", tmp_path / "t")


@pytest.mark.parametrize(("suffix", "write"), [("gz", write_gzip), ("zst", write_zstandard)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_corpus_that_is_cut_off_says_after_which_line(
    tmp_path, tokenizer, suffix, write, num_workers
):
    path = tmp_path / f"c.jsonl.{suffix}"
    write(path, lines_of(TEXTS).encode())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"is cut off or damaged, after line [1-9][\d,]*: .*again"):
        pack_tokens(path, tmp_path / "t", tokenizer, num_workers=num_workers, on_error="skip")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(("suffix", "write"), [("gz", write_gzip), ("zst", write_zstandard)])
def test_a_small_file_that_becomes_a_large_one_comes_in_pieces(
    tmp_path, monkeypatch, suffix, write
):
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 1 << 20)
    path, num_bytes = tmp_path / f"c.jsonl.{suffix}", 200 << 20
    write(path, b"\n" * num_bytes)
    sizes = [len(chunk.records) for chunk in corpus.Corpus(path, "text").chunks(CorpusPlace())]
    assert sum(sizes) == num_bytes
    assert max(sizes) < 40 << 20


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_what_is_not_compressed_as_its_name_says_is_an_error(tmp_path, tokenizer, suffix):
    path = tmp_path / f"c.jsonl.{suffix}"
    path.write_text(lines_of(TEXTS[:3]))
    with pytest.raises(StoreError, match="is cut off or damaged, after line 0"):
        pack_tokens(path, tmp_path / "t", tokenizer)


def test_a_line_without_an_end_is_an_error(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(unpacked, "MAX_TREE_BYTES", 10_000)
    (tmp_path / "c.jsonl").write_text("x" * 20_000)
    with pytest.raises(StoreError, match="has a line of more than 10,000 bytes"):
        pack_tokens(tmp_path / "c.jsonl", tmp_path / "t", tokenizer)


@pytest.mark.parametrize("name", ["c.txt", "folder"])
def test_what_is_no_corpus_is_an_error(tmp_path, tokenizer, name):
    (tmp_path / "c.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises((ConfigError, StoreError), match=r"\.jsonl|without a file ending"):
        pack_tokens(tmp_path / name, tmp_path / "t", tokenizer)


def test_what_is_no_tokenizer_is_an_error(tmp_path, lines):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
        pack_tokens(lines, tmp_path / "t", tmp_path / "tokenizer.json")
    with pytest.raises(StoreError, match="cannot read"):
        pack_tokens(lines, tmp_path / "t", tmp_path / "absent.json")


class Interrupted(Exception):
    """Raised by a test, in the middle."""


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "folder"])
def test_an_interrupted_run_goes_on_at_any_place(tmp_path, tokenizer, kind):
    path = tmp_path / f"c.{kind}"
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=333)
    elif kind == "folder":
        path.mkdir()
        (path / "a.jsonl").write_text(lines_of(TEXTS[:700]))
        (path / "b.jsonl").write_text(lines_of(TEXTS[700:]))
    elif kind == "jsonl.gz":
        write_gzip(path, lines_of(TEXTS).encode())
    else:
        path.write_text(lines_of(TEXTS))

    def stop(*_):
        raise Interrupted

    num_runs = 0
    report = None
    while report is None:
        num_runs += 1
        try:
            report = pack_tokens(path, tmp_path / "t", tokenizer, resume=True, progress=stop)
        except Interrupted:
            assert not (tmp_path / "t").exists()
    assert num_runs > 5
    assert documents_in(tmp_path / "t") == EXPECTED
    assert report.num_resumed == len(TEXTS)  # the last run found all of them, one chunk each
    TokenFile(tmp_path / "t").verify()
    assert not (tmp_path / "t.partial").exists()
    again = pack_tokens(path, tmp_path / "t", tokenizer, resume=True)
    assert (again.num_documents, again.num_resumed) == (len(TEXTS), len(TEXTS))


def stopped(lines, tmp_path, tokenizer, after=3):
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        pack_tokens(lines, tmp_path / "t", tokenizer, progress=stop)


def test_a_run_of_something_else_is_not_gone_on_with(tmp_path, tokenizer, lines):
    stopped(lines, tmp_path, tokenizer)
    with pytest.raises(StoreError, match="holds a part of something else"):
        pack_tokens(lines, tmp_path / "t", tokenizer, append_token="</s>", resume=True)
    with open(lines, "a") as file:
        file.write(lines_of(["w1"]))
    with pytest.raises(StoreError, match="holds a part of something else"):
        pack_tokens(lines, tmp_path / "t", tokenizer, resume=True)
    pack_tokens(lines, tmp_path / "t", tokenizer)
    assert documents_in(tmp_path / "t") == [*EXPECTED, [3]]


def test_what_was_written_behind_the_journal_is_cut_off(tmp_path, tokenizer, lines):
    stopped(lines, tmp_path, tokenizer)
    for name in ("tokens", "offsets"):
        with open(tmp_path / "t.partial" / name, "ab") as file:
            file.write(b"torn")
    pack_tokens(lines, tmp_path / "t", tokenizer, resume=True)
    assert documents_in(tmp_path / "t") == EXPECTED


@pytest.mark.parametrize("name", ["tokens", "offsets"])
def test_damage_of_an_interrupted_run_is_found(tmp_path, tokenizer, lines, name):
    stopped(lines, tmp_path, tokenizer)
    path = tmp_path / "t.partial" / name
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(StoreError, match=f"{name} is damaged: its checksum is not that of"):
        pack_tokens(lines, tmp_path / "t", tokenizer, resume=True)
    path.write_bytes(content[:-2])
    with pytest.raises(StoreError, match=f"{name} is cut off"):
        pack_tokens(lines, tmp_path / "t", tokenizer, resume=True)


def test_a_second_writer_is_refused(tmp_path):
    writer = token_writer.TokenWriter(tmp_path / "t", np.uint16)
    try:
        with pytest.raises(StoreError, match="another process is writing"):
            token_writer.TokenWriter(tmp_path / "t", np.uint16)
    finally:
        writer.close()


def test_the_command_packs_and_says_what(tmp_path, tokenizer, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text(lines_of(["w1 w2", "", "w3"]) + "{\n")
    arguments = ["pack", str(path), f"tokens:{tmp_path}/t", "--tokenizer", str(tokenizer)]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert f"{path}, line 4: " in captured.err
    assert main([*arguments, "--append-token", "</s>", "--skip-bad"]) == 0
    left_out, summary = capsys.readouterr().out.splitlines()
    assert left_out.startswith(f"{path}, line 4\tExpecting property name")
    assert re.fullmatch(
        rf"tokens:{tmp_path}/t: 2 documents, 5 tokens, [\d.]+ s, 1 empty, 1 left out", summary
    )
    assert main(arguments) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["tokens:t", "--resize", "9"], "--resize is not for tokens:PATH"),
        (["tokens:t", "--shards", "2"], "--shards is not for tokens:PATH"),
        (["tokens:t", "--image-field", "a"], "--image-field is not for tokens:PATH"),
        (["a.lmdb", "--text-key", "b"], "--text-key is for DST tokens:PATH"),
    ],
)
def test_options_of_the_other_kind_are_refused(lines, monkeypatch, tmp_path, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["pack", str(lines), *options]) == 1
    assert said in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_packed(tmp_path, tokenizer):
    (tmp_path / "c.jsonl").write_text(lines_of(TEXTS))
    program = (
        "import os, sys, signal\n"
        "from penstock.text import corpus, packing\n"
        "corpus._CHUNK_BYTES = 4096\n"
        "put = packing.TokenWriter.put\n"
        "def stop(self, *given):\n"
        "    put(self, *given)\n"
        "    if self.written.num_documents > 500: os.kill(os.getpid(), signal.SIGINT)\n"
        "packing.TokenWriter.put = stop\n"
        "from penstock.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["pack", "c.jsonl", "tokens:t", "--tokenizer", str(tokenizer), "--workers", "2"]
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert run.returncode == 128 + signal.SIGINT
    assert "is kept in t.partial: the same command with --resume goes on" in run.stderr
    report = pack_tokens(tmp_path / "c.jsonl", tmp_path / "t", tokenizer, resume=True)
    assert 500 < report.num_resumed < len(TEXTS)
    assert documents_in(tmp_path / "t") == EXPECTED


def test_what_cannot_be_put_in_place_is_not_lost(lines, tmp_path, tokenizer, monkeypatch):
    def fail(*_):
        raise StoreError("cannot be replaced")

    with monkeypatch.context() as patch:
        patch.setattr(token_writer, "put_in_place", fail)
        with pytest.raises(StoreError, match="cannot be replaced"):
            pack_tokens(lines, tmp_path / "t", tokenizer)
    report = pack_tokens(lines, tmp_path / "t", tokenizer, resume=True)
    assert report.num_resumed == len(TEXTS)
    assert documents_in(tmp_path / "t") == EXPECTED
    assert {path.name for path in (tmp_path / "t").iterdir()} == {
        "header.json",
        "tokens",
        "offsets",
    }
