#!/usr/bin/env bash
# Debian packages that the cluster tests start: two MPIs, sshd, rsync, Slurm, munge, ip. As root; none of their
# services is started. Says nothing and does nothing where all of them are there.
set -euo pipefail

commands=(mpirun.openmpi mpiexec.hydra ssh ssh-keygen rsync slurmctld slurmd srun munged ip)
packages=(openmpi-bin mpich openssh-client openssh-server rsync slurmctld slurmd slurm-client munge iproute2)
no_services=/usr/sbin/policy-rc.d # asked by Debian's packages before they start what they brought
PATH=$PATH:/usr/sbin:/sbin

missing() {
    local name
    [[ -x /usr/sbin/sshd ]] || echo sshd
    for name in "${commands[@]}"; do command -v "$name" >/dev/null || echo "$name"; done
}

if [[ -z $(missing) ]]; then exit 0; fi
if [[ $(id -u) != 0 ]]; then
    echo "install.sh: missing: $(missing | xargs): run it as root, or install ${packages[*]}" >&2
    exit 1
fi
command -v apt-get >/dev/null || { echo "install.sh: needs Debian's apt-get; install ${packages[*]}" >&2; exit 1; }
if [[ ! -e $no_services ]]; then
    trap 'rm -f "$no_services"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$no_services" # 101: not allowed
    chmod +x "$no_services"
fi

export DEBIAN_FRONTEND=noninteractive
{
    apt-get update -qq
    apt-get install -qqy --no-install-recommends "${packages[@]}"
} >&2 </dev/null
if [[ -n $(missing) ]]; then
    echo "install.sh: still missing: $(missing | xargs)" >&2
    exit 1
fi
