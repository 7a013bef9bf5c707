# SPDX-License-Identifier: Apache-2.0
"""Datasets over stores: transforms, decoding, repair, batches, random numbers, workers."""

from __future__ import annotations

import io
import pickle

import cv2
import numpy as np
import pytest
from PIL import Image
from tests.support.processes import python
from tests.support.stores import Program

import penstock
from penstock import Loader
from penstock.data import Subset
from penstock.errors import ConfigError, StoreError
from penstock.optional import install_command
from penstock.stores import EncodedImage, LMDBDataset, StoreDataset, open_store, pack


def photo(seed=0, height=48, width=64):
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(cv2.resize(small, (width, height))).save(file, "JPEG", quality=92)
    return file.getvalue()


FILES = [photo(seed) for seed in range(20)]


@pytest.fixture
def path(tmp_path):
    data = [(EncodedImage(file), number % 3) for number, file in enumerate(FILES)]
    pack(data, f"lmdb:{tmp_path}/photos.lmdb")
    return tmp_path / "photos.lmdb"


@pytest.fixture
def opened():
    """Make datasets that are closed at the end, so that the check of open files finds none."""
    datasets = []

    def make(*args, **options):
        datasets.append(LMDBDataset(*args, **options))
        return datasets[-1]

    yield make
    for dataset in datasets:
        dataset.close()
    datasets.clear()  # and their counts of repairs, which are files


def as_pillow_has_it(file):
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def test_images_are_decoded_to_rgb(path, opened):
    image, label = opened(path)[4]
    assert (image.shape, image.dtype, label) == ((48, 64, 3), np.uint8, 1)
    difference = image.astype(int) - as_pillow_has_it(FILES[4])
    assert np.abs(difference).max() <= 2  # two decoders of one library
    assert image.flags.writeable


def test_images_may_be_bytes_or_pillows_or_what_a_function_makes_of_them(path, opened):
    assert opened(path, decode=None)[3] == (FILES[3], 0)
    image, _ = opened(path, decode="pil")[3]
    assert isinstance(image, Image.Image)
    assert (np.asarray(image) == as_pillow_has_it(FILES[3])).all()
    kept = []
    assert opened(path, decode=lambda data: kept.append(data) or len(data))[3][0] == len(FILES[3])
    assert kept == [FILES[3]]
    assert type(kept[0]) is bytes
    with pytest.raises(ConfigError, match=r"a transform is called .* \[<.*Compose joins"):
        opened(path, transform=[crop])
    with pytest.raises(ConfigError, match="decode is 'rgb', 'pil', a function or None, not 'bgr'"):
        opened(path, decode="bgr")


def test_transforms_get_their_half_of_a_pair_and_a_lone_sample_whole(path, opened, tmp_path):
    dataset = opened(path, transform=np.mean, target_transform=str)
    mean, label = dataset[7]
    assert mean == np.mean(opened(path)[7][0])
    assert label == "1"
    pack([np.arange(4), np.arange(8)], f"lmdb:{tmp_path}/b.lmdb")
    assert opened(tmp_path / "b.lmdb", transform=np.sum, target_transform=str)[1] == 28


def test_a_batch_read_at_once_equals_the_samples_collated(path, opened):
    dataset = opened(path, decode=None)
    assert dataset.can_get_batch
    whole = dataset.get_batch(np.array([5, 0, -1]), np.empty)
    by_sample = Loader([dataset[5], dataset[0], dataset[19]], batch_size=3)
    (collated,) = by_sample
    assert type(whole[0]) is type(collated[0])
    assert whole[0] == collated[0] == (FILES[5], FILES[0], FILES[19])
    assert whole[1].tolist() == collated[1].tolist() == [2, 0, 1]
    assert whole[1].dtype == collated[1].dtype


@pytest.mark.parametrize(
    "options",
    [{"transform": len}, {"target_transform": str}, {"repair": True}, {"decode": len}],
)
def test_what_changes_samples_is_not_read_at_once(path, opened, options):
    dataset = opened(path, **({"decode": None} | options))
    assert not dataset.can_get_batch
    (batch,) = Loader(Subset(dataset, [1, 2]), batch_size=2)
    assert batch[1] == ("1", "2") if "target_transform" in options else list(batch[1]) == [1, 2]


def crop(image):
    return np.ascontiguousarray(image[:32, :32])


def noisy_crop(image):
    top = penstock.sample_rng().integers(0, 16)
    return image[top : top + 32, :32] + np.random.randint(0, 9, (1, 1, 1)).astype(np.uint8)


def test_random_transforms_draw_the_same_in_a_batch_as_alone_and_with_any_workers(path, opened):
    dataset = opened(path, transform=noisy_crop)
    epochs = []
    for num_workers in (0, 1, 3):
        loader = Loader(dataset, batch_size=4, shuffle=True, num_workers=num_workers, seed=3)
        epochs.append([images.tobytes() for images, _ in loader])
        dataset.close()
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == 5

    class OneByOne:
        def __len__(self):
            return len(dataset)

        def __getitem__(self, index):
            return dataset[index]

    alone = [
        images.tobytes() for images, _ in Loader(OneByOne(), batch_size=4, shuffle=True, seed=3)
    ]
    assert alone == epochs[0]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_open_the_store_for_themselves(path, opened, context):
    dataset = opened(path, decode=None)
    _ = dataset[0]  # opened here first
    loader = Loader(dataset, batch_size=7, num_workers=2, multiprocessing_context=context)
    assert [file for files, _ in loader for file in files] == FILES
    assert dataset[1][0] == FILES[1]


def test_a_pickled_dataset_carries_no_connection_and_keeps_its_transforms(path, opened):
    dataset = opened(path, transform=crop)
    _ = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy[2][0] == crop(opened(path)[2][0])).all()
    assert copy.labels.tolist() == dataset.labels.tolist()
    copy.close()


def test_an_image_that_cannot_be_decoded_is_named_and_left_out_on_request(tmp_path, opened):
    data = [(EncodedImage(file), 0) for file in FILES[:6]]
    data[4] = (EncodedImage(b"<!DOCTYPE html>"), 0)
    pack(data, f"lmdb:{tmp_path}/a.lmdb")
    dataset = opened(tmp_path / "a.lmdb", transform=crop)
    with pytest.raises(ValueError, match="text, not an image: it begins with '<!DOC") as raised:
        _ = dataset[4]
    assert raised.value.__notes__ == ["in 0 of the sample", "while reading sample 4 (4)"]
    for num_workers in (0, 2):
        loader = Loader(dataset, batch_size=3, num_workers=num_workers, on_error="skip")
        with pytest.warns(UserWarning, match="1 bad sample left out"):
            sizes = [len(images) for images, _ in loader]
        dataset.close()
        assert sum(sizes) == 5
        (failure,) = loader.failures
        assert (failure.index, failure.name) == (4, "4")


def test_a_damaged_record_is_left_out_on_request(path, opened):
    content = bytearray(path.read_bytes())
    content[content.index(FILES[8]) + 100] ^= 1
    path.write_bytes(content)
    dataset = opened(path, decode=None)
    loader = Loader(dataset, batch_size=5, on_error="skip")
    with pytest.warns(UserWarning, match="1 bad sample left out"):
        given = [file for files, _ in loader for file in files]
    assert given == FILES[:8] + FILES[9:]
    assert isinstance(loader.failures[0].error, StoreError)
    assert "checksum" in str(loader.failures[0].error)


@pytest.fixture
def truncated(tmp_path):
    files = [file if number % 4 else file[:-200] for number, file in enumerate(FILES)]
    files[1] += b"\0\0\0"  # filled up by a camera: not truncated
    pack([(EncodedImage(file), 0) for file in files], f"lmdb:{tmp_path}/cut.lmdb")
    return tmp_path / "cut.lmdb"


def test_truncated_jpegs_are_repaired_on_request(truncated, opened):
    with pytest.raises(ValueError, match=r"[Pp]remature|truncated|JPEG"):
        _ = opened(truncated)[0]
    images = [image for image, _ in opened(truncated, repair=True).__getitems__(range(20))]
    # What is there of the image is shown: its upper rows are those of the whole one.
    whole = as_pillow_has_it(FILES[0])
    assert np.abs(images[0][:8].astype(int) - whole[:8]).max() <= 2
    assert {image.shape for image in images} == {whole.shape}


def test_a_whole_photo_with_a_film_behind_it_is_not_repaired(tmp_path, opened):
    whole = FILES[0] + b"film" * 50
    pack([(EncodedImage(whole), 0)], f"lmdb:{tmp_path}/a.lmdb")
    repaired, plain = opened(tmp_path / "a.lmdb", repair=True), opened(tmp_path / "a.lmdb")
    assert (repaired[0][0] == plain[0][0]).all()


class TallOnes:
    def __call__(self, image):
        if image.mean() > self.limit:
            raise ValueError("too bright")
        return image[:8, :8]

    def __init__(self, limit):
        self.limit = limit


def test_what_a_transform_raises_names_its_sample_and_the_transform(path, opened):
    means = [opened(path)[i][0].mean() for i in range(20)]
    brightest = int(np.argmax(means))
    dataset = opened(path, transform=TallOnes(sorted(means)[-2]))
    for num_workers in (0, 2):
        with pytest.raises(ValueError, match="too bright") as raised:
            list(Loader(dataset, batch_size=20, num_workers=num_workers))
        dataset.close()
        said = "\n".join([str(raised.value), *raised.value.__notes__])
        assert (
            f"while reading sample {brightest} ({brightest:02}), in its transform TallOnes" in said
        )
        assert "samples [" not in said
        assert "on_error='skip'" in said


def test_repr_names_what_matters_and_labels_are_there_without_a_record(path, opened):
    dataset = opened(path, transform=crop)
    text = repr(dataset)
    assert text.startswith("LMDBDataset(store=lmdb:/")
    assert text.endswith("photos.lmdb, length=20, transform=crop)")
    assert dataset.labels.tolist() == [number % 3 for number in range(20)]
    assert dataset.describe(3) == "03"
    assert dataset.fingerprint == open_store(f"lmdb:{path}").fingerprint


@pytest.mark.parametrize(
    ("address", "options", "error", "message"),
    [
        ("redis://host/1", {}, ConfigError, "redis:// are not known"),
        ("lmdb:a", {"layout": "json"}, ConfigError, "lmdb stores is 'records' or 'pickle'"),
        ("folder:a", {"layout": "pickle"}, ConfigError, "layout is 'auto'"),
        ("tar:a", {"layout": "pickle"}, ConfigError, "tar stores have no option 'layout'"),
        ("mongodb:ada:s3cret@host/db.c", {}, ConfigError, "has the form mongodb://USER:PASSWORD@"),
        ("mongodb//ada:s3cret@host/db.c", {}, ConfigError, "has the form mongodb://USER:PASSWORD@"),
        ("MongoDB:/ada:s3cret@host/db.c", {}, ConfigError, "has the form mongodb://USER:PASSWORD@"),
        ("lmbd:a.lmdb", {}, ConfigError, "begin with lmbd: are not known"),
        ("SQLite:a", {}, ConfigError, "begin with SQLite: are not known"),
        ("lmdb:a", {"verify": "often"}, ConfigError, "verify is 'once'"),
        ("lmdb:a", {"color": 1}, ConfigError, "lmdb stores have no option 'color'"),
    ],
)
def test_wrong_addresses_and_options_are_named(address, options, error, message):
    with pytest.raises(error, match=message) as raised:
        open_store(address, **options)
    assert "s3cret" not in str(raised.value)


def test_schemes_may_be_written_large_and_paths_with_a_colon_be_named(tmp_path, monkeypatch):
    assert open_store("LMDB:a.lmdb").address == "lmdb:a.lmdb"
    monkeypatch.chdir(tmp_path)
    assert open_store("./run:3").address == "folder:run:3"
    (tmp_path / "run:3").mkdir()
    assert open_store("run:3").address == "folder:run:3"


def hand_made(path, samples, *, keys=True):
    import lmdb

    env = lmdb.open(str(path), subdir=path.suffix == "", map_size=1 << 26)
    with env, env.begin(write=True) as txn:
        names = [str(number).encode("ascii") for number in range(len(samples))]
        for name, sample in zip(names, samples, strict=True):
            txn.put(name, pickle.dumps(sample))
        if keys:
            txn.put(b"__keys__", pickle.dumps(names))
        txn.put(b"__len__", pickle.dumps(len(samples)))


@pytest.mark.parametrize("name", ["a.lmdb", "folder"])
@pytest.mark.parametrize("keys", [True, False])
def test_the_layout_that_scripts_make_by_hand_is_read_if_it_is_trusted(
    tmp_path, opened, name, keys
):
    hand_made(tmp_path / name, [(file, n % 3) for n, file in enumerate(FILES)], keys=keys)
    with pytest.raises(StoreError, match=r'layout="pickle", trusted=True'):
        opened(tmp_path / name)
    with pytest.raises(ConfigError, match="can run any program"):
        opened(tmp_path / name, layout="pickle")
    dataset = opened(tmp_path / name, layout="pickle", trusted=True, decode=None)
    assert len(dataset) == 20
    assert dataset[11] == (FILES[11], 2)
    assert opened(tmp_path / name, layout="pickle", trusted=True)[11][0].shape == (48, 64, 3)
    report = pack(dataset.store, f"lmdb:{tmp_path}/safe.lmdb")
    assert report.num_records == 20
    safe = opened(tmp_path / "safe.lmdb", decode=None)
    assert safe.labels.tolist() == [n % 3 for n in range(20)]
    assert safe[11] == (FILES[11], 2)


def test_labels_of_numpy_and_a_length_as_text_are_understood(tmp_path, opened):
    import lmdb

    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        for number in range(3):
            txn.put(str(number).encode(), pickle.dumps((FILES[number], np.int64(number))))
        txn.put(b"__len__", b"3")
    dataset = opened(tmp_path / "a.lmdb", layout="pickle", trusted=True, decode=None)
    assert [label for _, label in map(dataset.__getitem__, range(3))] == [0, 1, 2]
    pack(dataset, f"lmdb:{tmp_path}/b.lmdb")
    assert opened(tmp_path / "b.lmdb").labels.tolist() == [0, 1, 2]
    pack([(1, 2)], f"lmdb:{tmp_path}/c.lmdb")
    with pytest.raises(StoreError, match=r"is no file of pickles.* without layout"):
        opened(tmp_path / "c.lmdb", layout="pickle", trusted=True)


@pytest.mark.parametrize("index", [slice(3), "a", None, 1.5])
def test_an_index_that_is_no_integer_is_named(path, opened, index):
    with pytest.raises(TypeError, match="positions are a list of integers, not"):
        _ = opened(path)[index]


def test_files_as_they_are_need_no_random_numbers_and_transforms_do(path, opened):
    from penstock.data.dataset import is_drawless

    assert is_drawless(opened(path, decode=None))
    assert is_drawless(Subset(opened(path, decode=None), [1, 2]))
    assert not is_drawless(opened(path))
    assert not is_drawless(opened(path, decode=None, transform=noisy_crop))


def test_a_store_given_by_the_caller_is_not_closed(path):
    with open_store(f"lmdb:{path}") as store:
        first = store.get_many([0])
        with store.borrow([0]):
            StoreDataset(store, decode=None)
            assert store._open is not None
        assert store.get_many([0]) == first


def test_no_pickle_is_run_without_trust(tmp_path, opened):
    made = tmp_path / "made by a pickle"
    hand_made(tmp_path / "a.lmdb", [Program(str(made))] * 3)
    for options in ({}, {"layout": "pickle"}, {"layout": "pickle", "trusted": 1}):
        with pytest.raises((StoreError, ConfigError)):
            _ = opened(tmp_path / "a.lmdb", **options)[0]
    assert not made.exists()


def test_a_damaged_pickle_is_named(tmp_path, opened):
    import lmdb

    hand_made(tmp_path / "a.lmdb", [(b"x", 1)] * 3)
    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        txn.put(b"1", b"\x80\x04junk")
        txn.delete(b"2")
    dataset = opened(tmp_path / "a.lmdb", layout="pickle", trusted=True)
    assert dataset[0] == (b"x", 1)
    with pytest.raises(StoreError, match=r"the value of '1' in lmdb:.*cannot be unpickled"):
        _ = dataset[1]
    with pytest.raises(StoreError, match="are not there: '2'"):
        _ = dataset[2]


def test_a_missing_extra_is_named():
    script = """
    import sys
    sys.modules["lmdb"] = None
    from penstock.stores import open_store
    open_store("lmdb:a")
    """
    said = "MissingExtraError: this store needs lmdb, which is not installed. Install it with: "
    assert f"{said}{install_command('lmdb')}\n" in python("-c", script).stderr


class Numbered(StoreDataset):
    """A dataset of the user's whose samples have one member more."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


@pytest.mark.parametrize("name", ["penstock", "penstock.torch", "torch.utils.data"])
def test_a_getitem_of_a_subclass_is_heard_in_batches_too(path, name):
    library = pytest.importorskip(name)
    make_loader = Loader if name == "penstock" else library.DataLoader
    dataset = Numbered(str(path), transform=np.mean)
    batches = list(make_loader(dataset, batch_size=2))
    assert all(len(batch) == 3 for batch in batches)
    assert [int(i) for batch in batches for i in batch[2]] == list(range(len(dataset)))
    dataset.close()
