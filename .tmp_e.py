import pathlib
class Page:
    def __init__(s, path): s.p = pathlib.Path(path); s.t = s.p.read_text()
    def cut(s, start, end, new):
        a = s.t.index(start); b = s.t.index(end, a) if end else len(s.t)
        s.t = s.t[:a] + new + s.t[b:]
        return s
    def sub(s, a, b):
        assert s.t.count(a) == 1, (s.p, a, s.t.count(a)); s.t = s.t.replace(a, b); return s
    def save(s): s.p.write_text(s.t)

p = Page("docs/explanation/scheduling.md")
p.cut("**By value** (", "## Groups", """**By value** (`--by-value`). The most valuable shapes go first: calls x (time now - expected time). The expected time is the
[roofline](../how-to/backends.md#2-analyze)'s over the efficiency of the nearest row of `--db` (0.6 without rows). The time now is the row in `--db`, else the column
`now_us`, else a guess (1.5 x expected), which the end reports.

**Cost.** `cost(group) = setup + sum over shapes of a + b * flops + c * weights`, fitted to earlier runs in `--runs` with the same family, tuner and gfx. The range
(`range_s`, `end_s` in `--plan --json`) should hold for nine of ten runs; it is a factor of 5 either way for a first guess. No time limit and no result depends on it.

""")
p.sub("""- A slot in doubt (quarantined, or several shapes faulted there) gets the shortest work.
""", "")
p.cut("## Losses", "## Leases", """## Losses

If a worker dies or its node is given up, each shape in flight has a **loss** and runs alone next. After three losses it fails as `kills_nodes`. A node that comes back
late loses nothing: its rows count, and its work goes on.

""")
p.cut("A worker locks its device", "## An example", """A worker locks its device (the GPU, or the cores of the host) by a file in `/tmp/.gemmfleet-locks` on the node, open to every user and mounted
into containers. If the device is locked, the worker waits; under `share` it starts and says so in its log. Workers without a controller occupy a node until they had no
work for 15 minutes, or until `cancel`.

""")
p.save()

p = Page("docs/explanation/aiter.md")
p.cut("| AITER | gemmfleet |", "## Workarounds", """| AITER | gemmfleet |
|---|---|
| until 2025-12-30 waits for ever for a pool process that a GPU fault killed | ends it by its own watchdog |
| until 2026-04-15 a shape without a valid candidate costs later shapes of its batch their winners | one shape per batch, winners from the profile |
| until 2026-08 `--timeout` counts from the submission of a batch | keeps time itself |
| `--warmup`, `--iters` have no effect on `a4w4_blockscale`, `a16w16`, `fmoe` | |

""")
p.cut("A group runs in one process", "### Environment", """A group runs in one process (`--mp 1`) in `attempts/<attempt>/aiter-<n>/`. Only flags that the script has are passed; never `--all`, `--sort` or `--verbose` (from v0.1.15 on
it turns wrong results into refusals). A batch has four shapes if every shape has candidates and the script has `--run_config` (2026-04-14), else one; `--batch N` sets
it. Groups of their own: shapes whose K is not a multiple of 256 or whose N is not one of 128 (`a16w16`: 64 for both), or whose float32 references take over 64 GiB.

**Reading.** A time of -1 means "could not run", inf "crashed or hung", 0 "error". A `sitecustomize` reports the candidate in flight. AITER's winner stands if it has a
time, an error within the limit and a kernel name; else the best right candidate is taken, with a note in `detail` (never for `fmoe`, whose winner is a pair of stages).

""")
p.cut("| seen in AITER's own tables", "Two flags of `fmoe`", """`libtype` `triton` with kernelName `triton`, `gluon` or `auto` was routed by hand (bf16's tuner times `auto` itself); `analyze` calls it aiter-triton or aiter-gluon. Nobody
reads `bw`, which is in TB/s in two model tables. `tuned_grouped_fmoe.csv`, `tuned_fhmoe.csv` and `chunk_gdn_h_opt_tuned.csv` belong to no family here.

""")
p.save()

p = Page("docs/contributing/index.md")
p.cut("### Real nodes", "### A Kubernetes cluster", """### Real nodes

`tests.integration.heavy.HeavyFleet(folder).start(3, users=("root", "tuner"))` gives nodes in containers with their own sshd, dockerd, address and disk;
[node.py](../../tests/integration/heavy/node.py) has their faults (`h2.partition()`, `h2.heal()`, ...). They need root on Debian or Ubuntu. Users: `root`; `tuner`, in the
group docker; `nodocker`, with `sudo -n docker`. Images are built once (900 MB in `~/.cache/gemmfleet-tests`; torch 800 MB more).

""")
p.sub("""Use real
  nodes, Slurm or Kubernetes only for what they alone can show. A new transport gets a `Way` in `tests/integration/test_transports.py`.""", """Use real
  nodes only for what they alone can show. A new transport gets a `Way` in `tests/integration/test_transports.py`.""")
p.cut("## A change, start to end", None, """## A change, start to end

1. A test that fails, then the code. [Adding](adding.md) has the steps for a tuner, an engine, a family, a command, a known issue.
2. `make lint types`, the tests of what you touched, then `make test`.
3. Docs, and a line in [CHANGELOG.md](../../CHANGELOG.md). One commit per step: what, and why.
""")
p.save()

p = Page("docs/how-to/node-fails.md")
p.cut("| seen | happens by itself | do |", "Take a node out", """| seen | do |
|---|---|
| node `slow`, `unreachable`, never came up | repair it, `gemmfleet nodes check -i INV`; after 90 s (`--lost-after`) its work goes elsewhere, and it may return |
| node busy | wait, or `resume --busy skip` or `share` |
| host key unknown or changed; image or Docker missing | what the message says |
| Python module missing for the tuner | fix the image |
| disk full, of a node or the controller | free space; controller: `resume` |
| slot `quarantined`, uncorrectable hardware errors | check the GPU; the slot is tried again after a [cool-down](../explanation/scheduling.md#canaries-and-quarantine) |
| slot named slow, hot or power-capped | [a slow GPU](slow-gpu.md); its winners are right |
| shape `fault`, `oom`, `hang`, `error` | section 3 |
| `no_candidate`, `wrong_result`, `unsupported` | check family, chip, `--err-ratio` |
| `kills_nodes` | leave the shape out |
| `outlives_lease` | ask for a longer time limit (`time:`) |
| winner `unconfirmed` | run with two slots |

""")
p.save()

p = Page("docs/explanation/failures.md")
p.save()

p = Page("docs/tutorial/first-run.md")
p.cut("(Shortened. Two Xeon", "## 3. Look", """(Shortened. Two Xeon cores with AMX, torch 2.13, with other work on them. These times say nothing about a GPU.)

`vs median` is the time of the median correct candidate over the winner's. The leaders are measured again before one wins; a winner that is then slower than the median
candidate is marked `noisy`: tune it again on a quiet machine. The first estimate of the duration is a wide range; it narrows as your runs add up.

""")
p.sub("""Commands take the latest run unless you name one: `make status RUN=20261123-041032-15a5`, or an unambiguous beginning of its id.
""", """Commands take the latest run unless you name one (`RUN=20261123`: a beginning of its id).
""")
p.save()

p = Page("docs/tutorial/first-fleet.md")
p.cut("Shortened output, on two", "To keep nodes until", "")
p.save()
