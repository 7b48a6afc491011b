"""A node that only lives: `liveness_peer.py INCARNATION KEY [HOST]` prints its port, learns its peers from its
standard input, one JSON line of [incarnation, port, host] lists at a time, and prints whom it takes for lost."""

from __future__ import annotations

import json
import sys

from swift_rendezvous.node.liveness import Liveness
from swift_rendezvous.roster.records import NodeRecord


def main(incarnation: str, key: str, host: str = "127.0.0.1") -> None:
    def lost(peer: str, evidence: str, is_dead: bool) -> None:
        print(json.dumps({"lost": peer, "evidence": evidence, "is_dead": is_dead}), flush=True)

    liveness = Liveness(host, lost, key=key.encode())
    me = NodeRecord(incarnation, incarnation, host, liveness.port, 1)
    liveness.start(me)
    print(json.dumps({"port": liveness.port}), flush=True)
    for line in sys.stdin:
        liveness.update([me, *(NodeRecord(i, i, where, port, 1) for i, port, where in json.loads(line))])
    liveness.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
