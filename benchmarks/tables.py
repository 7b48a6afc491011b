"""The tables of the SWIFT paper (arXiv 2302.06173) that can be computed, by this product, beside what the paper prints;
its figures, with --figures; and the models of Just-In-Time Checkpointing and of Nicolae et al., for examples of ours.

Must never hold a figure that is worked out: what is in here was printed by the paper, or measured by its authors, or
is said to be an example. `docs/reproduction.md` shows the output, and says where the deviations come from.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from swift_recovery.strategy import half_updates, just_in_time
from swift_recovery.strategy.grouping import Chain, Groups, greedy, optimal
from swift_recovery.strategy.profile import parse
from swift_recovery.strategy.simulation import Scheme, total_as_in_the_paper_s, total_s, wasted

if TYPE_CHECKING:
    from swift_agent.ctl.plots import Chart

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
# Figure 11 by limit of Tables 7 and 6: seconds of a recovery, as the authors' script for it has them. One run each.
FIGURE_11 = {
    "ViT-128/32": (256, {1.4e12: 126.012, 9e11: 147.53, 6e11: 156.01, 3e11: 171.71, 1e11: 198.560}, TABLE_7),
    "BERT-128": (128, {5e11: 76.539, 4e11: 76.547, 1.5e11: 83.035, 8e10: 160.836, 5e10: 184.363}, TABLE_6),
}
STAGES_PER_MACHINE, NUM_MACHINES = 8, 16
# OPT-175B: 110 failures in two months of 992 GPUs. The other numbers are an example: 5 s for a checkpoint, 60 s for a
# restart, 5 s for a minibatch.
OPT_FAILURES_PER_S = 110 / (992 * 60 * 86400)
FLEETS = [just_in_time.Fleet(num, OPT_FAILURES_PER_S, 5.0, 60.0, 5.0) for num in (8, 128, 1024, 4096, 16384)]
# An example: half of an update is made when one of eight replicas is lost.
CUT = half_updates.Cut(
    num_replicas=8, batch=256, updated=0.5, iteration_s=0.5, replace_s=2.0, restart_s=35.0, interval_s=600.0
)
PROFILES = Path(__file__).parents[1] / "examples" / "profiles"


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


def mean_part(groups: str, micro_batches: int) -> float:
    """Of one group of all machines: the time in which the group of a lost machine repeats an iteration, the mean over
    the machines. Of equal stages: (m + s - 1) / (m + p - 1), section 5.2."""
    sizes = [int(last or first) - int(first) + 1 for first, _, last in (one.partition("-") for one in groups.split())]
    all_stages = micro_batches + STAGES_PER_MACHINE * NUM_MACHINES - 1
    times = [size * (micro_batches + STAGES_PER_MACHINE * size - 1) / all_stages for size in sizes]
    return sum(times) / NUM_MACHINES


def figure_11() -> list[str]:
    rows = []
    for name, (micro_batches, measured, table) in FIGURE_11.items():
        longest_s = max(measured.values())
        for limit, seconds in measured.items():
            part, found = seconds / longest_s, mean_part(table[limit], micro_batches)
            groups = len(table[limit].split())
            rows.append((name, groups, f"{seconds:.0f} s", f"{part:.2f}", f"{found:.2f}", f"{found / part - 1:+.0%}"))
    return lines(("model", "groups", "paper", "of one group's", "computed", "deviation"), rows)


def just_in_time_table() -> list[str]:
    rows = []
    for fleet in FLEETS:
        interval_s = 1 / just_in_time.best_frequency(fleet)
        ways = (
            (just_in_time.least_periodic, Scheme("", fleet.checkpoint_s / interval_s, fleet.restart_s, interval_s)),
            (just_in_time.by_the_script, Scheme("", 0.0, fleet.restart_s + fleet.minibatch_s / 2)),
            (just_in_time.transparent, Scheme("", 0.0, fleet.minibatch_s / 2)),
        )
        cells = [f"{just_in_time.of_each_gpu(fleet, of(fleet)):.3%}, {simulated(fleet, way):.3%}" for of, way in ways]
        often = f"{1 / fleet.job_failures_per_s / HOUR_S:.1f} h"
        rows.append((f"{fleet.num_gpus:,}", often, f"{interval_s:.0f} s", *cells))
    return lines(("GPUs", "a failure every", "1 / c*", "checkpoints with c*", "by the script", "transparent"), rows)


def simulated(fleet: just_in_time.Fleet, scheme: Scheme) -> float:
    """The part of the time that is no training, by 500 runs with 200 failures each."""
    generator, mtbf_s = np.random.default_rng(0), 1 / fleet.job_failures_per_s
    totals_s = total_s(scheme, 200 * mtbf_s, 500, lambda num: generator.exponential(mtbf_s, num))
    return wasted({"": totals_s}, 200 * mtbf_s)[""]


def half_updates_table() -> list[str]:
    rows = [
        (one.name, f"{one.seconds:.1f} s", f"{one.twice:.0%}", f"{one.unlearnt:g}", "yes" if one.is_exact else "no")
        for one in half_updates.outcomes(CUT)
    ]
    return lines(("way", "lost", "parameters updated twice", "samples not learnt", "exact"), rows)


PARTS = {
    "Table 3: bytes logged in an iteration": table_3,
    f"Table 5: hours of training, a failure every 17 h, means of {NUM_RUNS} runs": table_5,
    "Table 6: groups of BERT-128": lambda: groups_of(BERT, TABLE_6),
    "Table 7: groups of ViT-128/32": lambda: groups_of(VIT, TABLE_7),
    "Figure 11: time of a recovery, by groups": figure_11,
    "Just-In-Time Checkpointing: part of each GPU's time that is wasted, computed and simulated": just_in_time_table,
    "Nicolae et al.: an update that is cut in the middle": half_updates_table,
}


def draw_figures(directory: Path) -> list[Path]:
    """PNGs of figures 11, 13 and 14 of SWIFT, and of what is wasted by the number of GPUs. Needs matplotlib."""
    from swift_agent.ctl.plan import space_time
    from swift_agent.ctl.plots import Line, draw
    from swift_recovery.strategy.choose import choose, ways

    found = {}
    for name, path in (("ViT-128/32", "vit.json"), ("BERT-128", "bert.json")):
        # The authors killed a machine 50 iterations after a checkpoint.
        job = replace(parse((PROFILES / path).read_text()), checkpoint_every=100)
        possible = ways(job, helpers="groups")
        chart = space_time(job, possible, choose(possible, job.mtbf_s))
        unit_bytes = {"TiB": 1 << 40, "GiB": 1 << 30}[chart.x_label.rpartition(" ")[2]]
        _, measured, table = FIGURE_11[name]
        each = job.boundary_bytes[0] * job.checkpoint_every / unit_bytes
        points = [((len(table[limit].split()) - 1) * each, seconds) for limit, seconds in measured.items()]
        found[f"figure-11-{Path(path).stem}"] = replace(
            chart, lines=[*chart.lines, Line("measured by the paper's authors", points, is_mark=True)]
        )
    for name in TABLE_5:
        found[f"figure-13-{name.split('/')[0].lower()}"] = sweep(name, "failures")
        found[f"figure-14-{name.split('/')[0].lower()}"] = sweep(name, "checkpoints")
    found["just-in-time"] = just_in_time_chart()
    paths = {directory / f"{name}.png": chart for name, chart in found.items()}
    for path, chart in paths.items():
        draw(chart, path)
    return list(paths)


def sweep(name: str, what: str) -> Chart:
    """Of Table 5, by how often failures or checkpoints come. Snapshots: every 30 iterations, for what SWIFT says of
    CheckFreq, and what follows from its Table 5 for Elastic Horovod."""
    from swift_agent.ctl.plots import Chart, Line

    num_iterations, every, hours, _, _, repeats = TABLE_5[name]
    training_s, step_s = hours * HOUR_S, hours * HOUR_S / num_iterations
    factors = [2.0**power for power in range(-3, 4)]
    positions = np.random.default_rng(0).random((NUM_RUNS, 400))
    lines_of: dict[str, list[tuple[float, float | None]]] = {}
    for factor in factors:
        mtbf_s, interval = (MTBF_S * factor, every) if what == "failures" else (MTBF_S, round(every * factor))
        for scheme in (
            Scheme("global checkpoints", 0.0, 0.0, interval * step_s),
            Scheme("CheckFreq-like snapshots", 0.035, 0.0, 30 * step_s),
            Scheme("Elastic-Horovod-like snapshots", 0.075, 0.0, 30 * step_s),
            Scheme("SWIFT", 0.0, 0.0, interval * step_s, repeats),
        ):
            mean_s = float(total_as_in_the_paper_s(scheme, training_s, mtbf_s, positions).mean())
            x = mtbf_s / HOUR_S if what == "failures" else interval
            lines_of.setdefault(scheme.name, []).append((x, mean_s / HOUR_S))
    ticks = [x for x, _ in lines_of["SWIFT"]]
    lines_of["without failures"] = [(ticks[0], hours), (ticks[-1], hours)]
    by = {"failures": "hours from one failure to the next", "checkpoints": "iterations between two checkpoints"}
    return Chart(
        f"{name} of SWIFT: {hours} h of training with failures,\nmeans of {NUM_RUNS} runs",
        by[what], "hours that the training takes",
        [Line(way, points) for way, points in lines_of.items()], log_x=True, ticks=ticks,
    )  # fmt: skip


def just_in_time_chart() -> Chart:
    """By the number of GPUs, on logarithmic axes."""
    from swift_agent.ctl.plots import Chart, Line

    ticks = [2.0**power for power in range(3, 18, 2)]
    ways = {
        "periodic, with the best interval": just_in_time.least_periodic,
        "just in time, by the script": just_in_time.by_the_script,
        "just in time, transparent": just_in_time.transparent,
    }
    fleets = [replace(FLEETS[0], num_gpus=int(num)) for num in ticks]
    return Chart(
        "GPU time that failures waste (by the model of Just-In-Time Checkpointing):\n"
        "failures of OPT-175B; checkpoint 5 s, restart 60 s, minibatch 5 s",
        "GPUs", "part of each GPU's time that is wasted, %",
        [Line(name, [(one.num_gpus, 100 * just_in_time.of_each_gpu(one, of(one))) for one in fleets])
         for name, of in ways.items()],
        log_x=True, log_y=True, ticks=ticks,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the figures as well, into this directory")
    figures: Path | None = parser.parse_args().figures
    if figures:
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--figures needs matplotlib; type: pip install 'swift-agent[plot]'")
        try:
            figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--figures {figures}: {error}")
    for title, make in PARTS.items():
        print(f"## {title}", "", *make(), "", sep="\n")
    if figures:
        for path in draw_figures(figures):
            print(f"drawn: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
