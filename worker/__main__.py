"""Command line of the worker, `python -m worker VERB`. Imports only what the verb needs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from worker.protocol import SLOT_RE


def parser() -> argparse.ArgumentParser:
    """The command line of the worker."""
    top = argparse.ArgumentParser(prog="worker", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)

    agent = verbs.add_parser("agent", help="drain the inbox of a node folder on one slot")
    _node_dir(agent, required=True)
    agent.add_argument("--slot", type=_slot, required=True)

    run = verbs.add_parser("run", help="run one group to the end, without an agent")
    run.add_argument("group", type=Path, metavar="GROUP.json", help="a spec, e.g. attempts/ID/spec.json")
    _node_dir(run)
    run.add_argument("--slot", type=_slot, default="0")
    run.add_argument("--tuner", help="instead of the one that the spec or node.json names")

    follow = verbs.add_parser("follow", help="stream records and logs of a node folder to stdout")
    _node_dir(follow, required=True)
    follow.add_argument("--from", dest="start", default="{}", metavar="JSON", help="offsets to begin at")

    probe = verbs.add_parser("probe", help="identity of this machine and its AITER installations")
    probe.add_argument("--json", action="store_true", help="one JSON object on one line")
    probe.add_argument(
        "--aiter-root",
        type=Path,
        metavar="PATH",
        help="instead: what the AITER tree there supports, by its files",
    )
    probe.add_argument("--gfx", default="gfx950", help="chip for --aiter-root", metavar="GFX")

    verify = verbs.add_parser("verify", help="run AITER's operators with a tuned table (--run_config)")
    verify.add_argument("table", type=Path, metavar="TUNED.csv")
    verify.add_argument("--family", required=True)
    capture = verbs.add_parser("capture", help="run a workload and list the shapes without a tuned row")
    capture.add_argument("command", nargs="+", metavar="CMD", help="after --")
    for verb in (verify, capture):
        _node_dir(verb)
        verb.add_argument("--slot", type=_slot, default="0")
        verb.add_argument("--until-eof", action="store_true", help="the end of standard input ends it")

    child = verbs.add_parser("child", help="the tuner's process (the agent starts it)")
    child.add_argument("--tuner", required=True)
    child.add_argument("--options", default="{}", help="JSON object")
    child.add_argument("--fd", type=int, required=True, help="where messages go")
    child.add_argument("--parent", type=int, required=True, help="process number of the agent")
    child.add_argument("--node", default="")
    _node_dir(child)
    child.add_argument("--slot", type=_slot, default="0")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a verb; its exit status."""
    args = parser().parse_args(argv)
    if args.verb in ("agent", "run"):
        if args.verb == "agent":
            from worker.agent import loop

            return loop.main(args.node_dir, args.slot)
        from worker.agent.group_run import run_group

        return run_group(args.group, args.node_dir, args.slot, args.tuner)
    if args.verb == "follow":
        from worker.agent import follow

        return follow.main(args.node_dir, args.start)
    if args.verb == "probe":
        return _probe(args)
    if args.verb in ("verify", "capture"):
        return _on_slot(args)
    return _child(args)


def _on_slot(args: argparse.Namespace) -> int:
    """`verify` and `capture` run a program with a slot's environment variables."""
    from worker.agent.control import read_config
    from worker.protocol import NodePaths

    slot_env = read_config(NodePaths(args.node_dir)).slots.get(args.slot, {})
    if args.verb == "verify":
        from worker.tuners.aiter.verify import verify

        return verify(args.table, args.family, slot_env, args.until_eof)
    from worker import capture

    return capture.main(args.command, slot_env, args.until_eof)


def _probe(args: argparse.Namespace) -> int:
    if args.aiter_root is not None:
        return _probe_tree(args)
    from worker.bench import software
    from worker.device import identify

    facts = {**identify(), **software.installed()}
    aiter = software.aiter_trees(facts["gfx"] if facts["gfx"].startswith("gfx") else "")
    if aiter:
        facts["aiter"] = aiter
    print(json.dumps(facts, indent=None if args.json else 1))
    return 0


def _probe_tree(args: argparse.Namespace) -> int:
    from worker.aiter_tree.locate import NotATreeError
    from worker.tuners.aiter.findings import inspect

    try:
        findings = inspect(args.aiter_root.absolute(), args.gfx)
    except NotATreeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(json.dumps(findings.as_json(), indent=None if args.json else 1))
    return 0


def _child(args: argparse.Namespace) -> int:
    from worker.agent import tuner_child
    from worker.tuners.base import Place

    place = Place(args.node_dir, args.node, args.slot, args.parent)
    status = tuner_child.serve(args.tuner, args.options, args.fd, args.parent, place)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # what libraries do at exit may hang, and there is nothing left to save


def _node_dir(verb: argparse.ArgumentParser, *, required: bool = False) -> None:
    here = Path.cwd()
    verb.add_argument("--node-dir", type=here.joinpath, required=required, default=here, metavar="DIR")


def _slot(text: str) -> str:
    if not SLOT_RE.match(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of up to four digits")
    return text


if __name__ == "__main__":
    sys.exit(main())
