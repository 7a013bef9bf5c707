# SPDX-License-Identifier: Apache-2.0
"""A password in an address comes out nowhere: not in errors, texts, logs, warnings or pages."""

from __future__ import annotations

import re
import urllib.parse
import warnings

import pytest

pytest.importorskip("pymongo")
pytest.importorskip("typer")

from tests.images.making import picture, saved

from penstock import Loader
from penstock.cli import main
from penstock.stores import MongoDataset, StoreDataset, create_store, open_store, pack
from penstock.torch import DataLoader

SECRET = "Hunter2Secret"
QUICK = "serverSelectionTimeoutMS=30&connectTimeoutMS=30"
HOST = f"127.0.0.1:1/lab.photos?{QUICK}"
# How a password may be typed, well or badly.
ADDRESSES = {
    "plain": f"mongodb://ada:{SECRET}@{HOST}",
    "with a sign": f"mongodb://ada:{urllib.parse.quote(SECRET + '@/:')}@{HOST}",
    "not quoted": f"mongodb://ada:a@{SECRET}@{HOST}",
    "a slash in it": f"mongodb://ada:a/{SECRET}@{HOST}",
    "of hosts": f"mongodb://ada:{SECRET}@127.0.0.1:1,127.0.0.1:2/lab.photos?{QUICK}",
    "wrong port": f"mongodb://ada:{SECRET}@127.0.0.1:port/lab.photos",
    "no collection": f"mongodb://ada:{SECRET}@127.0.0.1:1/lab",
    "unknown option": f"mongodb://ada:{SECRET}@{HOST}&nonsense=1",
    "in an option": f"mongodb://{HOST}&tls=true&tlsCertificateKeyFilePassword={SECRET}",
    "in another": f"mongodb://ada@{HOST}&authMechanismProperties=AWS_SESSION_TOKEN:{SECRET}",
    "misspelt scheme": f"mongo://ada:{SECRET}@{HOST}",
    "without slashes": f"mongodb:ada:{SECRET}@{HOST}",
    "of a service": f"https://ada:{SECRET}@127.0.0.1:1/lab.photos",
    "signed": f"s3://bucket/a.lmdb?X-Amz-Signature={SECRET}",
}


def shown(thing):
    """Return all texts that an object shows of itself."""
    return [repr(thing), str(thing), *(
        getattr(thing, name)() for name in ("_repr_html_",) if hasattr(thing, name)
    )]  # fmt: skip


def a_dataset(address):
    dataset = StoreDataset(open_store(address))
    texts = [*shown(dataset), *shown(Loader(dataset, 2)), *shown(DataLoader(dataset, 2))]
    return [*texts, dataset[0]]


def of_loader(num_workers):
    def act(address):
        dataset = MongoDataset(address)
        return list(Loader(dataset, batch_size=2, num_workers=num_workers, on_error="raise"))

    return act


# What is done with an address; names of commands are their arguments.
ACTS = {
    "open_store": lambda address: [*shown(open_store(address)), len(open_store(address))],
    "labels": lambda address: open_store(address).labels,
    "create_store": create_store,
    "pack to": lambda address: pack([b"x"], address),
    "pack from": lambda address: pack(open_store(address), "lmdb:a.lmdb"),
    "dataset": a_dataset,
    "MongoDataset": lambda address: len(MongoDataset(address)),
    "a loader": of_loader(0),
    "a loader with a worker": of_loader(1),
    "a keyword": lambda address: open_store(address, nonsense=1),
    **{
        " ".join(words): words
        for words in (
            ("pack", "A", "lmdb:a.lmdb"), ("pack", "images", "A"), ("pack", "--resume", "A", "A"),
            ("check", "A"), ("check", "--json", "A"), ("stats", "A"), ("stats", "--json", "A"),
            ("view", "A"), ("tune", "A"), ("report", "A"), ("split", "A"),
            ("convert", "A", "out", "--to", "voc"), ("doctor", "A"), ("explain", "A"),
            ("doctor", "--storage", "A"),
            ("stats", "--column", "A", "A"), ("check", "--no-such-option", "A"), ("A",),
        )
    },
}  # fmt: skip


def texts_of(act, address):
    """Return everything that comes of an act, but for what goes to the terminal and the logs."""
    try:
        if isinstance(act, tuple):
            main([address if word == "A" else word for word in act])
            return []
        return shown(act(address))
    except BaseException as error:
        return [*shown(error), str(getattr(error, "__notes__", "")), *causes(error)]


def causes(error):
    """Return the texts of all that a traceback shows an error to have come of."""
    seen = []
    while error := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        seen += shown(error)
    return seen


QUICK_ACTS = ("a keyword", "pack --resume A A", "explain A")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK_ACTS else pytest.mark.slow) for n in ACTS],
)
def test_no_password_comes_out(name, tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images/cat").mkdir(parents=True)
    (tmp_path / "images/cat/1.png").write_bytes(saved(picture(), "PNG"))
    caplog.set_level(0)
    leaks = []
    for kind, address in ADDRESSES.items():
        caplog.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            texts = texts_of(ACTS[name], address)
        out, err = capfd.readouterr()
        told = [
            ("error", " ".join(map(str, texts))), ("stdout", out), ("stderr", err),
            ("log", " ".join(r.getMessage() + str(r.exc_info) for r in caplog.records)),
            ("warning", " ".join(str(w.message) for w in warned)),
        ]  # fmt: skip
        for where, text in told:
            # Errors about arguments are broken into lines, with a frame around them.
            if SECRET in re.sub(r"[^\w]", "", text):
                leaks.append(f"{kind}: {where}: {text[max(text.find(SECRET) - 90, 0) :][:300]}")
    leaks += [f"file {p}" for p in files_with_secret(tmp_path)]
    assert not leaks, "\n".join(leaks)


def files_with_secret(folder):
    return [
        path for path in folder.rglob("*")
        if SECRET in path.name or (path.is_file() and SECRET.encode() in path.read_bytes())
    ]  # fmt: skip
