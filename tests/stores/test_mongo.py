# SPDX-License-Identifier: Apache-2.0
"""MongoDB stores, against a real server: the contract, and what is MongoDB's own."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.support.processes import python
from tests.support.stores import refused

if os.environ.get("PENSTOCK_REQUIRE_MONGO") != "1":
    pytest.importorskip("pymongo", reason='no pymongo: pip install "penstock-loader[mongo]"')

import gridfs
import pymongo
import pymongo.errors
from bson import Int64, ObjectId
from tests.stores.mongod import (  # noqa: F401 - the fixtures are found by their names
    PASSWORD,
    USER,
    AnswerLosing,
    Mongod,
    free_port,
    mongod,
    mongod_program,
    own_mongod,
    served,
)

from penstock import Loader
from penstock.errors import ConfigError, StoreError, StoreUnreachable
from penstock.stores import (
    EncodedImage,
    MongoDataset,
    create_store,
    open_store,
    pack,
)
from penstock.stores.mongo import connection as mongo_connection
from penstock.stores.mongo import writer as mongo_writer
from penstock.stores.mongo.collection import own_documents
from penstock.stores.mongo.connection import MongoAddress
from penstock.stores.mongo.connection import _clients as clients
from penstock.stores.mongo.store import MongoStore
from penstock.stores.mongo.writer import MongoWriter
from penstock.stores.records import encode_record
from penstock.testing.stores import StoreContract

SECRETS = (PASSWORD, "p%40ss", "50%25", USER + ":", f"'{USER}'")


def image(number, size=2000):
    return b"\xff\xd8\xff\xe0" + np.random.default_rng(number).bytes(size)


def encoded(pixels):
    import cv2

    return cv2.imencode(".jpg", pixels)[1].tobytes()


def pairs(count):
    return [(EncodedImage(image(number)), number % 5) for number in range(count)]


def records(count):
    return [encode_record(f"{i}.jpg", sample, sample[1]) for i, sample in enumerate(pairs(count))]


def written(uri, items, **facts):
    writer = MongoWriter(uri, **facts)
    try:
        writer.put_many(items)
        writer.finish()
    finally:
        writer.close()
    return uri


def shown(error):
    """All that can be seen of an error: text, causes, contexts, notes, and what pickles."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(pickle.dumps(error))


def assert_no_secret(text):
    assert not [secret for secret in SECRETS if secret in text], text


@pytest.fixture
def uri(mongod, tmp_path):  # noqa: F811
    """The address of a collection that is not there yet."""
    return mongod.uri(f"tests.{tmp_path.name}")


@pytest.fixture
def collection(mongod, tmp_path):  # noqa: F811
    """The same, by pymongo."""
    with mongod.client() as client:
        yield client.tests[tmp_path.name]


class TestMongo(StoreContract):
    @pytest.fixture(autouse=True)
    def served(self, mongod):  # noqa: F811
        self.server = mongod

    def place(self, tmp_path):
        return self.server.uri(f"contract.{tmp_path.name}")

    def open(self, address):
        return open_store(address)

    def create(self, address, **facts):
        writer = create_store(address, **facts)
        writer._message_bytes = 5000
        return writer

    def interrupt(self, writer, records):
        writer._message_bytes = 1
        super().interrupt(writer, records)

    def of(self, address, act):
        with self.server.client() as client:
            return act(client.contract[MongoAddress.parse(address).collection])

    def raw(self, address):
        return self.of(
            address, lambda there: {d["key"]: d["record"] for d in there.find({"_id": {"$gte": 0}})}
        )

    def damage(self, address, key, data):
        self.of(address, lambda there: there.update_one({"key": key}, {"$set": {"record": data}}))

    def remove(self, address, key):
        self.of(address, lambda there: there.delete_one({"key": key}))


# Addresses and secrets


def test_an_address_is_shown_without_user_password_and_options(uri, mongod, tmp_path):  # noqa: F811
    written(uri, records(2))
    dataset = MongoDataset(uri, decode=None)
    plain = f"mongodb://{mongod.host}/tests.{tmp_path.name}"
    assert dataset.store.address == plain
    assert_no_secret(repr(dataset))  # whose line is short
    for text in (repr(dataset.store), repr(MongoAddress.parse(uri))):
        assert plain in text
        assert_no_secret(text)
    dataset.close()


@pytest.mark.parametrize(
    "wrong",
    [
        f"mongodb://{USER}:{PASSWORD}@host/db.c",  # not escaped
        f"mongodb://{USER}:p%40ss@host:1/db",
        f"mongodb://{USER}:p%40ss@host/db.c?w",
        f"mongodb://{USER}:p%40ss@host/db.c?timeoutMS=p%40ss",
        f"mongodb://{USER}:p%40ss@host/db.c?p%40ss=1",
        f"mongodb://{USER}:p%40ss@ho st/db.c",
        f"mongodb://{USER}:p%40ss:x@host/db.c",
        f"mongodb://{USER}:1/p%40ss@host/db.c",
        "mongodb://",
    ],
)
def test_a_wrong_address_is_refused_without_being_quoted(wrong):
    with pytest.raises(ConfigError, match="address") as caught:
        MongoStore(wrong)
    assert_no_secret(shown(caught.value))


def test_an_option_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match="'tlss' is unknown to pymongo"):
        MongoStore("mongodb://localhost/db.c?tlss=true")


def test_client_options_that_do_not_fit_are_refused_without_their_secrets():
    store = MongoStore(
        "mongodb://localhost/db.c",
        client_options={"username": USER, "password": PASSWORD, "maxPoolSize": PASSWORD},
    )
    with pytest.raises(ConfigError, match="maxPoolSize") as caught:
        len(store)
    assert PASSWORD not in shown(caught.value)


def test_a_wrong_password_is_refused_at_once_and_not_shown(mongod):  # noqa: F811
    store = MongoStore(mongod.uri("tests.c", password=PASSWORD + "!"))
    start_s = time.monotonic()
    with pytest.raises(StoreError, match=r"Authentication failed.*code 18.*authSource") as caught:
        len(store)
    assert time.monotonic() - start_s < 20  # and not retry_s
    assert_no_secret(shown(caught.value))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_no_server_is_an_error_within_the_time_to_retry():
    uri = f"mongodb://{USER}:p%40ss@127.0.0.1:{free_port()}/db.c"
    start_s = time.monotonic()
    with pytest.raises(StoreUnreachable) as caught:
        MongoDataset(uri, retry_s=1.5)
    assert time.monotonic() - start_s < 4
    assert str(caught.value).startswith(
        f"cannot read {MongoAddress.parse(uri)}: no answer from 127"
    )
    assert "Connection refused" in str(caught.value)
    assert "Is mongod running there" in str(caught.value)
    assert "A larger `retry_s` waits longer" in str(caught.value)
    assert_no_secret(shown(caught.value))


def test_first_contact_waits_5_seconds_at_most_and_the_log_says_that_it_waits(caplog):
    uri = f"mongodb://127.0.0.1:{free_port()}/db.c"
    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        for raised in [
            threads.submit(MongoDataset, uri),
            threads.submit(MongoWriter, uri.replace("db.c", "db.d")),
        ]:
            error = raised.exception()
            assert type(error) is StoreUnreachable
            assert "`retry_s` (60 s) is for servers that answered before" in str(error)
    assert time.monotonic() - start_s < 8
    said = [record for record in caplog.records if record.name == "penstock"]
    assert [record.levelname for record in said] == ["WARNING", "WARNING"]
    assert "db.c does not answer" in caplog.text
    assert "waiting for it, 5 s at most" in caplog.text


def test_who_knows_the_server_waits_for_it_longer_than_first_contact_does(
    own_mongod,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(mongo_connection, "_FIRST_CONTACT_S", 0.1)
    uri = own_mongod.uri("tests.c")
    written(uri, records(4))
    with MongoStore(uri) as store:
        len(store)
    own_mongod.kill()
    with pytest.raises(StoreUnreachable):
        len(MongoStore(uri))
    timer = threading.Timer(1.5, own_mongod.start)
    timer.start()
    with pickle.loads(pickle.dumps(store)) as copy:  # as a worker gets one
        assert copy.get_many([3])[0].key == "3.jpg"
    timer.join()


def test_a_name_that_cannot_be_looked_up_is_a_server_out_of_reach(monkeypatch):
    import dns.resolver

    no_server = dns.resolver.Resolver(configure=False)
    no_server.nameservers, no_server.port = ["127.0.0.1"], free_port()
    monkeypatch.setattr(dns.resolver, "default_resolver", no_server)
    uri = f"mongodb+srv://{USER}:p%40ss@db.lab.example/db.c?connectTimeoutMS=300"
    with pytest.raises(StoreUnreachable, match=r"mongodb\+srv://db.lab.example/db.c") as caught:
        MongoDataset(uri, retry_s=1)
    assert_no_secret(shown(caught.value))


def test_what_the_driver_says_is_masked_where_it_is_secret_and_nowhere_else():
    address = MongoAddress.parse(
        "mongodb://u:p%40ss%2Bw@host/db.c?authMechanismProperties=AWS_SESSION_TOKEN:tok9"
    )
    plain = "configured timeouts for user u: socketTimeoutMS: 20000.0ms"
    assert address.scrubbed(plain) == plain
    said = "mongodb://u:p%40ss%2Bw@host/db: p@ss+w, p%40ss%2Bw, tok9, u"
    assert address.scrubbed(said) == "mongodb://***@host/db: ***, ***, ***, u"
    options = {"username": "me", "password": "abc", "proxyPassword": "xyz"}
    assert address.scrubbed("some abc, xyz", options) == "some ***, ***"
    assert MongoAddress.parse("mongodb://a:c@h/d.c").scrubbed("cannot") == "cannot"


# Clients


def test_stores_of_one_server_share_a_client_that_the_last_one_closes(uri):
    written(uri, records(3))
    one, other = MongoStore(uri), MongoStore(uri)
    larger = MongoStore(uri, client_options={"maxPoolSize": 5})
    assert [len(one), len(other), len(larger)] == [3, 3, 3]
    assert [entry.num_users for entry in clients._entries.values()] == [2, 1]
    client = next(iter(clients._entries.values())).thing.client
    assert client.options.pool_options.max_pool_size == 2
    assert client.options.pool_options.appname == "penstock"
    one.close()
    assert one.get_many([1])[0].label == 1
    one.close()
    other.close()
    larger.close()
    assert not clients._entries
    with pytest.raises(pymongo.errors.InvalidOperation):
        client.admin.command("ping")


def test_what_was_never_closed_is_closed_at_exit_without_a_word(uri):
    written(uri, records(3))
    script = f"""
from penstock.stores.mongo.store import MongoStore
store = MongoStore({uri!r})
assert len(store.get_many([0, 1])) == 2
itself = [MongoStore({uri!r})]
itself.append(itself)
len(itself[0])
del itself
"""
    ended = python("-W", "error", "-X", "dev", "-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_options_of_the_uri_come_before_ours(mongod, tmp_path):  # noqa: F811
    options = "authSource=admin&MAXPOOLSIZE=7&appName=mine&compressors=zlib"
    uri = mongod.uri(f"tests.{tmp_path.name}", options=options)
    written(uri, records(3))
    with MongoStore(uri) as store:
        assert len(store.get_many([0, 1])) == 2
        (entry,) = clients._entries.values()
        assert entry.thing.client.options.pool_options.max_pool_size == 7
        assert entry.thing.client.options.pool_options.appname == "mine"


def read_all(store, sender):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sender.send([bytes(r.sample[0].data) for r in store.scan()])
        sender.send(len(clients._forgotten))


def test_a_forked_child_makes_its_own_client_and_leaves_the_parents_alone(uri):
    written(uri, records(40))
    store = MongoStore(uri)
    store.get_many([0])
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=read_all, args=(store, sender))
    child.start()
    sender.close()
    assert receiver.recv() == [image(number) for number in range(40)]
    assert receiver.recv() == 1
    child.join()
    receiver.close()
    assert child.exitcode == 0
    assert store.get_many([39])[0].sample[0].data == image(39)
    store.close()


class Listener(pymongo.monitoring.CommandListener):
    """Calls a function with each command that is sent."""

    def __init__(self, started):
        self.started = started

    def succeeded(self, event):
        pass

    failed = succeeded


def test_a_batch_is_one_query_and_names_what_it_needs(uri):
    written(uri, records(200))
    queries = []
    with MongoStore(uri, client_options={"event_listeners": [Listener(queries.append)]}) as store:
        len(store)
        queries.clear()
        found = store.get_many(np.random.default_rng(0).permutation(200).repeat(2))
    assert len(found) == 400
    assert [q.command_name for q in queries if q.command_name != "endSessions"] == ["find"]
    assert set(queries[0].command["projection"]) == {"record", "file", "fingerprint"}


# The server goes away


def test_a_read_outlasts_a_server_that_is_killed_and_restarted(own_mongod):  # noqa: F811
    uri = own_mongod.uri("tests.c")
    written(uri, records(20))
    with MongoStore(uri) as store:
        store.get_many([0])
        own_mongod.kill()
        timer = threading.Timer(1.0, own_mongod.start)
        timer.start()
        assert [r.key for r in store.get_many([7, 3])] == ["7.jpg", "3.jpg"]
        timer.join()
        own_mongod.kill()
        store._retry_s = 1.0
        store.close()
        with pytest.raises(StoreError, match="no answer from 127") as caught:
            store.get_many([7])
        assert_no_secret(shown(caught.value))
        store._retry_s = 60.0
        own_mongod.start()
        assert store.get_many([7])[0].key == "7.jpg"


def test_an_epoch_outlasts_a_server_that_is_killed_and_restarted(own_mongod):  # noqa: F811
    uri = own_mongod.uri("tests.c")
    written(uri, records(240))
    dataset = MongoDataset(uri, decode=None)
    facts = {"batch_size": 8, "shuffle": True, "seed": 3, "num_workers": 2, "collate_fn": list}
    expected = list(Loader(dataset, **{**facts, "num_workers": 0}))
    dataset.close()
    got = []
    timer = threading.Timer(1.0, own_mongod.start)
    for step, batch in enumerate(Loader(dataset, **facts)):
        got.append(batch)
        if step == 4:
            own_mongod.kill()
            timer.start()
    timer.join()
    assert got == expected
    assert sorted(sample for batch in got for sample in batch) == sorted(
        (image(number), number % 5) for number in range(240)
    )


@pytest.mark.parametrize("command", ["insert", "renameCollection", "delete"])
def test_a_write_whose_answer_is_lost_is_done_again_without_doubling(
    command,
    mongod,  # noqa: F811
    tmp_path,
):
    uri = mongod.uri(f"tests.{tmp_path.name}")
    items = records(9)
    with AnswerLosing(mongod.port) as proxy:
        writer = MongoWriter(uri.replace(f":{mongod.port}/", f":{proxy.port}/"))
        proxy.lose_answer_to(command)
        writer.put_many(items)
        writer.finish()
        assert proxy.num_lost == 1
    with MongoStore(uri) as store:
        assert [record.key for record in store.scan()] == [item.key for item in items]
    MongoWriter(uri).close()  # the lock was given back


# Packed collections


def test_documents_are_laid_out_as_the_page_says(uri, collection):
    items = records(3)
    written(uri, items, class_names=("a", "b"), what="three")
    for position, item in enumerate(items):
        document = collection.find_one({"_id": position})
        assert document == {
            "_id": position,
            "key": item.key,
            "label": item.label,
            "record": item.data,
        }
    named = [d["_id"] for d in collection.find({"_id": {"$type": "string"}}, sort=[("_id", 1)])]
    assert named == ["penstock.index.0", "penstock.pack", "penstock.summary"]
    assert collection.find_one({"_id": "penstock.pack"})["what"] == "three"
    summary = collection.find_one({"_id": "penstock.summary"})
    with MongoStore(uri) as store:
        assert summary["fingerprint"] == store.fingerprint
        assert summary["count"] == 3


def test_a_large_record_that_an_earlier_release_put_into_gridfs_is_read(uri, collection):
    items = records(3)
    written(uri, items)
    bucket = gridfs.GridFSBucket(collection.database, f"{collection.name}.penstock")
    file_id = bucket.upload_from_stream("1.jpg", items[1].data, chunk_size_bytes=500)
    change = {"$set": {"file": file_id}, "$unset": {"record": 1}}
    collection.update_one({"_id": 1}, change)
    with MongoStore(uri) as store:
        assert [record.key for record in store.get_many([1, 2, 1, 0])] == [
            "1.jpg", "2.jpg", "1.jpg", "0.jpg",
        ]  # fmt: skip
        collection.database[f"{collection.name}.penstock.chunks"].delete_one({"n": 2})
        with pytest.raises(StoreError, match="lacks a part"):
            store.get_many([1])
        bucket.delete(file_id)
        with pytest.raises(StoreError, match=r"'1\.jpg'"):
            store.get_many([0, 1])


def test_a_record_larger_than_a_document_is_refused(uri):
    writer = MongoWriter(uri)
    with pytest.raises(StoreError, match=r"record 'large' has 17,.* Pack into an LMDB file"):
        writer.put_many([encode_record("large", {"x": bytes(17_000_000)})])
    writer.close()


def test_an_index_larger_than_a_document_comes_in_parts(uri, collection):
    # Keys of 100 kB, so that few records make a large index.
    items = [encode_record(f"{number:03}" + "k" * 100_000, number, number) for number in range(180)]
    written(uri, items)
    assert collection.count_documents({"_id": {"$regex": "^penstock.index"}}) == 3
    with MongoStore(uri) as store:
        assert store.labels.tolist() == list(range(180))
        assert store.keys[179] == items[179].key
    collection.delete_one({"_id": "penstock.index.1"})
    refused(MongoStore(uri), r"speaks of 3 parts of its index, and 2 are there")


def test_a_collection_that_is_replaced_while_its_index_is_read_is_found(uri, monkeypatch):
    monkeypatch.setattr(mongo_writer, "_INDEX_PART_BYTES", 8)  # more than one reply can hold
    written(uri, records(40))
    counts = [30]

    def replace(event):  # before the rest of what a query finds is asked for
        if event.command_name == "getMore" and counts:
            written(uri, records(counts.pop()))

    with MongoStore(uri, client_options={"event_listeners": [Listener(replace)]}) as store:
        assert len(store) == 30
        assert len(store.get_many(range(30))) == 30
    assert not counts


def test_a_collection_packed_anew_is_not_read_with_the_old_index(uri, collection):
    written(uri, records(5))
    store = MongoStore(uri)
    assert len(store.get_many([0])) == 1
    copy = pickle.dumps(store)
    shrunk = [encode_record(r.key, (EncodedImage(b"shrunk"), r.label), r.label) for r in records(5)]
    written(uri, shrunk)  # the same keys
    for one in (store, pickle.loads(copy)):
        for read in (one.get_many, lambda p, s=one: s.borrow_images(np.array(p)).__enter__()):
            with pytest.raises(StoreError, match="packed anew while it was in use"):
                read([0])
        one.close()
    with MongoStore(uri) as anew:
        assert anew.get_many([0])[0].sample[0].data == b"shrunk"
        collection.drop()
        with pytest.raises(StoreError, match="now there is none"):
            anew.get_many([0])


IMAGE = image(2)
HOSTILE = {
    "another record": records(5)[3].data,
    "no pair": encode_record("2.jpg", {"x": bytes(500)}, 2).data,
    "padding first": encode_record("2.jpg", (b"x" * 64, EncodedImage(IMAGE)), 2).data,
    "another label": encode_record("2.jpg", (EncodedImage(IMAGE), 3), 3).data,
    "not binary": "text",
    "nothing": None,
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("verify", [True, False])
def test_a_record_that_is_no_image_of_its_own_is_never_taken_for_one(uri, collection, kind, verify):
    written(uri, records(5))
    collection.update_one({"_id": 2}, {"$set": {"record": HOSTILE[kind]}})
    with MongoStore(uri, verify=verify) as store:
        assert store.index.are_pairs
        with pytest.raises(StoreError, match=r"'2\.jpg'"), store.borrow_images(np.array([1, 2])):
            pass
        if kind == "another record":
            with pytest.raises(StoreError, match=r"the record of '3\.jpg' lies there"):
                store.get_many([2])


@pytest.mark.parametrize(
    ("document", "field", "value", "expected"),
    [
        ("summary", "count", 4, "its summary speaks of 4 records .* its index of 5"),
        ("summary", "count", None, "its summary speaks of None records"),
        ("summary", "num_index_parts", 10**12, "speaks of 1000000000000 parts"),
        ("summary", "num_index_parts", "many", "speaks of 'many' parts"),
        ("summary", "fingerprint", None, "with the fingerprint None, its index of 5"),
        ("index.0", "data", "text", "or not all are binary"),
        ("index.0", "data", b"PNSK", "index of .* is truncated"),
        ("index.0", "data", encode_record("index", [1]).data, "index of .* is damaged"),
    ],
)
def test_documents_of_the_index_that_were_damaged_are_named(
    uri, collection, document, field, value, expected
):
    written(uri, records(5))
    collection.update_one({"_id": f"penstock.{document}"}, {"$set": {field: value}})
    with pytest.raises(StoreError, match=expected) as caught:
        len(MongoStore(uri))
    assert collection.name in str(caught.value)


def test_fields_are_not_named_for_a_packed_collection(uri):
    written(uri, records(1))
    refused(MongoStore(uri, image_field="record"), "was packed by Penstock", ConfigError)


@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_packing_does_not_drop_a_collection_of_somebodys(uri, collection, suffix):
    theirs = collection.database[f"{collection.name}{suffix}"]
    theirs.insert_one({"precious": 1})
    with pytest.raises(StoreError, match=rf"{collection.name}{suffix} holds .* did not write"):
        MongoWriter(uri)
    assert theirs.find_one()["precious"] == 1


def test_an_unfinished_collection_says_how_to_finish_it(uri):
    writer = MongoWriter(uri)
    writer.put_many(records(2))
    writer.close()
    with pytest.raises(StoreError, match=r"unfinished.*--resume"):
        MongoDataset(uri)


def test_no_client_is_open_between_the_making_of_a_writer_and_its_first_records(uri):
    writer = MongoWriter(uri)
    assert not clients._entries
    writer.put_many(records(2))
    writer.finish()
    assert not clients._entries


def test_resuming_refuses_what_is_damaged(uri, collection):
    items = records(4)
    writer = MongoWriter(uri, what="a")
    writer.put_many(items[:3])
    writer.close()
    partial = collection.database[f"{collection.name}.partial"]
    partial.update_one({"_id": 1}, {"$set": {"record": b"rotten"}})
    with pytest.raises(StoreError, match=r"record 1 of .*partial is truncated"):
        MongoWriter(uri, what="a", resume=True)
    written(uri, items)
    with MongoStore(uri) as store:
        assert [record.key for record in store.scan()] == [item.key for item in items]


def waiting_records_of(uri, **facts):
    """Keys that a writer that resumes finds."""
    writer = MongoWriter(uri, resume=True, **facts)
    try:
        return [key for key, _ in writer.written()]
    finally:
        writer.close()


def test_closing_an_interrupted_writer_keeps_the_records_that_wait(uri, collection):
    writer = MongoWriter(uri, what="a")
    writer.put_many(records(20))
    partial = collection.database[f"{collection.name}.partial"]
    assert partial.count_documents({"_id": {"$gte": 0}}) == 0
    writer.close()
    assert waiting_records_of(uri, what="a") == [f"{number}.jpg" for number in range(20)]


class Interrupting(pymongo.monitoring.CommandListener):
    """A Ctrl-C that comes when the server has carried out an insert."""

    is_armed = False

    def started(self, event): ...

    def failed(self, event): ...

    def succeeded(self, event):
        if self.is_armed and event.command_name == "insert":
            self.is_armed = False
            raise KeyboardInterrupt


def test_a_ctrl_c_in_the_middle_of_an_insert_loses_and_doubles_nothing(uri):
    ctrl_c = Interrupting()
    writer = MongoWriter(uri, what="a", client_options={"event_listeners": [ctrl_c]})
    writer.put_many(records(9))
    ctrl_c.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        writer._flush()
    assert not ctrl_c.is_armed
    writer.close()
    assert waiting_records_of(uri, what="a") == [f"{number}.jpg" for number in range(9)]


def test_closing_a_writer_whose_server_is_away_takes_no_minute(own_mongod):  # noqa: F811
    writer = MongoWriter(own_mongod.uri("tests.c"), retry_s=1)
    writer.put_many(records(3))
    own_mongod.kill()
    start_s = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"lock on .* stays"):
        writer.close()
    assert time.monotonic() - start_s < 10


def test_resuming_what_is_complete_finds_nothing_to_be_done(uri, collection):
    items = records(6)
    written(uri, items, what="a")
    summary = collection.find_one({"_id": "penstock.summary"})
    pack_id = collection.find_one({"_id": "penstock.pack"})
    writer = MongoWriter(uri, what="a", resume=True)
    assert writer.finished
    assert list(writer.written()) == [(item.key, item.label) for item in items]
    with pytest.raises(StoreError, match="is complete"):
        writer.put_many(records(7)[6:])
    writer.finish()
    writer.close()
    assert collection.find_one({"_id": "penstock.summary"}) == summary
    assert collection.find_one({"_id": "penstock.pack"}) == pack_id
    assert f"{collection.name}.partial" not in collection.database.list_collection_names()
    for what, resume in (("b", True), ("a", False)):
        writer = MongoWriter(uri, what=what, resume=resume)
        assert not writer.finished
        assert list(writer.written()) == []
        writer.close()
    writer = MongoWriter(uri, what="a", resume=True)  # something is left unfinished
    assert not writer.finished
    writer.close()


forks_with_a_client: list[int] | None = None


def note_fork():
    if forks_with_a_client is not None:
        forks_with_a_client.append(len(clients._entries))


os.register_at_fork(before=note_fork)


def test_a_dataset_that_was_opened_leaves_no_client_for_workers_to_inherit(uri):
    written(uri, records(3))
    dataset = MongoDataset(uri, decode=None)
    assert not clients._entries
    assert len(dataset) == 3


@pytest.mark.usefixtures("workers_by_fork")
def test_packing_forks_no_worker_while_a_client_is_open(uri, monkeypatch):
    written(uri, records(100))
    for source in ([(EncodedImage(image(number)), 0) for number in range(100)], uri):
        monkeypatch.setitem(globals(), "forks_with_a_client", [])
        pack(source, uri.replace("?", "_packed?"), num_workers=2, overwrite=True)
        assert forks_with_a_client == [0, 0]


def test_a_lock_of_another_machine_stays_and_the_remedy_is_named(uri, collection):
    lock = {
        "_id": collection.name,
        "token": ObjectId(),
        "host": "elsewhere.lan",
        "pid": 1,
        "started": "1",
        "time": ObjectId().generation_time,
    }
    locks = collection.database["penstock.locks"]
    locks.insert_one(lock)
    with pytest.raises(StoreError, match=r"on elsewhere.lan.*mongosh: db.getCollection") as caught:
        MongoWriter(uri)
    assert f'deleteOne({{_id: "{collection.name}"}})' in str(caught.value)
    assert locks.find_one({"_id": collection.name})["token"] == lock["token"]
    locks.delete_one({"_id": collection.name})
    MongoWriter(uri).close()
    assert locks.find_one({"_id": collection.name}) is None


def test_a_collection_is_replaced_only_on_request(uri, collection):
    pack([1, 2, 3], uri)
    for resume in (False, True):
        with pytest.raises(StoreError, match="is there already") as caught:
            pack([4], uri, resume=resume)
        assert_no_secret(str(caught.value))
    assert pack([1, 2, 3], uri, resume=True).num_resumed == 3
    with open_store(uri) as store:
        assert len(store) == 3
    bucket = f"{collection.name}.penstock"  # where an earlier release put large records
    gridfs.GridFSBucket(collection.database, bucket).upload_from_stream("1.jpg", b"large")
    pack([4], uri, overwrite=True)
    with open_store(uri) as store:
        assert len(store) == 1
    names = collection.database.list_collection_names()
    assert not [name for name in names if name.startswith(bucket)]


def test_a_collection_that_lost_records_is_not_put_in_its_place(uri, collection):
    writer = MongoWriter(uri)
    writer._message_bytes = 1
    writer.put_many(records(3))
    collection.database[f"{collection.name}.partial"].delete_one({"_id": 1})
    with pytest.raises(StoreError, match="has 2 records instead of 3"):
        writer.finish()
    writer.close()
    assert collection.find_one() is None


# Collections of other making


@pytest.fixture
def foreign(collection):
    """Documents as a team keeps them: with more in them than images."""
    names = ("hen", "cat", "dog")
    documents = [
        {
            "path": f"{number}.jpg",
            "meta": {"class": names[number % 3], "number": float(number % 3)},
            "data": image(number),
            "thumbnail": bytes(10),
        }
        for number in range(20)
    ]
    collection.insert_many(documents)
    return collection


def test_a_collection_of_somebodys_is_read_by_naming_its_fields(foreign, uri):
    dataset = MongoDataset(
        uri, image_field="data", label_field="meta.class", key_field="path", decode=None
    )
    assert dataset.class_names == ("cat", "dog", "hen")
    assert dataset.labels.tolist() == [(2, 0, 1)[number % 3] for number in range(20)]
    assert list(dataset.store.keys) == [f"{number}.jpg" for number in range(20)]
    assert dataset[7] == (image(7), 0)
    assert [bytes(s[0]) for s in dataset.__getitems__([3, 19, 3])] == [
        image(3),
        image(19),
        image(3),
    ]
    files, labels = dataset.get_batch(np.array([5, 2]), np.empty)
    assert files == (image(5), image(2))
    assert labels.tolist() == [1, 1]
    batches = list(Loader(dataset, batch_size=6, num_workers=2, collate_fn=list))
    assert [sample[0] for batch in batches for sample in batch] == [image(n) for n in range(20)]
    dataset.close()


def test_labels_may_be_numbers_or_absent_and_ids_are_the_usual_keys(foreign, uri):
    with MongoStore(uri, image_field="data", label_field="meta.number") as store:
        assert store.labels.tolist() == [number % 3 for number in range(20)]
        assert store.class_names == ()
        ids = [str(document["_id"]) for document in foreign.find(sort=[("_id", 1)])]
        assert list(store.keys) == ids
        with_labels = store.fingerprint
    with MongoStore(uri, image_field="data") as store:
        assert store.labels is None
        assert store.get_many([4])[0].sample == EncodedImage(image(4))
        assert store.fingerprint != with_labels


def test_a_query_selects_documents(foreign, uri):
    query = {"meta.class": "dog"}
    with MongoStore(uri, image_field="data", key_field="path", query=query) as store:
        assert list(store.keys) == [f"{number}.jpg" for number in range(2, 20, 3)]
        assert store.get_many([-1])[0].sample == EncodedImage(image(17))
    with pytest.raises(StoreError, match="no document that fits the query"):
        len(MongoStore(uri, image_field="data", query={"meta.class": "cow"}))


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2**40],
        ["penstock.b", "a", "c"],
        [{"shard": 1, "n": 2}, {"shard": 1, "n": 1}, {"shard": 0, "n": 3}],
        [b"\x01", 1.5, "mixed"],
        [ObjectId(f"{n:024x}") for n in (256, 1, 2**30)],
    ],
    ids=["integers", "strings", "documents", "mixed", "ids that end in zeros"],
)
def test_ids_may_be_of_any_kind(collection, uri, ids):
    collection.insert_many({"_id": of, "data": image(n)} for n, of in enumerate(ids))
    order = [ids.index(d["_id"]) for d in collection.find({}, {"_id": 1}, sort=[("_id", 1)])]
    with MongoStore(uri, image_field="data") as store:
        for copy in (store, pickle.loads(pickle.dumps(store))):
            found = copy.get_many([2, 0, 1, 2])
            assert own_documents(copy._connection(), copy._address) == {}
            expected = [image(order[position]) for position in (2, 0, 1, 2)]
            assert [record.sample.data for record in found] == expected
            copy.close()


def test_images_may_be_files_in_gridfs(foreign, uri):
    with MongoStore(uri, image_field="data") as store:
        bucket = gridfs.GridFSBucket(foreign.database)
        file_id = bucket.upload_from_stream("large", image(99, 600_000))
        foreign.update_one({"path": "3.jpg"}, {"$set": {"data": file_id}})
        assert [r.sample.data for r in store.get_many([3, 4])] == [image(99, 600_000), image(4)]
        bucket.delete(file_id)
        with pytest.raises(StoreError, match=r"GridFS file .* which is not there"):
            store.get_many([3, 4])


def test_a_manifest_decides_on_order_and_labels(foreign, uri, tmp_path):
    manifest = tmp_path / "train.json"
    paths = ["9.jpg", "2.jpg", "11.jpg"]
    fields = {"image_field": "data", "key_field": "path", "manifest": manifest}
    manifest.write_text(json.dumps({"path_list": paths, "label_list": [4, 0, 7]}))
    with MongoStore(uri, **fields) as store:
        assert list(store.keys) == paths
        assert [r.sample for r in store.scan()] == [
            (EncodedImage(image(9)), 4),
            (EncodedImage(image(2)), 0),
            (EncodedImage(image(11)), 7),
        ]
    manifest.write_text(json.dumps({"path_list": paths, "label_list": ["b", "a", "b"]}))
    with MongoStore(uri, **fields) as store:
        assert store.class_names == ("a", "b")
        assert store.labels.tolist() == [1, 0, 1]
    for text, expected in {
        '{"path_list": ["no.jpg"], "label_list": [1]}': r"train.* 1 key.* not among .*no.jpg",
        '{"path_list": ["1.jpg"], "label_list": []}': "1 paths and 0 labels",
        '["1.jpg"]': r"path_list.*Expected `object`",
        "{": r"path_list.*truncated",
    }.items():
        manifest.write_text(text)
        refused(MongoStore(uri, **fields), expected)
    repeated = ["1.jpg", "2.jpg", "1.jpg", "1.jpg"]
    manifest.write_text(json.dumps({"path_list": repeated, "label_list": [1, 0, 1, 1]}))
    with MongoStore(uri, **fields) as store:
        assert list(store.keys) == repeated
        one, two = (EncodedImage(image(1)), 1), (EncodedImage(image(2)), 0)
        assert [r.sample for r in store.scan()] == [one, two, one, one]
        pack(store, f"lmdb:{tmp_path}/packed.lmdb", num_workers=0)
    assert open_store(tmp_path / "packed.lmdb").labels.tolist() == [1, 0, 1, 1]
    foreign.insert_many(
        [{"_id": "train", "path_list": paths, "label_list": [4.0, Int64(7), 1]}, {}]
    )
    with MongoStore(uri, **{**fields, "manifest": foreign.find_one({"_id": "train"})}) as store:
        assert list(store.keys) == paths  # and documents without a path do not matter
        assert store.labels.tolist() == [4, 7, 1]
    with pytest.raises(StoreError, match=r"manifest given of .*missing required field .label_l"):
        len(MongoStore(uri, **{**fields, "manifest": {"path_list": paths}}))
    manifest.unlink()
    refused(MongoStore(uri, **fields), rf"cannot read {manifest}: No such file")
    with pytest.raises(ConfigError, match="not from both"):
        MongoStore(uri, label_field="meta.class", **fields)


def test_unnamed_fields_are_asked_for_with_those_that_are_there(foreign, uri):
    with pytest.raises(StoreError) as caught:
        MongoDataset(uri)
    text = str(caught.value)
    assert "image_field=" in text
    assert "'path' (str)" in text
    assert "'data' (bytes)" in text


def test_an_absent_collection_says_how_to_make_it(uri):
    for fields in ({}, {"image_field": "data"}):
        with pytest.raises(StoreError, match="penstock pack SRC") as caught:
            MongoDataset(uri, **fields)
        assert_no_secret(shown(caught.value))


def test_documents_that_were_removed_or_hold_no_image_are_named(foreign, uri):
    with MongoStore(uri, image_field="data", key_field="path") as store:
        len(store)
        foreign.delete_many({"path": {"$in": ["4.jpg", "5.jpg"]}})
        with pytest.raises(StoreError, match=r"2 record.*'5.jpg', '4.jpg'"):
            store.get_many([3, 5, 4, 5])
        foreign.update_one({"path": "6.jpg"}, {"$unset": {"data": 1}})
        foreign.update_one({"path": "7.jpg"}, {"$set": {"data": "/images/7.jpg"}})
        with pytest.raises(StoreError, match=r"'6.jpg'.*has a NoneType there"):
            store.get_many([6])
        with pytest.raises(StoreError, match=r"'7.jpg'.*has a str there"):
            store.get_many([7])


def test_a_field_that_no_document_has_is_refused_on_opening_with_those_there_are(foreign, uri):
    fields = r"'path' \(str\), .*'data' \(bytes\)"
    for image_field in ("dta", "path"):
        with pytest.raises(StoreError, match=rf"image_field='{image_field}'.*{fields}"):
            MongoDataset(uri, image_field=image_field)
    with pytest.raises(StoreError, match=rf"label_field='lable'.*{fields}"):
        MongoDataset(uri, image_field="data", label_field="lable")


@pytest.mark.parametrize("label", [None, 1.5, [1, 2], "hen", float("nan"), float("inf"), -1e30])
def test_a_label_of_another_kind_is_named(foreign, uri, label):
    foreign.update_one({"path": "8.jpg"}, {"$set": {"meta.number": label}})
    fields = {"image_field": "data", "label_field": "meta.number", "key_field": "path"}
    refused(MongoStore(uri, **fields), r"label of '8.jpg' in")


def test_keys_that_repeat_or_lack_are_refused(foreign, uri):
    refused(MongoStore(uri, image_field="data", key_field="name"), "has no field 'name'")
    refused(MongoStore(uri, image_field="data", key_field="meta.class"), "'hen' comes twice")


def test_the_python_of_the_page_runs(foreign, uri, mongod, tmp_path, monkeypatch, capsys):  # noqa: F811
    page = Path(__file__).parents[2] / "docs" / "mongodb.md"
    if not page.exists():
        pytest.skip("the pages are not there")
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    (manifest,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.json").write_text(manifest)
    photo = encoded(np.random.default_rng(0).integers(0, 256, (64, 80, 3), np.uint8))
    whole = {"path": "cats/2.jpg", "meta": {"class": "cat", "split": "train"}, "data": photo}
    other = {"path": "dogs/1.jpg", "meta": {"class": "dog", "split": "train"}, "data": photo}
    cut = {"path": "cats/cut.jpg", "data": photo[: len(photo) // 2]}
    with mongod.client() as client:
        client.lab.raw.insert_many([whole, other, cut, {"_id": "train", **json.loads(manifest)}])
    written(mongod.uri("lab.photos"), [encode_record("a", (1.5, 0), 0)])
    text = text.replace("mongodb://ada:s3cret@db.lan", mongod.uri().split("/?")[0])
    text = text.replace("db.lan", mongod.host).replace('"s3cret"', repr(PASSWORD))
    # As in `Mongod.client`: the page's own client.
    text = text.replace("/?authSource=admin", "/?authSource=admin&serverMonitoringMode=poll")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
        if "dataset" in names:
            names["dataset"].close()
    assert capsys.readouterr().out.splitlines() == [
        f"<MongoStore mongodb://{mongod.host}/lab.photos>",
        "2 ('cat', 'dog')",
        "(2, 64, 80, 3) [0, 1]",
        "(64, 80, 3) [128 128 128]",
    ]
    assert list(names["dataset"].store.keys) == ["cats/2.jpg", "dogs/1.jpg"]
    assert names["dataset"].class_names == ("cat", "dog")
    names["repaired"]._repair = False
    with pytest.raises(ValueError, match="Premature end of JPEG file"):
        names["repaired"][0]
    names["repaired"].close()


def test_a_later_layout_is_refused(uri, collection):
    written(uri, records(1))
    collection.update_one({"_id": "penstock.summary"}, {"$set": {"version": 9}})
    refused(MongoStore(uri), "version 9 of the layout")


def test_records_that_wait_for_long_are_inserted(uri, collection):
    partial = collection.database[f"{collection.name}.partial"]
    for message_s, expected in ((0, 2), (3600, 0)):
        writer = MongoWriter(uri, what="a")
        writer._message_s = message_s
        writer.put_many(records(2))
        assert partial.count_documents({"_id": {"$gte": 0}}) == expected
        writer.close()
