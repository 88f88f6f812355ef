"""Parser of launch lines of training programs: the launcher of the ranks, the program, and its options. Pure.

``known_programs`` lists the options of launchers that take no value. For programs there is no such list: words after an
option that do not begin with a dash are taken as its values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from rlhf_core.shell.known_programs import (
    CONFIG_OPTIONS,
    CONFIG_SUFFIXES,
    CONFIGS_OF_DEEPSPEED,
    CONTAINERS,
    FILES_OF_LAUNCHERS,
    FLAGS,
    LAUNCHER_MODULES,
    LAUNCHERS,
    PAIRED,
    PYTHON,
    RAY_GPUS,
    RAY_NODE,
    RAY_PROGRAMS,
    SHELLS,
    SUBMITTER,
    SUITES,
    WRAPPERS,
    Launcher,
    flags_of,
)

Role = Literal["variable", "wrapper", "launcher", "launcher_option", "program", "argument", "positional"]


@dataclass(frozen=True)
class LaunchItem:
    """Part of a launch line, with its position in argv."""

    role: Role
    name: str
    """Normalised name of a variable or option; for a wrapper, its own name; otherwise empty."""
    start: int
    stop: int
    """Index after its last word."""
    is_joined: bool = False
    """True if name and value form one word: ``--name=value``."""


@dataclass(frozen=True)
class Wrapper:
    """Program before the launcher, such as ``srun`` or ``nohup``."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Values by normalised option; empty for options without a value."""
    image: str = ""
    """Image of a container."""


@dataclass(frozen=True)
class LaunchLine:
    """Parts of a launch line. Names of options have no leading dashes, and ``_`` instead of ``-``."""

    argv: tuple[str, ...]
    """The original line."""
    launcher: Launcher = ""
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    """Options of the launcher; empty text for those without a value."""
    program: tuple[str, ...] = ()
    """Script or module, or the words of a subcommand: ``swift rlhf``."""
    is_module: bool = False
    """True if the program is a module, given with ``-m``."""
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of the program and their values; the last values if one is repeated. ``a.b=c`` counts as an option."""
    positional: tuple[str, ...] = ()
    """Words of the program that do not belong to an option."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables assigned before the command, or by ``env``."""
    config_files: tuple[str, ...] = ()
    """Files with further settings: of the launcher, the program or DeepSpeed."""
    wrappers: tuple[Wrapper, ...] = ()
    items: tuple[LaunchItem, ...] = ()
    """All parts with their positions; each word of argv belongs to one."""

    @property
    def command(self) -> str:
        """First word that is not a variable: the program that a shell would start; empty if there is none."""
        return next((self.argv[item.start] for item in self.items if item.role != "variable"), "")

    @property
    def shell_text(self) -> str:
        """Text that a shell runs (``bash -c TEXT``); empty for any other program."""
        is_shell = bool(self.program) and PurePosixPath(self.program[0]).name in SHELLS
        return (self.value("c", "lc", "ec") or "") if is_shell else ""

    @property
    def starts_itself(self) -> bool:
        """True for a program that neither a launcher nor Python starts; ``srun`` starts any."""
        return self.launcher in ("", "srun") and not any(item.role == "launcher" for item in self.items)

    @property
    def is_of_ray(self) -> bool:
        """True for a program that starts Ray, or is submitted to it, and so places its ranks itself."""
        if PurePosixPath(self.command).name == RAY_NODE:
            return True
        is_submitted = any(wrapper.name == "ray" for wrapper in self.wrappers)
        by_name = any(word.endswith(RAY_PROGRAMS) for word in self.program)
        is_one = is_submitted or by_name or any(name in self.arguments for name in RAY_GPUS)
        return is_one and self.launcher in ("python", "srun")

    @property
    def deepspeed_configs(self) -> frozenset[str]:
        """Configs of DeepSpeed; the other files are those of the launcher and the program."""
        options = self.launcher_options
        given = {found for name in CONFIGS_OF_DEEPSPEED for found in (self.value(name), options.get(name))}
        return frozenset(self.config_files) & given

    def value(self, *names: str) -> str | None:
        """First value of the first of these options of the program that is present; None without such an option or
        value."""
        return next((self.arguments[name][0] for name in names if self.arguments.get(name)), None)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
_SETTING = re.compile(r"\+{0,2}~?([A-Za-z_@][\w.@/-]*)=", re.ASCII)
_EXPANSION = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*(?:\[@\])?\})", re.ASCII)
_NUMBER = re.compile(r"-\.?\d[\d.,:eE+-]*")


def normalized(word: str) -> str:
    """Name of an option without leading dashes and value, with ``_`` instead of ``-``."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def read_launch_line(argv: Sequence[str]) -> LaunchLine:
    """Parse a launch line. Never raises: a line of an unknown kind is a program with arguments."""
    reader = _LineReader(tuple(argv))
    reader.read()
    return reader.line()


@dataclass
class _LineReader:
    argv: tuple[str, ...]
    at: int = 0
    launcher: Launcher = ""
    items: list[LaunchItem] = field(default_factory=list)
    wrappers: list[Wrapper] = field(default_factory=list)
    is_module: bool = False

    @property
    def word(self) -> str:
        """The next word; empty at the end."""
        return self.argv[self.at] if self.at < len(self.argv) else ""

    @property
    def name(self) -> str:
        """The same without its folder."""
        return PurePosixPath(self.word).name

    def read(self) -> None:
        self._prefix()
        if self.at >= len(self.argv):
            return
        name = self.name
        if submitted := self._submitted():
            self.items.append(LaunchItem("wrapper", SUBMITTER, self.at, submitted))
            self.wrappers.append(Wrapper(SUBMITTER))
            self.at = submitted
            self.read()
            return
        if name in SUITES and self._has_subcommand():
            self.launcher = SUITES[name]
            self._take("program", 2)
        elif name in LAUNCHERS and self._goes_on(LAUNCHERS[name][1]):
            self.launcher, words = LAUNCHERS[name]
            self._take("launcher", 1 + len(words))
            self._options(flags_of(self.launcher), "launcher_option")
            self._program()
        elif PYTHON.fullmatch(name):
            self._python()
        else:
            self.launcher = "srun" if self._is_in("srun") else ""
            self._take("program", 1)
        self._rest()

    def _submitted(self) -> int:
        """Index of the launcher that another program gets after ``--``; 0 without one."""
        rest = self.argv[self.at :]
        if "--" not in rest or self.name in SUITES or self.name in LAUNCHERS:
            return 0
        after = rest.index("--") + 1
        if "&&" in rest[after:]:  # a command for a shell on the nodes
            after = len(rest) - rest[::-1].index("&&")
        name = PurePosixPath(rest[after]).name if after < len(rest) else ""
        return self.at + after if name in SUITES or name in LAUNCHERS or PYTHON.fullmatch(name) else 0

    def _prefix(self) -> None:
        while self.at < len(self.argv):
            name = self.name
            if _VARIABLE.match(self.word):
                self._take("variable", 1, self.word.partition("=")[0], is_joined=True)
            elif name in WRAPPERS and self._goes_on(WRAPPERS[name]) and self.at + 1 < len(self.argv):
                self._wrapper(name)
            else:
                return

    def _wrapper(self, name: str) -> None:
        start = len(self.items)
        first, image = self.at, ""
        self.at += 1 + len(WRAPPERS[name])
        kind = {"apptainer": "container", "singularity": "container", "podman": "docker"}.get(name, name)
        flags = FLAGS.get(kind, frozenset())
        self._options(flags, "wrapper")
        options = dict(self._wrapper_option(item) for item in self.items[start:])
        if name in CONTAINERS:
            image = self.word
            self.at = min(self.at + 1, len(self.argv))
        if self.word == "--":
            self.at += 1
        del self.items[start:]
        self.items.append(LaunchItem("wrapper", name, first, self.at))
        self.wrappers.append(Wrapper(name, options, image))

    def _wrapper_option(self, item: LaunchItem) -> tuple[str, str]:
        word = self.argv[item.start]
        if len(word) > 2 and word[1] != "-":
            return word[1], word[2:].removeprefix("=")
        return item.name, (self._values(item) or ("",))[0]

    def _is_in(self, wrapper: str) -> bool:
        return any(found.name == wrapper for found in self.wrappers)

    def _has_subcommand(self) -> bool:
        return self.at + 1 < len(self.argv) and not self.argv[self.at + 1].startswith("-")

    def _goes_on(self, words: tuple[str, ...]) -> bool:
        found = self.argv[self.at + 1 : self.at + 1 + len(words)]
        # A container that is run starts the program as well.
        return found == words or (words == ("exec",) and found == ("run",))

    def _take(self, role: Role, count: int, name: str = "", *, is_joined: bool = False) -> None:
        stop = min(self.at + count, len(self.argv))
        self.items.append(LaunchItem(role, name, self.at, stop, is_joined))
        self.at = stop

    def _options(self, flags: frozenset[str], role: Role) -> None:
        """Take options up to the first other word."""
        while self._is_option(role):
            word = self.word
            if not word.startswith("-"):
                self._take(role, 1)
                continue
            name, is_joined = normalized(word), "=" in word
            is_group = self.launcher == "python" and set(name) <= flags
            # -N2, but not -np of mpirun; -Wignore of Python
            is_short = role == "wrapper" or (self.launcher == "python" and word[1] in "WX")
            holds_value = is_short and len(word) > 2 and word[1] != "-"
            alone = is_joined or holds_value or is_group or name in flags
            is_paired = self.launcher == "mpirun" and name in PAIRED
            self._take(role, 1 if alone else 3 if is_paired else 2, name, is_joined=is_joined)
            if name in ("m", "module") or (is_group and "m" in name):
                self.is_module = role == "launcher_option"

    def _is_option(self, role: Role) -> bool:
        """True for an option, or an expansion that only a shell knows with further options after it."""
        if role == "launcher_option" and _EXPANSION.fullmatch(self.word):
            after = next((word for word in self.argv[self.at :] if not _EXPANSION.fullmatch(word)), "")
            return after.startswith("-")
        return self.word.startswith("-") and self.word not in ("-", "--")

    def _python(self) -> None:
        first = len(self.items)
        self.launcher = "python"
        self._take("launcher", 1)
        self._options(FLAGS["python"], "launcher_option")
        module = self.word if self.is_module else ""
        if module in LAUNCHER_MODULES:
            self.launcher, words = LAUNCHER_MODULES[module]
            self.is_module = False
            stop = min(self.at + 1 + words, len(self.argv))
            self.items[first:] = [LaunchItem("launcher", "", self.items[first].start, stop)]
            self.at = stop
            self._options(flags_of(self.launcher), "launcher_option")
        elif self._is_in("srun"):
            self.launcher = "srun"
        self._program()

    def _program(self) -> None:
        if self.word == "--":
            self._take("launcher", 1)
        if self.name in SUITES and self._has_subcommand():
            self._take("program", 2)
            return
        if self.launcher == "mpirun" and PYTHON.fullmatch(self.name):
            self._take("launcher", 1)
            self._options(FLAGS["python"], "launcher_option")
        self._take("program", 1)

    def _rest(self) -> None:
        argv = self.argv
        while self.at < len(argv):
            word = self.word
            setting = _SETTING.match(word)
            if setting:
                self._take("argument", 1, setting[1], is_joined=True)
            elif not _is_option(word):
                self._take("positional", 1)
            elif "=" in word:
                self._take("argument", 1, normalized(word), is_joined=True)
            else:
                stop = self.at + 1
                while (
                    stop < len(argv)
                    and not _is_option(argv[stop])
                    and (stop == self.at + 1 or not _SETTING.match(argv[stop]))
                ):
                    stop += 1
                self._take("argument", stop - self.at, normalized(word))

    def line(self) -> LaunchLine:
        """The parsed parts."""
        arguments = {item.name: self._values(item) for item in self.items if item.role == "argument"}
        options = {item.name: (self._values(item) or ("",))[0] for item in self.items if item.role == "launcher_option"}
        positional = tuple(self.argv[item.start] for item in self.items if item.role == "positional")
        variables = {item.name: self._values(item)[0] for item in self.items if item.role == "variable"}
        named = [value for name in sorted(CONFIG_OPTIONS) for value in arguments.get(name, ())[:1]]
        named += [value for name, value in options.items() if name in CONFIG_OPTIONS]
        files = [value for value in [*named, *positional] if value.lower().endswith(CONFIG_SUFFIXES)]
        files += [value for name, value in options.items() if name in FILES_OF_LAUNCHERS and value]
        return LaunchLine(
            argv=self.argv,
            launcher=self.launcher,
            launcher_options=options,
            program=tuple(
                word for item in self.items if item.role == "program" for word in self.argv[item.start : item.stop]
            ),
            is_module=self.is_module,
            arguments=arguments,
            positional=positional,
            variables=variables,
            config_files=tuple(dict.fromkeys(files)),
            wrappers=tuple(self.wrappers),
            items=tuple(self.items),
        )

    def _values(self, item: LaunchItem) -> tuple[str, ...]:
        if item.is_joined:
            return (self.argv[item.start].partition("=")[2],)
        return self.argv[item.start + 1 : item.stop]


def _is_option(word: str) -> bool:
    """True for ``--name`` and ``-n``; a negative number is a value."""
    return word.startswith("-") and word not in ("-", "--") and not _NUMBER.fullmatch(word)
