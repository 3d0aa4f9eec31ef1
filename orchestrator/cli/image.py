"""`gemmfleet image build`: an image with AITER at a git ref, on a base image of your own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt

if TYPE_CHECKING:
    from orchestrator.image.build import Recipe
    from orchestrator.inventory import Inventory


class RecipeOptions(NamedTuple):
    """Group: the image to make."""

    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="Your image with ROCm, torch and git.")]
    inventory: Annotated[
        Path | None,
        typer.Option("-i", "--inventory", metavar="INV", help="Nodes that will use it: their image and gfx."),
    ] = None
    tag: Annotated[
        str | None,
        typer.Option("--tag", metavar="IMAGE", help="Name of the new image (default: the inventory's image)."),
    ] = None
    ref: Annotated[str, typer.Option("--ref", metavar="REF", help="Tag, branch or commit of AITER.")] = "main"
    repo: Annotated[
        str | None, typer.Option("--repo", metavar="URL", help="AITER's git repository (default: the public one).")
    ] = None
    gfx: Annotated[
        list[str] | None, typer.Option("--gfx", metavar="GFX", help="Chip to compile for; repeatable (GPU_ARCHS).")
    ] = None
    prebuild: Annotated[
        int,
        typer.Option("--prebuild", metavar="N", help="PREBUILD_KERNELS: 0 at first use, 1 GEMMs and attention now."),
    ] = 0
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Compilers at once (MAX_JOBS).")] = None
    table: Annotated[
        list[Path] | None,
        typer.Option("--table", metavar="CSV", help="Tuned table to compile with and use; repeatable."),
    ] = None
    no_requirements: Annotated[
        bool, typer.Option("--no-requirements", help="Skip AITER's requirements.txt: the base image has them.")
    ] = False


def build(
    image: RecipeOptions,
    render: Annotated[
        bool, typer.Option("--render", help="Build nothing: print the Dockerfile, or write the build folder to --out.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="With --render: folder for Dockerfile, build.sh, tables."),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="N", help="Build on this node; repeatable (default: here).")
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", metavar="NET", help="Network of the build, such as host.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build every step again, so that a branch is fresh.")
    ] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    json_: JsonOpt = False,
) -> None:
    """Build the image with Docker, here or on nodes.

    Several nodes build one after the other.
    """
    from orchestrator.errors import InputError
    from orchestrator.image.build import HERE
    from orchestrator.image.build import build as run

    known = _inventory(image.inventory)
    if render:
        _render(_recipe(known, image), out)
        return
    if out is not None:
        raise InputError("--out is the folder that --render writes: add --render")
    if node and known is None:
        raise InputError("--node needs the inventory that has it: -i INV")
    strange = [n for n in node or () if known is not None and n not in known.nodes]
    if strange:
        raise InputError(
            f"the inventory has no node {strange[0][:60]!r} (there: {', '.join(known.nodes) if known else ''})"
        )
    recipe = _recipe(known, image)
    flags = [*(["--network", network] if network else []), *(["--no-cache"] if no_cache else [])]
    built = {}
    targets: list[str | None] = [*node] if node else [None]
    for name in targets:
        where = name or HERE

        def log(line: str, where: str = where) -> None:
            print(f"[{where}] {line}", file=sys.stderr if json_ else sys.stdout, flush=True)

        of = known.nodes[name] if known is not None and name is not None else None
        built[where] = run(recipe, of, flags, log, accept_new_host_keys=accept_new_host_keys)
        log(f"built {recipe.tag}: {built[where]}")
    if json_:
        print(json.dumps({"image": recipe.tag, "built": built}))


def _render(recipe: Recipe, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(recipe.dockerfile())
        return
    from orchestrator.transport import LocalTransport

    LocalTransport("this machine").put(str(out), recipe.files(("docker",), ()))
    print(f"written: {out}; build it with: sh {out}/build.sh")


def _inventory(path: Path | None) -> Inventory | None:
    from orchestrator.inventory import load_inventory

    return load_inventory(path) if path is not None else None


def _recipe(known: Inventory | None, image: RecipeOptions) -> Recipe:
    from orchestrator.engines import find_engine
    from orchestrator.errors import InputError
    from orchestrator.image.build import AITER_REPO, Recipe
    from orchestrator.inventory.values import has_reference

    nodes = list(known.nodes.values()) if known else []
    tag = image.tag
    if tag is None:
        images = {
            n.image for n in nodes if find_engine(n.engine).runs_images and n.image and not has_reference(n.image)
        }
        if len(images) != 1:
            why = f"the nodes have {', '.join(sorted(images))}" if images else "no node names an image"
            raise InputError(f"the name of the new image is ambiguous ({why}): give --tag")
        tag = images.pop()
    chips = image.gfx or list(dict.fromkeys(n.gfx for n in nodes if n.gfx))
    return Recipe(
        base=image.base,
        tag=tag,
        gfx=tuple(chips),
        repo=image.repo or AITER_REPO,
        ref=image.ref,
        prebuild=image.prebuild,
        jobs=image.jobs,
        requirements=not image.no_requirements,
        tables=tuple(image.table or ()),
    )
