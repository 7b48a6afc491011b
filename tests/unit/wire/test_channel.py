"""The socket between an agent and its workers: whole messages in order, and every way in which the other can go."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_agent.wire.channel import MAX_MESSAGE_BYTES, ChannelClosed, Message, WorkerChannel, WorkerListener, connect


@pytest.fixture
def pair() -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    ours, theirs = socket.socketpair()
    ends = WorkerChannel(ours), WorkerChannel(theirs)
    for end in ends:
        end.sock.settimeout(10.0)
    yield ends
    for end in ends:
        end.close()


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def test_messages_come_whole_and_in_order(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    ours, theirs = pair
    messages: list[Message] = [{"op": "go", "plan": {"ü": [1, 2.5, None]}}, {}, {"why": "x" * 200_000}, {"last": True}]

    def send() -> None:
        for message in messages:
            ours.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [theirs.receive() for _ in messages] == messages
    sender.join()


def test_what_a_side_said_before_it_went_is_there_though_nothing_reaches_it(
    pair: tuple[WorkerChannel, WorkerChannel],
) -> None:
    ours, theirs = pair
    theirs.send({"last": "word"})
    theirs.sock.close()
    with pytest.raises(ChannelClosed):
        ours.post({"op": "stop"})
    ours.stop_sending()
    assert ours.stuck_since_s is None and ours.receive_rest() == [{"last": "word"}] and ours.receive_rest() == []


def test_a_message_that_cannot_be_read_takes_none_before_it_away(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    ours, theirs = pair
    theirs.send({"first": 1})
    theirs.sock.sendall(frame(b"{"))
    assert ours.receive_rest() == [{"first": 1}]


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=3), max_size=6),
       st.data())
def test_messages_cut_anywhere_are_put_together_again(messages: list[Message], data: st.DataObject) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = WorkerChannel(ours), WorkerChannel(theirs)
        for message in messages:
            sender.send(message)
        ours.shutdown(socket.SHUT_WR)
        stream = b""
        while chunk := theirs.recv(1 << 16):
            stream += chunk
        received: list[Message] = []
        again, feed = socket.socketpair()
        with again, feed:
            receiver = WorkerChannel(again)
            while stream:
                size = data.draw(st.integers(1, len(stream)))
                feed.sendall(stream[:size])
                stream = stream[size:]
                received += receiver.receive_ready()
        assert received == messages


def test_receive_leaves_the_messages_behind_the_first_for_later(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    ours, theirs = pair
    ours.sock.sendall(frame(b'{"n":1}') + frame(b'{"n":2}') + frame(b'{"n":3}')[:6])
    assert theirs.receive() == {"n": 1}
    ours.sock.sendall(frame(b'{"n":3}')[6:])
    assert theirs.receive_ready() == [{"n": 2}, {"n": 3}]


def test_many_threads_may_send(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    ours, theirs = pair

    def send(name: int) -> None:
        for number in range(50):
            ours.send({"from": name, "n": number, "filling": "x" * 3000})

    threads = [threading.Thread(target=send, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    received = [theirs.receive() for _ in range(200)]
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [m["n"] for m in received if m["from"] == name] == list(range(50))


@pytest.mark.parametrize("data", [
    frame(b"not json"), frame(b"\xff\xfe"), frame(b"[1]"), frame(b"1"), struct.pack("!I", MAX_MESSAGE_BYTES + 1),
    frame(b'{"op":"cut in the mid')[:-4],
])  # fmt: skip
def test_what_is_no_message_closes_the_channel(pair: tuple[WorkerChannel, WorkerChannel], data: bytes) -> None:
    ours, theirs = pair
    ours.sock.sendall(data)
    ours.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed):
        theirs.receive()


def test_the_end_of_the_other_side(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    ours, theirs = pair
    ours.send({"last": "word"})
    ours.close()
    assert theirs.receive_ready() == [{"last": "word"}]
    with pytest.raises(ChannelClosed, match="end of file"):
        theirs.receive_ready()
    with pytest.raises(ChannelClosed):
        for _ in range(3):  # the first may still go into the socket's buffer
            theirs.send({"too": "late"})
    ours.close()  # twice does no harm


def test_closing_wakes_the_thread_that_reads() -> None:
    ours, theirs = socket.socketpair()
    channel, seen = WorkerChannel(ours), list[str]()

    def read() -> None:
        try:
            channel.receive()
        except ChannelClosed as error:
            seen.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    channel.close()
    reader.join(5.0)
    theirs.close()
    assert not reader.is_alive() and len(seen) == 1


def test_a_worker_connects_and_the_kernel_names_its_process(tmp_path: Path) -> None:
    listener = WorkerListener(str(tmp_path))
    worker = connect(listener.path)
    accepted = listener.accept()
    assert accepted is not None
    channel, pid = accepted
    assert pid == os.getpid()
    worker.send({"op": "hello"})
    assert channel.receive() == {"op": "hello"}
    for end in (worker, channel, listener):
        end.close()
    with pytest.raises(OSError):
        connect(listener.path)
    with pytest.raises(OSError):
        connect(str(tmp_path / "nothing"))


def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = WorkerListener(str(tmp_path))
    with monkeypatch.context() as patch:
        uid = os.getuid()
        patch.setattr(os, "getuid", lambda: uid + 1)  # the agent's user is another than the one who connects
        worker = connect(listener.path)
        assert listener.accept() is None
    worker.sock.settimeout(5.0)
    with pytest.raises(ChannelClosed):
        worker.receive()
    worker.close()
    listener.close()
