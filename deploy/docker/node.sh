#!/bin/sh
# A container of the worker image: `head` is Ray's head, `worker` a node that the launcher places drafts or targets on,
# `launcher` the launcher. OUTRIDER_NODE_LABELS: Ray's labels of the node, such as outrider/role=draft.
set -eu

: "${OUTRIDER_NODE_LABELS:=}" "${OUTRIDER_NODE_CPUS:=1}" "${OUTRIDER_HEAD:=ray-head:6379}"
: "${OUTRIDER_OBJECT_STORE_BYTES:=104857600}" "${OUTRIDER_START_TIMEOUT_S:=300}"
: "${RAY_AUTH_MODE:=token}" "${RAY_AUTH_TOKEN:=}" "${RAY_AUTH_TOKEN_PATH:=/run/outrider/ray_token}"
export RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH
# Without these Ray takes over half a minute to see that a machine is gone, and drafts and targets wait to be placed anew.
export RAY_health_check_initial_delay_ms="${RAY_health_check_initial_delay_ms:-2000}"
export RAY_health_check_period_ms="${RAY_health_check_period_ms:-1000}"
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-2000}"
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-3}"
# Ray would start an idle process for each core.
export RAY_prestart_worker_first_driver=0
# Ray's 15 is for batch jobs: whoever else runs on the machine would come before answers.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

# Ray's logs are in /tmp, which is small: of each, two files of 8 MiB, not six of 512.
export RAY_ROTATION_MAX_BYTES="${RAY_ROTATION_MAX_BYTES:-8388608}" RAY_ROTATION_BACKUP_COUNT="${RAY_ROTATION_BACKUP_COUNT:-1}"

have_token() { [ -n "$RAY_AUTH_TOKEN" ] || [ -s "$RAY_AUTH_TOKEN_PATH" ]; }

make_token() {
    have_token && return
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH.part")
    mv "$RAY_AUTH_TOKEN_PATH.part" "$RAY_AUTH_TOKEN_PATH"
}

wait_for_head() {
    give_up=$(($(date +%s) + OUTRIDER_START_TIMEOUT_S))
    until have_token && python deploy/docker/container_health.py tcp "$OUTRIDER_HEAD" 2>/dev/null; do
        if [ "$(date +%s)" -ge "$give_up" ]; then
            echo "node: no Ray head at $OUTRIDER_HEAD after $OUTRIDER_START_TIMEOUT_S s, or no token in" \
                "$RAY_AUTH_TOKEN_PATH; is ray-head up, and is its token's volume mounted here?" >&2
            exit 1
        fi
        sleep 1
    done
}

# Ray gives its own processes 30 s, which a busy machine may exceed.
start_ray() {
    for attempt in 1 2 3; do
        ray start --labels="$OUTRIDER_NODE_LABELS" --object-store-memory="$OUTRIDER_OBJECT_STORE_BYTES" \
            --disable-usage-stats "$@" && return
        echo "node: Ray did not start, attempt $attempt of 3" >&2
        ray stop --force >/dev/null 2>&1 || true
    done
    exit 1
}

case "${1:-}" in
head)
    make_token
    # No CPU of its own: nothing is placed here. No dashboard: nobody looks at it, and it would listen.
    start_ray --head --port=6379 --num-cpus=0 --num-gpus=0 --include-dashboard=false --include-log-monitor=false
    touch /tmp/head-is-up
    exec python deploy/docker/stay.py gcs_server
    ;;
launcher)
    shift
    wait_for_head
    start_ray --address="$OUTRIDER_HEAD" --num-cpus=0 --num-gpus=0 --include-log-monitor=false
    # Asked to end it would end the workers as well. Here it is about to be replaced: with `ray.name` in its settings
    # they outlive it, and the next one takes them over.
    python -m deploy.launcher "$@" &
    launcher=$!
    # It would stay with a cluster whose head is gone.
    { python deploy/docker/stay.py raylet || kill -KILL "$launcher"; } &
    trap 'kill -KILL "$launcher"; exit 0' TERM INT
    wait "$launcher"
    ;;
worker)
    wait_for_head
    start_ray --address="$OUTRIDER_HEAD" --num-cpus="$OUTRIDER_NODE_CPUS"
    exec python deploy/docker/stay.py raylet
    ;;
*)
    exec "$@"
    ;;
esac
