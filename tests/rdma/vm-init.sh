#!/bin/busybox sh
# shellcheck shell=dash
# The first process of the machine that vm.sh boots. In: its initramfs, and the host's files by 9p. Out: the
# same root as the host's, below an overlay in memory, in which vm-guest.sh goes on. What fails is said on the
# console, and turns the machine off.
busybox=/bin/busybox
die() {
    $busybox echo "vm-init.sh: $*" >/dev/console
    $busybox poweroff -f
}

$busybox mount -t proc proc /proc
$busybox mount -t sysfs sys /sys
$busybox mount -t devtmpfs dev /dev
while read -r module; do
    # Or there would be a bond0 already.
    case $module in bonding.ko) options=max_bonds=0 ;; *) options= ;; esac
    $busybox insmod "/modules/$module" $options || die "insmod $module"
done </modules/order

by=trans=virtio,version=9p2000.L,msize=512000
$busybox mount -t 9p -o "ro,cache=loose,$by" host /host || die "the host's files"
$busybox mount -t tmpfs up /up
$busybox mkdir /up/upper /up/work
$busybox mount -t overlay -o lowerdir=/host,upperdir=/up/upper,workdir=/up/work over /root || die "overlay"
for kept in proc sys dev; do
    $busybox mount --move "/$kept" "/root/$kept" || die "mount /$kept"
done
$busybox mkdir -p /root/dev/shm /root/dev/pts
$busybox mount -t tmpfs shm /root/dev/shm
$busybox mount -t devpts pts /root/dev/pts
$busybox mount -t tmpfs run /root/run
$busybox mkdir /root/run/vm
$busybox mount -t 9p -o "ro,$by" control /root/run/vm || die "what to run"
exec $busybox chroot /root /bin/bash /run/vm/guest
