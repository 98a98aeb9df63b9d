#!/usr/bin/env bash
# Build the image and start it as its own user, without a container engine: buildah runs in a chroot, on a Debian base
# from debootstrap. The script exits with 0 when /health and /ready of the server in the container have answered.
#   BUILD_ARGS   more options for buildah build, for example --volume and --build-arg of a package mirror
#   WORK         folder for base and layers, kept between runs (default: a folder that is removed at the end)
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in buildah debootstrap curl; do
    command -v "$tool" >/dev/null || { echo "image check: $tool is missing (apt-get install $tool)" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "image check: debootstrap and a chroot need root" >&2; exit 2; }

if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK/run"
export XDG_RUNTIME_DIR="$WORK/run"
store=(--root "$WORK/store" --runroot "$WORK/run" --storage-driver vfs)
read -r -a more <<<"${BUILD_ARGS:-}"

if ! buildah "${store[@]}" images -q localhost/tonnage-base >/dev/null 2>&1; then
    [ -d "$WORK/base/usr" ] ||
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$WORK/base" >/dev/null
    tar -C "$WORK/base" -cf "$WORK/base.tar" .
    from=$(buildah "${store[@]}" from scratch)
    buildah "${store[@]}" add "$from" "$WORK/base.tar" / >/dev/null
    buildah "${store[@]}" commit -q "$from" localhost/tonnage-base >/dev/null
    buildah "${store[@]}" rm "$from" >/dev/null
    rm -f "$WORK/base.tar"
fi

echo "image check: building"
# --format docker is needed because OCI images have no HEALTHCHECK.
buildah "${store[@]}" build --isolation chroot --format docker --network host --target cpu \
    --build-arg BASE=localhost/tonnage-base "${more[@]}" -f deploy/Dockerfile -t localhost/tonnage:check . \
    >"$WORK/build.log" 2>&1 || { tail -n 40 "$WORK/build.log" >&2; exit 1; }

user=$(buildah "${store[@]}" inspect --type image --format '{{.OCIv1.Config.User}}' localhost/tonnage:check)
[ "$user" = 10001 ] || { echo "image check: the image runs as '$user', not as 10001" >&2; exit 1; }
buildah "${store[@]}" inspect --type image --format '{{.Docker.Config.Healthcheck}}' localhost/tonnage:check |
    grep -q /health || { echo "image check: the image has no health check" >&2; exit 1; }

# This machine's model cache becomes a volume of the container's user.
models="$WORK/models"
mkdir -p "$models"
cp -rn "${TONNAGE_CACHE:-$HOME/.cache/tonnage}/." "$models/" 2>/dev/null || true
chown -R 10001 "$models"
port=$((20000 + RANDOM % 20000))
container=$(buildah "${store[@]}" from localhost/tonnage:check)
buildah "${store[@]}" run --isolation chroot --network host --user 10001 --volume "$models:/var/cache/tonnage" \
    --env TONNAGE_CACHE=/var/cache/tonnage "$container" -- \
    /opt/tonnage/bin/tonnage serve demo --port "$port" --kv-cache-memory-bytes 64MiB --max-model-len 1024 \
    >"$WORK/serve.log" 2>&1 &
server=$!
stop() {
    pkill -TERM -P "$server" 2>/dev/null || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    buildah "${store[@]}" rm "$container" >/dev/null
}
for route in health ready; do
    for attempt in $(seq 1 300); do
        if curl -fsS --max-time 2 "http://127.0.0.1:$port/$route" 2>/dev/null; then
            echo "  <- /$route after $attempt s"
            break
        fi
        if [ "$attempt" = 300 ] || ! kill -0 "$server" 2>/dev/null; then
            tail -n 40 "$WORK/serve.log" >&2
            stop
            exit 1
        fi
        sleep 1
    done
done
owner=$(ps -eo uid,args | awk -v port="$port" '$2 ~ /python/ && index($0, "serve demo --port " port) {uid = $1} END {print uid}')
stop
[ "$owner" = 10001 ] || { echo "image check: the server ran as uid '$owner'" >&2; exit 1; }
echo "image check: ok (uid $owner)"
