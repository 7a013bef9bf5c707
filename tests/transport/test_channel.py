# SPDX-License-Identifier: Apache-2.0
"""Frames and descriptors over a socket pair."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transport.channel import Channel


@pytest.fixture
def ends():
    one, two = (Channel(sock) for sock in socket.socketpair())
    yield one, two
    one.close()
    two.close()


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300_000), max_size=6))
def test_frames_arrive_whole_and_in_order_and_posting_never_blocks(messages):
    ours, theirs = (Channel(sock) for sock in socket.socketpair())
    for message in messages:
        ours.post(message)  # far more than the socket takes: the rest waits here
    received = []
    while len(received) < len(messages):
        ours.flush()
        received += [frame.data for frame in theirs.receive()]
    assert received == messages
    assert not ours.has_unsent
    ours.close()
    theirs.close()


def test_each_descriptor_comes_with_its_own_frame(ends):
    one, two = ends
    pipes = [os.pipe() for _ in range(5)]
    for number, (_, write_fd) in enumerate(pipes):
        one.post(str(number).encode(), [write_fd] * number)
        os.close(write_fd)
    frames = []
    while len(frames) < 5:
        frames += two.receive(wait=True)
    for number, frame in enumerate(frames):
        assert frame.data == str(number).encode()
        assert len(frame.fds) == number
        for fd in frame.fds:
            os.write(fd, b"x")
            os.close(fd)
        assert number == 0 or os.read(pipes[number][0], 9) == b"x" * number
        os.close(pipes[number][0])


def test_closing_ends_the_peer_even_if_a_copy_of_the_socket_is_open(ends):
    one, two = ends
    copy = os.dup(one.fileno())
    one.close()
    with pytest.raises(EOFError):
        two.receive(wait=True)
    os.close(copy)


def test_a_frame_cut_short_by_a_death_is_the_end_and_not_a_frame(ends):
    one, two = ends
    one._socket.send(b"\xff\x00\x00\x00\x00only a part")
    one.close()
    with pytest.raises(EOFError):
        two.receive(wait=True)


def test_what_was_sent_before_the_end_is_still_received(ends):
    one, two = ends
    one.send(b"last words")
    one.close()
    assert [frame.data for frame in two.receive()] == [b"last words"]
    with pytest.raises(EOFError):
        two.receive()


def test_descriptors_that_were_never_taken_are_closed_with_the_channel():
    one, two = (Channel(sock) for sock in socket.socketpair())
    before = len(os.listdir("/proc/self/fd"))
    read_fd, write_fd = os.pipe()
    one.post(b"x" * 10, [write_fd])
    os.close(write_fd)
    two._read(0)
    two.close()
    one.close()
    assert os.read(read_fd, 1) == b""  # no one holds the writing end
    os.close(read_fd)
    assert len(os.listdir("/proc/self/fd")) == before - 2
