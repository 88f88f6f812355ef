"""Parsing of shell scripts without a shell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.shell.script import MAX_CHARACTERS, read_shell
from rlhf_core.shell.values import ShellCommand

SWIFT = """
# before: swift rollout --model x
nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift rlhf \\
    --rlhf_type cpo \\
    --dataset 'a#20' "b c" \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --kwargs '{"use": $false}' > log.txt 2>&1 &
"""


def only(text: str, **known: str) -> ShellCommand:
    script = read_shell(text, known)
    assert len(script.commands) == 1, script
    return script.commands[0]


def test_a_script_in_the_style_of_ms_swift() -> None:
    found = only(SWIFT)
    assert found.argv == (
        "swift", "rlhf", "--rlhf_type", "cpo", "--dataset", "a#20", "b c",
        "--gradient_accumulation_steps", "8", "--kwargs", '{"use": $false}',
    )  # fmt: skip
    assert found.variables == {"CUDA_VISIBLE_DEVICES": "0,1", "NPROC_PER_NODE": "2"}
    assert (found.line, found.in_background, found.unread) == (5, True, ())


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("x ${A:-8} ${B-b} ${C:=c}", ["x", "8", "b", "c"]),
        ("A=1\nx ${A:-8} $A", ["x", "1", "1"]),
        ("A=\nx ${A:-8} [$A] $A", ["x", "8", "[]"]),
        ('A=${A:-"1 2"}\nx "$A"', ["x", "1 2"]),
        ('A="${A:-"1 2"}"\nx "$A"', ["x", "1 2"]),
        ("A=${A:-'1 2'} B=\"${B:-'3'}\"\nx $A $B", ["x", "1", "2", "'3'"]),
        ('A=4\nx ${B:-"1 2"}${B:-3 4} ${B:-"$A"}', ["x", "1 23", "4", "4"]),
        ("x --s $'a\\n' $'it\\'s' \"$'5'\"", ["x", "--s", "a\n", "it's", "$'5'"]),
        ("A='1 2'\nx $A \"$A\" p$A'q r'", ["x", "1", "2", "1 2", "p1", "2q r"]),
        ("A=$((2 * 4)) B=$((A/2))\nx $A", ["x", "8"]),
        ("N=4\nx $((N * 8 + 1)) $(expr $N \\* 2)", ["x", "33", "8"]),
        ("x a\\ b 'c'\"d\"e", ["x", "a b", "cde"]),
        ('x --j "{\\"a\\": \\$b}"', ["x", "--j", '{"a": $b}']),
        ("x a\\\nb c\\\n d", ["x", "ab", "c", "d"]),
        ("x # comment\n", ["x"]),
        ('x --a 1 \\\n `# comment` \\\n --b "`#`"', ["x", "--a", "1", "--b", ""]),
        ("A=1\nunset -v A B\nx [$A] ${A:-2}", ["x", "[]", "2"]),
        ("x a#b", ["x", "a#b"]),
        ("x `a \\`b 'c'\\`` d", ["x", "`a \\`b 'c'\\``", "d"]),
        ("x $(a \"it's )\" # isn't )\n) 'b c'", ["x", "$(a \"it's )\" # isn't )\n)", "b c"]),
        ("x \"${A:-'}'}\" ${B:-'}'} ${C:+d}e", ["x", "'}'", "}", "${C:+d}e"]),
        ("A=(1 2)\nx ${A[${#A[@]}-1]}b", ["x", "${A[${#A[@]}-1]}b"]),
        ("x <<\\EOF\n$(\nEOF\nx $(cat <<EOF\n)\nEOF\n) b", ["x", "$(cat <<EOF\n)\nEOF\n)", "b"]),
        ("A=x\nA+=y\n$A z", ["xy", "z"]),
        ("x > log 2>&1 < in", ["x"]),
        ("x &> log", ["x"]),
        ("x ''", ["x", ""]),
        ("read -r -d '' W <<EOF\na \\\n b\nEOF\nx $W", ["x", "a", "b"]),
    ],
)
def test_words(text: str, argv: list[str]) -> None:
    assert [*read_shell(text).commands[-1].argv] == argv


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("x $RANK", "$RANK"),
        ("x ${A[@]}", "${A[@]}"),
        ("A=(1 $B)\nx ${A[1]}", "${A[1]}"),
        ("x $(hostname)", "$(hostname)"),
        ("x `hostname`", "`hostname`"),
        ("H=$(scontrol show hostnames | head -n 1)\nx $H", "$(scontrol show hostnames | head -n 1)"),
        ("x ${A##*/}", "${A##*/}"),
        ("x $'\\x41'", "$'\\x41'"),
        ("x $((1 / 0))", "$((1 / 0))"),
        ("x $((9 ** 99999))", "$((9 ** 99999))"),
        ("x ~/data", "~"),
        ("if y; then A=1; fi\nx $A", "$A (assigned in a branch, line 1)"),
        ("for A in 1 2; do x $A; done", "$A (assigned in a branch, line 1)"),
        ('A=1\n[ "$SIZE" = big ] && A=2\nx $A', "$A (assigned in a branch, line 2)"),
        ("[[ -n $B && -n $C ]] && A=2\nx $A", "$A (assigned in a branch, line 1)"),
        ("y ||\n A=2\nx $A", "$A (assigned in a branch, line 2)"),
    ],
)
def test_values_known_only_to_a_shell_are_named_and_kept(text: str, unread: str) -> None:
    found = [command for command in read_shell(text).commands if command.argv[0] == "x"][-1]
    assert unread in found.unread
    assert unread.partition(" (assigned")[0] in " ".join(found.argv)


def test_variables_are_the_exported_ones() -> None:
    found = read_shell("A=1\nexport B=2\nexport A\nC=3\nD=4 x").commands[-1]
    assert found.variables == {"A": "1", "B": "2", "D": "4"}


def test_variables_that_are_unset_are_not_exported() -> None:
    """Proxies for a download before the training, for instance."""
    found = read_shell("export A=1 B=2 C=3 D=4\nunset A\nexport -n B\nunset -f C\nif x; then unset D; fi\nx")
    assert found.commands[-1].variables == {"C": "3", "D": "$D"}
    assert found.commands[-1].unread == ("$D (assigned in a branch, line 5)",)


def test_arguments_of_the_script() -> None:
    script = read_shell('N=$1\nshift\ntorchrun --nproc_per_node=$N train.py "$@" $1', arguments=["4", "--lr", "a b"])
    assert script.commands[-1].argv == ("torchrun", "--nproc_per_node=4", "train.py", "--lr", "a b", "--lr")
    assert read_shell('x "$@" ${1:-8} $2').commands[-1].argv == ("x", "8")


def test_folders() -> None:
    script = read_shell("cd sub\nx $PWD $(pwd) ~/d", {"PWD": "/home/u", "HOME": "/home/u"})
    assert script.commands[-1].argv == ("x", "/home/u/sub", "/home/u/sub", "/home/u/d")
    unknown = read_shell("cd $WHERE\nx $(pwd)", {"PWD": "/home/u"}).commands[-1]
    assert unknown.unread == ("$(pwd)",)


def test_commands_in_branches_that_may_not_run_are_conditional() -> None:
    script = read_shell("f() {\n a\n}\nif b; then\n c\nfi\nd || e\ng | h\n")
    sure = {command.argv[0]: not command.is_conditional for command in script.commands}
    assert read_shell("cd y &&\n export A=1 && x $A").commands[-1].argv == ("x", "1")
    assert sure == {"b": True, "c": False, "d": True, "e": False, "g": True, "h": True}
    assert script.unread == ()


@pytest.mark.parametrize("text", ["x 'a", 'x "a', "x $(a", "x ${a", "x `a", "A=(1", "x <<EOF\na", "x <<"])
def test_unclosed_constructs_are_named_with_their_line(text: str) -> None:
    script = read_shell(f"first\n{text}\n\nlast")
    assert script.commands[0].argv == ("first",)
    assert script.unread[0].startswith("everything from line 2")


def test_a_script_that_is_too_long_is_reported() -> None:
    assert "more than" in read_shell("x" * (MAX_CHARACTERS + 1)).unread[0]


def test_doubling_variables_do_not_fill_the_memory() -> None:
    script = read_shell("a=" + "x" * 60_000 + "\n" + "a=$a$a\n" * 200 + "b $a$a$a\n" * 2_000)
    assert sum(len(word) for command in script.commands for word in command.argv) < 20_000_000
    assert len(read_shell("a=$x\n" + "a=$a$a\n" * 100 + "b $a").commands[0].unread) == 1


@given(st.text(alphabet="ab01 \n\t$(){}[]'\"`\\<>|&;#=+-@*!~:/%", max_size=60))
@settings(max_examples=500)
def test_it_never_raises(text: str) -> None:
    script = read_shell(text)
    assert all(1 <= command.line <= text.count("\n") + 1 for command in script.commands)


@given(st.text(max_size=60), st.lists(st.text(max_size=9), max_size=4))
@settings(max_examples=200)
def test_it_never_raises_on_any_text(text: str, arguments: list[str]) -> None:
    read_shell(text, {"HOME": "/h", "PWD": "/p"}, arguments)


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6))
@settings(max_examples=300)
def test_quoted_words_come_back_as_they_are(words: list[str]) -> None:
    import shlex

    found = read_shell(" ".join(shlex.quote(word) for word in words)).commands
    quoted = [word for word in words if shlex.quote(word) != word]
    if len(quoted) == len(words):
        assert found[0].argv == tuple(words)
        assert found[0].unread == ()
