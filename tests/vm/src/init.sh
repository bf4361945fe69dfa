#!/bin/sh
# The first program of the guest. It prepares the system, and then executes the init of busybox, which runs the agent.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm /run /tmp
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr

. /etc/vm.conf
hostname "$VM_NAME"
modprobe -a virtio_pci virtio_console $VM_MODULES
ip link set lo up
if [ -n "$VM_ADDRESS" ]; then
    modprobe virtio_net
    ip address add "$VM_ADDRESS" dev eth0
    ip link set eth0 up
fi
for share in $VM_SHARES; do
    mkdir -p "${share#*:}"
    modprobe -a 9pnet_virtio 9p
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 "${share%%:*}" "${share#*:}"
done
if [ -n "$VM_HOST_FILES" ]; then
    mkdir -p /host
    modprobe -a 9pnet_virtio 9p
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose "$VM_HOST_FILES" /host
    for own in dev proc run sys tmp usr/local; do
        mount -o rbind "/$own" "/host/$own"
    done
fi
exec /sbin/init
