"""Which tests with jobs and servers `make test` runs: at least one for each thing that the product does, by real
processes. All others of these directories are marked `full`, and run in `make test-all`. tests/unit and tests/model run
in both, but for what is in LATER. Those that are marked `long` (`long`, `in_soak`) run in `make soak` only.

A name stands for all its parameters; one with brackets for those only. A name that is no test's is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest

ALL = ("",)

QUICK: dict[str, tuple[str, ...]] = {
    # ---- a worker or a node is lost ----
    "faults/test_kill_points.py": (
        "test_both_workers[forward]",
        "test_both_workers[backward, inside the all-reduces]",
        "test_both_workers[inside the step of the victim only]",
        "test_both_workers[between iterations]",
        "test_both_workers[end of the evaluation]",
        "test_worker[1-first iteration]",
        "test_worker[1-last iteration]",
        "test_worker[1-end of the run]",
        "test_node[forward]",
        "test_node[evaluation]",
        "test_node[first iteration]",
    ),
    "faults/test_cascades.py": (
        "test_second_failure_during_recovery[rebuild-1]",
        "test_second_failure_during_recovery[verify-0]",
        "test_node_lost_during_the_recovery_of_another",
    ),
    "faults/test_defaults.py": (
        "test_kills_without_progress_end_the_job_at_the_third",
        "test_the_same_exception_ends_the_job_at_the_second_time[raises]",
        "test_the_quick_start_goes_on_when_a_worker_is_killed",
    ),
    "faults/test_journal.py": ALL,
    # ---- coordinator, etcd, network ----
    "faults/test_coordinator_failover.py": (
        "test_killed",
        "test_generation_that_forgets_a_node[kill-after]",
    ),
    "faults/test_etcd_trouble.py": (
        "test_a_single_etcd_is_restarted",
        "test_the_etcd_of_a_job_on_one_machine_is_killed",
        "test_the_leader_is_killed",
    ),
    "faults/test_cut_off.py": ("test_a_node_whose_cable_is_cut_is_replaced_and_comes_back_as_a_spare",),
    "faults/test_split_brain.py": ("test_a_single_node_and_its_successor",),
    "faults/test_neighbours.py": (
        "test_a_port_scan_during_a_recovery_does_no_harm",
        "test_a_state_that_is_altered_on_its_way_is_sent_again",
    ),
    # ---- what operators do ----
    "faults/test_drain.py": ("test_a_stage_of_a_pipeline_moves[checkpoints]",),
    "faults/test_elastic.py": (
        "test_a_job_that_is_recovered_in_place_grows_between_two_iterations",
    ),
    "faults/test_endings.py": (
        "test_signal_ends_the_whole_job[SIGTERM to all]",
        "test_workers_die_with_their_agent",
    ),
    "integration/test_result_file.py": ("test_how_it_ended[raises]",),
    "integration/test_kubernetes_manifests.py": ALL,
    "faults/test_slurm.py": ("test_srun_needs_no_option_of_the_rendezvous[plain]",),
    "faults/test_notices.py": (
        "test_a_spare_takes_its_place[0-SIGTERM]",
        "test_without_a_spare_it_leaves_and_the_job_waits_for_another[0]",
        "test_all_are_told_to_go_and_nothing_is_lost[ab-0.0]",
    ),
    "integration/test_traces.py": ALL,
    "faults/test_injection.py": ("test_a_worker_is_killed_at_a_moment[backward]",),
    "faults/test_metrics.py": ("test_a_node_is_lost",),
    "integration/test_observability.py": ALL,
    "faults/test_demo.py": ("test_demo_notices_one_different_bit",),
    # ---- models ----
    "faults/test_hsdp.py": (
        "test_workers",
        "test_nodes[its end and the step]",
        "test_shards_without_replicas_come_back_from_a_checkpoint",
    ),
    "faults/test_kernels.py": (
        "test_a_spare_that_computes_otherwise_says_so_when_it_has_taken_a_place",
        "test_replicas_that_round_otherwise_train_on_and_are_told[a worker]",
    ),
    "faults/test_meshes.py": (
        "test_workers[tensor]",
        "test_workers[pipeline]",
        "test_nodes[forward and step-pipeline]",
    ),
    "faults/test_overlap.py": (
        "test_exact[sgd]",
        "test_undone_within_the_bound[adam]",
        "test_nothing_is_undone_that_a_survivor_has_untouched[lamb]",
        "test_any_subset_of_ranks_has_updated_any_buckets[0-muon]",
        "test_immediate_rollback",
        "test_lossy_forward",
    ),
    "faults/test_uneven.py": ("test_a_replica_of_one_stage_is_lost_beside_a_stage_that_logs",),
    "faults/test_uneven_nodes.py": ALL,
    # ---- pipelines, logs, checkpoints ----
    "faults/test_pipelines.py": (
        "test_workers[forward]",
        "test_nodes[forward]",
        "test_several_nodes_are_lost_at_once[[3, 2, 0]]",
        "test_who_gives_a_log_is_lost_meanwhile",
        "test_a_repetition_that_differs_is_noticed[worker-5-0]",
        "test_who_has_taken_part_in_a_collective_begins_its_iteration_again",
        "test_what_collectives_gave_is_repeated[from a checkpoint]",
        "test_collectives_cannot_be_repeated[one is lost-compiled]",
    ),
    "faults/test_replicated_stages.py": (
        "test_nodes[backward]",
        "test_workers[agreed]",
        "test_since_a_checkpoint[3]",
        "test_after_all_have_begun_with_a_checkpoint[once]",
    ),
    "faults/test_checkpoints.py": (
        "test_a_lost_stage_begins_with_the_newest[forward-begins0]",
        "test_a_loss_at_each_step_of_a_checkpoint[the worker of rank 0]",
        "test_all_begin_with_it_if_iterations_cannot_be_repeated",
        "test_replicas_write_one_part",
    ),
    "faults/test_helpers.py": (
        "test_a_spare_helps[forward]",
        "test_the_ends_of_a_pipeline[3]",
        "test_a_helper_dies[exchanges]",
        "test_what_cannot_be_shared_is_repeated_alone",
    ),
    "faults/test_log_groups.py": (
        "test_a_worker_takes_its_group_back[backward]",
        "test_groups_of_one_two_and_three[1-lost1]",
    ),
    "faults/test_profile_of_a_job.py": ALL,
    "faults/test_log_store.py": ("test_logs_that_are_in_a_store_only[s3]", "test_a_disk_that_is_full"),
    # ---- scripts ----
    "faults/test_scripts.py": (
        "test_form[scaler, clipping, scheduler outside]",
        "test_form[loader processes]",
        "test_form[job.run]",
        "test_survivor_ahead[source lost]",
        "test_collective_outside_an_iteration",
    ),
    "faults/test_waits.py": ("test_who_works_alone_is_waited_for",),
    "strangers/test_strangers.py": (
        "test_stranger[ddp tutorial-worker+node]",
        "test_stranger[image classifier-worker+node]",
        "test_stranger[step with a closure-worker+node]",
        "test_stranger[lightning's trainer-worker+node]",
        "test_stranger[accelerate's loader-worker+node]",
        "test_stranger[stateful loader-worker+node]",
        "test_stranger[stream-worker+node]",
    ),
    # ---- torchrun's command line ----
    "integration/test_torchrun_parity.py": (
        "test_environment_and_arguments_of_a_script",
        "test_failure_is_reported_alike[kill--9]",
        "test_all_workers_of_an_unmodified_script_are_restarted",
        "test_torchs_own_backends_still_work[c10d]",
    ),
    "integration/test_torchrun_launcher.py": (
        "test_a_failure_names_its_error_file[option0]",
        "test_a_script_without_record_tells_how_it_failed",
        "test_events_are_those_of_torchs_agent[badly]",
        "test_nodes_of_different_roles_sizes_and_arguments",
    ),
    "integration/test_torch_plugin.py": (
        "test_two_nodes_train_and_leave_nothing",
        "test_torch_finds_it_whatever_is_imported_first",
    ),
    "integration/test_bad_input.py": (
        "test_options[args0---spares]",
        "test_all_mistakes_at_once",
        "test_script_missing",
        "test_unreachable_etcd",
        "test_two_jobs_with_one_id",
    ),
    "integration/test_early_signals.py": (
        "test_nothing_remains[joined-15]",
        "test_nothing_remains[etcd's directory-2]",
    ),
    "integration/test_security.py": (
        "test_a_job_over_tls_with_a_role_of_its_own_leaks_no_secret",
    ),
    # ---- parts with real processes and servers ----
    "integration/test_ddp_surgery.py": ALL,
    "integration/test_overlap_updates.py": ALL,
    "integration/test_process_group.py": ALL,
    "integration/test_results.py": ALL,
    "integration/test_shared_steps.py": (
        "test_a_step_is_that_of_one_process[3]",
        "test_a_helper_dies[exchange-1]",
        "test_what_cannot_be_shared_is_not[orders1-its stages change Counting.mean]",
    ),
    "integration/test_staying.py": ALL,
    "integration/test_strangers.py": ALL,
    "integration/test_replica_transfer.py": (
        "test_one_source_serves_a_replacement_and_a_survivor",
        "test_a_source_that_dies_leaves_a_staged_survivor_whole",
        "test_plan",
        "test_every_byte_is_planned_once",
    ),
    "integration/test_ctl.py": ALL,
    "integration/test_ctl_commands.py": ALL,
    "integration/test_commands_of_pages.py": (
        "test_swiftctl_on_a_job",
        "test_logs_are_removed_by_hand",
        "test_etcd_is_compacted",
    ),
    "integration/test_ctl_screen.py": (
        "test_it_follows_the_job_and_ends_with_it",
        "test_it_leaves_the_terminal_as_it_was[Ctrl-C]",
    ),
    "integration/test_etcd_client.py": (
        "test_the_leader_of_three_is_killed",
        "test_tls_with_client_certificates_and_login",
        "test_a_watch_outlives_restarts_of_its_server",
        "test_a_watch_whose_history_is_gone_says_so",
        "test_a_frozen_member_of_three_is_left",
        "test_an_unreachable_store_is_no_lost_lease",
        "test_tokens_that_expired_or_died_with_their_server_are_renewed",
    ),
    "integration/test_etcd_members.py": (
        "test_a_lost_quorum_is_proven_and_a_lost_member_is_not",
        "test_a_server_that_is_frozen_proves_nothing",
    ),
    "integration/test_liveness.py": (
        "test_the_ring",
        "test_a_killed_peer_is_seen_within_a_second",
        "test_a_kernel_that_is_still_closing_is_no_life",
        "test_a_stranger_is_refused_and_does_no_harm",
        "test_strangers_who_say_nothing_keep_nobody_out",
        "test_a_queue_that_is_full_is_no_death",
        "test_no_descriptors_for_a_moment_keep_nobody_out_for_ever",
        "test_a_machine_that_is_cut_off_is_lost_before_its_lease_is[link down]",
        "test_a_short_cut_is_no_loss",
        "test_a_loss_that_is_over_can_be_looked_at_again",
    ),
    "integration/test_native.py": (
        "test_the_path_tells_torch_python_and_source_apart",
        "test_it_is_not_loaded_if_others_may_have_put_it_there[open to all-folder]",
        "test_it_is_used_only_if_built_and_wanted",
        "test_compiled_seeds_are_those_of_python",
        "test_a_watched_snapshot_is_that_of_python",
    ),
    "integration/test_private_etcd.py": ALL,
    "integration/test_s3.py": ALL,
    "integration/test_hdfs.py": (
        "test_files_come_and_go",
        "test_checkpoints_come_back_and_old_ones_go",
        "test_nobody_there_is_said_before_anything_starts",
    ),
}

# Of tests/unit and tests/model, what `make test` leaves out: most of what shows that tests find mistakes, and more of
# the same.
LATER: dict[str, tuple[str, ...]] = {
    "model/test_exploration.py": (
        "test_the_search_finds_a_mistake",
        "test_every_state_is_sound[no failure, every order]",
        "test_every_state_is_sound[two failures in a recovery]",
        "test_every_state_is_sound[three crashes and kills]",
        "test_every_state_is_sound[one failure in a recovery, every order]",
        "test_every_state_is_sound[a link is parted while two of three have no state]",
        "test_every_state_is_sound[the places of those who are cut off are given away]",
        "test_every_state_is_sound[etcd is away for all, and a node is cut off]",
        "test_every_state_is_sound[two failures while a replacement has no state]",
        "test_every_state_is_sound[garbage in a record, and a failure, in a recovery]",
        "test_every_state_is_sound[garbage in a record, and a failure, in training]",
        "test_every_state_is_sound[garbage in a record on the way to a boundary]",
        "test_every_state_is_sound[nodes are cut off from etcd, not from each other]",
        "test_every_state_is_sound[one failure, or the order taken back, on the way to a boundary]",
        "test_every_state_is_sound[leases are lost in training]",
        "test_every_state_is_sound[a drain, every order]",
        "test_every_state_is_sound[a link is parted while a replacement has no state]",
        "test_every_state_is_sound[a spare has been mistaken, and gets a slot]",
        "test_every_state_is_sound[a loss is told too late]",
        "test_every_state_is_sound[a node is cut off while a replacement has no state]",
        "test_every_state_is_sound[all nodes are told to go]",
        "test_every_state_is_sound[a signal on the way to a boundary]",
        "test_every_state_is_sound[a signal in a handover]",
        "test_every_state_is_sound[a signal, every order]",
        "test_every_state_is_sound[two links are parted in training]",
    ),
    "model/test_walks.py": ("test_the_walks_find_a_mistake",),
    "unit/agent/lifecycle/test_walks.py": (
        "test_the_walks_find_a_mistake",
        "test_nothing_is_lost_nor_run_twice_when_a_job_grows[2]",
        "test_whatever_fails_the_job_comes_to_its_end[many failures]",
        "test_whatever_fails_the_job_comes_to_its_end[two to four nodes of one worker]",
        "test_whatever_fails_the_job_comes_to_its_end[an untracked job of 2 to 4 nodes]",
    ),
    "unit/agent/processes/test_standby.py": (
        "test_a_server_that_gets_threads_after_all_makes_no_more_forks",
        "test_a_standby_starts_although_its_log_went_after_the_order",
        "test_a_replacement_starts_although_the_log_directory_has_gone",
        "test_orders_are_served_while_an_import_hangs",
        "test_modules_in_the_current_directory_are_not_those_of_the_server",
    ),
    "unit/worker/test_injection.py": (
        "test_it_stops_in_that_micro_batch[forward-0.5-3-begun 3]",
        "test_it_stops_in_that_micro_batch[backward-0.0-1-forward 1]",
        "test_it_stops_in_that_micro_batch[backward-0.5-3-forward 3]",
    ),
    "unit/worker/data/test_own_epochs.py": (
        "test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place[0-False]",
        "test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place[0-True]",
        "test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place[1-False]",
        "test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place[2-False]",
        "test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place[2-True]",
    ),
}
# Of those, all the same: each of another kind.
NOT_LATER = (
    "test_the_search_finds_a_mistake[no fence on the generation]",
    "test_the_search_finds_a_mistake[a lost node is taken for a spare]",
    "test_the_search_finds_a_mistake[a boundary that somebody has passed]",
    "test_the_walks_find_a_mistake[starts beside a living process]",
    "test_the_walks_find_a_mistake[goes before the plan]",
    "test_the_walks_find_a_mistake[keeps an old report]",
)

# These jobs mostly wait: for a timeout, for a lease to run out. They run beside the others, first of all, as what comes
# later beside those takes only the time that is left.
WAITING = tuple(
    f"tests/faults/test_{name}.py" for name in ("cut_off", "elastic", "etcd_trouble", "soak", "split_brain", "waits")
)

# Of these no test looks at how long a recovery takes, and few train: they run beside jobs, and take the time that those
# leave. Two jobs at a time are no faster on two cores than one after the other: each takes twice as long.
NO_JOBS = (
    "tests/model/",
    "tests/unit/",
    *(
        f"tests/integration/test_{name}.py"
        for name in (
            "bad_input",
            "ctl",
            "ctl_commands",
            "ctl_screen",
            "etcd_client",
            "etcd_members",
            "etcd_scripts",
            "hdfs",
            "kubernetes_manifests",
            "libhdfs",
            "native",
            "private_etcd",
            "s3",
            "slurm_script",
            "timeline_page",
            "torch_plugin",
            "torchrun_launcher",
            "torchrun_parity",
        )
    ),
)


def is_full(nodeid: str) -> bool:
    """Whether that test runs in `make test-all` only."""
    path, _, name = nodeid.removeprefix("tests/").partition("::")
    if path.startswith(("unit/", "model/")):
        return name not in NOT_LATER and any(_stands_for(entry, name) for entry in LATER.get(path, ()))
    return not any(_stands_for(entry, name) for entry in QUICK.get(path, ()))


def unknown(nodeids: Iterable[str]) -> list[str]:
    """Entries that stand for none of these tests, of the files that are among them."""
    names: dict[str, list[str]] = {}
    for nodeid in nodeids:
        path, _, name = nodeid.removeprefix("tests/").partition("::")
        names.setdefault(path, []).append(name)
    return [
        f"tests/{path}::{entry}"
        for path, entries in (*QUICK.items(), *LATER.items())
        if path in names
        for entry in entries
        if not any(_stands_for(entry, name) for name in names[path])
    ]


def _stands_for(entry: str, name: str) -> bool:
    return entry in ("", name, re.sub(r"\[.*", "", name))


def long(*values: Any) -> Any:
    """These parameters of a test, in `make soak` only."""
    return pytest.param(*values, marks=pytest.mark.long)


def in_soak(*values: Any) -> list[Any]:
    """Each of these, as the one parameter of a test, in `make soak` only."""
    return [long(value) for value in values]
