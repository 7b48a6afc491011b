"""Orders that a node leaves its job, written and taken back: by a person (`swiftctl drain`) or as a scheduler says.

What follows from an order is in `swift_rendezvous.roster.draining`. Must never order about another incarnation than the
one that was looked at, nor put a scheduler's order in the place of a person's.
"""

from __future__ import annotations

from swift_rendezvous.codec import encode
from swift_rendezvous.roster.draining import is_handed_over
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import DrainRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import Compare, Delete, KeyValueStore, Put


def order(store: KeyValueStore, keys: Keys, view: View, drain: DrainRecord) -> bool:
    """Write it, unless this incarnation has such an order already, or has just gone, or its job. Whether it was
    written."""
    known, key = view.drains.get(drain.node_id), keys.drain(drain.node_id)
    if known is not None and known.incarnation == drain.incarnation and (drain.ordered_by or not known.ordered_by):
        return False
    guards = [
        Compare.absent(keys.result),
        Compare.create_revision(keys.node(drain.node_id), "==", view.joined[drain.node_id]),
    ]
    if drain.ordered_by:
        guards.append(Compare.absent(key))
    return store.transaction(guards, [Put(key, encode(drain))]).succeeded


def take_back(store: KeyValueStore, keys: Keys, view: View, node: str) -> bool:
    """Remove the order of *view*. False if the job has changed meanwhile, or if it is too late."""
    drain, key = view.drains[node], keys.drain(node)
    if is_handed_over(view, node):
        return False
    guards = [
        Compare.value(key, "==", encode(drain)),
        Compare.mod_revision(keys.generation, "==", view.generation_revision),
    ]
    result = store.transaction(guards, [Delete(key)])
    return result.succeeded or (result.retried and store.get(key) is None)
