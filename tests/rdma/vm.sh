#!/usr/bin/env bash
# Runs a command against the kernel's own RDMA verbs (soft-RoCE), on a host whose kernel has none.
#
# In: a command, a topology. Boots Debian's kernel in qemu, emulated, so that neither KVM nor a module of
# the host's kernel is needed. The host's files are there, read-only, below an overlay in memory: every
# binary and library runs unchanged, in the caller's directory, as root.
# Out: what the command printed, and its exit status; 124 timed out; 125 the machine itself failed.
#
#   tests/rdma/vm.sh [OPTION…] [--] COMMAND [ARGUMENT…]
#     --topo NAME     what there is before the command runs (default: pair)
#                       none  nothing
#                       pair  rxe0 on nic0 10.77.0.1, rxe1 on nic1 10.77.0.2: two NICs, one wire
#                       bond  mlx5_bond_0 on bond0 10.77.0.1 (s0, s1), mlx5_bond_1 on bond1 10.77.0.2 (p0, p1)
#                       quad  pair, and rxe2 on nic2 10.78.0.1, rxe3 on nic3 10.78.0.2: a second wire
#     --smp N         virtual CPUs (default 2)      --mem MIB  memory (default 2048)
#     --timeout S     the whole run (default 600)   --rw DIR   a directory that can be written; several times
#     --env NAME[=V]  passes a variable; several times
#     --setup-only    installs, downloads and unpacks what is needed, boots nothing
#     -v              the kernel's console, too
# What is downloaded is kept in RDMA_VM_CACHE (default /var/cache/kvlane-rdma-vm).
set -euo pipefail
CACHE=${RDMA_VM_CACHE:-/var/cache/kvlane-rdma-vm}
TOPO=pair SMP=2 MEM=2048 TIMEOUT=600 VERBOSE=0 SETUP_ONLY=0
RW=() ENVS=()
while [ $# -gt 0 ]; do case $1 in
  --topo) TOPO=$2; shift 2;;       --smp) SMP=$2; shift 2;;        --mem) MEM=$2; shift 2;;
  --timeout) TIMEOUT=$2; shift 2;; --rw) RW+=("$(realpath "$2")"); shift 2;;
  --env) ENVS+=("$2"); shift 2;;
  --setup-only) SETUP_ONLY=1; shift;; -v) VERBOSE=1; shift;; --) shift; break;;
  -*) echo "vm.sh: unknown option $1" >&2; exit 125;; *) break;; esac; done
[ $SETUP_ONLY = 1 ] || [ $# -gt 0 ] || { sed -n '2,/^set -/p' "$0" >&2; exit 125; }
say() { echo "vm.sh: $*" >&2; }
die() { say "$*"; exit 125; }

# ---- 1. host packages (ordinary apt; nothing is loaded into the host kernel) ----------------------------------------
need=()
have() { command -v "$1" >/dev/null 2>&1 || [ -e "/usr/sbin/$1" ] || need+=("$2"); }
have qemu-system-x86_64 qemu-system-x86; have depmod kmod; have cpio cpio; have xz xz-utils; have zstd zstd
have ip iproute2; have rdma iproute2
[ -e /usr/share/doc/busybox-static ] || need+=(busybox-static)
[ -e /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so ] || ls /usr/lib/x86_64-linux-gnu/libibverbs/librxe-*.so >/dev/null 2>&1 || need+=(ibverbs-providers)
if [ ${#need[@]} -gt 0 ]; then
  say "apt-get install ${need[*]}"
  apt-get -qq update >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >&2 || die "apt-get install failed"
fi
export PATH=$PATH:/usr/sbin:/sbin

# ---- 2. kernel: download, extract (never installed), unpack to a plain vmlinux -----------------------------------------
mkdir -p "$CACHE"; exec 9>"$CACHE/lock"; flock 9
K=$CACHE/kernel
if [ ! -e "$K/ready" ]; then
  rm -rf "$K"; mkdir -p "$K/deb"
  if ! apt-cache policy linux-image-amd64 | grep -q 'Candidate: [0-9]'; then apt-get -qq update >&2; fi
  img=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/{print $2; exit}')
  [ -n "$img" ] || die "no linux-image-amd64 in the package lists"
  say "downloading $img"
  (cd "$K/deb" && apt-get -qq -o APT::Sandbox::User=root download "$img" >&2) || die "download of $img failed"
  dpkg-deb -x "$K"/deb/*.deb "$K/root"
  ver=$(basename "$K"/root/lib/modules/*); echo "$ver" >"$K/version"
  # the bzImage's own decompressor takes ~15 s under TCG; qemu boots an uncompressed ELF vmlinux directly (PVH note)
  python3 - "$K/root/boot/vmlinuz-$ver" "$K/vmlinux" <<'PY' || die "cannot unpack vmlinuz"
import subprocess, sys
d = open(sys.argv[1], 'rb').read()
for magic, cmd in ((b'\xfd7zXZ\x00', 'xz'), (b'\x28\xb5\x2f\xfd', 'zstd'), (b'\x1f\x8b\x08', 'gzip')):
    o = d.find(magic)
    while o >= 0:
        r = subprocess.run([cmd, '-dc'], input=d[o:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        if r[:4] == b'\x7fELF':
            open(sys.argv[2], 'wb').write(r); sys.exit(0)
        o = d.find(magic, o + 1)
sys.exit(1)
PY
  depmod -b "$K/root" "$ver"
  rm -rf "$K/deb"; touch "$K/ready"
fi
VER=$(cat "$K/version")

# ---- 3. initramfs: busybox + the few modules + /init (uncompressed: unpacking is slow under TCG) -----------------------
STAMP=$(sha256sum "$0" | cut -c1-16)
INITRD=$K/initrd-$STAMP.cpio
if [ ! -e "$INITRD" ]; then
  D=$(mktemp -d); mkdir -p "$D"/{bin,mod,proc,sys,dev,host,up,root}
  cp "$(command -v busybox || echo /bin/busybox)" "$D/bin/busybox"
  for m in virtio_pci virtio_console 9p 9pnet_virtio overlay veth dummy bonding bridge crc32_generic crc32c_generic libcrc32c ib_uverbs rdma_ucm rdma_rxe; do
    modprobe -d "$K/root" -S "$VER" --show-depends "$m" | awk '$1=="insmod"{print $2}'
  done | awk '!s[$0]++' >"$D/list.abs"
  while read -r f; do
    b=$(basename "$f"); case $b in
      *.xz) b=${b%.xz}; xz -dc "$f" >"$D/mod/$b";; *.zst) b=${b%.zst}; zstd -qdc "$f" >"$D/mod/$b";; *) cp "$f" "$D/mod/$b";; esac
    echo "$b" >>"$D/mod/list"
  done <"$D/list.abs"; rm "$D/list.abs"
  cat >"$D/init" <<'INIT'
#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
die() { $B echo "vm.sh: init: $*" >/dev/console; $B poweroff -f; }
while read -r m; do # bonding and dummy make a bond0 and a dummy0 on their own unless told not to
  case $m in bonding.ko) a=max_bonds=0;; dummy.ko) a=numdummies=0;; *) a=;; esac
  $B insmod /mod/$m $a || die "insmod $m"
done </mod/list
O="trans=virtio,version=9p2000.L,msize=512000"
$B mount -t 9p -o ro,cache=loose,$O host /host || die "mount 9p host"
$B mount -t tmpfs up /up; $B mkdir -p /up/u /up/w
$B mount -t overlay -o lowerdir=/host,upperdir=/up/u,workdir=/up/w over /root || die "mount overlay"
for d in proc sys dev; do $B mount --move /$d /root/$d || $B mount --bind /$d /root/$d; done
R=/root
[ -d $R/dev/shm ] || $B mkdir -p $R/dev/shm; $B mount -t tmpfs shm $R/dev/shm
$B mkdir -p $R/dev/pts; $B mount -t devpts pts $R/dev/pts
$B mount -t tmpfs tmp $R/run
$B mkdir -p $R/run/kvlane-rdma-vm; $B mount -t 9p -o ro,$O ctl $R/run/kvlane-rdma-vm || die "mount 9p ctl"
i=0; while read -r d; do $B mkdir -p "$R$d"; $B mount -t 9p -o rw,$O rw$i "$R$d" || die "mount rw $d"; i=$((i+1)); done <$R/run/kvlane-rdma-vm/rw
exec $B chroot $R /bin/sh /run/kvlane-rdma-vm/stage2
INIT
  chmod +x "$D/init"
  (cd "$D" && find . | cpio -o -H newc --quiet) >"$INITRD.tmp"; mv "$INITRD.tmp" "$INITRD"; rm -rf "$D"
fi
flock -u 9
[ $SETUP_ONLY = 0 ] || { say "ready: $VER, $INITRD"; exit 0; }

# ---- 4. this run: what to do inside ------------------------------------------------------------------------------------
CTL=$(mktemp -d "${TMPDIR:-/tmp}/kvlane-rdma-vm.XXXXXX"); trap 'rm -rf "$CTL"' EXIT
: >"$CTL/rw"; for d in ${RW[@]+"${RW[@]}"}; do echo "$d" >>"$CTL/rw"; done
{ printf 'cd %q || exit 125\n' "$PWD"
  for e in ${ENVS[@]+"${ENVS[@]}"}; do case $e in *=*) printf 'export %s=%q\n' "${e%%=*}" "${e#*=}";; *) printf 'export %s=%q\n' "$e" "${!e-}";; esac; done
  printf 'exec'; printf ' %q' "$@"; echo; } >"$CTL/cmd"
cat >"$CTL/stage2" <<'STAGE2'
export PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
out=/dev/vport0p1; ctl=/dev/vport0p2
for p in /sys/class/virtio-ports/*; do n=$(cat $p/name); d=/dev/$(basename $p); case $n in out) out=$d;; ctl) ctl=$d;; esac; done
fin() { echo "$1" >$ctl; sync; echo "uptime at end: $(cat /proc/uptime)" >/dev/console; busybox poweroff -f; }
bad() { echo "vm.sh: topology: $*" >/dev/console; echo bad >$ctl; busybox poweroff -f; }
. /run/kvlane-rdma-vm/topo; export KVLANE_RDMA=$TOPO
ip link set lo up
echo "uptime in userspace: $(cat /proc/uptime)" >/dev/console
nic() { # veth pair $1-$2 as two NICs of one host joined by a wire: allow each end to hear the other's local address
  ip link add "$1" type veth peer name "$2" || bad "veth"
  ip link set "$1" mtu 9000 up; ip link set "$2" mtu 9000 up; }
addr() { ip addr add "$2/24" dev "$1"; c=/proc/sys/net/ipv4/conf
  echo 1 >$c/$1/accept_local; echo 0 >$c/$1/rp_filter; echo 0 >$c/all/rp_filter; echo 1 >$c/$1/arp_ignore; echo 2 >$c/$1/arp_announce; }
case $TOPO in
 none) ;;
 loop) ip link add dummy0 type dummy; ip addr add 10.77.0.1/24 dev dummy0; ip link set dummy0 up
       rdma link add rxe0 type rxe netdev dummy0 || bad "rxe0";;
 pair|quad)
       nic nic0 nic1; addr nic0 10.77.0.1; addr nic1 10.77.0.2
       n=2
       if [ $TOPO = quad ]; then nic nic2 nic3; addr nic2 10.78.0.1; addr nic3 10.78.0.2; n=4; fi
       i=0; while [ $i -lt $n ]; do
         rdma link add rxe$i type rxe netdev nic$i || bad rxe$i
         i=$((i+1))
       done;;
 bond) nic s0 p0; nic s1 p1
       for b in 0 1; do ip link add bond$b type bond mode active-backup miimon 100 || bad bond; done
       for s in s0 s1; do ip link set $s down; ip link set $s master bond0; done
       for s in p0 p1; do ip link set $s down; ip link set $s master bond1; done
       ip link set bond0 up; ip link set bond1 up; addr bond0 10.77.0.1; addr bond1 10.77.0.2
       rdma link add mlx5_bond_0 type rxe netdev bond0 || bad mlx5_bond_0
       rdma link add mlx5_bond_1 type rxe netdev bond1 || bad mlx5_bond_1;;
 *) bad "unknown topology $TOPO";;
esac
ulimit -l unlimited
echo "uptime at start of command: $(cat /proc/uptime)" >/dev/console
/bin/bash /run/kvlane-rdma-vm/cmd >$out 2>&1 </dev/null; fin $?
STAGE2
echo "TOPO=$TOPO" >"$CTL/topo"

# ---- 5. boot -----------------------------------------------------------------------------------------------------------
: >"$CTL/exit"; : >"$CTL/console"; mkfifo "$CTL/out"; cat "$CTL/out" & CAT=$!   # a stdio chardev would block on EOF of stdin
V=(-virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
   -virtfs "local,path=$CTL,mount_tag=ctl,security_model=none,readonly=on")
i=0; for d in ${RW[@]+"${RW[@]}"}; do V+=(-virtfs "local,path=$d,mount_tag=rw$i,security_model=none,multidevs=remap"); i=$((i+1)); done
set +e
timeout -k 5 "$TIMEOUT" qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu max -smp "$SMP" -m "$MEM" -kernel "$K/vmlinux" -initrd "$INITRD" \
  -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off random.trust_cpu=on no_timer_check tsc=reliable clocksource=tsc" \
  -nodefaults -no-user-config -display none -no-reboot -serial "file:$CTL/console" "${V[@]}" \
  -device virtio-rng-pci -device virtio-serial-pci \
  -chardev "file,id=o,path=$CTL/out" -device virtserialport,chardev=o,name=out \
  -chardev "file,id=c,path=$CTL/exit" -device virtserialport,chardev=c,name=ctl </dev/null 2>"$CTL/qemu.err"
rc=$?
(exec 7<>"$CTL/out") # frees cat where qemu never opened it
wait $CAT
set -e
[ $VERBOSE = 0 ] || { cat "$CTL/qemu.err" "$CTL/console" >&2; }
st=$(tr -dc '0-9a-z' <"$CTL/exit")
if [[ $st =~ ^[0-9]+$ ]]; then exit "$st"; fi
if [ $rc = 124 ]; then say "timed out after ${TIMEOUT}s"; tail -20 "$CTL/console" >&2; exit 124; fi
say "the VM failed (qemu rc $rc)"; tail -5 "$CTL/qemu.err" >&2; tail -30 "$CTL/console" >&2; exit 125
