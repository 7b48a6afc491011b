"""The messages of etcd's v3 API, built at import from a descriptor file.

No generated code: that would pin the version of protobuf and clash with any other etcd client in the process, since
two modules cannot register the same message in protobuf's default pool. Here the pool is private. Must never touch the
default pool.

`etcd_rpc.binpb` is a FileDescriptorSet of etcd's rpc.proto, kv.proto and auth.proto (etcd-io/etcd 3.5, Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from swift_rendezvous.store.kv import (
    Compare,
    Delete,
    DeletePrefix,
    Event,
    Get,
    GetPrefix,
    KeyValue,
    Op,
    OpResponse,
    Put,
    prefix_end,
)


def _load_pool() -> Any:
    files = descriptor_pb2.FileDescriptorSet()
    files.ParseFromString(resources.files("swift_rendezvous.store").joinpath("etcd_rpc.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # in the order of their imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_pool = _load_pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"etcdserverpb.{name}"))


class Method:
    """A call of the service: its path, how to write the request and how to read the response."""

    def __init__(self, service: str, name: str, message: str = "") -> None:
        self.name = name
        self.path = f"/etcdserverpb.{service}/{name}"
        self.request = _message(f"{message or name}Request")
        self.response = _message(f"{message or name}Response")


RANGE = Method("KV", "Range")
PUT = Method("KV", "Put")
DELETE_RANGE = Method("KV", "DeleteRange")
TXN = Method("KV", "Txn")
COMPACT = Method("KV", "Compact", "Compaction")
LEASE_GRANT = Method("Lease", "LeaseGrant")
LEASE_REVOKE = Method("Lease", "LeaseRevoke")
LEASE_TIME_TO_LIVE = Method("Lease", "LeaseTimeToLive")
# A stream in the protocol. One request and one answer on it look the same on the wire as a plain call, and a plain
# call has a deadline and needs no thread.
LEASE_KEEP_ALIVE = Method("Lease", "LeaseKeepAlive")
AUTHENTICATE = Method("Auth", "Authenticate")
MEMBER_LIST = Method("Cluster", "MemberList")
STATUS = Method("Maintenance", "Status")
WATCH = Method("Watch", "Watch")

_CompareMessage = _message("Compare")
_RequestOp = _message("RequestOp")
_WatchCreateRequest = _message("WatchCreateRequest")

_OPERATORS = {"==": 0, ">": 1, "<": 2, "!=": 3}
_TARGETS = {
    "version": (0, "version"),
    "create": (1, "create_revision"),
    "mod": (2, "mod_revision"),
    "value": (3, "value"),
    "lease": (4, "lease"),
}
_DELETE_EVENT = 1


def encode_key(key: str) -> bytes:
    """UTF-8; what another program wrote in other encodings survives a round trip."""
    return key.encode("utf-8", "surrogateescape")


def prefix_range(prefix: str, before: str | None = None) -> dict[str, bytes]:
    """The fields `key` and `range_end` of all keys that start with *prefix* and are smaller than *before*."""
    start = encode_key(prefix)
    return {"key": start or b"\0", "range_end": prefix_end(start) if before is None else encode_key(before)}


def decode_key_value(message: Any) -> KeyValue:
    return KeyValue(
        message.key.decode("utf-8", "surrogateescape"),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def decode_event(message: Any) -> Event:
    return Event("delete" if message.type == _DELETE_EVENT else "put", decode_key_value(message.kv))


def watch_request(prefix: str, single_key: bool, start_revision: int, before: str | None = None) -> Any:
    """Start a watch. The server reports its progress every ten minutes, which keeps the resume point of a quiet watch
    ahead of compaction."""
    keys = {"key": encode_key(prefix)} if single_key else prefix_range(prefix, before)
    create = _WatchCreateRequest(**keys, start_revision=start_revision, progress_notify=True)
    return WATCH.request(create_request=create)


def transaction_request(compare: Iterable[Compare], success: Iterable[Op], failure: Iterable[Op]) -> Any:
    return TXN.request(
        compare=[_encode_compare(condition) for condition in compare],
        success=[_encode_op(op) for op in success],
        failure=[_encode_op(op) for op in failure],
    )


def _encode_compare(condition: Compare) -> Any:
    target, field = _TARGETS[condition.target]
    return _CompareMessage(
        result=_OPERATORS[condition.operator],
        target=target,
        key=encode_key(condition.key),
        **{field: condition.operand},
    )


def _encode_op(op: Op) -> Any:
    match op:
        case Put(key, value, lease_id):
            return _RequestOp(request_put=PUT.request(key=encode_key(key), value=value, lease=lease_id))
        case Delete(key):
            return _RequestOp(request_delete_range=DELETE_RANGE.request(key=encode_key(key)))
        case DeletePrefix(prefix):
            return _RequestOp(request_delete_range=DELETE_RANGE.request(**prefix_range(prefix)))
        case Get(key):
            return _RequestOp(request_range=RANGE.request(key=encode_key(key)))
        case GetPrefix(prefix):
            return _RequestOp(request_range=RANGE.request(**prefix_range(prefix)))


def decode_responses(ops: Iterable[Op], messages: Iterable[Any]) -> tuple[OpResponse, ...]:
    """One response per operation, as `kv.OpResponse` says."""
    responses: list[OpResponse] = []
    for op, message in zip(ops, messages, strict=True):
        match op:
            case Put():
                responses.append(None)
            case Delete() | DeletePrefix():
                responses.append(message.response_delete_range.deleted)
            case Get():
                found = message.response_range.kvs
                responses.append(decode_key_value(found[0]) if found else None)
            case GetPrefix():
                responses.append(tuple(decode_key_value(kv) for kv in message.response_range.kvs))
    return tuple(responses)
