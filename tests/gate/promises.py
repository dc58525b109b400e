"""The promises: what each says, the number it is held to, and the tests that hold it.

A test is named as pytest does, `FILE` or `FILE::TEST`; the gate runs it whole, what stands behind `soak` and `bench`
included. What a test has seen it says with `record_property("seen", …)`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise. `without_network`: its tests run where there is none. `missing` says what no test holds yet."""

    key: str
    says: str
    number: str
    tests: tuple[str, ...]
    without_network: bool = False
    missing: str = ""


PROMISES: tuple[Promise, ...] = (
    Promise(
        "P1",
        "observation changes nothing: weights, optimizer state, generators and losses are bit-identical",
        "180 runs of 200 steps: 12 models x 3 optimizers x 5 modes",
        ("tests/promises/test_bit_identity.py",),
    ),
    Promise(
        "P2",
        "no exception of gradwatch's reaches training; each is counted",
        "150 pairs of call site and exception",
        ("tests/promises/test_faults.py",),
    ),
    Promise(
        "P3",
        "a hook returns nothing, or a tensor of the same shape, dtype, device and layout",
        "10,000 gradients of each kind of hook",
        ("tests/promises/test_hook_returns.py", "tests/actions/backward/test_returns.py"),
    ),
    Promise(
        "P4",
        "models stay copyable, checkpoints stay clean",
        "0 failures",
        (
            "tests/promises/test_copies.py",
            "tests/promises/test_saved_whole.py",
            "tests/localise/held_calls/test_calls_before_attach.py",
        ),
    ),
    Promise(
        "P5", "any legal model works", "30 situations x the laws", ("tests/situations/test_situations.py",)
    ),
    Promise(
        "P6",
        "never blind in silence: coverage falls within a step, and is healed or told within two",
        "8 of 8",
        ("tests/promises/test_healing.py", "tests/promises/test_blind_spots.py"),
    ),
    Promise(
        "P7",
        "a forked child owns nothing of ours, and no lock is held in it",
        "0 hangs",
        (
            "tests/endpoint/test_http_server.py::test_a_forked_child_owns_nothing_and_the_parent_goes_on",
            "tests/journal/test_disk_faults.py::test_a_forked_child_owns_nothing_of_ours",
            "tests/session/test_watch.py::test_forked_child_is_not_watched",
            "tests/session/test_watch.py::test_forked_child_may_watch_for_itself",
            "tests/sinks/prometheus/test_sink.py::test_a_forked_child_neither_hangs_nor_takes_the_endpoint_away",
        ),
    ),
    Promise(
        "P8",
        "it exits when the script exits, with the script's status",
        "close <= 50 ms, <= 2 s where the disk hangs",
        (
            "tests/gate/test_times.py::test_closing_takes_little_time",
            "tests/gate/test_times.py::test_closing_beside_a_hung_disk_takes_two_seconds_at_most",
            "tests/journal/test_disk_faults.py::test_closing_does_not_wait_for_a_hung_disk",
            "tests/journal/test_disk_faults.py::test_the_script_may_end_without_closing",
            "tests/launch/test_exit_summary.py::test_every_way_out_is_told_and_kept",
            "tests/launch/test_os_exit.py",
            "tests/session/test_watch.py::test_script_that_never_closes_exits_cleanly",
        ),
    ),
    Promise(
        "P9",
        "no signal handler, hook for exceptions, handler of the root log, warning filter or default dtype is changed",
        "identical",
        ("tests/test_layers.py::test_no_network_and_no_default_pollution",),
    ),
    Promise(
        "P10",
        "ranks decide and act the same, also where one of them fails",
        "100 of 100 faults",
        ("tests/ranks/test_actions.py", "tests/ranks/test_faults.py"),
    ),
    Promise(
        "P11",
        "threads, descriptors, queues and memory are bounded",
        "< 1 MiB over 100,000 steps; 2 threads; 8 descriptors; queues of 1,024",
        (
            "tests/promises/test_bounded.py",
            "tests/journal/test_disk_faults.py::test_memory_does_not_grow",
            "tests/journal/test_disk_faults.py::test_the_queue_is_bounded_in_bytes",
            "tests/journal/test_disk_faults.py::test_incidents_without_a_disk_are_bounded",
        ),
    ),
    Promise(
        "P12",
        "a watchdog keeps gradwatch's own cost within a budget, shedding what can be shed",
        "max(1 % of a step, 1 ms)",
        (),
        missing="not built: own cost is measured and told (account, metric, alert), nothing is shed by it",
    ),
    Promise(
        "P13",
        "the endpoint cannot hurt training",
        "steps/s >= 95 % of the same load aimed elsewhere, five kinds of attack",
        (
            "tests/deploy/test_endpoint_attacked.py",
            "tests/gate/test_times.py::test_attacks_on_the_endpoint_slow_no_step",
        ),
    ),
    Promise(
        "P14",
        "it starts quickly, and asks no network",
        "attach <= 50 ms at 1,000 parameters, first use < 300 ms after torch is imported; no connection",
        (
            "tests/gate/test_times.py::test_a_first_watch_starts_quickly",
            "tests/promises/test_bounded.py::test_start_makes_no_connection_and_resolves_no_name",
        ),
    ),
    Promise(
        "P15",
        "a port in use never stops training",
        "20 of 20 starts",
        (
            "tests/sinks/prometheus/test_sink.py::test_a_port_in_use_gives_way_to_a_free_one",
            "tests/sinks/prometheus/test_sink.py::test_a_restart_after_sigkill_gets_its_port_back",
        ),
    ),
    Promise(
        "P16",
        "an acknowledged incident survives kill -9",
        "500 kills, 0 lost",
        ("tests/journal/test_crash.py::test_an_acknowledged_incident_survives_kill_9",),
    ),
    Promise(
        "P17",
        "... and a power cut",
        "50 cuts, 0 lost",
        (
            "tests/journal/test_crash.py::test_an_acknowledged_incident_survives_a_power_cut",
            "tests/journal/test_crash.py::test_an_acknowledged_incident_survives_the_loss_of_unsynced_writes",
            "tests/journal/test_crash.py::test_the_loss_of_unsynced_writes_would_be_seen",
        ),
    ),
    Promise(
        "P18",
        "a damaged journal never shows a wrong record",
        "cut at every byte, a bit flipped in every byte",
        (
            "tests/journal/test_crash.py::test_truncated_at_every_byte",
            "tests/journal/test_crash.py::test_a_bit_flipped_in_every_byte",
            "tests/journal/test_crash.py::test_four_kibibytes_of_zeros",
            "tests/journal/test_crash.py::test_a_stale_block_of_another_journal_is_not_taken_for_ours",
        ),
    ),
    Promise(
        "P19",
        "a disk that is full, read-only or gone: training goes on, the first incident is kept, it recovers",
        "all",
        ("tests/journal/test_disk_faults.py",),
    ),
    Promise(
        "P20",
        "a hung disk never stalls a step",
        "< 1 ms added",
        (
            "tests/gate/test_times.py::test_a_hung_disk_adds_less_than_a_millisecond",
            "tests/journal/test_disk_faults.py::test_a_hung_disk_never_stalls_a_step",
        ),
    ),
    Promise(
        "P21",
        "ranks and restarts never share a file",
        "8 processes x 1,000 journals",
        ("tests/journal/test_disk_faults.py::test_ranks_and_restarts_never_share_a_file",),
    ),
    Promise(
        "P22",
        "no flood: a line a rule and minute, a journal of 64 MiB",
        "1,000,000 incidents",
        (
            "tests/sinks/test_log.py::test_a_flood_in_full",
            "tests/journal/test_journal.py::test_a_cap_thins_the_middle_and_keeps_first_and_last",
        ),
    ),
    Promise(
        "P23",
        "NaN, Inf, -0.0 and subnormals keep their bits",
        "100 %",
        ("tests/journal/test_journal.py::test_awkward_numbers_keep_their_bits",),
    ),
    Promise(
        "P25",
        "a rule file is accepted, or refused with file, line and column",
        "50,000 mutants, <= 50 ms each",
        ("tests/rules/test_refusals.py",),
    ),
    Promise("P26", "what is written in a rule file is what is done", "0 surprises", ("tests/rules",)),
    Promise(
        "P27",
        "the same gradients give the same incidents",
        "byte-identical by hash seed, time zone and locale",
        (
            "tests/engine/test_laws.py::test_the_same_gradients_give_the_same_incidents_everywhere",
            "tests/engine/test_laws.py::test_evaluate_is_pure",
        ),
    ),
    Promise(
        "P28",
        "resumed is as uninterrupted",
        "cut at 100 steps",
        (
            "tests/checkpoint/test_health_tracker.py::test_a_resume_is_as_if_uninterrupted_wherever_it_is_cut",
            "tests/engine/test_laws.py::test_resume_is_as_if_nothing_had_happened",
        ),
    ),
    Promise(
        "P29",
        "a changed rule file is taken up whole, between two steps and on all ranks, or not at all",
        "1,000 replacements",
        (
            "tests/launch/test_rules_reload.py",
            "tests/distributed/test_all_ranks_or_none.py",
            "tests/gate/test_replacements.py",
        ),
    ),
    Promise(
        "P31",
        "a stopped process and a clock that jumps cause no incident",
        "0",
        ("tests/promises/test_clocks.py",),
    ),
    Promise(
        "P32",
        "the endpoint is local, reads only, and survives whatever is asked",
        "100,000 requests, 0 tracebacks",
        ("tests/endpoint", "tests/endpoint/test_http_server.py::test_fuzzed_requests_in_full"),
    ),
    Promise(
        "P33",
        "any name of a parameter is harmless",
        "10,000 names",
        (
            "tests/sinks/prometheus/test_sink.py::test_hostile_names_in_full",
            "tests/sinks/test_log.py::test_any_name_is_one_harmless_line",
            "tests/journal/test_journal.py::test_any_parameter_name_is_harmless",
            "tests/incidents/bundle/test_bundle_writer.py",
        ),
    ),
    Promise(
        "P34",
        "to open a foreign journal or bundle runs nothing and writes nothing",
        "0 effects",
        (
            "tests/test_layers.py::test_nothing_can_run_foreign_data",
            "tests/incidents/bundle/test_bundle_reader.py",
            "tests/journal/test_journal.py::test_a_foreign_payload_is_refused_not_run",
        ),
    ),
    Promise(
        "P36",
        "files are private, links are not followed",
        "0600, 0700",
        (
            "tests/journal/test_journal.py::test_files_are_private_and_ignored_by_git",
            "tests/journal/test_disk_faults.py::test_a_linked_run_directory_is_not_followed",
            "tests/sinks/prometheus/test_sink.py::test_a_link_in_the_way_is_not_followed",
        ),
    ),
    Promise(
        "P37",
        "it needs no network",
        "the test command of the README without one",
        ("tests",),
        without_network=True,
    ),
    Promise(
        "P38",
        "`gradwatch run X` is `python X`",
        "40 scripts, byte-identical",
        ("tests/launch/test_launch.py", "tests/trainings"),
    ),
    Promise(
        "P40",
        "off means off",
        "0 hooks, 0 threads",
        (
            "tests/session/test_watch.py::test_gradwatch_0_is_off",
            "tests/promises/test_copies.py",
            "tests/promises/test_healing.py",
        ),
    ),
    Promise(
        "lines",
        "at every line of a step and of an attach: ours never reaches training, the script's own always does",
        "every line x 3 kinds of exception x 3 rule files",
        ("tests/promises/test_injection.py",),
    ),
)
