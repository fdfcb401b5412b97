# shellcheck shell=bash
# Inside the machine that vm.sh boots: makes the topology, runs the command, says how it ended, turns the
# machine off.
#
#   pair  rxe0 on nic0 10.77.0.1, rxe1 on nic1 10.77.0.2: two NICs, one wire
#   quad  pair, and rxe2 on nic2 10.78.0.1, rxe3 on nic3 10.78.0.2: a second wire
#   bond  mlx5_bond_0 on bond0 10.77.0.1 (members s0, s1), mlx5_bond_1 on bond1 10.77.0.2 (members p0, p1):
#         two wires, s0 to p0 and s1 to p1
#
# All is in one network namespace, as soft-RoCE carries no packets in others. It sends by the device of the
# queue pair, so that packets do go over the wire.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root TERM=dumb
set -u

for port in /sys/class/virtio-ports/*; do
    case $(cat "$port/name") in
    out) out=/dev/${port##*/} ;;
    status) status=/dev/${port##*/} ;;
    esac
done
off() {
    sync
    busybox poweroff -f
}
# try COMMAND…: without it there is no machine.
try() {
    "$@" >/dev/console 2>&1 || {
        echo "vm-guest.sh: $* failed" >/dev/console
        off
    }
}
wire() {
    try ip link add "$1" type veth peer name "$2"
    # So that a packet of RDMA holds 4 KiB.
    try ip link set "$1" mtu 9000 up
    try ip link set "$2" mtu 9000 up
}
# address NETDEV ADDRESS: heard by the other end although it is this host's as well.
address() {
    local conf=/proc/sys/net/ipv4/conf/$1
    try ip addr add "$2/24" dev "$1"
    echo 1 >"$conf/accept_local"
    echo 0 >"$conf/rp_filter"
    echo 1 >"$conf/arp_ignore"
    echo 2 >"$conf/arp_announce"
}
device() { try rdma link add "$1" type rxe netdev "$2"; }
bond() {
    try ip link add "$1" type bond mode active-backup miimon 100
    for member in "$2" "$3"; do
        try ip link set "$member" down
        try ip link set "$member" master "$1"
    done
    try ip link set "$1" up
}

ip link set lo up
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
KVLANE_RDMA=$(sed -n 's/^export KVLANE_RDMA=//p' /run/vm/command)
case $KVLANE_RDMA in
bond)
    wire s0 p0
    wire s1 p1
    bond bond0 s0 s1
    bond bond1 p0 p1
    address bond0 10.77.0.1
    address bond1 10.77.0.2
    device mlx5_bond_0 bond0
    device mlx5_bond_1 bond1
    ;;
*)
    wire nic0 nic1
    address nic0 10.77.0.1
    address nic1 10.77.0.2
    device rxe0 nic0
    device rxe1 nic1
    if [ "$KVLANE_RDMA" = quad ]; then
        wire nic2 nic3
        address nic2 10.78.0.1
        address nic3 10.78.0.2
        device rxe2 nic2
        device rxe3 nic3
    fi
    ;;
esac
ulimit -l unlimited
bash /run/vm/command >"$out" 2>&1 </dev/null
echo $? >"$status"
off
