"""``rlhf init`` and ``check``: write a config, and check it before its run."""

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.output import JsonOption
from rlhf_core.errors import BadInput
from rlhf_core.presets import PRESETS

if TYPE_CHECKING:
    from rlhf_core.config.site import Site
    from rlhf_core.schemas.checks import CheckResult
    from rlhf_core.schemas.run import RunSpec


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help=f"A TOML file, or the name of a preset: {', '.join(PRESETS)}.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one setting; may be given several times."),
]


def init(
    place: Annotated[
        Path, typer.Argument(metavar="PATH", help="File to write, ending in .toml, or folder to write it to.")
    ] = Path(),
    preset: Annotated[str, typer.Option(help=f"Name of a preset to start from: {', '.join(PRESETS)}.")] = "quickstart",
) -> None:
    """Write a commented starter config: every setting with its meaning and default."""
    from rlhf_core.cli.starter_config import starter_config
    from rlhf_core.files.whole import write_for_user

    if str(place) in PRESETS and not place.exists():
        raise BadInput(
            f"{place} is the name of a preset: `rlhf init --preset {place}` writes {place}.toml here; for a new folder "
            f"of that name, write ./{place}/{preset}.toml"
        )
    target = place if place.suffix == ".toml" and not place.is_dir() else place / f"{preset}.toml"
    quoted = shlex.quote(str(target))
    text = starter_config(preset, quoted)
    try:
        write_for_user(target, text)
    except FileExistsError:
        if not target.exists():
            raise BadInput(f"{place} is a file; give a folder, or a file that ends in .toml") from None
        raise BadInput(f"{target} already exists; choose another file or folder, or remove it first") from None
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror}") from None
    output.print_text(f"{target} written. Next: rlhf check {quoted}, then rlhf run {quoted}")


def check(
    config: ConfigArgument,
    set_: SetOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also take the allocation, and compare and measure its nodes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a config before anything starts, and show all findings at once. Exit code 0: fine, 2: blocked."""
    from rlhf_core.config.site import load_site
    from rlhf_core.control.node_probe import probe_nodes
    from rlhf_core.preflight.runner import blocking
    from rlhf_core.scheduler import get_scheduler

    site = load_site()
    spec = _spec(config, set_ or [], site)
    results = [*_checks(spec, site)]
    if probe and not blocking(results):
        results += probe_nodes(spec, site, get_scheduler(site.scheduler), output.note)
    if as_json:
        output.print_json([result.model_dump() for result in results])
    else:
        _print_checks(results)
    if blocking(results):
        raise typer.Exit(2)


def _spec(config: str, overrides: Sequence[str], site: "Site") -> "RunSpec":
    """The spec to check, with a warning about each file that is only beside the config."""
    from rlhf_core.config import loading
    from rlhf_core.control.new_run import stored_spec
    from rlhf_core.launch.config_paths import absolute_paths, misplaced

    spec = loading.load(config, overrides)
    for problem in misplaced(spec, config, Path.cwd()):
        output.warn(problem)
    return stored_spec(absolute_paths(spec, Path.cwd()), site)


def _checks(spec: "RunSpec", site: "Site") -> "Sequence[CheckResult]":
    from rlhf_core.control.baseline import read_baseline_of_site
    from rlhf_core.launch.prepare import code_sources, keep_code
    from rlhf_core.preflight.gather_facts import Surroundings, missing_code
    from rlhf_core.preflight.runner import make_checks
    from rlhf_core.scheduler import get_scheduler

    scheduler = get_scheduler(site.scheduler)
    # User code is imported from a snapshot like the one the nodes would get.
    missing = missing_code(spec)  # left to the check code.paths
    readable = tuple(path for path in spec.code.paths if path not in missing)
    copied = spec.model_copy(update={"code": spec.code.model_copy(update={"paths": readable})})
    with tempfile.TemporaryDirectory() as folder:
        keep_code(Path(folder), copied, Path.cwd(), "")
        around = Surroundings(
            site=site,
            inventory=scheduler.inventory(),
            scheduler=scheduler.name,
            code_path=Path(folder) / "snapshot",
            code_sources=code_sources(copied, Path.cwd()),
            baseline=read_baseline_of_site(site, spec, output.note),
        )
        return make_checks(spec, around)


def _print_checks(results: "Sequence[CheckResult]") -> None:
    order = {"blocked": 0, "warning": 1, "skipped": 2, "passed": 3}
    rows = [
        (result.status.value, result.id, result.found, result.expected, result.advice)
        for result in sorted(results, key=lambda result: order[result.status.value])
    ]
    columns = ("status", "check", "found", "expected", "what to do")
    if output.fits(columns, rows):
        output.print_table(columns, rows)
    else:  # in folded columns, a setting in the advice could not be copied
        good = [f"passed  {check}: {found}" for status, check, found, *_ in rows if status == "passed"]
        findings = [row for row in rows if row[0] != "passed"]
        if good:
            output.print_text("\n".join(good))
        if findings:
            output.print_text("")
            output.print_records(columns, findings)
            output.print_text("")
    counts = {name: sum(result.status.value == name for result in results) for name in order}
    output.print_text(", ".join(f"{count} {name}" for name, count in counts.items() if count))
