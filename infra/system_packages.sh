#!/bin/sh
# Ensures one group of system packages: installs them with apt if this user is root, otherwise lists what is missing.
# usage: system_packages.sh python|compiler|postgresql|slurm|browser [PYTHON]
set -eu
group=$1
python=${2:-}

install() {  # install "what it is for" package...
    purpose=$1
    shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing $* ($purpose)"
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 \
            || { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
    else
        echo "missing: $* ($purpose). You are not root here: ask an administrator to install them, then run make again." >&2
        return 1
    fi
}

case $group in
python)
    [ -n "$python" ] || { echo "no python3 on PATH: Python 3.11 or newer is needed" >&2; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || { echo "found $("$python" --version), need Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || install "virtual environments" python3-venv
    ;;
compiler)
    # For tests only: the clock of a throw-away Slurm's node, and a compiler that one fault of the campaign keeps busy.
    { command -v cc && command -v g++; } >/dev/null || install "the clock of a throw-away Slurm's node" g++ || true
    ;;
postgresql)
    # Optional: without it the PostgreSQL half of the history tests is skipped with a reason.
    ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || install "history tests on a real PostgreSQL" postgresql || true
    ;;
slurm)
    # Only the programs are needed: the packages' own daemons are left without a configuration.
    { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; } >/dev/null \
        || install "a throw-away Slurm cluster (infra/slurm)" slurmctld slurmd slurm-client munge
    ;;
browser)
    # Optional: without it the tests of the Prefect UI are skipped with a reason.
    { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
        || install "tests of the Prefect UI in a real browser" chromium || true
    ;;
*)
    echo "unknown group $group" >&2
    exit 2
    ;;
esac
