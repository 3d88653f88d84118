#!/usr/bin/env bash
# Two hosts on this machine, for tests of what happens between machines. Each has a network, a host name (node1, node2),
# processes and sshd of its own; FOLDER/disk is its own disk, everything else is shared, as by a file server.
#
#   two_hosts.sh up FOLDER       FOLDER: absolute and short (Unix sockets), made if it is not there
#   ssh -F FOLDER/ssh_config "$(head -1 FOLDER/hosts)" hostname
#   two_hosts.sh kill FOLDER 2   as if its power were cut; `cut` takes its network away, `mend` gives it back
#   two_hosts.sh down FOLDER     whatever state it is in; removes FOLDER
#
# Left in FOLDER: hosts (an address a line), ssh_config, gateway (this machine's address between them), logs. Hosts end
# by themselves after LIFETIME seconds (3600). Needs root and CAP_NET_ADMIN (to make networks).
set -euo pipefail

fail() { echo "two_hosts.sh: $*" >&2; exit 1; }
usage() { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

[[ $# -ge 2 ]] || usage
PATH=$PATH:/usr/sbin:/sbin
verb=$1 folder=$2 host=${3:-}
lifetime=${LIFETIME:-3600}

# Names that nobody else has: networks and interfaces belong to the whole machine.
name() { cat "$folder/name"; }

# A private network that is not in use, so that several of these can be up at once.
free_network() {
    local try net
    for ((try = 0; try < 4096; try++)); do
        net=10.$((64 + ($$ + try) / 256 % 64)).$((($$ + try) % 256))
        ip -4 route show root "$net.0/24" | grep -q . || { echo "$net"; return; }
    done
    fail "no free network between 10.64.0.0 and 10.127.255.0"
}

write_ssh() { # number, address
    ssh-keygen -q -t ed25519 -N '' -f "$folder/host$1.key" </dev/null
    echo "[$2]:2222 $(cut -d' ' -f1,2 "$folder/host$1.key.pub")" >>"$folder/known_hosts"
    cat >"$folder/sshd$1.conf" <<EOF
ListenAddress $2:2222
HostKey $folder/host$1.key
AuthorizedKeysFile $folder/user.key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PidFile none
MaxStartups 100
SetEnv PATH=$PATH
EOF
}

start_host() { # number, address, name of its network
    local inside="hostname node$1 && mount --bind '$folder/disk$1' '$folder/disk' &&
            mount --bind '$folder/names' /etc/hosts || exit
        (sleep $lifetime; kill 1) >/dev/null 2>&1 &
        exec /usr/sbin/sshd -D -f '$folder/sshd$1.conf' -E '$folder/sshd$1.log'"
    mkdir -p "$folder/disk$1"
    # nsenter, not `ip netns exec`: that one takes /sys/fs/cgroup away, without which slurmd does not start.
    setsid nsenter --net="/run/netns/$3" unshare --uts --pid --fork --kill-child --mount-proc sh -c "$inside" \
        </dev/null >"$folder/node$1.log" 2>&1 &
    echo $! >"$folder/node$1.pid"
}

up() {
    [[ $folder == /* && ${#folder} -lt 60 ]] || fail "$folder: an absolute path of fewer than 60 characters is needed"
    [[ ! -e $folder/name ]] || fail "$folder is in use: two_hosts.sh down $folder"
    mkdir -p "$folder/disk" /run/sshd
    chmod 700 "$folder"
    echo "st$$" >"$folder/name"
    trap 'down' EXIT # until all of it is up
    local net bridge number address space
    net=$(free_network) bridge=$(name)br
    ip link add "$bridge" type bridge
    ip address add "$net.254/24" dev "$bridge"
    ip link set "$bridge" up
    echo "$net.254" >"$folder/gateway"
    ssh-keygen -q -t ed25519 -N '' -f "$folder/user.key" </dev/null
    printf '%s\n' "127.0.0.1 localhost" "$net.1 node1" "$net.2 node2" "$net.254 $(hostname -s)" >"$folder/names"
    for number in 1 2; do
        address=$net.$number space=$(name)n$number
        echo "$address" >>"$folder/hosts"
        ip netns add "$space"
        ip link add "$(name)v$number" type veth peer name eth0 netns "$space"
        ip link set "$(name)v$number" master "$bridge" up
        ip -n "$space" address add "$address/24" dev eth0
        ip -n "$space" link set eth0 up
        ip -n "$space" link set lo up
        write_ssh "$number" "$address"
        start_host "$number" "$address" "$space"
    done
    cat >"$folder/ssh_config" <<EOF
Host node1
    HostName $net.1
Host node2
    HostName $net.2
Host node? $net.*
    Port 2222
    User root
    IdentityFile $folder/user.key
    IdentitiesOnly yes
    UserKnownHostsFile $folder/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 5
    LogLevel ERROR
EOF
    answer
    trap - EXIT
}

answer() {
    local address try
    while read -r address; do
        for ((try = 0; try < 100; try++)); do
            if ssh -n -F "$folder/ssh_config" "$address" true 2>/dev/null; then continue 2; fi
            sleep 0.1
        done
        cat "$folder"/node?.log "$folder"/sshd?.log >&2 || true
        fail "no answer from $address"
    done <"$folder/hosts"
}

# The process that the host is, if it lives; its number alone could be somebody else's by now.
process() {
    local pid
    pid=$(cat "$folder/node$1.pid" 2>/dev/null) || return 0
    if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$folder/disk$1"; then echo "$pid"; fi
}

kill_host() {
    local pid try
    pid=$(process "$1")
    if [[ -z $pid ]]; then return 0; fi
    kill -9 "$pid" # and with it everything in its space of process numbers
    for ((try = 0; try < 100; try++)); do [[ -n $(process "$1") ]] || return 0; sleep 0.1; done
    fail "node$1 (process $pid) does not end"
}

down() {
    [[ -e $folder/name ]] || return 0
    local number try
    for number in 1 2; do
        kill_host "$number"
        ip netns del "$(name)n$number" 2>/dev/null || true
    done
    # A space goes, with its end of the wire, only when the last process in it is gone: a moment later.
    for ((try = 0; try < 100; try++)); do
        ip -brief link | grep -q "^$(name)v" || break
        sleep 0.1
    done
    ip link del "$(name)br" 2>/dev/null || true
    rm -rf "$folder"
}

case $verb in
    up) up ;;
    down) down ;;
    kill) kill_host "$host" ;;
    cut) ip link set "$(name)v$host" down ;;
    mend) ip link set "$(name)v$host" up ;;
    *) usage ;;
esac
