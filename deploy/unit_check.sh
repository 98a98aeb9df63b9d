#!/usr/bin/env bash
# Start the unchanged tonnage.service under a systemd that is process 1 of its own namespaces. The unit therefore has
# its own system call filter, its own user, and only the writable folders that it names. Each engine must become ready,
# complete a prompt and stop on request. The machine's own systemd is not involved.
#   PYTHON    the interpreter of an environment with tonnage's dependencies (default: .venv/bin/python)
#   BACKENDS  default: fake, hf, and vllm if it is installed
#   UNIT      another unit file
#   WORK      folder for the models, kept between runs (default: a folder that is removed at the end)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
UNIT=$(realpath "${UNIT:-deploy/systemd/tonnage.service}")
for tool in /lib/systemd/systemd systemctl unshare nsenter pgrep curl "$PYTHON"; do
    command -v "$tool" >/dev/null || { echo "unit check: $tool is missing" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "unit check: process 1 of a namespace needs root" >&2; exit 2; }
if [ -z "${BACKENDS:-}" ]; then
    BACKENDS="fake hf"
    "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' && BACKENDS+=" vllm"
fi

base=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
lib=$("$PYTHON" -c 'import sys; print(sys.prefix)')/lib

KEPT=${WORK:-}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK/cache"
# Copy this machine's model cache; the service's user will own the files.
cp -rn "${TONNAGE_CACHE:-$HOME/.cache/tonnage}/." "$WORK/cache/" 2>/dev/null || true
groups=$(findmnt -n -t cgroup2 -o TARGET | head -n 1)
group=
pid=
stop() {
    [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
    pid=
    for attempt in $(seq 1 50); do  # cgroups can be removed only after their processes have ended
        find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ -d "$group" ] || break
        sleep 0.1
    done
}
finish() {
    stop
    [ -n "$KEPT" ] || rm -rf "$WORK"
}
trap finish EXIT

# The script of process 1. It has its own /run, /etc, /opt and /var/cache, and reads units only from /run/units.
cat >"$WORK/boot" <<'BOOT'
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 run /run
cp -a /etc /run/etc && mount --bind /run/etc /etc
mkdir -p /run/units/tonnage.service.d /run/opt/python /run/opt/tonnage/bin /run/opt/tonnage/lib /run/cache/private/tonnage
chmod 700 /run/cache/private
mount --bind "$WORK/cache" /run/cache/private/tonnage
# Mount environment and sources at the unit's paths, because ProtectHome hides /root and /home from it.
mount --bind "$BASE" /run/opt/python
mount --bind "$LIB" /run/opt/tonnage/lib
ln -s /opt/python/bin/python3 /run/opt/tonnage/bin/python
echo "home = /opt/python/bin" >/run/opt/tonnage/pyvenv.cfg
printf '#!/opt/tonnage/bin/python\nimport sys\nfrom tonnage.server.cli import main\nif __name__ == "__main__":\n    sys.exit(main())\n' \
    >/run/opt/tonnage/bin/tonnage
chmod 755 /run/opt/tonnage/bin/tonnage
for name in planner cache server; do
    mkdir -p /run/opt/sources/tonnage/$name
    mount --bind "$PWD/$name" /run/opt/sources/tonnage/$name
done
mount --rbind /run/opt /opt
mount --rbind /run/cache /var/cache
mount -t proc proc /proc
mkdir -p /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cp "$UNIT" /run/units/tonnage.service
# There is no journal here, so the output goes to a file and the service is not restarted.
printf '[Service]\nRestart=no\nLimitCORE=0\nStandardOutput=append:/run/log\nStandardError=append:/run/log\n' \
    >/run/units/tonnage.service.d/check.conf
for name in sysinit basic shutdown network-online multi-user; do
    printf '[Unit]\nDefaultDependencies=no\n' >/run/units/$name.target
done
mkdir -p /etc/tonnage
cp "$WORK/env" /etc/tonnage/tonnage.env
mount --bind /dev/null /dev/console  # hide the machine's console
exec env -i container=check SYSTEMD_UNIT_PATH=/run/units PATH=/usr/bin:/bin \
    /lib/systemd/systemd --system --unit=tonnage.service --log-target=null --show-status=0
BOOT

inside() { nsenter -t "$first" --mount --pid --cgroup --uts --ipc "$@"; }
state() { inside systemctl show tonnage.service -p ActiveState,Result,ExecMainCode,ExecMainStatus | tr '\n' ' '; }
fail() {
    echo "unit check: $backend: $1: $(state)" >&2
    inside cat /run/log >"$WORK/log" && tail -n 60 "$WORK/log" >&2
    exit 1
}
told=
for backend in $BACKENDS; do
    port=$((20000 + RANDOM % 20000))
    printf '%s\n' TONNAGE_MODEL=demo "TONNAGE_BACKEND=$backend" "TONNAGE_PORT=$port" PYTHONPATH=/opt/sources LD_LIBRARY_PATH=/opt/python/lib \
        TONNAGE_KV_CACHE_MEMORY_BYTES=64MiB TONNAGE_MAX_MODEL_LEN=1024 TONNAGE_MAX_NUM_SEQS=4 >"$WORK/env"
    group=$groups/tonnage-check-$$
    mkdir "$group"
    BASE=$base LIB=$lib WORK=$WORK UNIT=$UNIT bash -c '
        echo $$ >"'"$group"'/cgroup.procs"
        exec unshare --mount --pid --cgroup --uts --ipc --fork --kill-child bash "$WORK/boot"' &
    pid=$!
    disown  # otherwise bash reports its end
    for attempt in $(seq 1 100); do
        first=$(pgrep -P "$pid" || true)
        [ -n "$first" ] && inside systemctl show >/dev/null 2>&1 && break
        sleep 0.1
    done
    [ -n "$first" ] || { echo "unit check: no process 1" >&2; exit 1; }
    for attempt in $(seq 1 600); do
        curl -fsS --max-time 2 "http://127.0.0.1:$port/ready" >/dev/null 2>&1 && break
        kill -0 "$pid" 2>/dev/null || { echo "unit check: $backend: systemd ended" >&2; exit 1; }
        case $(state) in *ActiveState=failed* | *ActiveState=inactive*) fail "it ended" ;; esac
        [ "$attempt" = 600 ] && fail "not ready after 600 s"
        sleep 1
    done
    curl -fsS --max-time 120 "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
        -d '{"model": "demo", "prompt": "The capital of France is", "max_tokens": 4}' | grep -q '"text"' ||
        fail "no completion"
    owner=$(inside stat -c %u "/proc/$(inside systemctl show tonnage.service -p MainPID --value)")
    [ "$owner" -ge 61184 ] || fail "it runs as uid $owner, not as a dynamic user"
    inside systemctl stop tonnage.service
    case $(state) in *Result=success*) ;; *) fail "it did not stop well" ;; esac
    stop
    told+="$backend "
    echo "unit check: $backend: ready, a completion, stopped (uid $owner)"
done
echo "unit check: ok (${told% })"
