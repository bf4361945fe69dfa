// A library to preload, which makes a device report that it is a ConnectX-5. perftest uses the ibv_wr_* functions only on adapters that
// it knows by their number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    int (*theirs)(struct ibv_context *, struct ibv_device_attr *) = dlvsym(RTLD_NEXT, "ibv_query_device", "IBVERBS_1.1");
    int result = theirs(context, attr);
    attr->vendor_part_id = 4119;
    return result;
}
