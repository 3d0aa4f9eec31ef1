"""`gemmfleet image`: build an image with AITER on the user's base image."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt
from orchestrator.cli.printer import plain
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.inventory.load import load_inventory
from orchestrator.inventory.model import Inventory, Node
from orchestrator.inventory.references import has_reference
from orchestrator.pages import Page
from orchestrator.transport.local import LocalTransport

if TYPE_CHECKING:  # it imports docker, which the help of this command does not need
    from orchestrator.image.build import Recipe


class RecipeOptions(NamedTuple):
    """Group: the image to make."""

    base: Annotated[str, typer.Option(metavar="IMAGE", help="Your image with ROCm, torch and git.")]
    inventory: Annotated[
        Path | None,
        typer.Option("-i", "--inventory", metavar="INV", help="Nodes that will use it: their image and gfx."),
    ] = None
    tag: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Name of the new image (default: the inventory's image)."),
    ] = None
    ref: Annotated[str, typer.Option(metavar="REF", help="Tag, branch or commit of AITER.")] = "main"
    repo: Annotated[
        str | None, typer.Option(metavar="URL", help="AITER's git repository (default: the public one).")
    ] = None
    gfx: Annotated[
        list[str] | None, typer.Option(metavar="GFX", help="Chip to compile for; repeatable (GPU_ARCHS).")
    ] = None
    prebuild: Annotated[
        int,
        typer.Option(metavar="N", help="PREBUILD_KERNELS: 0 at first use, 1 GEMMs and attention now."),
    ] = 0
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Compilers at once (MAX_JOBS).")] = None
    table: Annotated[
        list[Path] | None,
        typer.Option(metavar="CSV", help="Tuned table to compile with and use; repeatable."),
    ] = None
    no_requirements: Annotated[
        bool, typer.Option("--no-requirements", help="Skip AITER's requirements.txt: the base image has them.")
    ] = False


def build_image(
    image: RecipeOptions,
    render: Annotated[
        bool, typer.Option("--render", help="Do not build: print the Dockerfile, or write the build folder to --out.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="With --render: folder for Dockerfile, build.sh, tables."),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="N", help="Build on this node; repeatable (default: here).")
    ] = None,
    network: Annotated[str | None, typer.Option(metavar="NET", help="Network of the build, such as host.")] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build every step again, so that a branch is fresh.")
    ] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    json_: JsonOpt = False,
) -> Page | None:
    """Build the image with Docker, here or on nodes.

    Several nodes build one after the other.
    """
    from orchestrator.image.build import HERE, build

    inventory = load_inventory(image.inventory) if image.inventory is not None else None
    if render:
        _render(_read_recipe(inventory, image), out)
        return None
    if out is not None:
        raise InputError("--out is the folder that --render writes: add --render")
    nodes = _nodes_to_build_on(inventory, node or [])
    recipe = _read_recipe(inventory, image)
    flags: list[str] = []
    if network:
        flags += ["--network", network]
    if no_cache:
        flags.append("--no-cache")
    built = {}
    for name, machine in nodes or [(HERE, None)]:

        def log(line: str, name: str = name) -> None:
            print(f"[{name}] {plain(line)}", file=sys.stderr if json_ else sys.stdout, flush=True)

        built[name] = build(recipe, machine, flags, log, accept_new_host_keys=accept_new_host_keys)
        log(f"built {recipe.tag}: {built[name]}")
    return Page({"image": recipe.tag, "built": built})


def _nodes_to_build_on(inventory: Inventory | None, names: list[str]) -> list[tuple[str, Node | None]]:
    """Return the nodes of --node with their names. Raises InputError for one that the inventory does not have."""
    if not names:
        return []
    if inventory is None:
        raise InputError("--node needs the inventory that has it: -i INV")
    for name in names:
        if name not in inventory.nodes:
            raise InputError(f"the inventory has no node {name[:60]!r} (there: {', '.join(inventory.nodes)})")
    return [(name, inventory.nodes[name]) for name in names]


def _render(recipe: Recipe, out: Path | None) -> None:
    """Print the Dockerfile, or write the folder of the build to `out`."""
    if out is None:
        sys.stdout.write(recipe.dockerfile())
        return
    LocalTransport("this machine").put(str(out), recipe.files(("docker",), ()))
    print(f"written: {out}; build it with: sh {out}/build.sh")


def _read_recipe(inventory: Inventory | None, options: RecipeOptions) -> Recipe:
    """Return the image to make; name and chips come from the inventory's nodes if no option gives them."""
    from orchestrator.image.build import AITER_REPO, Recipe

    nodes = list(inventory.nodes.values()) if inventory else []
    chips = options.gfx or list(dict.fromkeys(node.gfx for node in nodes if node.gfx))
    return Recipe(
        base=options.base,
        tag=options.tag if options.tag is not None else _only_image(nodes),
        gfx=tuple(chips),
        repo=options.repo or AITER_REPO,
        ref=options.ref,
        prebuild=options.prebuild,
        jobs=options.jobs,
        requirements=not options.no_requirements,
        tables=tuple(options.table or ()),
    )


def _only_image(nodes: list[Node]) -> str:
    """Return the one image that all nodes with an image use. Raises InputError."""
    images = {
        node.image
        for node in nodes
        if find_engine(node.engine).runs_images and node.image and not has_reference(node.image)
    }
    if len(images) != 1:
        why = f"the nodes have {', '.join(sorted(images))}" if images else "no node names an image"
        raise InputError(f"the name of the new image is ambiguous ({why}): give --tag")
    return images.pop()
