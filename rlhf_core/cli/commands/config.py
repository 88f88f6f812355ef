"""Commands about config files: ``rlhf config show`` and ``migrate``."""

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlhf_core.cli import output
from rlhf_core.cli.commands.check import ConfigArgument, SetOption
from rlhf_core.errors import BadConfig

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Table

_MARKER = "rlhf_loops_stand_here"


class CommandWithSettings(TyperCommand):
    """Command whose help ends with every setting of a config."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the table of settings, whose schemas are imported only now."""
        super().format_help(ctx, formatter)
        from rlhf_core.config.fields import describe_fields

        rows = [
            (field.name, field.type, "required" if field.required else field.default, field.meaning)
            for field in describe_fields()
        ]
        output.print_table(("setting", "type", "default", "meaning"), rows, "Settings (TOML, or --set)")


def show(
    config: ConfigArgument,
    set_: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out settings that have their default.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print every setting of a config as its run would have it: the file or preset, overrides and defaults together.

    The output is a config itself. Paths are absolute, and names that the site resolves are folders.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.control.new_run import resolve
    from rlhf_core.control.site_names import for_site
    from rlhf_core.render.config_text import as_toml, settings

    spec = for_site(resolve(config, set_ or []), load_site())
    if as_json:
        output.print_json(settings(spec, only_set=changed))
    else:
        output.print_text(as_toml(spec, only_set=changed).rstrip())


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config, rewritten in place.")],
) -> None:
    """Rewrite a config of rlhf-flows 0.1 for this version, keeping its comments."""
    from rlhf_core.files.whole import write_text

    after = migrated_text(file)
    if after == file.read_text(encoding="utf-8"):
        output.print_text(f"{file} already has the format of this version.")
        return
    place = file.resolve()  # a link to the config stays one
    write_text(place, after, stat.S_IMODE(place.stat().st_mode))
    output.print_text(f"{file} was rewritten; its meaning is unchanged.")


def migrated_text(file: Path) -> str:
    """Translate a config into the format of this version.

    Raises:
        BadConfig: the file is invalid, or can only be rewritten by hand.
    """
    from tomlkit import parse

    from rlhf_core.config.loading import validate
    from rlhf_core.config.toml_files import read_toml
    from rlhf_core.schemas.migration import OLD_SECTIONS, RENAMED, current_document, current_name, old_settings

    try:
        content = read_toml(file)
    except OSError as error:
        raise BadConfig(f"cannot read {file}: {error.strerror}") from None
    old = old_settings(content)
    text = file.read_text(encoding="utf-8")
    if not old:
        return text
    manual = "\n".join(f"  write {current_name(name)} instead of {name}" for name in old)
    renamed = any(name in RENAMED for name in old)
    if renamed or "loops" in content or not all(_is_plain(text, name) for name in OLD_SECTIONS if name in content):
        raise BadConfig(f"{file} must be rewritten by hand:\n{manual}")
    current = current_document(content)
    expected = validate(current, str(file), old_names=old)
    document = parse(text)
    block = _take_old_sections(document, current["loops"])
    found = re.sub(
        rf"(?m)^[ \t]*\[[^\n]*\n{_MARKER} = (true|false)\n",
        lambda mark: block if mark[1] == "true" else "",
        document.as_string(),
    )
    found = re.sub(r"\n{3,}", "\n\n", found).rstrip() + "\n"
    try:
        same = validate(parse(found).unwrap(), str(file)) == expected
    except (BadConfig, ValueError):
        same = False
    if not same:
        raise BadConfig(f"{file} must be rewritten by hand:\n{manual}")
    return found


def _is_plain(text: str, section: str) -> bool:
    """True if a section has a header line of its own, that is, if it is not an inline table."""
    return re.search(rf"(?m)^\s*\[\s*{section}\s*\]", text) is not None


def _take_old_sections(document: "TOMLDocument", loops: dict[str, Any]) -> str:
    """Replace each old section of the document by a marker, and return the sections of the new format.

    Lines below the last setting of a section belong to the section that follows.
    """
    from tomlkit import parse

    from rlhf_core.schemas.migration import OLD_SECTIONS, current_name

    given: dict[str, list[str]] = {}  # by new name: the line of a setting, with the comments above it
    headers: dict[str, tuple[list[str], str]] = {}  # by new name: the comments above and beside a header
    order = [str(key.key) if key else "" for key, _ in document.body]
    above: list[str] = []
    for old in [name for name in order if name in OLD_SECTIONS]:
        table: Any = document[old]
        headers[current_name(old)] = above, table.trivia.comment
        above = []
        for key, item in table.value.body:
            if key is None:
                above.append(item.as_string().rstrip("\n"))
                continue
            name = current_name(f"{old}.{key.key}")
            line = f"{name.rpartition('.')[2]} = {item.as_string()} {item.trivia.comment}".rstrip()
            given[name] = [*_without_gaps(above), line]
            above = []
        last = order.index(old) == len(order) - 1 or order[order.index(old) + 1] not in OLD_SECTIONS
        document[old] = _placeholder(above if last else [], is_first=len(headers) == 1)
        above = [] if last else _without_gaps(above)
    sections = dict(_loop_sections(loops, given))
    of_trainer = [line for name, lines in given.items() if name.startswith("trainer.") for line in lines]
    if "trainer" not in document:
        sections["trainer"] = of_trainer
    elif of_trainer:
        trainer: Any = document["trainer"]
        for key, item in parse("\n".join(of_trainer) + "\n").body:
            trainer.add(item) if key is None else trainer.add(key, item)
    blocks = []
    for name, lines in sections.items():
        before, comment = headers.get(name, ([], ""))
        blocks += ["\n".join([*before, f"[{name}] {comment}".rstrip(), *lines]) + "\n"] if lines else []
    return "\n".join(blocks)


def _placeholder(below: list[str], *, is_first: bool) -> "Table":
    """Build the table that takes the place of an old section: a marker, and the lines below its last setting."""
    from tomlkit import comment, nl, table

    placeholder = table()
    placeholder[_MARKER] = is_first
    for line in below:
        placeholder.add(comment(line.lstrip("# ")) if line.strip() else nl())
    return placeholder


def _loop_sections(loops: dict[str, Any], given: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of the loops, each with its lines: those of the file, and the defaults of 0.1 that this
    version requires explicitly. Settings without effect are left out."""
    from rlhf_core.config.fields import to_toml

    for loop in ("warm_start", "main"):
        table = loops.get(loop, {})
        if loop == "warm_start" and not table.get("num_steps"):
            continue
        num_steps = {name: value for name, value in table.items() if name == "num_steps"}
        for part, values in {"": num_steps, ".algorithm": table["algorithm"], ".optimizer": table["optimizer"]}.items():
            section = f"loops.{loop}{part}"
            lines = {name: given.get(f"{section}.{name}", [f"{name} = {to_toml(values[name])}"]) for name in values}
            yield section, [line for name in sorted(lines, key=lambda name: name != "name") for line in lines[name]]


def _without_gaps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip()]
