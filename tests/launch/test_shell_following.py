"""Branches, loops, functions, arrays and other files of shell scripts, followed as a shell would."""

import subprocess

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_core.shell.script import read_shell

ARRAYS = """
EMPTY=
COMMON=(
  --lr 1e-6   # a comment
  # --unused 1

  --name "a b" '' $EMPTY
)
COMMON+=(--bf16)
declare -a MORE
MORE+=("--seed" 7)
NONE=()
x "${COMMON[@]}" ${MORE[@]} "${NONE[@]}" ${NONE[@]+"${NONE[@]}"} "${NONE[@]:-none}" ${#COMMON[@]}
I=1
x "${COMMON[0]}" ${MORE[$I]} ${MORE[I-1]} "${COMMON[*]}" $MORE ${MORE[@]+"${MORE[@]}"}
"""
OPTIONS = """
LR=1e-6
MODEL=small
REST=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --lr) LR="$2"; shift 2 ;;
    -m | --model )
      MODEL=$2
      shift
      shift
      ;;
    --seed=*) SEED="${1#*=}"; shift;;
    *)
      REST+=("$1")
      shift ;;
  esac
done
x $LR $MODEL ${SEED:-0} "${REST[@]}"
"""
FUNCTIONS = """
usage() {
  echo "x never"
  exit 1
}
function build {
  local kind=$1
  ARGS=(--kind "$kind" --count $#)
  if [ "$kind" = big ]; then ARGS+=(--big); fi
}
run() { x "$@" "${ARGS[@]}"; }
[ $# -gt 50 ] && usage
if false; then run() { x never; }; fi
one() ( x one )
one
build big now
run --first "a b"
build small
run
x $1
"""
CONDITIONS = """
A=$1
if [ "$A" == "" ]; then A=none; fi
if [[ -z "$A" || "$A" = none && ! -n "" ]]; then x 1; elif true; then x 2; else x 3; fi
if [ $# -lt 1 ] || false; then x few; else x many; fi
(( $# > 0 )) && x some
(( 2 * 3 == 6 && 1 < 2 )) && x six
[[ "grpo-7b" == grpo* ]] && [[ a != b ]] && x pattern
[[ "grpo*" == "grpo*" ]] || x never
[ 3 -ge 2 -a 1 -ne 2 ] && x numbers
! false && x negated
true || x never
N=0
until [ $N -ge 3 ]; do N=$((N + 1)); x round $N; done
while [ $N -gt 9 ]; do x never; done
{ x group; }
! true && { false || true; } && x never
B=1 && B=2
case $B in 1) x one ;; 2|3) x two ;; *) x other ;; esac
x $A $B
"""
WORDS = """
: "${GPUS:=4}" ${NAME:=run}
RESUME=ckpt OFF=
x $GPUS $NAME ${RESUME:+--resume $RESUME} ${OFF:+--off} [${RESUME%/*}] ${NAME#r} ${NAME%n}
x ${RESUME:+-r "$RESUME d" 'a b'} ${1+"$@"} "${OFF:-$RESUME}"
P=/models/qwen/7b.tar.gz
x ${P##*/} ${P%.*} ${P%%.*} ${P#*/}
CMD="x --from eval '"'a b'"' $GPUS"
eval $CMD
eval "$CMD"
eval "C=1; x \\$C"
set -- one 'two three'
x $# "$@"
shift
x "$1" $#
shift 5
x $#
"""
LOCALS = """
PORT=1 KIND=k
f() {
  local PORT=2 KIND
  KIND=$1
  [ -n "$KIND" ] && local MORE=3
  declare -g SHARED=4
  if [ "$1" = deep ]; then f deeper; fi
  x $PORT $KIND
}
f deep
x $PORT $KIND $SHARED
"""
SUBSHELLS = """
A=1 B=b
export A
(A=2; x $A; B+=c; x $B) && x in $A
( A=3
  ( A=4; x $A ); x $A
) 2> /dev/null
[ $A = 1 ] && (x yes $A)
x then $A $B
[ $A = 2 ] && ( x never ) || ( x other )
if [ $B = b ]; then ( B=; x "$B" ); fi; x $B
(
  case $B in a) x never ;; b) x case ;; esac
  set -- b c
  x after "$@" "${D:-'}'}" "it's"
)
x "$@" $1
exit 0
x never
"""
COMPARED = (ARRAYS, OPTIONS, FUNCTIONS, CONDITIONS, WORDS, LOCALS, SUBSHELLS)


def words_of_bash(text: str, arguments: list[str]) -> list[list[str]]:
    """Words of every call of `x`, according to bash."""
    stub = 'x() { printf \'%s\\0\' "$#" "$@"; }\nexec 3>&1\n'
    done = subprocess.run(["bash", "-c", stub + text, "s", *arguments], capture_output=True, text=True, env={})
    parts = done.stdout.split("\0")[:-1]
    calls, at = list[list[str]](), 0
    while at < len(parts):
        count = int(parts[at])
        calls.append(parts[at + 1 : at + 1 + count])
        at += 1 + count
    return calls


@pytest.mark.parametrize("text", COMPARED)
@pytest.mark.parametrize("arguments", [[], ["--lr", "2", "--seed=5", "-m", "large", "--x", "y z"], ["a"]])
def test_the_words_are_those_of_bash(text: str, arguments: list[str]) -> None:
    found = read_shell(text, arguments=arguments).commands
    calls = [[*command.argv[1:]] for command in found if command.argv[0] == "x"]
    assert calls == words_of_bash(text, arguments)
    assert not [command for command in found if command.argv[0] == "x" and command.is_conditional]


WORDS = (
    *(
        "a",
        '"b c"',
        "'d e'",
        "$A",
        '"$B"',
        "${C}",
        "${A:-z}",
        '${B:+"q r"}',
        '"${C:-its}"',
        "${A#a}",
        '"${L[@]}"',
        "${#L[@]}",
    ),
    *(
        "$((N + 1))",
        '"$@"',
        "$#",
        "x\\ y",
        "${L[0]}",
        "$1",
        '"${2:-two words}"',
        "$'t\\n'",
        "$(expr $N + 2)",
        "pre$A/$B.x",
    ),
    *("$(dirname /a/b/c)", '"a$ b"', "{a}", "--o=$N", "\\\n  cont", "${A%%a*}", '"${A%a}"', "${@:-none}"),
)
TESTS = (
    *(
        "[ $N -gt 1 ]",
        '[[ "$A" == a* ]]',
        '[ -z "$B" ]',
        "true",
        "false",
        "! true",
        "[[ -n $C && $N -lt 2 || $A = b ]]",
    ),
    *(
        "(( N > 1 ))",
        '[ "$A" = "b c" -o $N -ge 1 ]',
        "[[ ! ( $N -eq 1 ) ]]",
        "{ true; }",
        "! { false; }",
        "x a && false",
    ),
)
SHORT = (
    *("N=$((N + 1))", "shift", "unset A", ': ${B:="k l"}', "set -- p 'q r'", 'export A; x "${A:=d}"', "L+=(e $A)"),
    *("x before | cat; x after", "cat > /dev/null <<E\n$A (\nE\nx here", "for i in a b; do :; done", "time x t"),
    *("until [ $N -ge 3 ]; do N=$((N + 1)); x u $N; done", "while true; do x once; break; x never; done"),
)


def blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Scripts with branches, loops, groups and functions that hold other scripts."""
    body, test = st.lists(inner, min_size=1, max_size=3).map("\n".join), st.sampled_from(TESTS)
    return st.one_of(
        st.builds("if {}; then\n{}\nelif {}; then\n{}\nelse\n{}\nfi".format, test, body, test, body, body),
        st.builds('case "$A" in a|b*)\n{}\n;; "b c") x m ;;\n*)\n{}\n;;\nesac'.format, body, body),
        st.builds("M=0\nwhile [ $M -lt {} ]; do\nM=$((M + 1))\nx loop $M\ndone".format, st.integers(0, 3)),
        st.builds("f() {{\nlocal A={}\n{}\n}}\nf {}".format, st.sampled_from(WORDS), body, st.sampled_from(WORDS)),
        st.builds("(\n{}\n)".format, body),
        st.builds("{{\n{}\n}}".format, body),
        st.builds("{} {} {{\n{}\n}}".format, test, st.sampled_from(["&&", "||"]), body),
    )


SIMPLE = st.one_of(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(lambda words: f"x {' '.join(words)}"),
    st.builds("{}={}".format, st.sampled_from("ABC"), st.sampled_from(WORDS)),
    st.sampled_from(SHORT),
)
SCRIPTS = st.lists(st.recursive(SIMPLE, blocks, max_leaves=6), min_size=1, max_size=4).map("\n".join)


@given(SCRIPTS, st.sampled_from([[], ["p"], ["p", "q r"]]))
@settings(max_examples=300)
def test_calls_that_are_known_are_those_of_bash(script: str, arguments: list[str]) -> None:
    text = f"A=a B= C=c N=1 L=(1 '2 3')\n{script}"
    calls = [command for command in read_shell(text, arguments=arguments).commands if command.argv[0] == "x"]
    assume(not any(call.is_conditional or call.unread for call in calls))
    assert [[*call.argv[1:]] for call in calls] == words_of_bash(text, arguments)


def test_the_comparison_with_bash_has_calls_to_compare() -> None:
    assert [len(words_of_bash(text, ["a"])) for text in COMPARED] == [2, 1, 4, 13, 9, 3, 13]


@pytest.mark.parametrize(
    ("text", "argv", "unread"),
    [
        # known within a branch that may not run, and unknown after it
        ("if [ -f f ]; then A=1; x $A; fi", "x 1", ()),
        ("A=0\nif [ -f f ]; then A=1; else A=2; fi\nx $A", "x $A", ("$A (assigned in a branch, line 2)",)),
        ("A=0\nfor i in 1 2; do\n if y; then A=$i; fi\ndone\nx $A", "x $A", ("$A (assigned in a branch, line 3)",)),
        ("f() { A=1; }\nif y; then f; x $A; fi", "x 1", ()),
        ('f() { x "$@" $2; }\nf a$N 1 $M', "x a$N 1 $M 1", ("$N", "$M")),
        ("f() { A=1; }\nif y; then f; fi\nx $A", "x $A", ("$A (assigned in a branch, line 1)",)),
        # elements after an unknown number of them
        ("A=(1 $(hostnames))\nx ${A[0]} ${A[1]}", "x 1 ${A[1]}", ("${A[1]}",)),
        ("declare -A A=([a]=1)\nx ${A[@]}", "x ${A[@]}", ("${A[@]}",)),
        ("A=(1); A[1]=2\nx ${A[@]}", "x ${A[@]}", ("${A[@]}",)),
        (
            "A=0\nif [ -f f ]; then while [ $A -lt 3 ]; do A=$((A+1)); done; x $A; fi",
            "x $A",
            ("$A (assigned in a branch, line 2)",),
        ),
        ("A=0\nif [ -f f ]; then { A=1; }; (A=2); x $A; fi", "x 1", ()),
        ("for A do x $A; done", "x $A", ("$A (assigned in a branch, line 1)",)),
        ("((N++))\nx $N", "x $N", ("$N",)),
        ("N=1; ((N++))\nx $N", "x $N", ("$N",)),
    ],
)
def test_values_that_depend_on_what_only_a_shell_knows(text: str, argv: str, unread: tuple[str, ...]) -> None:
    found = [command for command in read_shell(text).commands if command.argv[0] == "x"]
    assert (" ".join(found[-1].argv), found[-1].unread) == (argv, unread)


@pytest.mark.parametrize(
    "text",
    [
        "while true; do x; sleep 5; done",
        "while [ 1 ]; do x; done",
        "f() { f; }\nf\nx",
        "while [ $# -gt 0 ]; do echo $1; done\nx",
        "x\nwhile [ $# -gt 0 ]; do\n case $1 in *) exit 1 ;; esac\ndone",
    ],
)
def test_loops_without_an_end_are_left(text: str) -> None:
    found = read_shell(text, arguments=["a"]).commands
    assert sum(command.argv == ("x",) for command in found) == 1
    assert len(found) < 300


KEYWORDS = (
    "if", "then", "elif", "else", "fi", "while", "until", "for i in 1 2", "do", "done", "case $1 in", "a)", "*)", ";;",
    "esac", "{", "}", "f()", "f", "(", ")", "[[", "]]", "[", "]", "&&", "||", "!", "x", "$1", "A=(1 2)", "A+=(3)",
    '"${A[@]}"', "${A[$1]}", "${#A[@]}", "<<E", "E", "source s.sh", "eval", '"$A"', "shift", "set -- a b", "break",
    "exit", "cat", "|", "((", "))", "N=1", "$N", "-gt", "0", "N=$((N+1))", "function g {", "g", ";", "\n", "\n", "read",
)  # fmt: skip


@given(st.lists(st.sampled_from(KEYWORDS), max_size=40))
@settings(max_examples=400)
def test_any_order_of_keywords_comes_to_an_end(words: list[str]) -> None:
    found = read_shell(" ".join(words), arguments=["a", "b"], sourced={"s.sh": "source s.sh; f; x"}.get)
    assert all(command.line for command in found.commands)


@pytest.mark.parametrize(
    "text",
    ["(x;", "if x; then ", "{ ", "case a in a) ", "f() { ", "while $N; do ", "x | ", "x && ", "! ", "[[ ( ", "[ ! "],
)
def test_scripts_with_thousands_of_blocks_are_read_in_time(text: str) -> None:
    found = read_shell(f"first\n{text * 5_000}")
    assert found.commands[0].argv == ("first",)


def test_a_sourced_file_is_read_in_its_place() -> None:
    files = {"/p/conf/model.sh": 'MODEL_ARGS=(--layers 4)\nexport GIVEN=$1 HERE="$(dirname "$BASH_SOURCE")"'}
    text = 'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    text += 'source "${SCRIPT_DIR}/model.sh" big\nx ${MODEL_ARGS[@]} "$(dirname "$0")"\nsource other.sh'
    found = read_shell(text, {"PWD": "/p", "0": "conf/run.sh"}, sourced=files.get).commands
    assert [command.argv for command in found] == [("x", "--layers", "4", "conf"), ("source", "other.sh")]
    assert found[0].variables == {"GIVEN": "big", "HERE": "/p/conf"}
    assert found[0].line == 3


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("$(cd $(dirname $0)/../..; pwd)", "/p"),
        ('$(cd "$(dirname "$(readlink -f "$0")")" > /dev/null 2>&1 && pwd -P)', "/p/a/b"),
        ("$(cd ../q && pwd)", "/q"),
        ("`pwd`", "/p"),
        ('$(cd "$HERE" && pwd)', '$(cd "$HERE" && pwd)'),
    ],
)
def test_folders_that_a_script_changes_to(text: str, folder: str) -> None:
    assert read_shell(f"x {text}", {"PWD": "/p", "0": "a/b/run.sh"}).commands[0].argv == ("x", folder)


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("N=2\nsbatch --parsable <<EOF\n#SBATCH -N $N\nx \\$M $N\nEOF", ("sbatch", "--parsable", "bash", "-c")),
        ("N=2\nsrun -N 2 bash <<EOF\nx \\$M $N\nEOF", ("srun", "-N", "2", "bash", "-c")),
        ("N=2\ncat <<EOF | sbatch\nx \\$M $N\nEOF", ("sbatch", "bash", "-c")),
    ],
)
def test_a_shell_that_reads_a_here_document(text: str, argv: tuple[str, ...]) -> None:
    found = read_shell(text).commands[-1].argv
    assert found[:-1] == argv
    assert found[-1].endswith("x $M 2\n")


def test_a_file_that_the_script_writes() -> None:
    script = read_shell("N=2\ncat > run.sh <<EOF\nx $N\nEOF\ncat <<'EOF' > raw.sh\nx $N\nEOF\ny")
    assert script.files == {"run.sh": "x 2\n", "raw.sh": "x $N\n"}
    assert script.unread == ("file run.sh, written in line 2", "file raw.sh, written in line 5")


def test_a_subshell_changes_no_folder_of_the_script() -> None:
    text = "(cd other && x in) || x failed\nx out\n(x in\ncd other\nx there)\nx out"
    found = read_shell(text, {"PWD": "/p"}).commands
    folders = [(command.argv[1], command.folder) for command in found if command.argv[0] == "x"]
    assert folders == [
        ("in", "/p/other"), ("failed", "/p"), ("out", "/p"), ("in", "/p"), ("there", "/p/other"), ("out", "/p"),
    ]  # fmt: skip


def test_an_exit_for_missing_arguments_does_not_hide_the_rest() -> None:
    script = read_shell('usage() { exit 1; }\n[ -n "$1" ] || exit 1\n[ $# -gt 0 ] || usage\nx $1', arguments=[])
    assert [command.argv[0] for command in script.commands] == ["x"]


def test_arguments_that_are_not_given_are_named() -> None:
    script = read_shell('A=$1\nB=${2:-8}\nf() { y $4; }\nf\nif [ "$3" = slurm ]; then z; fi', arguments=[])
    assert (script.absent, script.tested) == (("$1",), ("$3",))
    assert read_shell("A=$1", arguments=["a"]).absent == ()
