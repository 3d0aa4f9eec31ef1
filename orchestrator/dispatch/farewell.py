"""The end of a run on its nodes: the workers that are left are stopped, everywhere at once, also where a node had been
given up and can be reached again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.dispatch.node import NodeDriver
from orchestrator.dispatch.roll import Roll
from orchestrator.errors import NodeError

STOP_S, KILL_S = 5.0, 2.0
"""So long may workers take that are asked to stop, or killed."""
LIMIT_S = 20.0
"""So long may it take in all, for a node that hardly answers."""
POLL_S = 0.1


def stop_workers(roll: Roll, listen: Callable[[float, Callable[[], bool]], None], *, tidy: bool) -> Mapping[str, str]:
    """Stop all that runs; node -> why it may have been in vain. `tidy`: remove what the run left in the engines, too.

    `listen(seconds, over)` takes in what nodes still say.
    """
    up = {d.node: d for d in roll.reached()}
    away = {n: d for n, d in roll.drivers.items() if n not in up and d.may_have_started}
    if not up and not away:
        return {}
    pool = ThreadPoolExecutor(min(32, len(up) + len(away)), "farewell")
    ends: dict[str, Future[str]] = {n: pool.submit(_end, d, tidy) for n, d in up.items()}
    ends |= {n: pool.submit(_call_and_end, d, tidy) for n, d in away.items()}
    listen(LIMIT_S, lambda: all(e.done() for e in ends.values()))
    for node, end in ends.items():
        if not end.done():
            roll.drivers[node].hang_up()
    pool.shutdown(wait=False, cancel_futures=True)
    found = {n: end.result() if end.done() else "it does not answer" for n, end in ends.items()}
    return {n: why for n, why in found.items() if why}


def _call_and_end(driver: NodeDriver, tidy: bool) -> str:
    try:
        driver.call_again()
    except NodeError as e:
        return str(e)
    return _end(driver, tidy)


def _end(driver: NodeDriver, tidy: bool) -> str:
    try:
        for kill, patience in ((False, STOP_S), (True, KILL_S)):
            if not driver.alive():
                break
            driver.halt(kill=kill)
            until = time.monotonic() + patience
            while driver.alive() and time.monotonic() < until:
                time.sleep(POLL_S)
        driver.keep_results()
        if tidy:
            driver.tidy()
    except NodeError as e:
        return str(e)
    return ""
