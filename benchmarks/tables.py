"""The tables of the SWIFT paper (arXiv 2302.06173) that can be computed, by this product, beside what the paper prints.

Must never hold a figure that is worked out: what is in here was printed by the paper, or measured by its authors.
`docs/reproduction.md` shows the output, and says where the rest of the deviations comes from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from swift_recovery.strategy.grouping import Chain, Groups, greedy, optimal
from swift_recovery.strategy.simulation import Scheme, total_as_in_the_paper_s

HOUR_S = 3600.0
# The authors' profile of ViT-128/32 on 16 machines (commit d66eaf0bcc of their repository), seconds for an iteration.
VIT_S = (
    4.190398454666138, 3.9173083305358887, 3.6475815773010254, 3.350229263305664, 3.1106820106506348,
    2.7829363346099854, 2.6102020740509033, 2.3116931915283203, 2.051832437515259, 1.8167130947113037,
    1.6026933193206787, 0.4898104667663574, 0.46216487884521484, 0.2429513931274414, 0.38614392280578613,
    0.9754316806793213,
)  # fmt: skip
# What crosses one boundary, in one direction, in an iteration: samples, tokens, width, bytes of each, micro-batches.
BERT_BYTES = 4 * 128 * 1024 * 4 * 128
VIT_BYTES = {tokens: 16 * tokens * 1024 * 4 * 256 for tokens in (49, 50)}
# 10 Gb/s; every bandwidth from 1.19e9 to 1.92e9 gives the same groups. Of BERT no profile was published: ViT's stands
# in for it, with a bandwidth that fits.
VIT = Chain(VIT_S, (VIT_BYTES[50],) * 15, bytes_per_s=1.25e9, iterations=100)
BERT = Chain(VIT_S, (BERT_BYTES,) * 15, bytes_per_s=1.40e8, iterations=100)

TABLE_6 = {
    5e11: "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    4e11: "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    3.5e11: "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    3e11: "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    2.5e11: "0 1 2 3-4 5-6 7-8 9-10 11-12 13-15",
    2.2e11: "0 1-2 3-4 5-6 7-8 9-12 13-15",
    1.5e11: "0-2 3-4 5-8 9-12 13-15",
    1e11: "0-2 3-8 9-15",
    8e10: "0-8 9-15",
    5e10: "0-15",
}
TABLE_7 = {
    1.4e12: "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15",
    1.2e12: "0 1 2 3 4 5 6 7 8 9 10 11-12 13-14 15",
    1.1e12: "0 1 2 3 4 5 6 7 8 9 10 11-12 13-15",
    1.0e12: "0 1 2 3 4 5 6 7-8 9-10 11-12 13-15",
    9e11: "0 1 2 3 4 5 6-7 8-9 10-12 13-15",
    8e11: "0 1 2 3 4-5 6-7 8-9 10-12 13-15",
    7e11: "0 1 2 3 4-5 6-7 8-9 10-15",
    6e11: "0 1 2-3 4-5 6-7 8-9 10-15",
    5e11: "0-1 2-3 4-5 6-9 10-15",
    4e11: "0-1 2-5 6-9 10-15",
    3e11: "0-1 2-5 6-15",
    2e11: "0-5 6-15",
    1e11: "0-15",
}
# Iterations, iterations between two checkpoints, hours without failures; hours with global checkpoints, and with SWIFT;
# the time to repeat what is lost beside that of all (section 7).
TABLE_5 = {
    "Wide-ResNet-50": (450_360, 5004, 479.4, 557.4, 480.7, 0.0),
    "ViT-128/32": (93_600, 312, 85.6, 86.4, 86.0, 0.427),
    "BERT-128": (500_000, 5000, 461.1, 524.2, 476.1, 0.237),
}
MTBF_S = 17 * HOUR_S
NUM_RUNS = 2000


def text(groups: Groups) -> str:
    return " ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def lines(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table of Markdown."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def table_3() -> list[str]:
    def gigabytes(num_bytes: int, num_boundaries: int) -> str:
        return f"{num_bytes * 2 * num_boundaries / 1e9:.2f} GB"

    return lines(("model", "groups", "paper", "computed"), [
        ("BERT-128", "16", "8.05 GB", gigabytes(BERT_BYTES, 15)),
        ("BERT-128", "8", "3.76 GB", gigabytes(BERT_BYTES, 7)),
        ("ViT-128/32, 49 tokens", "16", "24.66 GB", gigabytes(VIT_BYTES[49], 15)),
        ("ViT-128/32, 50 tokens", "16", "", gigabytes(VIT_BYTES[50], 15)),
        ("ViT-128/32, 50 tokens", "8", "", gigabytes(VIT_BYTES[50], 7)),
    ])  # fmt: skip


def table_5() -> list[str]:
    positions = np.random.default_rng(0).random((NUM_RUNS, 40))
    rows = []
    for name, (num_iterations, every, hours, with_checkpoints, with_swift, repeats) in TABLE_5.items():
        training_s = hours * HOUR_S
        interval_s = every * training_s / num_iterations
        for way, printed, part in (("global checkpoints", with_checkpoints, 1.0), ("SWIFT", with_swift, repeats)):
            scheme = Scheme(way, 0.0, 0.0, interval_s, part)
            found = float(total_as_in_the_paper_s(scheme, training_s, MTBF_S, positions).mean()) / HOUR_S
            rows.append((name, way, f"{printed} h", f"{found:.1f} h", f"{found / printed - 1:+.1%}"))
    return lines(("model", "way", "paper", "computed", "deviation"), rows)


def groups_of(chain: Chain, printed: dict[float, str]) -> list[str]:
    rows = []
    for limit, expected in printed.items():
        found = greedy(chain, limit, "authors")
        best = optimal(chain, chain.log_bytes(found))
        slower = chain.expected_repeat_s(found) / chain.expected_repeat_s(best) - 1
        same = "the same" if text(found) == expected else text(found)
        rows.append((f"{limit:.1e}", expected, same, f"{slower:.1%}"))
    return lines(("limit, bytes", "paper", "computed", "slower than the optimum"), rows)


PARTS = {
    "Table 3: bytes logged in an iteration": table_3,
    f"Table 5: hours of training, a failure every 17 h, means of {NUM_RUNS} runs": table_5,
    "Table 6: groups of BERT-128": lambda: groups_of(BERT, TABLE_6),
    "Table 7: groups of ViT-128/32": lambda: groups_of(VIT, TABLE_7),
}


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for title, make in PARTS.items():
        print(f"## {title}", "", *make(), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
