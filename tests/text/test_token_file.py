# SPDX-License-Identifier: Apache-2.0
"""`TokenFile` gives the documents that were written, from three layouts, and refuses damage."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.documents import some_documents, write_datatrove, write_megatron

from penstock import Loader
from penstock.data import ConcatDataset, RaggedArray, Subset
from penstock.errors import CollateError, ConfigError, StoreError
from penstock.text import TokenFile

DOCUMENTS = some_documents()


@pytest.fixture
def path(tmp_path):
    TokenFile.write(tmp_path / "tokens", DOCUMENTS, np.uint16)
    return tmp_path / "tokens"


def lists(samples):
    return [np.asarray(sample).tolist() for sample in samples]


def first_of(file, queue):
    queue.put(file[0].tolist())


@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=12), max_size=12),
    st.sampled_from([np.uint16, np.uint32]),
)
def test_what_is_written_is_read(documents, dtype):
    with tempfile.TemporaryDirectory() as folder:
        TokenFile.write(Path(folder, "t"), documents, dtype)
        file = TokenFile(Path(folder, "t"))
        assert lists(file[k] for k in range(len(file))) == documents
        assert lists(file.__getitems__(list(range(len(file))))) == documents
        assert file.lengths.tolist() == list(map(len, documents))
        assert file.num_tokens == sum(map(len, documents))
        assert file.dtype == dtype
        file.verify()


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 5))
def test_pieces_hold_every_token_once_and_know_where_they_are(lengths, max_tokens):
    documents = [np.arange(length) + 100 * k for k, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        TokenFile.write(Path(folder, "t"), documents)
        pieces = TokenFile(Path(folder, "t"), max_tokens)
        tokens = [token for document in documents for token in document.tolist()]
        assert [token for piece in pieces for token in piece.tolist()] == tokens
        # All are full but the last of a document, and none is empty.
        starts = [range(0, length, max_tokens) for length in lengths]
        assert pieces.lengths.tolist() == [
            min(max_tokens, length - start)
            for length, of_document in zip(lengths, starts, strict=True)
            for start in of_document
        ]
        for index, piece in enumerate(pieces):
            document, start = pieces.document_of(index)
            assert piece.tolist() == documents[document][start : start + max_tokens].tolist()


def test_a_whole_document_is_its_own_piece(path):
    file = TokenFile(path)
    assert file.document_of(7) == (7, 0)
    assert file.document_of(-1) == (len(DOCUMENTS) - 1, 0)


def test_a_sample_is_an_int64_array_of_its_own(path):
    file = TokenFile(path)
    sample = file[3]
    assert sample.dtype == np.int64
    sample[:] = 0
    assert file[3].tolist() == DOCUMENTS[3].tolist()


def test_negative_indices_count_from_the_end_and_others_are_refused(path):
    file = TokenFile(path)
    assert file[-1].tolist() == DOCUMENTS[-1].tolist()
    assert lists(file.__getitems__([-1, 0])) == lists([DOCUMENTS[-1], DOCUMENTS[0]])
    for index in (50, -51):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 50 documents"):
            file[index]
        with pytest.raises(IndexError, match=f"index {index} is out of range for 50 documents"):
            file.__getitems__([0, index])


def test_many_samples_come_in_two_arrays(path):
    samples = TokenFile(path).__getitems__([4, 2, 4])
    assert isinstance(samples, RaggedArray)
    assert lists(samples) == lists([DOCUMENTS[4], DOCUMENTS[2], DOCUMENTS[4]])


def test_blocks_are_the_tokens_in_a_row(path):
    file, tokens = TokenFile(path, max_tokens=3), np.concatenate(DOCUMENTS)
    blocks = file.blocks(16)
    assert len(blocks) == len(tokens) // 16
    assert blocks.lengths.tolist() == [16] * len(blocks)
    assert np.concatenate(list(blocks)).tolist() == tokens[: len(blocks) * 16].tolist()
    (batch,) = Loader(blocks, batch_size=len(blocks), num_workers=0)
    assert batch.tolist() == tokens[: len(blocks) * 16].reshape(-1, 16).tolist()
    with pytest.raises(IndexError, match="out of range for"):
        blocks[len(blocks)]
    with pytest.raises(ConfigError, match=r"blocks\(0\)"):
        file.blocks(0)


def test_documents_of_one_length_are_a_batch_and_others_say_what_to_do(tmp_path):
    TokenFile.write(tmp_path / "t", [[1, 2], [3, 4], [5]])
    file = TokenFile(tmp_path / "t")
    (batch,) = Loader(file, batch_size=2, sampler=[1, 0])
    assert batch.dtype == np.int64
    assert batch.tolist() == [[3, 4], [1, 2]]
    with pytest.raises(CollateError, match="sample 0") as caught:
        list(Loader(file, batch_size=3))
    assert any("PackedCollate" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "backend": "thread"}]
)
def test_a_loader_gives_the_same_with_any_workers(path, options):
    options = {"batch_size": 8, "shuffle": True, "seed": 3, **options}
    batches = list(Loader(TokenFile(path).blocks(8), **options))
    expected = list(Loader(TokenFile(path).blocks(8), batch_size=8, shuffle=True, seed=3))
    assert np.array_equal(np.concatenate(batches), np.concatenate(expected))


def test_a_pickle_is_small_and_opens_the_file_again(path):
    file = TokenFile(path, max_tokens=7)
    pickled = pickle.dumps(file)
    assert len(pickled) < 1000
    assert lists(pickle.loads(pickled)) == lists(file)
    assert lists(pickle.loads(pickle.dumps(file.blocks(5)))) == lists(file.blocks(5))


def test_a_spawned_process_reads_it(path):
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=first_of, args=(TokenFile(path), queue))
    process.start()
    assert queue.get() == DOCUMENTS[0].tolist()
    process.join()
    queue.close()


def test_a_file_that_was_replaced_is_not_read_for_another(path):
    pickled = pickle.dumps(TokenFile(path))
    TokenFile.write(path, DOCUMENTS[1:], np.uint16, overwrite=True)
    with pytest.raises(StoreError, match="was changed since it was opened"):
        pickle.loads(pickled)


def test_its_fingerprint_is_that_of_a_copy_and_not_of_another(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    TokenFile.write(tmp_path / "other", DOCUMENTS[::-1], np.uint16)
    file = TokenFile(path)
    assert file.fingerprint == TokenFile(tmp_path / "copy").fingerprint
    others = TokenFile(tmp_path / "other"), TokenFile(path, 5)
    assert file.fingerprint not in [other.fingerprint for other in others]
    for make in (lambda file: file, lambda file: file.blocks(4)):
        state = Loader(make(file), batch_size=4, seed=1).state_dict()
        with pytest.warns(UserWarning, match="saved with other data"):
            Loader(make(others[0]), batch_size=4, seed=1).load_state_dict(state)


@pytest.mark.parametrize("name", ["train.bin", "train.ds"])
def test_a_folder_may_have_any_name(tmp_path, name):
    TokenFile.write(tmp_path / name, [[1, 2]])
    assert TokenFile(tmp_path / name)[0].tolist() == [1, 2]


def test_subsets_and_concatenations_read_it(path):
    file = TokenFile(path)
    both = ConcatDataset([Subset(file, [3, 1]), file])
    assert lists(both.__getitems__([1, 2, 0])) == lists([DOCUMENTS[k] for k in (1, 0, 3)])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint16"])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_megatrons_files_are_read(tmp_path, dtype, num_sequences):
    documents = some_documents(largest=100)
    path = write_megatron(tmp_path / "corpus", documents, dtype, num_sequences)
    file = TokenFile(path)
    assert lists(file) == lists(documents)
    assert lists(pickle.loads(pickle.dumps(file))) == lists(documents)
    with pytest.raises(ConfigError, match="has no checksum"):
        file.verify()


def test_megatrons_files_with_modes_are_read(tmp_path):
    path = write_megatron(tmp_path / "corpus", DOCUMENTS, modes=bytes(len(DOCUMENTS)))
    assert lists(TokenFile(path)) == lists(DOCUMENTS)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_datatroves_files_are_read(tmp_path, dtype):
    path = write_datatrove(tmp_path / "00000.ds", DOCUMENTS, dtype)
    file = TokenFile(path, max_tokens=9)
    assert np.concatenate(list(file)).tolist() == np.concatenate(DOCUMENTS).tolist()
    assert lists(TokenFile(path)) == lists(DOCUMENTS)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def lengthen(path):
    path.write_bytes(path.read_bytes() + bytes(2))


@pytest.mark.parametrize("name", ["tokens", "offsets"])
@pytest.mark.parametrize(("damage", "said"), [(cut, "is cut off"), (lengthen, "is too long")])
def test_a_wrong_size_is_an_error_with_both_sizes(path, name, damage, said):
    size_bytes = (path / name).stat().st_size
    damage(path / name)
    with pytest.raises(
        StoreError, match=f"{name} {said}: it has .* and should have {size_bytes:,}"
    ):
        TokenFile(path)


def change(path, **values):
    header = json.loads((path / "header.json").read_text())
    (path / "header.json").write_text(json.dumps({**header, **values}))


def test_offsets_that_were_changed_are_an_error(path):
    offsets = np.fromfile(path / "offsets", "<i8")
    offsets[3] += 1
    offsets.tofile(path / "offsets")
    with pytest.raises(StoreError, match="offsets is damaged: its checksum"):
        TokenFile(path)


def test_offsets_that_do_not_ascend_are_an_error(path):
    offsets = np.fromfile(path / "offsets", "<i8")
    offsets[3] = offsets[5]
    offsets.tofile(path / "offsets")
    sums = json.loads((path / "header.json").read_text())["crc32"]
    change(path, crc32={**sums, "offsets": zlib.crc32(offsets.tobytes())})
    with pytest.raises(StoreError, match=r"do not ascend: .* at document 3"):
        TokenFile(path)


def test_changed_tokens_are_found_by_verify(path):
    tokens = np.fromfile(path / "tokens", "<u2")
    tokens[9] ^= 1
    tokens.tofile(path / "tokens")
    with pytest.raises(StoreError, match="tokens is damaged: its checksum"):
        TokenFile(path).verify()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"format": "x"}, "is not the header of a folder of tokens"),
        ({"version": 2}, "is of version 2 of the layout"),
        ({"dtype": "float32"}, "its dtype, counts or checksums are missing or wrong"),
        ({"dtype": ["uint16"]}, "its dtype, counts or checksums are missing or wrong"),
        ({"num_tokens": -1}, "its dtype, counts or checksums are missing or wrong"),
        ({"crc32": 3}, "its dtype, counts or checksums are missing or wrong"),
    ],
)
def test_a_header_that_is_none_is_an_error(path, values, said):
    change(path, **values)
    with pytest.raises(StoreError, match=said):
        TokenFile(path)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, "\udcff"])
def test_a_header_that_is_no_json_is_an_error(path, text):
    (path / "header.json").write_text(text, errors="surrogateescape")
    with pytest.raises(StoreError, match=r"header\.json is damaged"):
        TokenFile(path)


def test_what_is_no_file_of_tokens_says_what_would_be(tmp_path):
    with pytest.raises(StoreError, match=r"does not exist\. Name a folder that `penstock pack"):
        TokenFile(tmp_path / "absent")
    with pytest.raises(StoreError, match=r"it has no header\.json"):
        TokenFile(tmp_path)
    with pytest.raises(StoreError, match=r"cannot read .*absent\.bin: No such file"):
        TokenFile(tmp_path / "absent.bin")


def patch(path, place, data):
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("place", "data", "said"),
    [
        (0, b"X", "is not an index of Megatron's"),
        (9, struct.pack("<Q", 2), "is of version 2"),
        (17, b"\x07", "values of type 7"),
        (18, struct.pack("<Q", 2**60), "is cut off"),
        (34, struct.pack("<i", 10**6), "do not lie one after the other"),
        (34 + 12 * 50, struct.pack("<q", 1), "should run from 0 to 50"),
        (34 + 12 * 50 + 8, struct.pack("<q", 40), "do not ascend"),
    ],
)
def test_a_damaged_index_of_megatron_is_an_error(tmp_path, place, data, said):
    path = write_megatron(tmp_path / "corpus", DOCUMENTS)
    patch(path.with_suffix(".idx"), place, data)
    with pytest.raises(StoreError, match=said):
        TokenFile(path)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_of_megatron_that_is_cut_off_is_an_error(tmp_path, suffix):
    path = write_megatron(tmp_path / "corpus", DOCUMENTS)
    cut(path.with_suffix(suffix))
    with pytest.raises(StoreError, match=f"{suffix} is cut off"):
        TokenFile(path)


def test_a_file_of_datatrove_that_is_cut_off_is_an_error(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    cut(path)
    with pytest.raises(StoreError, match=r"its index says .* tokens of 2 or 4 bytes each"):
        TokenFile(path)
    path = write_datatrove(tmp_path / "b.ds", DOCUMENTS)
    cut(tmp_path / "b.ds.index")
    with pytest.raises(StoreError, match="index is too long"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([1, 70_000], "document 1 has token IDs from 1 to 70000; uint16 keeps 0 to 65535"),
        ([-1], "document 1 has token IDs from -1 to -1"),
        ([[1]], r"document 1 is an array of int64, shape \(1, 1\)"),
        ([0.5], "document 1 is an array of float64"),
    ],
)
def test_what_is_no_document_is_not_written(tmp_path, document, said):
    with pytest.raises(ConfigError, match=said):
        TokenFile.write(tmp_path / "t", [[1], document], np.uint16)
    assert not (tmp_path / "t").exists()


def test_a_folder_is_replaced_only_when_it_is_told_to(path):
    with pytest.raises(StoreError, match="is there already"):
        TokenFile.write(path, [[1]])
    TokenFile.write(path, [[1]], overwrite=True)
    assert lists(TokenFile(path)) == [[1]]


def test_another_folder_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(StoreError, match="is no folder of tokens"):
        TokenFile.write(tmp_path / "thesis", [[1]], overwrite=True)


@pytest.mark.parametrize("argument", [0, -3])
def test_pieces_have_a_token_or_more(path, argument):
    with pytest.raises(ConfigError, match=f"max_tokens={argument}"):
        TokenFile(path, max_tokens=argument)


def test_another_dtype_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="uint16 or uint32, not int64"):
        TokenFile.write(tmp_path / "t", [[1]], np.int64)
