#!/usr/bin/env bash
# A Slurm of one controller (this machine) and two nodes (node1 and node2 of two_hosts.sh, which it starts if FOLDER
# holds none), for tests of jobs that end early, are queued again, or lose a node.
#
#   slurm.sh up FOLDER
#   SLURM_CONF=FOLDER/slurm.conf srun -N 2 hostname
#   slurm.sh rejoin FOLDER 2     starts the node's daemon again after it was killed
#   slurm.sh down FOLDER         its jobs, the daemons, and the two hosts
#
# Two cores and 2000 MB a node. A job that is cancelled or queued again has 5 s from SIGTERM to SIGKILL (KillWait; a
# cluster has 30), a lost node is noticed after some 10 s, a requeued job starts again after some 10 s.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "slurm.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

[[ $# -ge 2 ]] || usage
PATH=$PATH:/usr/sbin:/sbin
verb=$1 folder=$2 host=${3:-}
export SLURM_CONF=$folder/slurm.conf

write_conf() {
    local addresses gateway controller
    mapfile -t addresses <"$folder/hosts"
    gateway=$(cat "$folder/gateway") controller=$(hostname -s)
    cat >"$SLURM_CONF" <<EOF
ClusterName=steady
SlurmctldHost=$controller($gateway)
SlurmctldPort=$((16000 + $$ % 4000))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/slurm/state
SlurmdSpoolDir=$folder/slurm/%n
SlurmctldPidFile=$folder/slurm/slurmctld.pid
SlurmdPidFile=$folder/slurm/slurmd.%n.pid
SlurmctldLogFile=$folder/slurm/slurmctld.log
SlurmdLogFile=$folder/slurm/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=60
KillWait=5
JobRequeue=1
NodeName=node1 NodeAddr=${addresses[0]} CPUs=2 RealMemory=2000
NodeName=node2 NodeAddr=${addresses[1]} CPUs=2 RealMemory=2000
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=60 State=UP
EOF
}

up() {
    [[ ! -e $SLURM_CONF ]] || fail "$folder is in use: slurm.sh down $folder"
    [[ -e $folder/hosts ]] || "$here/two_hosts.sh" up "$folder"
    trap 'tail -n 20 "$folder"/munge/{said,log} "$folder"/slurm/{said*,*.log} >&2 || true; down' EXIT # until all of it is up
    mkdir -p "$folder/munge" "$folder"/slurm/{state,node1,node2}
    chmod 755 "$folder/munge" # its socket must be reachable, its key is not
    head -c 128 /dev/urandom >"$folder/munge/key"
    chmod 400 "$folder/munge/key"
    munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
        --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" </dev/null >"$folder/munge/said" 2>&1
    write_conf
    slurmctld -c </dev/null >"$folder/slurm/said" 2>&1
    rejoin 1
    rejoin 2
    wait_for_nodes
    trap - EXIT
}

rejoin() {
    ssh -n -F "$folder/ssh_config" "$(sed -n "$1p" "$folder/hosts")" \
        "SLURM_CONF='$SLURM_CONF' exec slurmd -N node$1 </dev/null >'$folder/slurm/said$1' 2>&1"
}

wait_for_nodes() {
    local try
    for ((try = 0; try < 300; try++)); do
        if [[ $(sinfo -h -o %t%D) == idle2 ]]; then return 0; fi
        sleep 0.1
    done
    sinfo >&2
    tail -n 20 "$folder"/slurm/*.log >&2
    fail "the nodes are not idle"
}

# Ends the daemon whose number a file holds, if the number is still that daemon's.
end() { # file, a word of its command line
    local pid try
    pid=$(cat "$1" 2>/dev/null) || return 0
    for ((try = 0; try < 100; try++)); do
        tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "$2" || return 0
        if ((try % 50 == 0)); then kill "$([[ $try == 0 ]] && echo -TERM || echo -KILL)" "$pid" 2>/dev/null || true; fi
        sleep 0.1
    done
    fail "$2 (process $pid) does not end"
}

down() {
    end "$folder/slurm/slurmctld.pid" slurmctld
    end "$folder/munge/pid" munged
    "$here/two_hosts.sh" down "$folder" # and with them their daemons and the jobs on them
}

case $verb in
    up) up ;;
    rejoin) rejoin "$host" ;;
    down) down ;;
    *) usage ;;
esac
