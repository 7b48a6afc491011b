"""What is expected of each script in `scripts/`: equal bit for bit, or told.

A new idiom is a script there and a line in `IDIOMS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ANY = (3, 6, 9)
BOTH = ("worker", "node")


@dataclass(frozen=True)
class Equal:
    """Lost ranks are replaced in place, all others keep their processes, and the end is that of an undisturbed run."""


@dataclass(frozen=True)
class Told:
    """A line says what cannot be recovered, and what helps.

    *lines*: a part of it; where several processes notice, of one of these: whichever comes first. *when*: "start": in
    a run without any failure too; "failure": at the first recovery. *then*: "refused": the job ends before its first
    iteration; "restart": all workers start again after a failure, and the end is that of an undisturbed run; "ends":
    the job ends with a failure that names the line. *moment*: of the three faults this one is made. *never*: what must
    not be said in a run without any failure, as it would not help.
    """

    lines: str | tuple[str, ...]
    when: Literal["start", "failure"]
    then: Literal["refused", "restart", "ends"]
    moment: Literal["before", "inside", "after"] = "before"
    never: str = ""

    def is_in(self, text: str) -> bool:
        return any(line in text for line in ([self.lines] if isinstance(self.lines, str) else self.lines))


@dataclass(frozen=True)
class Idiom:
    """*script*: in `scripts/`; *args*: for it. *options*: for swift-run. *at*: the iterations in which something is
    killed before, inside and after it; if nothing hangs on these, workers are killed in them and nodes in the next
    ones, in one job. *workers*: on each of the two nodes. *scopes*: what is killed. *needs*: a library, without which
    the idiom is skipped."""

    script: str
    expected: Equal | Told = Equal()
    args: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    at: tuple[int, int, int] = ANY
    workers: int = 1
    scopes: tuple[str, ...] = BOTH
    needs: str = ""

    def jobs(self) -> tuple[tuple[str, ...], ...]:
        """What is killed in each of its jobs."""
        both = self.scopes == BOTH and self.at is ANY and isinstance(self.expected, Equal)
        return (BOTH,) if both else tuple((scope,) for scope in self.scopes)


# The second, if the rank that stays is not in the iteration yet when the other node goes.
_OTHER_DATA = ("was given other data when it was run again", "what the run, or the epoch, began with")

IDIOMS: dict[str, Idiom] = {
    "ddp tutorial": Idiom("ddp_tutorial.py"),
    "ddp tutorial with snapshots": Idiom("ddp_tutorial.py", args=("snapshots",), at=(3, 6, 10)),
    "image classifier": Idiom("image_classifier.py"),
    "endless iterator": Idiom("endless_iterator.py"),
    "one loop after the other": Idiom("several_loops.py"),
    "one loop after the other, lost before the first": Idiom("several_loops.py", at=(0, 4, 10), scopes=("worker",)),
    "hsdp": Idiom("sharded_transformer.py", args=("hsdp",), workers=2),
    "fsdp x tp": Idiom("sharded_transformer.py", args=("tp",), workers=2),
    "shards that nobody holds twice, lost in an iteration": Idiom(
        "sharded_snapshots.py",
        Told("no rank holds a replica of another one's shards", "start", "restart", "inside", never="@job.resilient")
    ),
    "shards that nobody holds twice, lost in a snapshot": Idiom(
        "sharded_snapshots.py", Told("no rank holds a replica of another one's shards", "start", "restart", "after"),
        at=(3, 6, 8)
    ),
    "per-step fault tolerance": Idiom("fault_tolerant_ddp.py"),
    "step with a closure": Idiom("closure_step.py"),
    "step with a closure, hsdp": Idiom("closure_step.py", args=("hsdp",), workers=2),
    "optimizers that are not torch's own": Idiom("odd_optimizers.py"),
    "a discriminator that begins later": Idiom("late_discriminator.py"),
    "learning rate by a counter": Idiom("counted_rate.py", Told("lr of optimizer is", "failure", "restart")),
    "collective by a counter": Idiom(
        "counted_collective.py", Told("ranks make different collectives", "failure", "restart"), args=("own",)
    ),
    "collective by the position": Idiom("counted_collective.py", args=("position",), at=(2, 6, 8)),
    "statistics of each rank": Idiom("own_statistics.py", args=("hand",)),
    "statistics that ddp leaves alone": Idiom("own_statistics.py", args=("ddp",)),
    "local sgd": Idiom("local_sgd.py", Told("Nothing has failed", "start", "refused")),
    "averaged copy among the models": Idiom("averaged_copy.py", args=("models",)),
    "averaged copy, before the update and after it": Idiom("averaged_copy.py", args=("models", "twice")),
    "averaged model": Idiom("averaged_copy.py", args=("swa",)),
    "averaged model, after a metric, and a momentum encoder": Idiom("averaged_copy.py", args=("swa", "late")),
    "objects from rank 0, an average in an object, and a network that is frozen": Idiom("objects_from_rank_0.py"),
    "shards of FSDP1": Idiom("refused.py", Told("(FSDP1), of whose shards", "start", "refused"), args=("fsdp1",)),
    "averaged now and then": Idiom(
        "refused.py", Told("with a PeriodicModelAverager ranks hold different", "start", "refused"), args=("averager",)
    ),
    "gradients that are never cleared": Idiom(
        "refused.py", Told("Call optimizer.zero_grad() in each iteration", "start", "refused"), args=("carried",)
    ),
    "gradients that are never cleared, sequence parallel": Idiom(
        "refused.py", Told("Call optimizer.zero_grad() in each iteration", "start", "refused"),
        args=("carried", "tensor"), scopes=("worker",)
    ),
    "a batch that is changed in place": Idiom("changed_in_place.py"),
    "a batch that is taken inside and changed in place": Idiom("changed_in_place.py", args=("inside",)),
    "a tensor that a section sums up in": Idiom("changed_in_place.py", args=("section",)),
    "a mask that grows, and parameter groups of sets": Idiom("grown_mask.py"),
    "weights that are given to the iteration": Idiom("changed_in_place.py", args=("weights",)),
    "a validation by a flag that it clears": Idiom(
        "section_by_a_flag.py", Told("goes another way on rank", "failure", "restart", "after")
    ),
    "a validation by a flag that it clears, tracked": Idiom("section_by_a_flag.py", args=("tracked",), at=(6, 9, 3)),
    "uneven inputs": Idiom(
        "uneven_inputs.py", Told("Give all ranks the same number of batches", "start", "refused"), scopes=("worker",)
    ),
    "a validation on averaged weights": Idiom(
        "swapped_weights.py", Told("changes parameters that an optimizer has", "start", "restart", "inside")
    ),
    "a validation on averaged weights, by way of data": Idiom(
        "swapped_weights.py",
        Told("changes parameters that an optimizer has", "start", "restart", "inside"),
        args=("data",),
    ),
    "statistics over all ranks": Idiom("shared_statistics.py"),
    "steps that are left out": Idiom("left_out_steps.py", args=("norm",), at=(2, 5, 8), workers=2),
    "steps in every third iteration": Idiom("left_out_steps.py", args=("accumulated",), at=(2, 4, 7)),
    "steps in every third iteration, hsdp": Idiom(
        "left_out_steps.py", args=("accumulated", "hsdp"), at=(2, 4, 7), workers=2
    ),
    "gradients of each rank, in every third iteration": Idiom(
        "left_out_steps.py", Told("ended with gradients, but without a step", "start", "refused"), args=("each",),
        scopes=("worker",)
    ),
    "gradients of each rank, in every third iteration, hsdp": Idiom(
        "left_out_steps.py", Told("ended with gradients, but without a step", "start", "refused"),
        args=("each", "hsdp"), workers=2, scopes=("worker",)
    ),
    "accelerate's wrappers": Idiom("library_wrappers.py", args=("accelerate",), needs="accelerate"),
    "accelerate's accumulation, in groups": Idiom("accelerated_groups.py", at=(3, 4, 8), needs="accelerate"),
    "accelerate's accumulation, batch by batch": Idiom(
        "accelerated_groups.py", Told("Give the iteration all batches of an update", "start", "refused"),
        args=("single",), scopes=("worker",), needs="accelerate"
    ),
    "accelerate's accumulation, reduced in each batch, in groups": Idiom(
        "accelerated_groups.py", args=("each",), at=(3, 4, 8), needs="accelerate"
    ),
    "accelerate's accumulation, reduced in each batch, batch by batch": Idiom(
        "accelerated_groups.py", args=("single", "each"), at=(4, 9, 12), needs="accelerate"
    ),
    "fabric's wrappers": Idiom("library_wrappers.py", args=("fabric",), needs="lightning"),
    "lightning's trainer": Idiom("lightning_trainer.py", needs="lightning"),
    "lightning's trainer, lost in a validation": Idiom(
        "lightning_trainer.py", args=("validation",), at=(5, 7, 10), needs="lightning"
    ),
    "transformers' trainer": Idiom("transformers_trainer.py", needs="transformers"),
    "transformers' trainer, in groups": Idiom(
        "transformers_trainer.py", args=("grouped",), at=(1, 3, 5), needs="transformers"
    ),
    "transformers' trainer, lost in an evaluation and while it saves": Idiom(
        "transformers_trainer.py", args=("stopping",), at=(4, 8, 12), needs="transformers"
    ),
    "lightning's trainer, nothing named": Idiom(
        "unnamed_trainer.py", Told("makes a step, and the job's loop has not begun", "start", "restart"),
        args=("lightning",), scopes=("worker",), needs="lightning"
    ),
    "transformers' trainer, nothing named": Idiom(
        "unnamed_trainer.py", Told("makes a step, and the job's loop has not begun", "start", "restart"),
        args=("transformers",), scopes=("worker",), needs="transformers"
    ),
    "a trainer whose step draws": Idiom("drawing_trainer.py", workers=2),
    "traced pipeline": Idiom("traced_pipeline.py"),
    "pipeline with static shapes": Idiom("traced_pipeline.py", args=("static",)),
    "micro-steps with a flag": Idiom("micro_steps.py"),
    "micro-steps with a flag, compiled": Idiom("micro_steps.py", args=("compiled",)),
    "micro-steps with a flag, compiled outside": Idiom("micro_steps.py", args=("outside",)),
    "accelerate's loader": Idiom("loaders.py", args=("accelerate",), needs="accelerate"),
    "fabric's loader": Idiom("loaders.py", args=("fabric",), needs="lightning"),
    "stateful loader": Idiom("loaders.py", args=("stateful",)),
    "a loader with its own generator": Idiom("loaders.py", args=("generator",)),
    "augmentation in processes that stay": Idiom("loaders.py", args=("processes",)),
    "stream": Idiom("loaders.py", args=("stream",)),
    "a loader with its own order": Idiom("loaders.py", args=("own order",)),
    "a sampler that counts": Idiom(
        "loaders.py", Told("was given other data than in the process", "failure", "restart"), args=("counting",),
        at=(8, 9, 10)
    ),
    "a stream that counts, batches of a data class": Idiom(
        "loaders.py", Told("was given other data than in the process", "failure", "restart"), args=("counting rows",),
        at=(8, 9, 10)
    ),
    "a stream that counts": Idiom(
        "loaders.py", Told("was given other data than in the process", "failure", "restart"), args=("counting stream",),
        at=(8, 9, 10)
    ),
    "a sampler that counts, between two passes": Idiom(
        "loaders.py", Told("changes from pass to pass on the other ranks", "failure", "restart", "after"),
        args=("counting",), at=(8, 9, 5)
    ),
    "a stream that counts, between two passes": Idiom(
        "loaders.py", Told("changes from pass to pass on the other ranks", "failure", "restart", "after"),
        args=("counting stream",), at=(8, 9, 5)
    ),
    "a count of all ranks before the iteration": Idiom(
        "loaders.py", Told("comes between a batch and its iteration in a replacement", "failure", "restart", "inside"),
        args=("summed before",), scopes=("worker",)
    ),
    "a count of all ranks, in a section": Idiom(
        "loaders.py", Told("the other ranks had finished the section of", "failure", "restart", "inside"),
        args=("summed in a section",), scopes=("worker",)
    ),
    "batches in groups": Idiom("loaders.py", args=("grouped",), at=(2, 4, 7)),
    "batches collected by the script": Idiom("loaders.py", args=("collected",), at=(2, 4, 7)),
    "iterations that draw": Idiom("loaders.py", args=("draws inside",)),
    "one batch ahead of the loop": Idiom("loaders.py", args=("one ahead",)),
    "one batch ahead of the update": Idiom(
        "loaders.py", Told("job.batches() had handed out before the last one", "start", "refused"),
        args=("ahead of the update",), scopes=("worker",)
    ),
    "the next batch made in the iteration": Idiom("prefetched_batch.py", at=(5, 7, 9)),
    "the next batch made in the iteration, before that is known": Idiom(
        "prefetched_batch.py", Told(_OTHER_DATA, "failure", "restart"), at=(2, 3, 4), scopes=("node",)
    ),
    "the next batch read in the iteration": Idiom(
        "prefetched_batch.py", Told("got other data than in its first run", "failure", "restart"), args=("read",),
        at=(5, 6, 9), scopes=("node",)
    ),
    "a batch read in the iteration, lost in a validation": Idiom(
        "prefetched_batch.py", Told("what the run, or the epoch, began with", "failure", "restart"),
        args=("read", "now", "validate"), at=(5, 6, 9)
    ),
    "a batch by the number of the iteration, lost in a validation": Idiom(
        "prefetched_batch.py", args=("numbered", "now", "validate")
    ),
    "a second loader of the script's own": Idiom(
        "second_loader.py", Told("that the script goes through by itself", "start", "restart", "inside"),
        scopes=("worker",)
    ),
    "a second loader of the script's own, lost in a validation": Idiom(
        "second_loader.py", Told("that the script goes through by itself", "start", "restart", "inside"),
        args=("validate",), scopes=("worker",)
    ),
    "a batch read in the iteration": Idiom(
        "prefetched_batch.py", Told(_OTHER_DATA, "failure", "restart"), args=("read", "now"), at=(5, 6, 9),
        scopes=("node",)
    ),
}
