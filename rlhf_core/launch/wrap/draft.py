"""Draft of a config: the launch line with the replacements so far, the settings read from it, and the missing parts."""

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue

from rlhf_core.files.settings_files import settings_in, text_of
from rlhf_core.shell.launch_line import LaunchLine, Role
from rlhf_core.text.redaction import carries_secret, secrets_in


@dataclass(frozen=True)
class ReadPart:
    """Part of a launch line that was understood."""

    what: str
    found: str
    place: str
    """Its place in the config."""


@dataclass(frozen=True)
class UnreadPart:
    """Part that was not understood, or that a run needs and the line lacks."""

    what: str
    advice: str


@dataclass(frozen=True)
class WrapSurroundings:
    """Folder of the launch line and access to the file system; tests replace it."""

    folder: str
    """Current folder of the user, absolute."""
    read_file: Callable[[str], str | None] = lambda path: None
    """Text of a small file, relative to the folder; None if there is none."""
    is_folder: Callable[[str], bool] = lambda path: False
    exists: Callable[[str], bool] = lambda path: True
    """True for a file or folder that exists, relative to the folder."""
    environment: str = ""
    """Virtual environment active in the user's shell, absolute; empty if there is none or it is rlhf's own."""
    has_program: Callable[[str], bool] = lambda name: False
    """True for a program that exists in this environment."""

    def within(self, folder: str) -> "WrapSurroundings":
        """The same for a line that is started in another folder."""
        if folder == self.folder:
            return self
        return replace(
            self,
            folder=folder,
            read_file=lambda path: self.read_file(posixpath.join(folder, path)),
            is_folder=lambda path: self.is_folder(posixpath.join(folder, path)),
            exists=lambda path: self.exists(posixpath.join(folder, path)),
        )


@dataclass
class Draft:
    """Launch line being converted."""

    line: LaunchLine
    around: WrapSurroundings
    settings: dict[str, JsonValue] = field(default_factory=dict)
    """Values by dotted name."""
    variables: dict[str, str] = field(default_factory=dict)
    given_variables: dict[str, str] = field(default_factory=dict)
    """Variables as given in the line or the script."""
    read: list[ReadPart] = field(default_factory=list)
    unread: list[UnreadPart] = field(default_factory=list)
    launcher_words: list[str] = field(default_factory=list)
    """Words added after the launcher's options."""
    last_words: list[str] = field(default_factory=list)
    """Words added at the end."""
    words: list[tuple[str, ...]] = field(default_factory=list)
    """Words of each item of the line; empty for removed items."""
    _files: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given_variables = dict(self.variables)
        self.words = [self.line.argv[item.start : item.stop] for item in self.line.items]

    # -- reading

    def find(self, role: Role, *names: str) -> int | None:
        """Index of the last remaining item with one of these names."""
        return max(self._remaining(role, names), default=None)

    def _remaining(self, role: Role, names: Collection[str]) -> list[int]:
        """Indices of the remaining items with one of these names."""
        items = enumerate(self.line.items)
        return [index for index, item in items if item.role == role and item.name in names and self.words[index]]

    def value_at(self, index: int) -> str:
        """Value of an option as given; empty for a flag."""
        item = self.line.items[index]
        words = self.line.argv[item.start : item.stop]
        if item.is_joined:
            return words[0].partition("=")[2]
        return words[1] if len(words) > 1 else ""

    def given(self, role: Role, *names: str) -> str | None:
        """Value of the last option with one of these names; None if there is none."""
        index = self.find(role, *names)
        return None if index is None else self.value_at(index)

    def in_files(self, *names: str) -> str | None:
        """Value that a config file of the line gives one of these names at its top level."""
        for path in self.line.config_files:
            # DeepSpeed's has options of the same name, most of them "auto".
            found = {} if path in self.line.deepspeed_configs else self.settings_of(path) or {}
            for name, value in found.items():
                if name in names and isinstance(value, str | int | float) and value != "":
                    return text_of(value)
        return None

    def names_in(self, path: str) -> set[str]:
        """Names with a value at the top level of a config file."""
        return {name for name, value in (self.settings_of(path) or {}).items() if value is not None}

    def settings_of(self, path: str) -> Mapping[str, Any] | None:
        """Settings at the top level of a config file; None if it cannot be read."""
        if path not in self._files:
            text = self.around.read_file(path)
            self._files[path] = None if text is None else settings_in(text, path)
        return self._files[path]

    # -- changing

    def replace(self, index: int, value: str) -> None:
        """Give an option another value and keep its spelling."""
        item, first = self.line.items[index], self.line.argv[self.line.items[index].start]
        # Words after the option's single value may belong to the program.
        others = self.words[index][2:]
        self.words[index] = (f"{first.partition('=')[0]}={value}",) if item.is_joined else (first, value, *others)

    def drop(self, role: Role, *names: str) -> list[str]:
        """Remove every option with these names, and return their values."""
        found = self._remaining(role, names)
        for index in found:
            self.words[index] = () if self.line.items[index].is_joined else self.words[index][2:]
        return [self.value_at(index) for index in found]

    def put(self, role: Role, names: Sequence[str], value: str, spelling: str) -> None:
        """Give every option with these names a value; if there is none, add one in the given spelling.

        Args:
            spelling: ``--name`` for two words, ``name=`` for one; empty to add none.
        """
        found = self._remaining(role, names)
        for index in found:
            self.replace(index, value)
        if not found and spelling:
            target = self.launcher_words if role == "launcher_option" else self.last_words
            target += [f"{spelling}{value}"] if spelling.endswith("=") else [spelling, value]

    # -- reporting

    def report(self, what: str, found: object, place: str) -> None:
        """Report a part that was understood."""
        self.read.append(ReadPart(what, str(found), place))

    def missing(self, what: str, advice: str) -> None:
        """Report a part that was not understood or is missing, once."""
        if UnreadPart(what, advice) not in self.unread:
            self.unread.append(UnreadPart(what, advice))

    def set(self, name: str, value: JsonValue, what: str, found: object = None) -> None:
        """Set a setting to a value read from the line."""
        self.settings[name] = value
        self.report(what, value if found is None else found, name)

    # -- result

    @property
    def argv(self) -> list[str]:
        """The launch line with placeholders."""
        return [word for group in self.groups() for word in group]

    def groups(self) -> Iterator[tuple[str, ...]]:
        """Yield the items of the launch line, each option with its values."""
        items = self.line.items
        last = max((i for i, item in enumerate(items) if item.role in ("launcher", "launcher_option")), default=-1)
        # The launcher's options precede `-m`, which expects the module next.
        while last >= 0 and items[last].role == "launcher_option" and items[last].name in ("m", "module"):
            last -= 1
        for index, words in enumerate(self.words):
            if words:
                yield words
            if index == last:
                yield from _pairs(self.launcher_words)
        yield from _pairs(self.last_words)

    def without_secrets(self) -> None:
        """Remove secrets: variables are passed to the job by name, options are dropped. Neither is ever stored."""
        for name, value in list(self.variables.items()):
            if any(secrets_in(f"slurm.environment.{name}", value)):
                del self.variables[name]
                passed = self.settings.setdefault("slurm.pass_environment", [])
                if isinstance(passed, list):
                    passed.append(name)
                self.report(
                    f"{name} (a secret)", "***", "slurm.pass_environment: taken from your environment at submission"
                )
        for index, item in enumerate(self.line.items):
            value = " ".join(self.words[index][1:]) if not item.is_joined else self.value_at(index)
            # Names of arguments are read as in trainer.argv: `--input_key` names a column, unlike a variable INPUT_KEY.
            named = item.role == "argument" and any(secrets_in("trainer.argv", [f"--{item.name}", value]))
            if self.words[index] and (named or carries_secret(value)):
                self.words[index] = ()
                self.missing(
                    f"--{item.name or 'a word'}: removed because it contains a secret",
                    "pass it in a variable listed in slurm.pass_environment",
                )


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each option with its value."""
    at = 0
    while at < len(words):
        both = words[at].startswith("-") and "=" not in words[at] and at + 1 < len(words)
        both = both and not words[at + 1].startswith("-")
        yield tuple(words[at : at + 1 + both])
        at += 1 + both


def number(text: str | None) -> int | None:
    """Parse a positive whole number; None for anything else."""
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None
