# The first process of a node. The node's other processes run in its namespaces, and they end with it. The test's
# process holds its stdin: when that process ends, in any way, this one ends too, and the kernel kills all processes in
# its pid namespace and removes the mounts and the network. Arguments: its folder, the folder of its logs, its name, its
# own address, the host's address.
set -eu
folder=$1 log=$2 name=$3 own=$4 host=$5

# This is still the host's /proc, so it has our pid outside. The test's process moves one end of a veth pair in here,
# and then writes a line.
read -r pid _ < /proc/self/stat
echo "$pid"
read -r _

mount -t proc proc /proc
# The customary folders of kubelet, runtime and CNI: Pods that mount them find what they expect, and nothing of this
# machine's own is touched.
mount --bind "$folder/lib" /var/lib
mount --bind "$log" /var/log
mount -t tmpfs tmpfs /run
# A kubelet demands these and sets what differs, for the whole machine. This one finds them set.
while read -r setting value; do
    echo "$value" > "$folder/settings/${setting//\//-}"
    mount --bind "$folder/settings/${setting//\//-}" "/proc/sys/$setting"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END

# In a UTS namespace of its own.
echo "$name" > /proc/sys/kernel/hostname
ip link set lo up
ip address add "$own/24" dev eth0
ip link set eth0 up
ip route add default via "$host"
echo ready

# bash reaps what is orphaned meanwhile.
read -r _ || true
