#!/bin/sh
# Debian packages that the tests use where SYSTEM=1 allows it. Does nothing where all are there.
set -eu
missing=
for pair in shellcheck:shellcheck flock:util-linux sshd:openssh-server ssh:openssh-client dockerd:docker.io \
    debootstrap:debootstrap ip:iproute2 iptables:iptables busybox:busybox-static \
    chromium:chromium chromedriver:chromium-driver \
    munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
# the API server of KUBE_BIN needs it
[ -z "${KUBE_BIN:-}" ] || command -v etcd >/dev/null 2>&1 || missing="$missing etcd-server"
python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "SYSTEM=1: not root on Debian or Ubuntu, so these are not installed and their tests are skipped:$missing"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
echo "SYSTEM=1: installing$missing"
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null
