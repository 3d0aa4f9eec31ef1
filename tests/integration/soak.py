"""`make soak [SEEDS=n]`: new drawn mixtures of mishaps on three real nodes, until Ctrl-C or n of them are through.

    python -m tests.integration.soak [--seeds N] [--seed FIRST]

Every seed is printed before it begins; `--seed` repeats one (what goes wrong is the same, the moments are as near as
a real machine allows). The folder of a seed that failed is kept. Exit code 1 where a law did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.chaosrun import run_seed
from tests.integration.fleetkit import NAMES, USERS, mend
from tests.integration.heavy import HeavyFleet, why_not
from tests.integration.heavy.outer import HeavyError
from tests.support.chaosplan import draw


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="how many (default: until Ctrl-C)")
    parser.add_argument("--seed", type=int, help="the first one, the others follow it (default: drawn each time)")
    args = parser.parse_args()
    if why_not():
        print(f"error: {why_not()}", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="gemmfleet-soak-"))
    fleet = HeavyFleet(folder / "fleet")
    broken: list[int] = []
    try:
        fleet.start(len(NAMES), users=USERS)
        (fleet.folder / "ssh_config").write_text(fleet.ssh_config())
        for i in itertools.count():
            if args.seeds and i >= args.seeds:
                break
            seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed + i
            if not one(fleet, folder / f"seed-{seed}", seed):
                broken.append(seed)
    except KeyboardInterrupt:
        print("stopped")
    except HeavyError as e:
        print(f"error: the nodes themselves fail: {e}", file=sys.stderr)
        return 3
    finally:
        fleet.stop()
        shutil.rmtree(fleet.folder, ignore_errors=True)
    if broken:
        print(f"the laws did not hold with {', '.join(map(str, broken))}; see {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def one(fleet: HeavyFleet, folder: Path, seed: int) -> bool:
    """Run one seed and mend the nodes; whether the laws held."""
    chaos = draw(seed)
    print(*chaos.lines(), sep="\n", flush=True)
    folder.mkdir()
    try:
        run = run_seed(fleet, folder, chaos)
    except Exception:  # noqa: BLE001 - whatever it is, the next seed is to be tried
        (folder / "error.txt").write_text(traceback.format_exc())
        print(f"  FAILED: {sys.exc_info()[1]!s:.2000}")
        print(f"  see {folder}; repeat: python -m tests.integration.soak --seeds 1 --seed {seed}", flush=True)
        return False
    finally:
        with ThreadPoolExecutor(len(fleet.nodes)) as pool:
            list(pool.map(mend, fleet.nodes))
    print(f"  ok in {run.took:.0f} s, {len(chaos.guilty)} of {run.total} shapes failed by right", flush=True)
    shutil.rmtree(folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
