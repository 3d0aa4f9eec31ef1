"""The list of planted bugs. Who moves or rewrites a line that stands here as `old`, or a test that is named here,
changes the entry with it: the law still needs a test that fails without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.paths import ROOT

_PAGE = (ROOT / "tests" / "laws.md").read_text()
LAWS = {int(n): says for n, says in re.findall(r"^\| (\d+) \| ([^|]+) \|", _PAGE, re.MULTILINE)}
"""The laws of the design, in short, as the page has them."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One fault to plant. `old` stands exactly once in `file`, and `new` takes its place. `breaks` says what goes wrong
    for a user. `tests` are the test files or ids of which at least one must fail then."""

    name: str
    law: int
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


BUGS: tuple[Bug, ...] = (
    Bug(
        "double-key", 1, "orchestrator/tables/merge.py",
        "lines[new.place] = (",
        'lines[f"{new.place} "] = (',
        "A merge adds the better row and leaves the old one of the same key in the table.",
        ("tests/unit/tables/test_table.py::test_the_incumbent_goes_only_if_clearly_beaten",),
    ),
    Bug(
        "split-loses-a-shape", 1, "orchestrator/policy/work_queue.py",
        "isolate(state, rest[middle:])",
        "isolate(state, rest[middle + 1 :])",
        "A group that is halved after a fault drops a shape, which then never ends.",
        ("tests/unit/policy/test_blame.py::test_unknown_in_flight_is_halved_and_uses_no_try",),
    ),
    Bug(
        "exit-code-believed", 2, "worker/agent/tuner_process.py",
        'return "fault", f"the tuner\'s process {exit_words(status)}"',
        'return ("done" if status == 0 else "fault"), f"the tuner\'s process {exit_words(status)}"',
        "A tuner that exits with 0 before it has delivered its shapes counts as done.",
        ("tests/unit/worker/agent/test_tuner_supervisor.py::test_a_fault_ends_the_attempt_and_names_the_shape",),
    ),
    Bug(
        "partial-rows-dropped", 2, "worker/tuners/aiter/tuner.py",
        "for row in end.partial:",
        "for row in end.partial[:0]:",
        "The rows that AITER measured before its process died are thrown away.",
        ("tests/unit/worker/aiter/test_tuner.py::test_a_fault_in_a_group_names_shape_and_candidate",),
    ),
    Bug(
        "lost-row", 3, "orchestrator/ledger/writer.py",
        "part = rows[i : i + _ROWS_AT_ONCE]",
        "part = rows[i : i + _ROWS_AT_ONCE - 1]",
        "Every 64th row of a large batch is not written to the ledger.",
        ("tests/unit/ledger/test_ledger.py::test_many_rows_of_one_read_are_kept_in_order",),
    ),
    Bug(
        "later-row-settles", 3, "orchestrator/ledger/reader.py",
        "winners.setdefault(row.shape, row)",
        "winners[row.shape] = row",
        "A later row replaces the winner of a shape that is settled.",
        ("tests/unit/ledger/test_ledger.py::test_the_first_valid_winner_settles_and_later_ones_are_kept_and_change_nothing",),
    ),
    Bug(
        "offset-not-committed", 4, "orchestrator/ledger/ingest.py",
        "self._ledger.advance_offset(node, slot, EVENTS, consumed)",
        "self._ledger.advance_offset(node, slot, EVENTS, 0)",
        "The offset of a stream is not committed with its rows, so a new controller reads them twice.",
        ("tests/unit/ledger/test_ingest.py::test_torn_lines_wait_and_bad_ones_in_the_middle_are_skipped",),
    ),
    Bug(
        "torn-tail-accepted", 4, "orchestrator/ledger/ingest.py",
        "    return lines, end\n",
        "    return lines, len(buffer)\n",
        "The beginning of a line that is still under way counts as read, and its record is lost.",
        (
            "tests/unit/ledger/test_ingest.py::test_torn_lines_wait_and_bad_ones_in_the_middle_are_skipped",
            "tests/unit/ledger/test_ingest.py::test_a_new_controller_reads_the_torn_line_again",
        ),
    ),
    Bug(
        "resume-repeats", 4, "orchestrator/controller/node_reports.py",
        "if attempt.id not in message.present]",
        "]",
        "A new controller sends again what the workers of a node still have.",
        ("tests/unit/controller/test_node_reports.py::test_only_what_a_node_does_not_have_is_sent_again",),
    ),
    Bug(
        "node-loss-is-a-try", 5, "orchestrator/policy/evidence.py",
        "if len(shape.losses) >= state.settings.losses:",
        "shape.tries += 1\n    if len(shape.losses) >= state.settings.losses:",
        "A node that is lost uses up a try of the shape that it had.",
        ("tests/unit/policy/test_node_changes.py::test_a_loss_with_the_shape_in_flight_uses_up_no_try",),
    ),
    Bug(
        "preemption-charged", 5, "orchestrator/policy/node_changes.py",
        "if event.charged:",
        "if event.cause != RELEASED:",
        "A preempted lease counts as a loss of the shapes that it had.",
        ("tests/unit/policy/test_node_changes.py::test_an_uncharged_end_gives_everything_back_at_once_and_blames_nobody",),
    ),
    Bug(
        "blame-from-one-slot", 6, "orchestrator/policy/blame.py",
        "if len({host for host, _ in places}) > 1:",
        "if places:",
        "A shape fails after a fault on a single slot.",
        ("tests/unit/policy/test_blame.py::test_two_nodes_convict",),
    ),
    Bug(
        "canary-ignored", 6, "orchestrator/policy/slot_changes.py",
        'state.to_quarantine[slot.id] = f"the canary failed: {event.detail}"',
        "slot.canary_failed = False",
        "A slot whose canary failed goes on tuning.",
        ("tests/unit/policy/test_slot_changes.py::test_a_failed_canary_shuts_the_slot_until_one_passes",),
    ),
    Bug(
        "sick-slot-accuses", 6, "orchestrator/policy/evidence.py",
        "strike_out(state, state.shapes[fault.shape], fault.attempt)",
        "pass",
        "A fault on a slot whose canary failed afterwards still counts against the shape.",
        ("tests/unit/policy/test_blame.py::test_a_fault_on_a_slot_whose_canary_then_fails_is_not_held_against_the_shape",),
    ),
    Bug(
        "workaround-without-predicate", 7, "worker/tuners/aiter/workarounds.py",
        'if findings.workarounds[workaround.name].verdict == "needed"',
        'if findings.workarounds[workaround.name].verdict != "harmful"',
        "A workaround is asked for on an AITER that does not need it.",
        ("tests/unit/worker/aiter/test_workarounds.py::test_two_in_one_file",),
    ),
    Bug(
        "workaround-not-recorded", 7, "worker/tuners/aiter/tuner.py",
        '"applied": [_brief(a) for a in session.applied]',
        '"applied": []',
        "The provenance of a run does not say which workarounds were applied.",
        ("tests/unit/worker/aiter/test_tuner.py::test_the_record_of_the_start_names_the_workarounds_that_were_applied",),
    ),
    Bug(
        "mixed-gfx", 8, "orchestrator/tables/mixing.py",
        '    if "gfx" not in table.header:\n',
        '    if "gfx" not in table.header and not table.rows:\n',
        "A table without a gfx column takes rows of another chip.",
        ("tests/unit/tables/test_table.py::test_a_table_without_gfx_takes_only_what_its_cu_num_says",),
    ),
    Bug(
        "mixed-images", 8, "orchestrator/tables/mixing.py",
        "if faults and not allowed:",
        "if faults and not known:",
        "Rows that were measured on two images get into one table, and nothing says so.",
        ("tests/unit/tables/test_merge.py::test_images_and_tuner_versions_that_are_known_do_not_mix_silently",),
    ),
    Bug(
        "old-table-not-kept", 9, "orchestrator/files/history.py",
        "                    _keep(path, kept[path])\n",
        "                    pass\n",
        "A merge replaces the user's table and keeps no copy of the old one.",
        ("tests/unit/tables/test_table.py::test_the_old_file_is_kept_under_a_name_of_its_own",),
    ),
    Bug(
        "written-in-place", 9, "orchestrator/files/write.py",
        "os.rename(aside, target)",
        "target.write_bytes(aside.read_bytes())\n        aside.unlink()",
        "A user's file is written in place: who reads meanwhile, or a crash, sees half of it.",
        ("tests/unit/tables/test_merge.py::test_a_merge_that_is_cut_off_leaves_an_old_or_a_new_table_whole",),
    ),
    Bug(
        "template-word-unquoted", 10, "orchestrator/templating.py",
        "return shlex.quote(text)",
        "return text",
        "A value of the inventory is pasted into a script, where the shell runs what is in it.",
        ("tests/unit/machines/test_node_files.py::test_values_reach_the_worker_as_they_are_and_run_nothing",),
    ),
    Bug(
        "command-line-unquoted", 10, "orchestrator/transport/commands.py",
        'return "exec " + " ".join(map(quote, argv))',
        'return "exec " + " ".join(f\'"{word}"\' for word in argv)',
        "The shell of a node expands what is in the words of a command.",
        ("tests/unit/transport/test_exec.py::test_a_command_line_gives_each_word_as_it_is",),
    ),
    Bug(
        "changed-host-key-accepted", 11, "orchestrator/transport/ssh_connection.py",
        "        raise hop.host_keys.changed(e) from e\n",
        "        hop.connection.client.get_host_keys().clear()\n        tried = hop.connection.open()\n",
        "A host whose key has changed is trusted under --accept-new-host-keys.",
        ("tests/integration/test_ssh.py::test_a_wrong_key_of_any_hop_is_refused_before_a_login",),
    ),
    Bug(
        "hop-not-checked", 11, "orchestrator/transport/ssh_connection.py",
        "KnownOnly(node, connection, settings, accept_new)",
        "KnownOnly(node, connection, settings, accept_new or bool(gateways))",
        "The host behind a jump host is trusted whatever key it shows.",
        ("tests/integration/test_ssh.py::test_an_unknown_key_of_any_hop_is_refused_or_kept_once",),
    ),
    Bug(
        "secret-in-a-file", 11, "orchestrator/machines/node_plan.py",
        "{name: value for name, value in env.items() if not has_reference(value)}",
        "resolve(env, node.name, node.origin)",
        "A value of the environment is written into the scripts of a node.",
        ("tests/unit/machines/test_node_plan.py::test_no_value_is_in_what_is_kept",),
    ),
    Bug(
        "oversized-record-accepted", 12, "worker/protocol/records.py",
        "if len(line) > MAX_RECORD_BYTES:",
        "if len(line) > 1000 * MAX_RECORD_BYTES:",
        "A record of any size that a node sends is read into memory.",
        ("tests/unit/worker/protocol/test_protocol.py::test_a_bad_record_is_refused",),
    ),
    Bug(
        "control-characters-shown", 12, "orchestrator/cli/printer.py",
        'escaped(uncoloured(text).replace("\\t", " ").rstrip())',
        "text",
        "Text of a node moves the cursor of the user's terminal.",
        ("tests/unit/cli/test_live_view.py::test_plain_lines_where_there_is_no_terminal",),
    ),
    Bug(
        "spec-from-a-pipe", 12, "worker/agent/inbox.py",
        "if not stat.S_ISREG(info.st_mode):",
        "if stat.S_ISDIR(info.st_mode):",
        "A named pipe in the inbox is read as if it were a spec.",
        ("tests/unit/worker/agent/test_loop.py::test_hostile_specs_hurt_nobody",),
    ),
    Bug(
        "markup-in-the-page", 12, "orchestrator/report/page.py",
        'return text.replace("<", "\\\\u003c")',
        "return text",
        "A kernel's name can end the data block of the page and begin a script.",
        ("tests/unit/report/test_page.py::test_embedded_data_is_ascii_without_markup",),
    ),
    Bug(
        "cpu-chip-unmarked", 13, "worker/device.py",
        'filter(None, ("cpu", machine, *levels[:1]))',
        "filter(None, (machine, *levels[:1]))",
        "Rows that were measured on a CPU name a chip like any other.",
        ("tests/unit/worker/test_device.py::test_a_cpu_is_named_as_one",),
    ),
    Bug(
        "cpu-bench-unmarked", 13, "orchestrator/cli/bench_page.py",
        "{'the CPU ' if is_on_cpu else ''}",
        "",
        "The end of a bench on a CPU does not say so.",
        ("tests/integration/test_bench.py::test_backends_side_by_side_with_one_that_dies_and_one_that_is_not_there",),
    ),
    Bug(
        "bound-not-found", 14, "worker/triton_configs/resolve.py",
        "if m <= x and",
        "if m < x and",
        "A config is planned for a bucket that AITER's own look-up does not choose at its bound.",
        ("tests/unit/configs/test_resolve.py",),
    ),
    Bug(
        "unselected-row-proven", 14, "orchestrator/results/verify.py",
        'return self.selected and self.verdict == "ok"',
        'return self.verdict == "ok"',
        "`verify` calls a row proven that AITER's look-up never took.",
        ("tests/unit/results/test_verify.py::test_a_lookup_that_took_something_else_proves_nothing",),
    ),
    Bug(
        "unjudged-rows-pass", 15, "orchestrator/results/comparison.py",
        'return 4 if results["open"] else 0',
        "return 0",
        "`compare` ends with 0 where rows could not be judged.",
        ("tests/unit/results/test_comparison.py::test_rows_for_a_second_look",),
    ),
    Bug(
        "swapped-sides", 15, "orchestrator/results/comparison.py",
        "judge(us[0], us[1], ",
        "judge(us[1], us[0], ",
        "`compare` takes the golden side for the one under test, so a regression reads as an improvement.",
        ("tests/unit/results/test_comparison.py::test_a_regression_ends_with_1_and_the_worst_comes_first",),
    ),
    Bug(
        "unread-kernels-pass", 15, "orchestrator/tables/rules.py",
        'BrokenRule(f"build: {answer.standing}", "error", answer.why)',
        'BrokenRule(f"build: {answer.standing}", "error" if answer.standing == "cannot" else "warning", answer.why)',
        "`db check --build` calls a table safe although the build's list of kernels could not be read.",
        ("tests/unit/tables/test_check_build.py::test_what_cannot_be_read_is_unsafe",),
    ),
    Bug(
        "slower-row-wins", 16, "orchestrator/tables/decision.py",
        "    if gain <= 0:\n",
        "    if gain <= -1:\n",
        "A slower row replaces a faster one in a tuned table.",
        ("tests/unit/tables/test_merge.py::test_the_judge",),
    ),
    Bug(
        "slower-config-merged", 16, "orchestrator/configs/merge.py",
        "and is_slower(row.old_us, row.new_us)",
        "and is_slower(row.old_us, row.old_us)",
        "A Triton config is merged although a measured M becomes slower with it.",
        ("tests/unit/configs/test_merge.py",),
    ),
    Bug(
        "import-upward", 17, "orchestrator/shapes/model.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport orchestrator.ledger.database\n",
        "A lower room imports a higher one.",
        ("tests/unit/project/test_rooms.py::test_every_room_imports_only_the_rooms_below_it",),
    ),
    Bug(
        "schema-out-of-step", 17, "orchestrator/inventory/option_types.py",
        "Field(ge=1, le=65535)",
        "Field(ge=0, le=65535)",
        "The schema that editors use says something else than the inventory's reader.",
        ("tests/unit/inventory/test_inventory.py::test_the_schema_in_the_repository_is_up_to_date",),
    ),
)  # fmt: skip
